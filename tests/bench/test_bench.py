"""Does the bench count and print what it says? Counters on cases made by hand, a table on made-up figures."""

import json

import pytest
import torch
from torch import nn

from bench.__main__ import as_json, parse
from bench.bytes import MovedBytes, bytes_sent
from bench.models import bottleneck, deep_narrow, gpt, llama, num_bytes
from bench.peak import LiveBytes
from bench.ranks import Conditions
from bench.rounds import Lap, interleaved
from bench.steps import Training, disagreement, mean_cpu, slowest_wall
from bench.table import Aim, Figure, Row, render, row_of_counts, row_of_rounds, three_digits

KIB = 1024
NUMBERS = KIB // 4  # fp32 numbers in a KiB


def test_peak_counts_each_storage_once_however_many_views_see_it() -> None:
    with LiveBytes() as live:
        x = torch.zeros(4 * NUMBERS)
        views = [x[:7], x.view(2, -1), x.t()]
        assert live.now == 4 * KIB
        del x
        assert live.now == 4 * KIB
        del views
        assert live.now == 0
    assert live.peak == 4 * KIB


def test_peak_is_of_what_lives_at_once_not_of_all_that_was_made() -> None:
    with LiveBytes() as live:
        for _ in range(5):
            x = torch.zeros(3 * NUMBERS)
            del x
        assert live.peak == 3 * KIB


def test_peak_follows_a_storage_freed_and_refilled_in_place() -> None:
    with LiveBytes() as live:
        flat = torch.zeros(8 * NUMBERS)
        flat.untyped_storage().resize_(0)
        assert live.now == 0
        live.forget_peak()
        flat.untyped_storage().resize_(8 * KIB)
        assert (live.now, live.peak) == (8 * KIB, 8 * KIB)
        flat.resize_(16 * NUMBERS)
        assert live.now == 16 * KIB


def test_peak_sees_what_was_made_before_it_looked_at_first_use() -> None:
    early = torch.zeros(2 * NUMBERS)
    with LiveBytes() as live:
        assert live.now == 0
        late = early + 1
        assert live.now == 4 * KIB
        del late
    assert (live.now, live.peak) == (2 * KIB, 4 * KIB)


def test_peak_holds_activations_until_backward_has_used_them() -> None:
    weight = torch.zeros(NUMBERS, requires_grad=True)
    with LiveBytes() as live:
        loss = weight.exp().exp().sum()
        assert live.now == 3 * KIB + 4  # the weight, two saved results, the loss
        loss.backward()
        assert live.now == 2 * KIB + 4  # the weight, its gradient, the loss


def test_peak_leaves_torch_as_it_was_also_after_an_exception() -> None:
    before = torch.UntypedStorage.resize_
    with pytest.raises(ZeroDivisionError), LiveBytes():
        _ = 1 / 0
    assert torch.UntypedStorage.resize_ is before


def test_copies_count_what_is_written_and_views_and_allocations_count_nothing() -> None:
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


def test_copies_into_given_outputs_count_each_output() -> None:
    whole, parts = torch.zeros(6 * NUMBERS), [torch.empty(2 * NUMBERS), torch.empty(4 * NUMBERS)]
    with MovedBytes(num_ranks=2) as moved:
        torch.split_with_sizes_copy(whole, [2 * NUMBERS, 4 * NUMBERS], out=parts)
    assert moved.written.total() == 6 * KIB


def test_wire_costs_are_those_of_the_cheapest_algorithm() -> None:
    whole, shard = torch.zeros(4 * NUMBERS), torch.zeros(NUMBERS)
    assert bytes_sent("c10d::_allgather_base_", (whole, shard), num_ranks=4) == 3 * KIB
    assert bytes_sent("c10d::_reduce_scatter_base_", (shard, whole), num_ranks=4) == 3 * KIB
    assert bytes_sent("c10d::allgather_", ([[shard] * 4], [shard]), num_ranks=4) == 3 * KIB
    assert bytes_sent("c10d::allreduce_", ([whole],), num_ranks=4) == 6 * KIB
    assert bytes_sent("c10d::barrier", (shard,), num_ranks=4) == 0


def test_a_collective_nobody_priced_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="c10d::novel_"):
        bytes_sent("c10d::novel_", (), num_ranks=4)


def test_each_round_visits_every_runner_and_starts_one_later() -> None:
    visited: list[str] = []

    def runner(name: str):
        return lambda number: visited.append(name) or Lap(number, number)

    laps = interleaved({name: runner(name) for name in "abc"}, num_rounds=3)
    assert visited == list("abcbcacab")
    assert laps["b"] == [Lap(0, 0), Lap(1, 1), Lap(2, 2)]


