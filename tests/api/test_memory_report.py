"""The memory report names every buffer, adds up, and refuses what it cannot report on."""

import gc
import weakref

import pytest
import torch
from torch import nn

from sherd import fully_shard
from sherd.engine.run.unit import Unit
from sherd.errors import ModuleError, PolicyError, PolicyTypeError, StateError
from sherd.memory.report import memory_report, track_memory
from tests.api.checks import assert_refuses, local
from tests.support.models import build
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.sharding import sharded


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


@on_processes(2)
def test_what_is_allocated_now_follows_the_model_through_its_life():
    """What is allocated as a model is built, stepped and cleared, beside what its tensors say."""
    # Buffers are padded, and a sum that is a gradient has flags behind it, so they are a little larger.
    model = sharded(build("mlp"))
    optimizer = torch.optim.AdamW(model.parameters())
    built = by_kind(memory_report(model))
    shards = sum(parameter.to_local().nbytes for parameter in model.parameters())
    assert set(built) == {"shards"}
    assert shards <= built["shards"] <= 1.5 * shards
    step(model)
    stepped = by_kind(memory_report(model))
    assert set(stepped) == {"shards", "gradients"}
    assert shards <= stepped["gradients"] <= 1.5 * shards
    optimizer.step()
    states = [local(each) for values in optimizer.state.values() for each in values.values()]
    state = sum(each.nbytes for each in states)
    assert by_kind(memory_report(model, optimizer)) == stepped | {"optimizer state": state}
    optimizer.zero_grad()
    assert by_kind(memory_report(model)) == built
    model.blocks[0].unshard()
    whole = sum(parameter.nbytes for parameter in model.blocks[0].parameters())
    unsharded = by_kind(memory_report(model))
    assert set(unsharded) == {"shards", "unsharded"}
    assert whole <= unsharded["unsharded"] <= 1.5 * whole


@pytest.mark.parametrize("name", ["mlp", "nested", "tied_across", "transformer", "branching"])
@on_processes(2)
def test_after_a_tracked_step_prediction_and_measurement_agree(name):
    model = sharded(build(name))
    before = memory_report(model)
    with track_memory(model) as peak:
        step(model)
    for parameter in model.parameters():
        parameter.grad = None
    after, unit = memory_report(model), weakref.ref(Unit.of(model))
    del model, parameter
    gc.collect()
    assert unit() is None
    staged = sum(row.at_peak for row in after.rows if row.kind == "transport" and row.unit == "(all units)")
    assert before.measured_peak is None
    assert after.measured_peak == peak.nbytes + staged
    assert sum(peak.rows.values()) == peak.nbytes
    assert after.predicted_peak == pytest.approx(after.measured_peak, rel=0.02)
    assert after.measured_moment == peak.moment
    assert peak.moment in str(peak)


def whole_report(unsynced=0):
    model = sharded(build("mlp"))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    step(model)
    optimizer.step()
    return memory_report(model, optimizer, unsynced_batches=unsynced)


@pytest.mark.front("A memory report")
@on_threads(2)
def test_rows_name_units_as_the_model_does_and_add_up_to_both_totals():
    report = whole_report()
    names = [name for name, _ in build("mlp").named_modules()]
    units = {row.unit for row in report.rows} - {"(all units)"}
    assert all(unit in names or unit == type(build("mlp")).__name__ for unit in units)
    assert report.now == sum(row.now for row in report.rows)
    assert report.predicted_peak == sum(row.at_peak for row in report.rows)
    assert all(row.now or row.at_peak for row in report.rows)
    assert len({(row.unit, row.kind) for row in report.rows}) == len(report.rows)
    assert whole_report(2).predicted_peak > report.predicted_peak, "backwards without a reduction need more"


@on_threads(2)
def test_the_table_has_a_line_for_each_unit_and_a_column_for_each_kind():
    report = whole_report()
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
    header, *lines = peak.splitlines()[1:]
    for row in report.rows:
        assert not row.at_peak or row.kind in header, row
    assert lines[-1].split()[0] == "all"
    assert len({len(line) for line in now.splitlines()[1:]}) == 1


@on_threads(2)
def test_a_model_on_the_meta_device_has_no_bytes_yet_and_the_same_prediction():
    model = sharded(build("mlp", device="meta"))
    report = memory_report(model)
    model.to_empty(device="cpu")
    assert by_kind(report) == {}
    assert peak_of_units(report) == peak_of_units(memory_report(model)) > 0


@on_threads(2)
def test_a_unit_below_the_root_can_be_reported_on_as_well():
    model = sharded(build("mlp"))
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
    assert 0 < peak_of_units(alone) == peak_of_units(within) < peak_of_units(root)


@on_threads(2)
def test_mistakes_are_named():
    model, plain = sharded(build("mlp")), nn.Linear(2, 2)
    assert_refuses(lambda: memory_report(plain), ModuleError, "got a Linear; pass the root")
    assert_refuses(lambda: memory_report(nn.Sequential(model)), ModuleError, "got a Sequential; pass the root")
    assert_refuses(lambda: memory_report(model, unsynced_batches=-1), PolicyError, "expected 0 or more")
    assert_refuses(lambda: memory_report(model, unsynced_batches=True), PolicyTypeError, "expected an int")
    assert_refuses(track_memory(plain).__enter__, ModuleError, "track_memory expects a module")
    on_meta = fully_shard(nn.Linear(2, 2, device="meta"))
    assert_refuses(track_memory(on_meta).__enter__, StateError, "meta device")
    with track_memory(model):
        assert_refuses(track_memory(model).__enter__, StateError, "is tracked already")
