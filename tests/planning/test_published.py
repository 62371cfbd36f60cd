"""bench/published.toml is whole and its halves are drawn by lot, predictions come out as they were written, and
docs/data/predictions.csv and docs/understand/predictions.md are what the script makes of them."""

import zlib
from collections import Counter
from dataclasses import replace

import pytest

from bench.device import played
from bench.pages import as_csv, read_csv, written
from bench.published import (
    CHECKPOINTING,
    DATA,
    KERNELS,
    ON_THE_PAGE,
    PAGE,
    TABLE,
    Compared,
    Predicted,
    _training,
    cluster_of,
    distribution,
    lines_of_data,
    main,
    memories,
    predict_rows,
    read_found,
    read_rows,
    summary,
    throughputs,
)
from sherd.tools.plan.planner import Planner
from sherd.tools.simulate.cluster import read_cluster, shipped_clusters
from sherd.tools.simulate.search import PUBLISHED, published_on
from sherd.tools.simulate.settings import Mesh, Settings
from sherd.tools.simulate.timeline import Lane
from sherd.train.config import read_tree
from tests.planning.models import LLAMA

TREE = read_tree(str(DATA))
ROWS = {row.id: row for row in read_rows(TREE)}
PARAMETERS = {  # the published numbers, of models for 2,048 tokens
    "mpt-125m": 125_311_488,
    "mpt-350m": 355_985_408,
    "mpt-760m": 760_470_528,
    "mpt-1b": 1_315_950_592,
    "mpt-3b": 2_651_837_440,
    "mpt-7b": 6_658_859_008,
    "mpt-13b": 12_853_954_560,
    "mpt-30b": 29_975_214_080,
    "mpt-70b": 64_862_437_376,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.2-3b": 3_212_749_824,
    "qwen3-32b": 32_762_123_264,
    "tinyllama": 1_100_048_384,
}
ROUNDED = {
    "llama2-34b": 34e9,
    "gpt-22b": 22e9,
    "gpt-175b": 175e9,
    "gpt-530b": 530e9,
    "gpt-1t": 1008e9,
    "internlm-7b": 7.3e9,
    "nanotron-8b": 8.86e9,
    "nanotron-80b": 80e9,
    "nemotron4-340b": 340e9,
    "stablecode-3b": 2.8e9,
    "titan-gpt2": 85e6 + 2 * 768 * 128_256,  # GPT-2's blocks, and the words of Llama 3 twice
}
PARTS = {  # so many of the layers of another
    "llama2-13b-4": ("llama2-13b", 40, 4),
    "llama2-13b-20": ("llama2-13b", 40, 20),
    "llama3-405b-21": ("llama3-405b", 126, 21),
    "llama3-405b-42": ("llama3-405b", 126, 42),
}


# The data


def test_rows_are_enough_no_two_are_one_and_each_is_held_out_by_lot():
    assert len(ROWS) == len(TREE["rows"]) >= 40
    assert not TREE.keys() - {"rows", "others", "models", "clusters", "sources"}
    assert all(row.held_out == (zlib.crc32(row.id.encode()) % 2 == 0) for row in ROWS.values())
    assert 0.4 < sum(row.held_out for row in ROWS.values()) / len(ROWS) < 0.6


def test_a_rows_fields_make_sense():
    shardings = ("FSDP1", "FSDP2", "HSDP", "ZeRO-1", "ZeRO-2", "none")
    for name, row in ROWS.items():
        assert row.sharding in shardings, name
        assert (row.shard == 1) == (row.sharding == "none"), name
        assert row.pp == 1 or row.micro_batches >= row.pp, name
        assert (row.replicate > 1) == (row.sharding == "HSDP"), name
        assert row.checkpointing in CHECKPOINTING, name
        assert row.parameters in ("float32", "bfloat16"), name
        assert row.attention in KERNELS, name
        assert row.memory_is in ("reserved", "active"), name
        assert row.tokens is None or row.mfu is None, name
        figures = [each for each in (row.tokens, row.mfu, row.memory) if each is not None]
        assert figures, name
        assert min(figures) > 0, name
        assert min(row.shard, row.tp, row.cp, row.pp, row.sequence, row.micro_batch, row.micro_batches) >= 1, name
        assert row.mfu is None or row.mfu < 100, name
        device = cluster_of(TREE["clusters"][row.cluster]).device
        assert (row.memory or 0) < device.memory / 2**30, name


