"""Torch's pipeline schedules train sharded stages as one process trains the whole model."""

import gc
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh

from sherd import Muon, accumulate, fully_shard, step_in_backward
from sherd.engine import StageUnits
from sherd.engine.run.unit import Unit
from sherd.errors import ModuleError, OwnershipError, StateError
from sherd.interop import torch_fsdp_identity
from sherd.interop.pipelining import PipelineStage
from sherd.optim.exchange import Bucket
from sherd.schedule.state import Live
from tests.pipelining.stages import (
    MICRO_BATCHES,
    WIDTH,
    Part,
    assert_same,
    batch,
    counted,
    loss_of,
    make_schedule,
    optimizer_of,
    parts,
    run_step,
    shard,
    stages_of,
    train,
)
from tests.support.ranks.bodies import on_threads
from tests.support.sharding import sharded
from tests.support.versions import needs_torch, torch_is_older

CPU = torch.device("cpu")

has_neighbours = needs_torch(2, 12, "a rank sends to itself if its stages are neighbours, which gloo cannot")
ZBV, DUAL_PIPE = (pytest.param(name, marks=has_neighbours) for name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"))
SINGLE = ["ScheduleGPipe", "Schedule1F1B"]
SCHEDULES = [*SINGLE, "ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble", ZBV]


LEARNING = 0 if torch_is_older(2, 12) else 1
"""How often all is gathered because torch runs each stage to learn the shapes; 2.11 does so without a second gather."""


def units_per_rank(schedule: str) -> int:
    return 3 * len(stages_of(schedule, 0)[0])


@pytest.mark.parametrize("schedule", [*SCHEDULES, DUAL_PIPE])
def test_a_pipeline_alone_trains_as_one_process_does(world, schedule):
    runs = world(2).run(train, schedule, "flat")
    assert_same(runs)
    once = {"Gather": units_per_rank(schedule), "Reduce": units_per_rank(schedule)}
    first = {**once, "Gather": (LEARNING + 1) * once["Gather"]}
    assert [run.counts for run in runs] == [[first, once]] * 2


def zbv(how: str) -> Any:
    return pytest.param("ScheduleZBVZeroBubble", how, marks=has_neighbours)


DATA_PARALLEL = [
    ("ScheduleGPipe", "shard"),
    ("Schedule1F1B", "zero1"),
    ("ScheduleInterleaved1F1B", "flat"),
    ("ScheduleLoopedBFS", "wrapper"),
    ("ScheduleInterleavedZeroBubble", "shard"),
    zbv("flat"),
    zbv("wrapper"),
]
"""Every schedule, every way to shard; those that split backward under each that has buffers of its own."""


@pytest.mark.parametrize(("schedule", "how"), DATA_PARALLEL)
def test_a_pipeline_beside_data_parallel_trains_as_one_process_does(world, schedule, how):
    runs = world(4).run(train, schedule, how, num_dp=2)
    assert_same(runs, num_dp=2)
    once = {"Gather": units_per_rank(schedule), "Reduce": units_per_rank(schedule)}
    assert all(run.counts[-1] == once for run in runs)


def muon_of(modules: list[nn.Module]) -> torch.optim.Optimizer:
    return Muon(nn.ModuleList(modules), lr=0.02, beta2=0.9, ns_dtype=torch.float32)


def exchanges_of_a_step(how: str) -> tuple[Any, int, int]:
    """A run with Muon, how often matrices travel in its last step, and how many travels are kept after it."""
    begun: list[Any] = []
    start = Bucket._start

    def noting(self: Bucket, *given: Any) -> Any:
        moving = start(self, *given)
        begun.append(weakref.ref(moving))
        return moving

    with mock.patch.object(Bucket, "_start", noting):
        run = train("ScheduleInterleaved1F1B", how, num_dp=2, optimizer_of=muon_of)
    gc.collect()
    return run, len(begun) // len(run.losses), sum(each() is not None for each in begun)


@pytest.mark.parametrize(("how", "ways"), [("shard", 1), ("flat", 2)])
def test_muon_steps_the_stages_of_a_rank_together_and_keeps_no_scratch(world, how, ways):
    runs, exchanges, kept = zip(*world(4).run(exchanges_of_a_step, how), strict=True)
    assert_same(list(runs), num_dp=2, optimizer_of=muon_of)
    assert (set(exchanges), set(kept)) == ({ways}, {0})


@pytest.mark.parametrize(("schedule", "how"), [zbv("only_blocks"), ("Schedule1F1B", "none")])
def test_a_stage_may_be_sharded_in_parts_or_not_at_all(world, schedule, how):
    assert_same(world(2).run(train, schedule, how))


@on_threads(1)
def test_units_that_are_stepped_within_backward_are_refused():
    schedule, (stage,) = alone("ScheduleGPipe")
    step_in_backward(stage.submod, optimizer_of([stage.submod]))
    with pytest.raises(StateError, match=r"stage 0: step_in_backward steps unit .* divides gradients"):
        run_step(schedule, [stage], 0, 0)


# In one process: stages after each other on one rank


def alone(schedule: str, how: str = "shard", num_stages: int = 1, kind: Any = PipelineStage) -> tuple[Any, list[Any]]:
    """A schedule and its stages, all on this rank."""
    mesh = init_device_mesh("cpu", (1,))
    stages = [kind(shard(part, how, mesh), index, num_stages, CPU) for index, part in enumerate(parts(num_stages))]
    return make_schedule(schedule, stages), stages


def gradients(stages: list[Any]) -> list[torch.Tensor]:
    return [each.grad.full_tensor().clone() for stage in stages for each in stage.submod.parameters()]


def live_of(stages: list[Any]) -> set[Live]:
    return {Unit.of(each).live for stage in stages for each in stage.submod.modules() if Unit.of(each)}


@has_neighbours
@on_threads(1)
def test_low_precision_is_what_it_is_without_a_pipeline():
    schedule, stages = alone("ScheduleZBVZeroBubble", "bfloat16", num_stages=2)
    run_step(schedule, stages, 0, 0)
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Sequential(*(shard(part, "bfloat16", mesh) for part in parts(2)))
    inputs, targets = batch(0, 0)
    for x, y in zip(inputs.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES), strict=True):
        loss_of(model(x), y).backward()
    expected = [each.grad.full_tensor() / MICRO_BATCHES for each in model.parameters()]
    torch.testing.assert_close(gradients(stages), expected, rtol=1e-6, atol=1e-7)


