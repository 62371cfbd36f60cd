"""What runs through a pipeline in these tests, and plain training on the same batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from sherd import FullyShardedDataParallel, MixedPrecisionPolicy, unsharded
from sherd.interop.pipelining import PipelineStage
from sherd.schedule.actions import Event, Gather, Reduce
from sherd.schedule.schedule import Edge, Schedule
from sherd.wrap import ModuleWrapPolicy
from tests.support import comparing
from tests.support.comparing import Named, plain_name, whole, whole_grads, whole_params
from tests.support.models import noise
from tests.support.sharding import sharded

WIDTH = 6
ROWS = 8
"""Of one data-parallel rank's batch."""

MICRO_BATCHES = 4

PIPE = 2
"""Ranks in a pipeline."""


class Block(nn.Module):
    """Two layers with a norm, a residual, and a parameter that is added as it is: its gradient is the input's."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.offset = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x + self.offset))))


class Part(nn.Module):
    """What one stage computes: blocks, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def parts(num_stages: int) -> list[Part]:
    """The whole model, the same on every rank."""
    torch.manual_seed(0)
    return [Part() for _ in range(num_stages)]


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one data-parallel rank in one step."""
    return noise(2 * step, rank, ROWS, WIDTH), noise(2 * step + 1, rank, ROWS, WIDTH)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target).square().mean()


@dataclass
class Run:
    """What a training left. Losses are the means over a rank's batch; gradients and parameters are whole, by name."""

    losses: list[float] = field(default_factory=list)
    grads: list[Named] = field(default_factory=list)
    params: Named = field(default_factory=dict)
    counts: list[dict[str, int]] = field(default_factory=list)


OptimizerOf = Callable[[list[nn.Module]], torch.optim.Optimizer]


def optimizer_of(modules: list[nn.Module]) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for module in modules for each in module.parameters()], lr=0.1)


def plain(num_stages: int, num_ranks: int, steps: int, optimizer_of: OptimizerOf = optimizer_of) -> Run:
    """One process, no pipeline, all data-parallel ranks' batches at once."""
    model = nn.Sequential(*parts(num_stages))
    optimizer, run = optimizer_of([model]), Run()
    for step in range(steps):
        inputs, targets = (
            torch.cat(each) for each in zip(*(batch(step, rank) for rank in range(num_ranks)), strict=True)
        )
        loss = loss_of(model(inputs), targets)
        loss.backward()
        run.losses.append(loss.item())
        run.grads.append(whole_grads(model))
        optimizer.step()
        optimizer.zero_grad()
    run.params = whole_params(model)
    return run


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How many units were gathered and reduced inside."""
    counts: Counter[str] = Counter()
    followed = Schedule.follow

    def noting(self: Schedule, kind: Callable[..., Event], *args: object) -> Edge:
        edge = followed(self, kind, *args)
        counts.update(type(action).__name__ for action in edge.actions if isinstance(action, Gather | Reduce))
        return edge

    with mock.patch.object(Schedule, "follow", noting):
        yield counts


# Schedules

LOOPED = ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleLoopedBFS")
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


def stages_of(schedule: str, rank: int) -> tuple[list[int], int]:
    """Which stages `rank` has under `schedule`, and how many there are."""
    if schedule in LOOPED:
        return [rank, rank + PIPE], 2 * PIPE
    if schedule in V_SHAPED:
        return [rank, 2 * PIPE - 1 - rank], 2 * PIPE
    return [rank], PIPE


OPTIONS: dict[str, dict[str, Any]] = {
    "flat": {"front": "flat"},
    "zero1": {"placements": "zero1"},
    "bfloat16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
}


def shard(part: Part, how: str, mesh: DeviceMesh) -> nn.Module:
    """`part` sharded over `mesh`: its blocks and itself, only its blocks, or nothing."""
    if how == "none":
        return part
    if how == "wrapper":
        return FullyShardedDataParallel(part, device_mesh=mesh, auto_wrap_policy=ModuleWrapPolicy({Block}))
    units = [*part.blocks] if how == "only_blocks" else [*part.blocks, part]
    return sharded(part, units=units, mesh=mesh, **OPTIONS.get(how, {}))


def make_schedule(name: str, stages: list[Any]) -> Any:
    kind = getattr(pipelining, name)
    single = issubclass(kind, pipelining.schedules.PipelineScheduleSingle)
    return kind(stages[0] if single else stages, MICRO_BATCHES, loss_fn=loss_of)


def run_step(schedule: Any, stages: list[Any], step: int, rank: int) -> float:
    """One step on the batch of data-parallel rank `rank`; the loss, 0 where the last stage is not."""
    inputs, targets = batch(step, rank)
    losses: list[Tensor] = []
    first, last = any(each.is_first for each in stages), any(each.is_last for each in stages)
    schedule.step(*((inputs,) if first else ()), **({"target": targets, "losses": losses} if last else {}))
    return sum(each.item() for each in losses) / MICRO_BATCHES


def train(
    name: str,
    how: str = "shard",
    num_dp: int = 1,
    steps: int = 2,
    kind: Any = PipelineStage,
    optimizer_of: OptimizerOf = optimizer_of,
) -> Run:
    """On a rank: what its stages have computed, their parameters named as in the whole model."""
    # DTensor remembers earlier, equal meshes, whose groups ended with the test that made them.
    _clear_sharding_prop_cache()
    mesh = init_device_mesh("cpu", (PIPE, num_dp), mesh_dim_names=("pipe", "data"))
    indices, num_stages = stages_of(name, mesh.get_local_rank("pipe"))
    everything, device = parts(num_stages), torch.device("cpu")
    stages = [
        kind(shard(everything[index], how, mesh["data"]), index, num_stages, device, group=mesh.get_group("pipe"))
        for index in indices
    ]
    schedule, optimizer, run = make_schedule(name, stages), optimizer_of([stage.submod for stage in stages]), Run()
    for step in range(steps):
        with counted() as counts:
            loss = run_step(schedule, stages, step, mesh.get_local_rank("data"))
        total = torch.tensor([loss])
        dist.all_reduce(total)
        run.losses.append(total.item() / num_dp)
        run.counts.append(dict(counts))
        run.grads.append(named(stages, lambda each: each.grad))
        optimizer.step()
        optimizer.zero_grad()
    run.params = named(stages, lambda each: each)
    return run


def named(stages: list[Any], what: Any) -> Named:
    """`what` of each parameter, whole, by its name in the whole model."""
    found = {}
    for stage in stages:
        with unsharded(stage.submod, writeback=False, with_grads=True):
            for name, each in stage.submod.named_parameters():
                assert what(each) is not None, f"stage {stage.stage_index}: {name} has none"
                found[f"{stage.stage_index}.{plain_name(name)}"] = whole(what(each))
    return found


def assert_same(runs: list[Run], num_dp: int = 1, optimizer_of: OptimizerOf = optimizer_of) -> None:
    """Every rank's run is its part of plain training, and together they are all of it."""
    num_stages = 1 + max(int(name.split(".")[0]) for run in runs for name in run.params)
    expected = plain(num_stages, num_dp, len(runs[0].losses), optimizer_of)
    assert set().union(*(run.params for run in runs)) == set(expected.params)
    for run in runs:
        here = (run.losses, run.grads, run.params)
        theirs = (
            expected.losses,
            [{name: each[name] for name in run.params} for each in expected.grads],
            {name: expected.params[name] for name in run.params},
        )
        comparing.assert_same(here, theirs, rtol=1e-4, atol=1e-6)