def test_what_rows_name_is_there_and_nothing_else_is():
    for table, field in (("models", "model"), ("clusters", "cluster")):
        assert TREE[table].keys() == {getattr(row, field) for row in ROWS.values()}
    of_rows = {row.source for row in ROWS.values()}
    assert TREE["sources"].keys() == of_rows | {each["source"] for each in TREE["others"]}
    for source in TREE["sources"].values():
        assert source.keys() == {"title", "found", "assumed", "optimizer"}
        assert all(source.values())
    assert all(each["source"] in TREE["sources"] and each["place"] and each["why"] for each in TREE["others"])


def test_a_cluster_is_the_shipped_one_but_for_what_is_other():
    shipped, slower = (cluster_of(TREE["clusters"][name]) for name in ("a100", "a100-400g"))
    assert slower.across.bandwidth == 5.75e9
    assert replace(slower, across=shipped.across) == shipped
    assert cluster_of(TREE["clusters"]["a100-40"]).device.bandwidth == 1.37e12


def numel_of(module):
    return sum(parameter.numel() for parameter in module.parameters())


def test_a_model_has_as_many_parameters_as_the_published_one():
    assert PARAMETERS.keys() | ROUNDED.keys() | PARTS.keys() == TREE["models"].keys()
    for name, model in TREE["models"].items():
        found = _training(model, 2048, "float32", "adamw").model
        if name in ROUNDED:
            assert numel_of(found) == pytest.approx(ROUNDED[name], rel=0.02), name
        elif name in PARTS:
            whole, all_layers, layers = PARTS[name]
            assert numel_of(found) == PARAMETERS[whole] - (all_layers - layers) * numel_of(found.model.layers[0]), name
        else:
            assert numel_of(found) == PARAMETERS[name], name


# Predictions


@pytest.mark.parametrize(
    "id", ["mosaic-a100-125m-2048-x8-mb32", "ibm-compile-h100-7b", "titan-808", "dgxc-405b-x96", "megatron-1t-full"]
)
def test_a_prediction_is_the_written_one(id):
    (found,) = predict_rows(TREE, [ROWS[id]]).values()
    written = read_found()[id]
    assert len(found) == len(written) == len(CHECKPOINTING[ROWS[id].checkpointing])
    for each, other in zip(found, written, strict=True):
        assert each.fits == other.fits
        for field in ("tokens", "mfu", "active", "reserved"):
            assert getattr(each, field) == pytest.approx(getattr(other, field), rel=0.011), field


TINY = LLAMA | {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 128}


def calls(cut, **axes):
    """What a step of two micro-batches sends on other axes than those of data: how often, by kind."""
    training = _training(TINY | {"num_hidden_layers": 4}, 32, "float32", "adamw", cut)
    settings = Settings(Mesh(**({"shard": 2} | axes)), micro_batches=2)
    spans = Planner(training, read_cluster("h100")).predict(settings).timeline.spans
    return Counter(span.name for span in spans if span.lane is Lane.MODEL and span.nbytes > 1000)


def test_axes_send_what_torchtitan_and_megatron_send():
    in_block, ends, times = 4, 2, 2  # before and behind attention and the rest, forward and backward; embedding, head
    each = times * (4 * in_block + ends)
    assert calls("tensors", tp=4) == {"all-reduce": each}
    assert calls("tensors and tokens", tp=4) == {"all-gather": each, "reduce-scatter": each}
    assert calls("tensors", cp=4) == {"all-gather": times * 4 * 2, "reduce-scatter": times * 4 * 2}
    stage = times * (2 * in_block + 1)
    assert calls("tensors and tokens", tp=2, pp=2) == {"all-gather": stage, "reduce-scatter": stage, "send": times}


def test_stages_share_a_model_out():
    training = _training(TINY | {"num_hidden_layers": 7}, 32, "float32", "adamw", "tensors")
    stages = [training.layout.stage(training.model, number, 3) for number in range(3)]
    assert [len(stage.blocks) for stage in stages] == [3, 2, 2]
    assert numel_of(training.model) == sum(map(numel_of, stages))
    assert [stage.embedding is not None for stage in stages] == [True, False, False]
    assert [stage.head is not None for stage in stages] == [False, False, True]


def test_rows_by_id_are_printed_and_nothing_is_written(capsys, monkeypatch):
    monkeypatch.setattr("bench.published.PAGE", None)
    monkeypatch.setattr("bench.published.PREDICTIONS", None)
    assert main(["hf-granite"]) == 0
    out = capsys.readouterr().out
    assert "| Table 3, row 1 |" in out
    assert "From DeepSpeed to FSDP and Back Again" in out
    assert "Table 1, 7B" not in out