def test_a_ratio_is_the_median_of_round_ratios_not_the_ratio_of_medians() -> None:
    row = row_of_rounds("step", "ms", {"FSDP2": [10, 100, 20], "sherd": [5, 80, 18]})
    assert row.values == {"FSDP2": 20, "sherd": 18}
    assert row.ratio == 0.8
    assert row.spread == pytest.approx((0.65, 0.85))


def test_table_shows_gaps_ratios_and_whether_aims_are_met() -> None:
    rows = [
        row_of_rounds("step", "ms", {"FSDP2": [20.0] * 3, "sherd": [15.0] * 3}, Aim(1.0)),
        row_of_counts("peak", "MiB", {"plain": 1234.5, "FSDP2": 100, "sherd": 110}, Aim(1.0), "counted"),
        Row("sharding", "s", {"sherd": 1.5}, aim=Aim(2.0, of="sherd")),
        Row("unknown", "s", {}, aim=Aim(0.8)),
    ]
    header, rule, step, peak, sharding, unknown = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in render(rows).splitlines()
    )
    assert header[:7] == ["figure", "unit", "plain", "DDP", "FSDP1", "FSDP2", "sherd"]
    assert all(set(cell) == {"-"} for cell in rule)
    assert step == ["step", "ms", "", "", "", "20.0", "15.0", "0.75 (0.75 to 0.75)", "<= 1: met", ""]
    assert peak == ["peak", "MiB", "1,234", "", "", "100", "110", "1.10", "<= 1: missed", "counted"]
    assert sharding[6:9] == ["1.50", "", "<= 2: met"]
    assert unknown[8] == "<= 0.8: not measured"


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234.5, "1,234"), (12.34, "12.3"), (1.234, "1.23"), (0.1234, "0.123"), (-45.6, "-45.6")],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert three_digits(value) == text


def training(losses: dict[str, list[float]], wall: float = 1.0) -> Training:
    laps = {name: [Lap(wall, 10 * wall)] for name in losses}
    return Training(dict.fromkeys(losses, 5.0), laps, losses)


def test_ranks_are_summed_up_as_slowest_wall_and_mean_cpu() -> None:
    ranks = [training({"sherd": [8.0]}, wall=2), training({"sherd": [8.0]}, wall=4)]
    assert slowest_wall(ranks) == {"sherd": [4]}
    assert mean_cpu(ranks) == {"sherd": [30]}


def test_losses_that_differ_are_noticed_and_plain_is_held_to_its_first_alone() -> None:
    same = training({"plain": [8.0, 3.0], "FSDP2": [8.0, 7.0], "sherd": [8.0, 7.0]})
    other = training({"plain": [8.0, 3.0], "FSDP2": [8.0, 7.0], "sherd": [8.0, 7.7]})
    assert disagreement([same, same], group_is_real=True)[0] == 0
    difference, note = disagreement([same, other], group_is_real=True)
    assert difference == pytest.approx(0.1)
    assert "DISAGREE" in note
    assert "not compared" in disagreement([other], group_is_real=False)[1]


def test_models_have_the_sizes_their_titles_claim() -> None:
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


@pytest.mark.parametrize("workload", [deep_narrow(1, 4), bottleneck(2)])
def test_workloads_train_and_repeat_their_batches(workload) -> None:
    model = workload.build()
    model(*workload.batch(3)).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(workload.batch(3), workload.batch(3), strict=True))
    assert not torch.equal(workload.batch(3)[0], workload.batch(4)[0])


def test_json_holds_rows_circumstances_and_every_raw_lap() -> None:
    row = row_of_counts("peak", "MiB", {"FSDP2": 2.0, "sherd": 1.0})
    figure = Figure([row], {"ranks": [training({"sherd": [8.0]})]}, ["a note"])
    report = json.loads(as_json({"cores": 2}, {"steps": figure}, [row], took=1.0))
    assert report["rows"][0]["ratio"] == 0.5
    assert report["samples"]["steps"]["ranks"][0]["laps"]["sherd"] == [{"wall_ms": 1.0, "cpu_ms": 10.0}]
    assert report["circumstances"] == {"cores": 2}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--rounds", "0"], "at least one round"),
        (["--only", "nonsense"], "invalid choice"),
        (["--json", "no/such/folder/file.json"], "there is no folder"),
    ],
)
def test_bad_arguments_end_in_one_line_and_exit_code_2(arguments, complaint, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(arguments)
    assert stop.value.code == 2
    assert complaint in capsys.readouterr().err


def test_quick_has_fewer_rounds_unless_told() -> None:
    assert parse(["--device", "cpu"]).rounds == 9
    assert parse(["--quick"]).rounds == 3
    assert parse(["--quick", "--rounds", "5"]).rounds == 5


def test_the_cpu_has_two_real_ranks() -> None:
    conditions = Conditions(device="cpu")
    assert (conditions.num_ranks, conditions.group_is_real) == (2, True)
