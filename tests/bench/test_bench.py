"""The bench counts and prints what it says: counters on cases made by hand, a table on made-up figures."""

import json
import pickle
import re
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import sherd
from bench import chart, muon
from bench.__main__ import as_json, parse
from bench.bytes import MovedBytes, bytes_sent
from bench.models import bottleneck, deep_narrow, gpt, llama, num_bytes
from bench.overhead import percent
from bench.peak import LiveBytes
from bench.ranks import Conditions
from bench.rounds import Lap, interleaved
from bench.small import KINDS, ONE_VECTOR, STEPPED, STEPS_PER_LAP, SmallParameters, row_of_steps
from bench.steps import Training, disagreement, mean_cpu, slowest_wall
from bench.systems import ALL, MEGATRON
from bench.table import (
    COLUMNS,
    Aim,
    Figure,
    Row,
    render,
    row_of_counts,
    row_of_differences,
    row_of_rounds,
    three_digits,
)
from sherd._torch import imagined_ranks
from sherd.comm import transport
from sherd.comm.host import sums

KIB = 1024
NUMBERS = KIB // 4  # fp32 numbers in a KiB


def test_peak_counts_each_storage_once_from_its_first_use_on_however_many_views_see_it():
    with LiveBytes() as live:
        x = torch.zeros(4 * NUMBERS)
        views = [x[:7], x.view(2, -1), x.t()]
        assert live.now == 4 * KIB
        del x
        assert live.now == 4 * KIB
        del views
        assert live.now == 0
    assert live.peak == 4 * KIB
    early = torch.zeros(2 * NUMBERS)
    with LiveBytes() as live:
        assert live.now == 0
        late = early + 1
        assert live.now == 4 * KIB
        del late
    assert (live.now, live.peak) == (2 * KIB, 4 * KIB)


def test_peak_is_of_what_lives_at_once_and_follows_a_storage_freed_and_refilled_in_place():
    with LiveBytes() as live:
        for _ in range(5):
            x = torch.zeros(3 * NUMBERS)
            del x
        assert live.peak == 3 * KIB
        flat = torch.zeros(8 * NUMBERS)
        flat.untyped_storage().resize_(0)
        assert live.now == 0
        live.forget_peak()
        flat.untyped_storage().resize_(8 * KIB)
        assert (live.now, live.peak) == (8 * KIB, 8 * KIB)
        flat.resize_(16 * NUMBERS)
        assert live.now == 16 * KIB


def test_peak_holds_activations_until_backward_has_used_them_and_leaves_torch_as_it_was():
    weight = torch.zeros(NUMBERS, requires_grad=True)
    with LiveBytes() as live:
        loss = weight.exp().exp().sum()
        assert live.now == 3 * KIB + 4  # the weight, two saved results, the loss
        loss.backward()
        assert live.now == 2 * KIB + 4  # the weight, its gradient, the loss
    before = torch.UntypedStorage.resize_
    with pytest.raises(ZeroDivisionError), LiveBytes():
        _ = 1 / 0
    assert torch.UntypedStorage.resize_ is before


def test_copies_count_what_is_written_and_views_and_allocations_count_nothing():
    source, target = torch.zeros(4 * NUMBERS), torch.empty(4 * NUMBERS)
    with MovedBytes(num_ranks=2) as moved:
        target.copy_(source)
        torch._foreach_copy_([target[:NUMBERS], target[NUMBERS:]], [source[:NUMBERS], source[NUMBERS:]])
        torch.cat([source, target])
        source.to(torch.float64)
        source.clone()
        target.div_(2)
        torch.empty(100 * NUMBERS)
        source.view(2, -1).t().detach().split(1)
    assert {name: size for name, size in moved.written.items() if size} == {
        "aten::copy_": 4 * KIB,
        "aten::_foreach_copy_": 4 * KIB,
        "aten::cat": 8 * KIB,
        "aten::_to_copy": 8 * KIB,
        "aten::clone": 4 * KIB,
        "aten::div_": 4 * KIB,
    }
    whole, parts = torch.zeros(6 * NUMBERS), [torch.empty(2 * NUMBERS), torch.empty(4 * NUMBERS)]
    with MovedBytes(num_ranks=2) as moved:  # into given outputs, of which each counts
        torch.split_with_sizes_copy(whole, [2 * NUMBERS, 4 * NUMBERS], out=parts)
    assert moved.written.total() == 6 * KIB


