"""Does the memory report name every buffer, add up, and refuse what it cannot report on?"""

import gc
import weakref

import pytest
import torch
from torch import nn

from sherd import fully_shard
from sherd.engine.run.seal import unit_of
from sherd.errors import ModuleError, PolicyError, StateError
from sherd.memory.report import memory_report, track_memory
from tests.support.models import build, shard
from tests.support.ranks import RanksFailed


def step(model):
    model.loss(model(*model.make_inputs(0, 0))).backward()


def by_kind(report):
    sums = {}
    for row in report.rows:
        sums[row.kind] = sums.get(row.kind, 0) + row.now
    return {kind: nbytes for kind, nbytes in sums.items() if nbytes and kind != "transport"}


def peak_of_units(report):
    """Without memory that ranks share, whatever model it was last used for."""
    return sum(row.at_peak for row in report.rows if row.unit != "(all units)")


def life_of_a_model():
    """What is allocated as a model is built, stepped and cleared, beside what its tensors say."""
    model = shard(build("mlp"))
    seen = [by_kind(memory_report(model))]
    optimizer = torch.optim.AdamW(model.parameters())
    step(model)
    seen.append(by_kind(memory_report(model)))
    optimizer.step()
    seen.append(by_kind(memory_report(model, optimizer)))
    optimizer.zero_grad()
    seen.append(by_kind(memory_report(model)))
    model.blocks[0].unshard()
    whole = sum(parameter.nbytes for parameter in model.blocks[0].parameters())
    seen.append(by_kind(memory_report(model)))
    model.blocks[0].reshard()
    shards = sum(parameter.to_local().nbytes for parameter in model.parameters())
    state = sum(
        each.to_local().nbytes if hasattr(each, "to_local") else each.nbytes
        for values in optimizer.state.values()
        for each in values.values()
    )
    return seen, shards, whole, state


def test_what_is_allocated_now_follows_the_model_through_its_life(world):
    for (built, stepped, optimized, cleared, unsharded), shards, whole, state in world(2).run(life_of_a_model):
        # Buffers are padded, and a sum that is a gradient has flags behind it, so they are a little larger.
        assert set(built) == {"shards"}
        assert shards <= built["shards"] <= 1.5 * shards
        assert set(stepped) == {"shards", "gradients"}
        assert shards <= stepped["gradients"] <= 1.5 * shards
        assert optimized == stepped | {"optimizer state": state}
        assert cleared == built
        assert set(unsharded) == {"shards", "unsharded"}
        assert whole <= unsharded["unsharded"] <= 1.5 * whole


def reports_around_a_tracked_step(name):
    model = shard(build(name))
    before = memory_report(model)
    with track_memory(model) as peak:
        step(model)
    for parameter in model.parameters():
        parameter.grad = None
    after, unit = memory_report(model), weakref.ref(unit_of(model))
    del model, parameter
    gc.collect()
    assert unit() is None
    return before, after, peak.nbytes, peak.moment, dict(peak.rows), str(peak)


@pytest.mark.parametrize("name", ["mlp", "nested", "tied_across", "transformer", "branching"])
def test_after_a_tracked_step_prediction_and_measurement_agree(world, name):
    for before, after, nbytes, moment, rows, shown in world(2).run(reports_around_a_tracked_step, name):
        staged = sum(row.at_peak for row in after.rows if row.kind == "transport" and row.unit == "(all units)")
        assert before.measured_peak is None
        assert after.measured_peak == nbytes + staged
        assert sum(rows.values()) == nbytes
        assert after.predicted_peak == pytest.approx(after.measured_peak, rel=0.02)
        assert after.measured_moment == moment
        assert moment in shown


def whole_report(unsynced):
    model = shard(build("mlp"))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    step(model)
    optimizer.step()
    return memory_report(model, optimizer, unsynced_batches=unsynced)