@on_threads(1)
def test_an_evaluation_in_between_gathers_once_and_leaves_gradients_alone():
    schedule, (stage,) = alone("ScheduleGPipe")
    stage.submod.blocks[1].set_reshard_after_forward(False)
    chosen = [unit.policy for unit in StageUnits(stage.submod, "").units]
    run_step(schedule, [stage], 0, 0)
    before = gradients([stage])
    inputs, _ = batch(0, 0)
    with torch.no_grad(), counted() as counts:
        output = schedule.eval(inputs, target=inputs)
    assert counts == {"Gather": (LEARNING + 1) * 3}  # torch learns the shapes again; then once for all micro-batches
    torch.testing.assert_close(output, parts(1)[0](inputs))
    torch.testing.assert_close(gradients([stage]), before)
    assert live_of([stage]) == {Live.SHARDED}
    assert chosen == [unit.policy for unit in StageUnits(stage.submod, "").units]


@has_neighbours
@pytest.mark.parametrize("reduce_each", [True, False], ids="reduce_each_{}".format)
@on_threads(1)
def test_two_steps_add_their_gradients_up(reduce_each):
    schedule, stages = alone("ScheduleZBVZeroBubble", num_stages=2)
    each_alone = []
    for step in range(2):
        run_step(schedule, stages, step, 0)
        each_alone.append(gradients(stages))
        for stage in stages:
            stage.submod.zero_grad()
    for step in range(2):
        for stage in stages:
            stage.submod.set_requires_gradient_sync(reduce_each or step == 1)
        run_step(schedule, stages, step, 0)
    torch.testing.assert_close(gradients(stages), [a + b for a, b in zip(*each_alone, strict=True)])