def test_wire_costs_are_those_of_the_cheapest_algorithm():
    whole, shard = torch.zeros(4 * NUMBERS), torch.zeros(NUMBERS)

    def sent(name, *args):
        return bytes_sent(f"c10d::{name}", args, num_ranks=4, rank=0)

    assert sent("_allgather_base_", whole, shard) == 3 * KIB
    assert sent("_reduce_scatter_base_", shard, whole) == 3 * KIB
    assert sent("allgather_", [[shard] * 4], [shard]) == 3 * KIB
    assert sent("allreduce_", [whole]) == 6 * KIB
    assert sent("barrier", shard) == 0
    assert sent("send", [whole], None, 1, 0) == 4 * KIB
    assert sent("recv_", [whole], None, 1, 0) == 0
    with pytest.raises(NotImplementedError, match="c10d::novel_"):
        sent("novel_")


def test_an_all_to_all_costs_what_goes_to_other_ranks():
    whole, uneven = torch.zeros(6 * NUMBERS), [NUMBERS, 2 * NUMBERS, 3 * NUMBERS]
    assert bytes_sent("c10d::alltoall_base_", (whole, whole, None, uneven, uneven), num_ranks=3, rank=1) == 4 * KIB
    assert bytes_sent("c10d::alltoall_base_", (whole, whole, None, [], []), num_ranks=3, rank=1) == 4 * KIB
    part, own_left_out = whole[: 2 * NUMBERS], [0, 2 * NUMBERS]
    assert bytes_sent("c10d::alltoall_base_", (part, part, None, own_left_out, own_left_out), 2, rank=0) == 2 * KIB


def test_what_a_transport_copies_is_counted_apart_also_through_a_function_of_the_caller():
    parts, total = [torch.zeros(2 * NUMBERS) for _ in range(2)], torch.empty(2 * NUMBERS)
    with MovedBytes(num_ranks=2) as moved:
        sums.add_up(parts, out=total)
        total.copy_(parts[0])
        transport.OneRank().all_gather(total, parts[0], [2 * NUMBERS], async_op=False)
    assert moved.carried == {"aten::add": 2 * KIB, "aten::copy_": 2 * KIB}
    assert moved.written == {"aten::copy_": 2 * KIB}


def test_flat_copies_no_parameter_and_each_gradient_once():
    def layers() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))

    with imagined_ranks(2):
        flat, plain = sherd.fully_shard(layers(), placement=sherd.Flat()), layers()
        beyond_plain = bytes_of_backward(flat) - bytes_of_backward(plain)
    assert num_bytes(plain) <= beyond_plain < 1.02 * num_bytes(plain)


def bytes_of_backward(model: nn.Module) -> int:
    x = torch.ones(1, 64)
    model(x).sum().backward()
    model.zero_grad()
    with MovedBytes(num_ranks=2) as moved:
        model(x).sum().backward()
    return moved.written.total()


def test_each_round_visits_every_runner_and_starts_one_later():
    visited: list[str] = []

    def runner(name: str):
        return lambda number: visited.append(name) or Lap(number, number)

    laps = interleaved({name: runner(name) for name in "abc"}, num_rounds=3)
    assert visited == list("abcbcacab")
    assert laps["b"] == [Lap(0, 0), Lap(1, 1), Lap(2, 2)]


def test_a_ratio_is_the_median_of_round_ratios_and_of_differences_that_of_medians():
    row = row_of_rounds("step", "ms", {"FSDP2": [10, 100, 20], "sherd": [5, 80, 18], "Flat": [5, 50, 10]})
    assert row.values == {"FSDP2": 20, "sherd": 18, "Flat": 10}
    assert row.ratios == {"sherd": 0.8, "Flat": 0.5}
    assert row.shards_replicas["sherd"] == pytest.approx((0.65, 0.85))
    row = row_of_differences("overhead", "ms", {"FSDP2": [0, 4, 8], "Flat": [-1, 2, 1]})
    assert row.ratios == {"Flat": 0.25}
    assert row.shards_replicas["Flat"] == pytest.approx((0.21875, 0.40625))