def test_every_row_is_predicted_and_the_page_is_what_the_script_writes():
    assert list(read_found()) == list(ROWS)
    page = PAGE.read_text()
    assert written(page, {"published": summary(TREE, read_found(), ON_THE_PAGE)}) == page
    assert as_csv(lines_of_data(TREE, read_found())) == TABLE.read_text()


# What errors are


def test_a_plan_says_how_much_more_or_less_than_planned_these_trainings_took():
    """On several devices, by kinds of devices with four rows at least and all together, without a tenth at each end."""
    columns, *lines = read_csv(TABLE)
    rows = [dict(zip(columns, line, strict=True)) for line in lines]
    took: dict[str, list[float]] = {}
    for row in rows:
        if row["memory error"] and int(row["GPUs"]) > 1:
            more = 1 / (1 + float(row["memory error"])) - 1
            took.setdefault(row["cluster"].split("-")[0].upper(), []).append(more)
    *names, last = sorted(took)
    took = {name: took[name] for name in sorted(took) if len(took[name]) >= 4} | {
        f"{', '.join(names)} and {last}": [more for each in took.values() for more in each]
    }
    for published, (name, more) in zip(PUBLISHED, took.items(), strict=True):
        more.sort()
        out = len(more) // 10
        assert (published.devices, published.num) == (name, len(more))
        assert (published.low, published.high) == pytest.approx((more[out], more[-1 - out]), abs=5e-4)


def test_a_cluster_has_the_trainings_on_its_kind_of_device_or_on_all_kinds():
    names = {name: published_on(read_cluster(name)) for name in shipped_clusters()}
    assert names.pop("laptop") is None
    assert {name: each.num for name, each in names.items()} == {"a100": 4, "h100": 49} | dict.fromkeys(
        ("b200", "h200", "mi300x"), 57
    )
    assert str(names["h100"]) == "published H100 trainings took 18% less to 10% more than planned"


def test_an_error_is_the_share_by_which_a_prediction_is_too_high_and_a_distribution_shows_misses():
    row = next(iter(ROWS.values()))
    assert Compared(row, 100.0, 120.0, 120.0).error == pytest.approx(0.2)
    assert Compared(row, 100.0, 75.0, 75.0).error == pytest.approx(-0.25)
    assert Compared(row, 100.0, 90.0, 130.0).error == 0
    assert Compared(row, 100.0, 50.0, 90.0).error == pytest.approx(-0.1)
    row = next(iter(ROWS.values()))
    compared = [Compared(replace(row, id=str(high)), 100.0, high, high) for high in (60.0, 95.0, 100.0, 110.0, 190.0)]
    first = distribution(compared).splitlines()[2]
    assert first.replace(" ", "") == "|all|5|10%|0%|-5%|+10%|+90%|190.0|"


def test_figures_are_held_against_predictions_of_the_same_kind():
    row = replace(next(iter(ROWS.values())), id="a", tokens=None, mfu=50.0, memory=20.0, memory_is="active")
    found = {"a": [Predicted(1000.0, 40.0, 10.0, 30.0, True), Predicted(900.0, 45.0, 15.0, 35.0, True)]}
    assert throughputs([row], found) == [Compared(row, 50.0, 40.0, 45.0)]
    assert memories([row], found) == [Compared(row, 20.0, 10.0, 15.0)]
    reserved = replace(row, tokens=800.0, mfu=None, memory_is="reserved")
    assert throughputs([reserved], found) == [Compared(reserved, 800.0, 900.0, 1000.0)]
    assert memories([reserved], found) == [Compared(reserved, 20.0, 30.0, 35.0)]


def test_what_the_clock_played_is_on_the_page():
    head, *lines = read_csv(played.TABLE)
    meant = {id: row for id, row in ROWS.items() if row.sharding == "FSDP2"}
    assert head == played.HEAD
    assert [line[0] for line in lines] == list(meant)
    for id, why, speed, found, off, *_ in lines:
        assert why in (played.reason_not_to_play(meant[id]), played.NOT_YET), id
        if off:
            assert float(off) == pytest.approx(float(found) / float(speed) - 1, abs=2e-3), id
    assert written(PAGE.read_text(), {"played": played.section(meant, lines)}) == PAGE.read_text()
