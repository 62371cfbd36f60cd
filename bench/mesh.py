"""Two axes: how long is a step, how many bytes go over the wire, and how many stay on a rank, by strategy?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import sherd
from sherd.api.placements import PRESETS
from sherd.engine import Unit
from sherd.memory.watch import held_by
from sherd.policy import Level
from sherd.schedule.moments import MemoryKind

from .bytes import MovedBytes
from .models import Model, Workload, gpt, num_bytes
from .ranks import Conditions, on_ranks
from .steps import AGREEMENT, Training, disagreement, laps_of, mean_cpu, slowest_wall
from .systems import System, Trainee
from .table import Aim, Figure, Row, row_of_counts, row_of_rounds

NUM_RANKS = 4
AIMS = [Aim(0.9, system="sherd"), Aim(0.9, system="Flat")]

Wrap = Callable[[nn.Module], Any]


@dataclass(frozen=True, slots=True)
class Sharded:
    """A model's blocks and root as units over a mesh `(replicate, shard)`, or `(dp, tp)`, by torch or by sherd."""

    by_sherd: bool
    placements: str | None = None
    flat: bool = False
    tensor_parallel: bool = False
    transport: str = "auto"

    def __call__(self, model: Model, mesh: DeviceMesh) -> Any:
        if self.tensor_parallel:
            for block in model.blocks:
                parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            mesh = mesh["dp"]
        wrap = self._ours(mesh) if self.by_sherd else partial(torch_fully_shard, mesh=mesh)
        for block in model.blocks:
            wrap(block)
        return wrap(model)

    def _ours(self, mesh: DeviceMesh) -> Wrap:
        return partial(
            sherd.fully_shard,
            mesh=mesh,
            placements=self.placements,
            placement=sherd.Flat() if self.flat else None,
            comm_policy=sherd.CommPolicy(transport=self.transport),
        )


def contenders(placements: str | None, tensor_parallel: bool = False) -> list[System]:
    """torch's, and ours cut on dim 0 and flat. torch has no HFSDP: its HSDP is held against ours."""
    ours = Sharded(by_sherd=True, placements=placements, tensor_parallel=tensor_parallel)
    return [
        System("FSDP2", Sharded(by_sherd=False, tensor_parallel=tensor_parallel)),
        System("sherd", ours),
        System("Flat", replace(ours, flat=True)),
    ]


CASES: dict[str, tuple[tuple[str, str], list[System]]] = {
    "HSDP": (("replicate", "shard"), contenders("hsdp")),
    "HFSDP": (("replicate", "shard"), contenders("hfsdp")),
    "TP": (("dp", "tp"), contenders(None, tensor_parallel=True)),
}
REMARKS = {"HFSDP": "slowest rank; FSDP2 has none: its HSDP", "TP": "slowest rank; the MLPs are tensor parallel"}


def workload(quick: bool) -> Workload:
    return gpt(1, 32, num_blocks=2) if quick else gpt(2, 128)


def measure(conditions: Conditions) -> Figure:
    """Four ranks in a mesh of 2 x 2, on the CPU."""
    if conditions.device != "cpu":
        return Figure([], notes=["mesh: for 4 CPU ranks; run it with --device cpu"])
    four = replace(conditions, cpu_ranks=NUM_RANKS)
    ranks = on_ranks(four, train, conditions.quick, conditions.rounds)
    rows, notes, sound = [], [f"mesh: {NUM_RANKS} gloo ranks; bytes sent are counted over torch's collectives"], True
    for case in CASES:
        trainings = [rank[case] for rank in ranks]
        rows.append(
            row_of_rounds(f"{case} 2 x 2: step", "ms", slowest_wall(trainings), AIMS, REMARKS.get(case, "slowest rank"))
        )
        rows.append(
            row_of_rounds(f"{case} 2 x 2: CPU time of a step", "ms", mean_cpu(trainings), None, "mean of ranks")
        )
        difference, note = disagreement(trainings, group_is_real=True)
        notes.append(f"{case} 2 x 2: {note}")
        sound = sound and difference <= AGREEMENT
    strategies = on_ranks(four, strategies_on_rank, conditions.quick)
    rows += list(rows_of_strategies(strategies))
    return Figure(rows, {"ranks": ranks, "strategies": strategies}, notes, sound)


# Time


def train(mesh: DeviceMesh, quick: bool, num_rounds: int) -> dict[str, Training]:
    """On a rank: each case in turn, its systems side by side."""
    return {case: train_one(mesh, names, systems, quick, num_rounds) for case, (names, systems) in CASES.items()}


def train_one(
    mesh: DeviceMesh, names: tuple[str, str], systems: list[System], quick: bool, num_rounds: int
) -> Training:
    """As in `steps`; ranks of one tensor-parallel group have the same batch."""
    two = init_device_mesh(mesh.device_type, (2, 2), mesh_dim_names=names)
    part = two.get_local_rank("dp") if "dp" in names else dist.get_rank()
    return laps_of({system.name: Trainee(system, workload(quick), two) for system in systems}, part, num_rounds)