def test_the_wrapper_is_held_against_fsdp1_with_the_same_parameters():
    counts = {"FSDP1": 4.0, "FSDP1 flat": 2.0, "FSDP2": 8.0, "sherd": 4.0, "wrapper": 3.0, "wrapper flat": 2.2}
    aims = [Aim(0.85, system="wrapper"), Aim(0.85, system="wrapper flat"), Aim(1.0, of="wrapper")]
    row = row_of_counts("bytes", "N", counts, aims)
    assert row.ratios == {"sherd": 0.5, "wrapper": 0.75, "wrapper flat": pytest.approx(1.1)}
    assert row_of_counts("bytes", "N", {"sherd": 1.0}).ratios == {}
    assert row_of_counts("bytes", "N", {"FSDP2": 0.0, "sherd": 1.0}).ratios == {}
    _, to_fsdp2, to_fsdp1, verdicts = (cells(table) for table in render([row]).split("\n\n"))
    assert (to_fsdp2[0], to_fsdp2[2]) == (["ratio to FSDP2", "sherd"], ["bytes", "0.50"])
    assert (to_fsdp1[0], to_fsdp1[2]) == (["ratio to FSDP1", "wrapper", "wrapper flat"], ["bytes", "0.75", "1.10"])
    assert verdicts[2:] == [
        ["bytes", "wrapper", "0.750", "of FSDP1", "<= 0.85: met"],
        ["bytes", "wrapper flat", "1.10", "of FSDP1 flat", "<= 0.85: missed"],
        ["bytes", "wrapper", "3.00", "N", "<= 1: missed"],
    ]


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]


def test_tables_show_values_ratios_and_whether_aims_are_met_and_none_of_nothing():
    times = {"FSDP2": [20.0] * 3, "sherd": [15.0] * 3, "Flat": [12.5] * 3}
    rows = [
        row_of_rounds("step", "ms", times, [Aim(0.7), Aim(0.7, system="Flat"), Aim(0.9, system="Flat gloo")]),
        row_of_counts("peak", "MiB", {"plain": 1234.5, "FSDP2": 100, "sherd": 110}, Aim(1.0), "counted"),
        Row("sharding", "s", {"sherd": 1.5}, aim=Aim(2.0, of="sherd")),
    ]
    values, ratios, aims = (cells(table) for table in render(rows).split("\n\n"))
    assert all(set(cell) == {"-"} for table in (values, ratios, aims) for cell in table[1])
    assert values[0] == ["figure", "unit", "plain", "FSDP2", "sherd", "Flat", "remark"]
    assert values[2:] == [
        ["step", "ms", "", "20.0", "15.0", "12.5", ""],
        ["peak", "MiB", "1,234", "100", "110", "", "counted"],
        ["sharding", "s", "", "", "1.50", "", ""],
    ]
    assert ratios[0] == ["ratio to FSDP2", "sherd", "Flat"]
    assert ratios[2:] == [["step", "0.75 (0.75 to 0.75)", "0.62 (0.62 to 0.62)"], ["peak", "1.10", ""]]
    assert aims[2:] == [
        ["step", "sherd", "0.750", "of FSDP2", "<= 0.7: missed"],
        ["step", "Flat", "0.625", "of FSDP2", "<= 0.7: met"],
        ["step", "Flat gloo", "", "of FSDP2", "<= 0.9: not measured"],
        ["peak", "sherd", "1.10", "of FSDP2", "<= 1: missed"],
        ["sharding", "sherd", "1.50", "s", "<= 2: met"],
    ]
    assert len(render([Row("padding", "%", {"Flat": 0.1})]).split("\n\n")) == 1


def test_a_verdict_rounds_to_two_digits_or_to_those_of_the_limit_and_numbers_have_three():
    for limit, value, verdict in (
        (0.8, 0.8049, "met"),
        (0.8, 0.8051, "missed"),
        (0.038, 0.0384, "met"),
        (0.038, 0.0391, "missed"),
        (1, 1.003, "met"),
    ):
        row = Row("figure", "N", {"Flat": value})
        assert Aim(limit, of="Flat").verdict(row) == f"<= {limit:g}: {verdict}", value
    for value, text in ((1234.5, "1,234"), (12.34, "12.3"), (1.234, "1.23"), (0.1234, "0.123"), (-45.6, "-45.6")):
        assert three_digits(value) == text


def test_every_system_has_a_column_every_column_a_system_and_all_can_be_sent_to_another_process():
    of_muon = [system for system, _ in muon.CONTENDERS]
    assert {system.name for system in (*ALL, ONE_VECTOR, MEGATRON, *of_muon)} == set(COLUMNS)
    for system in (*ALL[1:], MEGATRON, *of_muon):  # the plain module needs no rank to become what it is
        assert pickle.loads(pickle.dumps(system)) == system


def training(losses: dict[str, list[float]], wall: float = 1.0) -> Training:
    laps = {name: [Lap(wall, 10 * wall)] for name in losses}
    return Training(dict.fromkeys(losses, 5.0), laps, losses)