@pytest.mark.parametrize("kind", SINGLE)
@on_threads(1)
def test_the_step_after_one_that_raised_is_right(kind):
    schedule, stages = alone(kind)
    run_step(schedule, stages, 0, 0)
    expected = gradients(stages)
    stages[0].submod.zero_grad()
    loss, calls = schedule._loss_fn, []

    def raises_later(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        value = loss(output, target)
        if len(calls) == 3:
            value.register_hook(lambda _: 1 / 0)
        return value

    schedule._loss_fn = raises_later
    with pytest.raises(RuntimeError, match="backward"):
        run_step(schedule, stages, 1, 0)
    schedule._loss_fn = loss
    schedule._internal_losses.clear()  # which torch's schedule leaves behind
    run_step(schedule, stages, 0, 0)
    torch.testing.assert_close(gradients(stages), expected)
    assert live_of(stages) == {Live.SHARDED}


@on_threads(1)
def test_the_last_backward_reduces_while_it_runs():
    schedule, (stage,) = alone("ScheduleGPipe")
    begun: list[int] = []
    with counted() as counts:

        def watch(_: Any, __: Any, output: torch.Tensor) -> None:
            if output.grad_fn is not None:  # not while torch 2.11 learns the shapes
                output.grad_fn.register_hook(lambda *_: begun.append(counts["Reduce"]))

        stage.submod.blocks[0].register_forward_hook(watch)
        run_step(schedule, [stage], 0, 0)
    # What is behind the first block, when backward reaches that in each micro-batch.
    assert begun == [0, 0, 0, 1]


@has_neighbours
@on_threads(1)
def test_stages_are_gathered_ahead_and_given_up_when_the_schedule_says_so():
    schedule, stages = alone("ScheduleLoopedBFS", num_stages=5)
    whole: list[int] = []

    def note(*_: Any) -> None:
        whole.append(sum(Unit.of(stage.submod).live is not Live.SHARDED for stage in stages))

    run_step(schedule, stages, 0, 0)
    for stage in stages:
        stage.submod.blocks[0].norm.register_forward_hook(note)
        stage.submod.zero_grad()
    with counted() as counts:
        run_step(schedule, stages, 0, 0)
    assert max(whole) == whole[0] == 3  # two are gathered ahead; torch's schedules have three at most
    assert counts == {"Gather": 3 * (5 + 2), "Reduce": 3 * 5}  # the first two stages were given up in between
    assert live_of(stages) == {Live.SHARDED}


@needs_torch(2, 15, "its schedules always wait for a stage's reductions at once")
@on_threads(1)
def test_reductions_that_are_waited_for_later_give_the_same_gradients():
    def after_a_step(kind: Any, **how: Any) -> list[torch.Tensor]:
        _, stages = alone("ScheduleLoopedBFS", num_stages=2, kind=kind)
        run_step(pipelining.ScheduleLoopedBFS(stages, MICRO_BATCHES, loss_fn=loss_of, **how), stages, 0, 0)
        return gradients(stages)

    expected = after_a_step(PipelineStage)
    torch.testing.assert_close(after_a_step(PipelineStage, defer_reduce_grad_wait=True), expected)
    with torch_fsdp_identity():
        torch.testing.assert_close(after_a_step(pipelining.PipelineStage, defer_reduce_grad_wait=True), expected)


# Torch's own stage


def train_torchs_stage(*args: Any, **kwargs: Any) -> Any:
    with torch_fsdp_identity():
        return train(*args, kind=pipelining.PipelineStage, **kwargs)


@pytest.mark.parametrize(("schedule", "how"), [("Schedule1F1B", "shard"), zbv("wrapper")])
def test_torchs_own_stage_trains_the_same_once_it_knows_the_modules(world, schedule, how):
    runs = world(2).run(train_torchs_stage, schedule, how)
    assert_same(runs)
    assert all(run.counts[-1]["Reduce"] == units_per_rank(schedule) for run in runs)


@has_neighbours
@on_threads(1)
def test_torchs_own_stage_is_told_when_it_cannot_know():
    schedule, stages = alone("ScheduleZBVZeroBubble", "only_blocks", 2, pipelining.PipelineStage)
    with (
        torch_fsdp_identity(),
        pytest.raises(StateError, match=r"PipelineStage \(stage 0\).* fully_shard the stage's module itself"),
    ):
        run_step(schedule, stages, 0, 0)


# What is not one stage's


@on_threads(1)
def test_what_a_stage_cannot_serve_is_named():
    # A unit over two stages.
    first, second = parts(2)
    fully_shard([first.last, second.last])
    stages = [PipelineStage(part, index, 2, CPU) for index, part in enumerate((first, second))]
    with pytest.raises(ModuleError, match=r"stage 0: unit Linear also has modules .* \(FSDPLinear\)"):
        run_step(make_schedule("ScheduleLoopedBFS", stages), stages, 0, 0)
    # A parameter in two stages.
    first, second = parts(2)
    second.last.weight = first.last.weight
    stages = [PipelineStage(fully_shard(part), index, 2, CPU) for index, part in enumerate((first, second))]
    with pytest.raises(OwnershipError, match="stage 1: unit Part uses a parameter that unit Part owns"):
        run_step(make_schedule("ScheduleLoopedBFS", stages), stages, 0, 0)
    # A stage of a model that has run.
    model = nn.Sequential(Part(), nn.Linear(WIDTH, WIDTH))
    sharded(model, units=[model[0], model])(torch.ones(1, WIDTH))
    stage = PipelineStage(model[0], 0, 1, CPU)
    with pytest.raises(StateError, match="stage 0: unit 0 has run below Sequential"):
        run_step(make_schedule("ScheduleGPipe", [stage]), [stage], 0, 0)
    # A step that is counted elsewhere.
    schedule, stages = alone("ScheduleGPipe")
    counting = accumulate(stages[0].submod, MICRO_BATCHES)
    with pytest.raises(StateError, match="stage 0: a schedule runs inside accumulate"), counting:
        run_step(schedule, stages, 0, 0)


@needs_torch(2, 15, "a step of its schedules always reduces")
@on_threads(1)
def test_a_step_that_is_not_to_reduce_is_refused_before_it_changes_anything():
    schedule, stages = alone("ScheduleGPipe")
    inputs, targets = batch(0, 0)
    with pytest.raises(StateError, match=r"stage 0: step\(finalize_gradients=False\) .* set_requires_gradient_sync"):
        schedule.step(inputs, target=targets, finalize_gradients=False)
    run_step(schedule, stages, 0, 0)
    assert all(each is not None for each in gradients(stages))


@has_neighbours
@on_threads(1)
def test_torchs_own_stage_works_alone_unless_it_splits_backward():
    gc.collect()  # of earlier tests, stages of sherd, which lend their modules torch's class for as long as they live
    schedule, stages = alone("ScheduleZBVZeroBubble", num_stages=2, kind=pipelining.PipelineStage)
    with pytest.raises(StateError, match=r"unit Part runs in torch's PipelineStage \(stage 0\)"):
        run_step(schedule, stages, 0, 0)
    schedule, stages = alone("ScheduleLoopedBFS", num_stages=2, kind=pipelining.PipelineStage)
    run_step(schedule, stages, 0, 0)
    mine, others = alone("ScheduleLoopedBFS", num_stages=2)
    run_step(mine, others, 0, 0)
    torch.testing.assert_close(gradients(stages), gradients(others))