# Bytes


@dataclass(frozen=True, slots=True)
class Kept:
    """Of one strategy on one rank, in units of N: sent in a step, least possible; kept at rest; while accumulating."""

    sent: float
    least: float
    parameters: float
    gradients: float
    unreduced: float
    optimizer: float


def strategies_on_rank(mesh: DeviceMesh, quick: bool) -> dict[str, Kept]:
    """On a rank: every preset on a mesh of 2 x 2, `Flat()` and over torch's own collectives, which can be counted."""
    two = init_device_mesh(mesh.device_type, (2, 2), mesh_dim_names=("replicate", "shard"))
    return {name: bytes_of(name, two, workload(quick)) for name in PRESETS}


def bytes_of(name: str, mesh: DeviceMesh, given: Workload) -> Kept:
    system = System("sherd", Sharded(by_sherd=True, placements=name, flat=True, transport="torch"))
    trainee = Trainee(system, given, mesh)
    unit = num_bytes(given.build())
    trainee.step(trainee.batch(dist.get_rank()))
    with MovedBytes(mesh.size()) as moved:
        trainee.forward_backward(trainee.batch(1))
    gradients = sum(_local_bytes(parameter.grad) for parameter in trainee.model.parameters())
    trainee.drop_gradients()
    with sherd.accumulate(trainee.model, 2):
        trainee.forward_backward(trainee.batch(2))
        unreduced = _held(trainee.model, MemoryKind.GRADIENT_ROWS, MemoryKind.REDUCED)
        unreduced += sum(_local_bytes(parameter.grad) for parameter in trainee.model.parameters())
        trainee.forward_backward(trainee.batch(3))
    trainee.optimizer.step()
    trainee.drop_gradients()
    state = sum(_local_bytes(value) for each in trainee.optimizer.state.values() for value in each.values())
    kept = _held(trainee.model, MemoryKind.SHARDS, MemoryKind.UNSHARDED)
    least = least_sent(name, unit, num_bytes_of_root(trainee.model, unit), *mesh.mesh.shape)
    sent = sum(moved.sent.values())
    return Kept(*(size / unit for size in (sent, least, kept, gradients, unreduced, state)))


def least_sent(name: str, num_bytes: float, of_root: float, replicas: int, shards: int) -> float:
    """Bytes that a rank must send in one step, all parameters being used once.

    An all-gather or a reduce-scatter of B bytes over W ranks takes B (W - 1) / W of each, an all-reduce twice that.
    Parameters that are sharded are gathered for forward and for backward, the root's once; those that are not, once
    after they were written.
    """
    levels = PRESETS[name] if len(PRESETS[name]) == 2 else PRESETS[name] * 2
    over_all, within, across = (_share(each) for each in (replicas * shards, shards, replicas))
    gathers = 2 * num_bytes - of_root
    if levels == (Level.COPIES,) * 2:
        return 2 * num_bytes * over_all
    if levels == (Level.PARAMETERS,) * 2:
        return (gathers + num_bytes) * over_all
    gathered = gathers if levels[1] is Level.PARAMETERS else num_bytes
    return (gathered + num_bytes) * within + 2 * num_bytes / shards * across


def _share(num_ranks: int) -> float:
    return (num_ranks - 1) / num_ranks


def num_bytes_of_root(model: nn.Module, default: float) -> float:
    """Bytes of the unsharded parameters of the root unit."""
    root = Unit.below(model)[0]
    return sum(each.shape.numel() * each.dtype.itemsize for each in root.parameters) if root else default


def _held(model: nn.Module, *kinds: MemoryKind) -> float:
    return sum(size for unit in Unit.below(model) for kind, size in held_by(unit).values() if kind in kinds)


def _local_bytes(tensor: object) -> int:
    if not isinstance(tensor, Tensor) or tensor.dim() == 0:
        return 0
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def rows_of_strategies(ranks: list[dict[str, Kept]]) -> list[Row]:
    """A row for each kind of bytes of each strategy: the rank that has most."""
    rows = []
    for name in ranks[0]:
        each = [rank[name] for rank in ranks]
        least = max(kept.least for kept in each)
        for what in ("sent", "parameters", "gradients", "unreduced", "optimizer"):
            most = max(getattr(kept, what) for kept in each)
            remark = f"least possible {least:.3g}" if what == "sent" else TITLES[what]
            rows.append(row_of_counts(f"{name} 2 x 2: {what}", "N", {"Flat": most}, None, remark))
    return rows


TITLES = {
    "parameters": "at rest: shards, and whole ones that are kept",
    "gradients": "after the last backward",
    "unreduced": "after a backward that is not the last",
    "optimizer": "AdamW",
}