def test_ranks_are_summed_up_and_losses_that_differ_are_noticed():
    ranks = [training({"sherd": [8.0]}, wall=2), training({"sherd": [8.0]}, wall=4)]
    assert slowest_wall(ranks) == {"sherd": [4]}
    assert mean_cpu(ranks) == {"sherd": [30]}
    same = training({"plain": [8.0, 3.0], "FSDP2": [8.0, 7.0], "sherd": [8.0, 7.0]})
    other = training({"plain": [8.0, 3.0], "FSDP2": [8.0, 7.0], "sherd": [8.0, 7.7]})
    assert disagreement([same, same], group_is_real=True)[0] == 0
    difference, note = disagreement([same, other], group_is_real=True)
    assert difference == pytest.approx(0.1)
    assert "DISAGREE" in note
    assert "not compared" in disagreement([other], group_is_real=False)[1]


def test_models_have_the_sizes_their_titles_claim():
    def count(model: nn.Module) -> tuple[int, int, int]:
        return len(list(model.parameters())), num_bytes(model) // 4, len(model.blocks)

    with torch.device("meta"):
        small, narrow, wide = (workload.build() for workload in (gpt(1, 8), deep_narrow(1, 8), bottleneck(3)))
        large = llama(32)
    assert count(small) == (148, 41_999_360, 12)
    assert count(narrow)[0] == 1_504
    assert count(narrow)[2] == 125
    assert all(p.shape[0] % 4096 == 0 for p in wide.parameters())
    assert count(large) == (32 * 9 + 3, 6_738_415_616, 32)
    assert [tuple(p.shape) for p in SmallParameters().parameters()] == [(16, 16)] * 200


@pytest.mark.parametrize("workload", [deep_narrow(1, 4), bottleneck(2)])
def test_workloads_train_and_repeat_their_batches(workload):
    model = workload.build()
    model(*workload.batch(3)).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(workload.batch(3), workload.batch(3), strict=True))
    assert not torch.equal(workload.batch(3)[0], workload.batch(4)[0])


def test_json_holds_rows_circumstances_and_every_raw_lap():
    row = row_of_counts("peak", "MiB", {"FSDP2": 2.0, "sherd": 1.0})
    figure = Figure([row], {"ranks": [training({"sherd": [8.0]})]}, ["a note"])
    report = json.loads(as_json({"cores": 2}, {"steps": figure}, [row], took=1.0))
    assert report["rows"][0]["ratios"] == {"sherd": 0.5}
    assert report["samples"]["steps"]["ranks"][0]["laps"]["sherd"] == [
        {"wall_ms": 1.0, "cpu_ms": 10.0, "page_faults": 0}
    ]
    assert report["circumstances"] == {"cores": 2}


def refusal(capsys, call) -> str:
    """What `call` says as it ends this program with exit code 2."""
    with pytest.raises(SystemExit) as stop:
        call()
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_bad_arguments_end_with_exit_code_2(capsys):
    for words, complaint in (
        ("--rounds 0", "at least one round"),
        ("--only nonsense", "invalid choice"),
        ("--json no/such/folder/file.json", "there is no folder"),
    ):
        assert complaint in refusal(capsys, partial(parse, words.split())), words