def test_rows_name_units_as_the_model_does_and_add_up_to_both_totals(world):
    report, _ = world(2).run(whole_report, 0)
    names = [name for name, _ in build("mlp").named_modules()]
    units = {row.unit for row in report.rows} - {"(all units)"}
    assert all(unit in names or unit == type(build("mlp")).__name__ for unit in units)
    assert report.now == sum(row.now for row in report.rows)
    assert report.predicted_peak == sum(row.at_peak for row in report.rows)
    assert all(row.now or row.at_peak for row in report.rows)
    assert len({(row.unit, row.kind) for row in report.rows}) == len(report.rows)


def test_backwards_without_a_reduction_need_more(world):
    at_once, _ = world(2).run(whole_report, 0)
    waiting, _ = world(2).run(whole_report, 2)
    assert waiting.predicted_peak > at_once.predicted_peak


def test_the_table_has_a_line_for_each_unit_and_a_column_for_each_kind(world):
    report, _ = world(2).run(whole_report, 0)
    now, peak = str(report).split("\n\n")
    assert now.startswith("now: ")
    header, *lines, total = now.splitlines()[1:]
    for kind in {row.kind for row in report.rows if row.now}:
        assert kind in header
    assert total.split()[0] == "all"
    # Equal units share a line, and say how many they are.
    shared = [line for line in lines if "more, each" in line]
    more = sum(int(line.split(" and ")[1].split()[0]) for line in shared)
    assert len(lines) + more == len({row.unit for row in report.rows if row.now})
    assert peak.startswith("predicted peak of a step: ")
    assert report.predicted_moment in peak.splitlines()[0]
    assert len({len(line) for line in now.splitlines()[1:]}) == 1


def report_on_meta():
    model = shard(build("mlp", device="meta"))
    report = memory_report(model)
    model.to_empty(device="cpu")
    return by_kind(report), peak_of_units(report), peak_of_units(memory_report(model))


def test_a_model_on_the_meta_device_has_no_bytes_yet_and_the_same_prediction(world):
    for now, on_meta, with_data in world(2).run(report_on_meta):
        assert now == {}
        assert on_meta == with_data > 0


def reports_on_a_part_and_the_whole():
    model = shard(build("mlp"))
    block = model.blocks[0]
    alone = memory_report(block)
    with track_memory(model):
        step(model)
    for parameter in model.parameters():
        parameter.grad = None
    within, root = memory_report(block), memory_report(model)
    # What was measured is the whole model's, and its moment one of the whole model's units'.
    assert (within.measured_peak, within.measured_moment) == (None, None)
    assert root.measured_peak > 0
    return [peak_of_units(each) for each in (alone, within, root)]


def test_a_unit_below_the_root_can_be_reported_on_as_well(world):
    for alone, within, root in world(2).run(reports_on_a_part_and_the_whole):
        assert 0 < alone == within < root


def report_on(what, **options):
    model = shard(build("mlp"))
    if what == "plain":
        return memory_report(nn.Linear(2, 2))
    if what == "inside":
        return memory_report(nn.Sequential(model))
    if what == "twice":
        with track_memory(model), track_memory(model):
            return None
    if what == "tracked plain":
        with track_memory(nn.Linear(2, 2)):
            return None
    if what == "meta":
        with track_memory(fully_shard(nn.Linear(2, 2, device="meta"))):
            return None
    return memory_report(model, **options)


@pytest.mark.parametrize(
    ("what", "options", "error", "says"),
    [
        ("plain", {}, ModuleError, "got a Linear; pass the root"),
        ("inside", {}, ModuleError, "got a Sequential; pass the root"),
        ("tracked plain", {}, ModuleError, "track_memory expects a module"),
        ("twice", {}, StateError, "is tracked already"),
        ("meta", {}, StateError, "meta device"),
        ("options", {"unsynced_batches": -1}, PolicyError, "expected 0 or more"),
        ("options", {"unsynced_batches": True}, TypeError, "expected an int"),
    ],
)
def test_mistakes_are_named(world, what, options, error, says):
    with pytest.raises(RanksFailed) as failed:
        world(2).run(report_on, what, **options)
    name, text = failed.value.errors[0]
    assert says in text
    assert name in {each.__name__ for each in [error, *error.__subclasses__()]} | {"PolicyTypeError"}