def test_the_page_says_of_rounds_and_of_quick_what_the_command_does(capsys):
    page = (Path(chart.__file__).parent.parent / "docs/understand/benchmarks.md").read_text()
    with pytest.raises(SystemExit):
        parse(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    (full, quick) = (
        re.findall(rf"^    python -m bench{option} +# (.*)$", page, re.M)[0] for option in ("", " --quick")
    )
    assert quick in said
    assert f"{parse([]).rounds} rounds" in full
    assert f"{parse(['--quick']).rounds} rounds" in quick


def test_quick_has_fewer_rounds_unless_told_and_the_cpu_has_two_real_ranks():
    assert parse(["--device", "cpu"]).rounds == 9
    assert parse(["--quick"]).rounds == 3
    assert parse(["--quick", "--rounds", "5"]).rounds == 5
    conditions = Conditions(device="cpu")
    assert (conditions.num_ranks, conditions.group_is_real) == (2, True)


def test_an_optimizer_step_is_a_share_of_its_lap():
    laps = {f"foreach, {system.name}": [Lap(STEPS_PER_LAP * 4.0, 0.0)] for system in STEPPED}
    laps["foreach, Flat view"] = [Lap(STEPS_PER_LAP * 0.1, 0.0)]
    row = row_of_steps("foreach", laps)
    assert row.values["FSDP2"] == 4.0
    assert row.ratios["Flat view"] == pytest.approx(0.025)
    assert percent({"Flat": [30.0, 50.0]}, plain=500.0) == {"Flat": [6.0, 10.0]}
    assert [aim.verdict(row) for aim in row.aims] == ["<= 0.15: met", "<= 0.038: met"]
    assert set(KINDS) == {"foreach", "fused"}


# The chart


def report(ratio: float = 0.5) -> dict:
    figures = [
        "GPT, 42 M: step",
        "GPT, 42 M: CPU time of a step",
        "bytes copied, 2 ranks",
        "bytes copied, 16 fake ranks",
    ]
    rows = [{"figure": figure, "ratios": {"sherd": ratio, "Flat": 0.25, "Flat view": 0.2}} for figure in figures]
    return {"rows": rows, "circumstances": {"group": "2 ranks", "processor": "A & B", "torch": "2.13"}}


def test_a_chart_has_a_bar_for_each_figure_and_system_all_of_one_scale():
    panels = chart.panels_of(report()["rows"])
    assert list(panels) == ["step time", "CPU time", "bytes copied"]
    assert all(ratios == {"sherd": 0.5, "Flat": 0.25} for ratios in panels.values())
    widths = widths_of(chart.svg(panels, "below"))
    assert widths == pytest.approx([2 * widths[1], widths[1]] * 3)
    # One longer than the rival's fits too.
    slow, same = widths_of(chart.svg({"step time": {"sherd": 2.0, "Flat": 1.0}}, ""))
    assert slow == pytest.approx(2 * same)
    assert chart.LEFT + slow <= chart.WIDTH - chart.RIGHT


def widths_of(svg: str) -> list[float]:
    shapes = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}rect")
    return [float(shape.get("width")) for shape in shapes if shape.get("x") == str(chart.LEFT)]


def test_a_text_of_the_chart_in_a_wide_font_reaches_neither_the_next_swatch_nor_the_edge():
    """DejaVu Sans is what a Linux machine without Helvetica and Arial shows."""
    image_font = pytest.importorskip("PIL.ImageFont")
    matplotlib = pytest.importorskip("matplotlib")
    font = image_font.truetype(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf", 13)
    picture = Path(chart.__file__).parent.parent / "docs/understand/benchmarks.svg"
    shapes = list(ElementTree.fromstring(picture.read_text()))
    swatches = [(float(each.get("x")), float(each.get("y"))) for each in shapes if each.get("height") == "12"]
    for line in (each for each in shapes if each.tag.endswith("text")):
        long, x, y = font.getlength(line.text), float(line.get("x")), float(line.get("y"))
        begin = x - {"start": 0, "middle": long / 2, "end": long}[line.get("text-anchor")]
        assert begin >= 0
        assert begin + long <= chart.WIDTH, line.text
        assert not [at for at, above in swatches if above < y < above + 20 and begin < at < begin + long], line.text


def test_a_chart_is_written_from_json_and_takes_what_an_earlier_file_does_not_have_from_later_ones(tmp_path):
    pieces = {"steps": report(ratio=0.5), "rest": report(ratio=0.75)}
    pieces["steps"]["rows"] = pieces["steps"]["rows"][:2]
    files = [tmp_path / f"{name}.json" for name in pieces]
    for file, piece in zip(files, pieces.values(), strict=True):
        file.write_text(json.dumps(piece))
    assert chart.main([*map(str, files), str(tmp_path / "chart.svg")]) == 0
    drawn = (tmp_path / "chart.svg").read_text()
    assert "A &amp; B" in drawn
    assert [line.split("<")[-2].split(">")[-1] for line in drawn.splitlines() if 'fill="#777777">0.' in line] == [
        *("0.50", "0.25"),
        *("0.50", "0.25"),
        *("0.75", "0.25"),
    ]


def test_a_chart_of_different_machines_or_of_nothing_is_refused(tmp_path, capsys):
    def complaint(*contents: str) -> str:
        files = [tmp_path / f"{number}.json" for number in range(len(contents))]
        for file, content in zip(files, contents, strict=True):
            file.write_text(content)
        return refusal(capsys, partial(chart.main, [*map(str, files), str(tmp_path / "chart.svg")]))

    measured = [report(), report()]
    for each, name in zip(measured, ("here", "there"), strict=True):
        each["circumstances"]["processor"] = name
    said = complaint(*map(json.dumps, measured))
    assert all(f"2 ranks, {name}, torch 2.13" in said for name in ("here", "there"))
    assert "run it first" in complaint("no json")
    assert "none of the rows" in complaint('{"rows": []}')
    assert "run it first" in refusal(capsys, partial(chart.main, [str(tmp_path / "none.json"), "chart.svg"]))
