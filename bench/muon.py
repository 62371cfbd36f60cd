"""What does a step of Muon cost? Beside torch's over whole and over sharded matrices, and two packages for FSDP2."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from statistics import fmean, median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.optim import AdamW

import sherd
from sherd._torch import imagined_ranks
from sherd.optim.gradients import zeros_as_gradient
from sherd.optim.muon import left_to_adamw
from sherd.optim.newton_schulz import QUINTIC, coefficients_of, orthogonalized

from .bytes import MovedBytes
from .models import Workload, num_bytes
from .ranks import Conditions, on_ranks
from .rounds import Lap, interleaved, timed, without_collector
from .steps import AGREEMENT, Training, mean_cpu, slowest_wall, workloads
from .systems import DDP, FSDP2, SHERD, System, Trainee, sherd_system
from .table import Aim, Aims, Figure, Row, row_of_counts, row_of_rounds, three_digits

NUM_FAKE_RANKS = 16
NUM_WARMUPS = 3
OPTIONS = {"lr": 0.01, "weight_decay": 0.1}
ADAMW = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
WIRE = "wire"
"""The runner of bare all-to-alls."""

PLACEMENTS = {"Shard": Shard(0), "Flat": sherd.Flat(), "Blocks": sherd.Blocks(512), "Owned": sherd.Owned()}
"""Beside the default, under which backward reduces gradients to the owners of matrices."""
OURS = (SHERD.name, *PLACEMENTS)


class Several:
    """Optimizers that step one after the other."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none)


def divided(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Returns the hidden matrices, and what is left to AdamW."""
    left, named = left_to_adamw(model), dict(model.named_parameters())
    return [p for name, p in named.items() if not left[name]], [p for name, p in named.items() if left[name]]


# The optimizers: of products in bfloat16 with the same coefficients, rates, decay and momentum, all alike


def of_torch(model: nn.Module, mesh: DeviceMesh) -> Several:
    matrices, others = divided(model)
    return Several(torch.optim.Muon(matrices, **OPTIONS), AdamW(others, **ADAMW, foreach=True))


def of_sherd(model: nn.Module, mesh: DeviceMesh) -> torch.optim.Optimizer:
    return sherd.Muon(model, **OPTIONS, ns_dtype=torch.bfloat16, adamw=ADAMW)


def of_muon_fsdp2(model: nn.Module, mesh: DeviceMesh) -> torch.optim.Optimizer:
    from muon_fsdp2 import Muon

    matrices, others = divided(model)
    hidden = {"params": matrices, "use_muon": True, "rms_scale": False, "momentum": 0.95, **OPTIONS}
    return Muon([hidden, {"params": others, "use_muon": False, **ADAMW}])


def of_dion(model: nn.Module, mesh: DeviceMesh) -> torch.optim.Optimizer:
    """dion's Muon, with our products. It has another rule for rates, which groups by shape make up for."""
    from dion import Muon

    matrices, others = divided(model)
    groups = []
    for shape, alike in groupby(sorted(matrices, key=lambda p: tuple(p.shape)), key=lambda p: tuple(p.shape)):
        scale = math.sqrt(max(1, shape[0] / shape[1]))
        rate, decay = OPTIONS["lr"] * scale, OPTIONS["weight_decay"] / scale
        groups.append({"params": list(alike), "lr": rate, "weight_decay": decay})
    rest = {"params": others, "algorithm": "adamw", "lr": ADAMW["lr"], "weight_decay": ADAMW["weight_decay"]}
    return Muon([*groups, rest], mesh, nesterov=True, adjust_lr=None, newton_schulz_func=_products)


def _products(matrices: Tensor, epsilon: Tensor) -> Tensor:
    together = matrices.view(-1, *matrices.shape[-2:])
    return orthogonalized(together, coefficients_of(QUINTIC, 5), float(epsilon), torch.bfloat16).view_as(matrices)


def of_adamw(model: nn.Module, mesh: DeviceMesh) -> torch.optim.Optimizer:
    return AdamW(model.parameters(), **ADAMW, foreach=True)


Build = Callable[[nn.Module, DeviceMesh], "torch.optim.Optimizer | Several"]
CONTENDERS: list[tuple[System, Build]] = [
    (DDP, of_torch),
    (FSDP2, of_torch),
    (replace(FSDP2, name="muon-fsdp2"), of_muon_fsdp2),
    (replace(FSDP2, name="dion"), of_dion),
    (replace(SHERD, name="AdamW"), of_adamw),
    (SHERD, of_sherd),
    *((sherd_system(name, placement), of_sherd) for name, placement in PLACEMENTS.items()),
]
PACKAGES = {"muon-fsdp2": "muon_fsdp2", "dion": "dion"}
MISSING = [name for name, module in PACKAGES.items() if find_spec(module) is None]


def contenders(*left_out: str) -> dict[str, tuple[System, Build]]:
    """Returns those that are installed, by name."""
    return {each[0].name: each for each in CONTENDERS if each[0].name not in (*MISSING, *left_out)}


def trainee(name: str, workload: Workload, mesh: DeviceMesh) -> Trainee:
    system, build = contenders()[name]
    made = Trainee(system, workload, mesh)
    made.optimizer = build(made.model, mesh)
    return made


def measure(conditions: Conditions) -> Figure:
    """On two gloo ranks, and counted on ranks that are made up."""
    if conditions.device != "cpu":
        return Figure([], notes=["muon: for CPU ranks; run it with --device cpu"])
    workload = workloads(conditions.quick)[0]
    ranks = on_ranks(conditions, on_rank, conditions.quick, conditions.rounds)
    made_up = counted_on_made_up_ranks(workload, NUM_FAKE_RANKS)
    away = differences([rank.steps for rank in ranks])
    notes = [
        f"muon: {workload.title}, {conditions.num_ranks} gloo ranks; DDP: torch.optim.Muon of whole matrices, "
        "FSDP2: the same over DTensors; sherd: gradients go to the owners; Shard: given as the placement",
        "muon: losses differ from DDP's by " + ", ".join(f"{each:.0e} ({name})" for name, each in away.items()),
        *(f"muon: {name} is not installed" for name in MISSING),
    ]
    rows = [*rows_of_time(ranks), *rows_of_counts("2 ranks", [rank.counts for rank in ranks])]
    rows += rows_of_counts(f"{NUM_FAKE_RANKS} fake ranks", made_up)
    sound = all(away[name] <= AGREEMENT for name in OURS)
    return Figure(rows, {"ranks": ranks, "made_up": made_up}, notes, sound)


# Time


@dataclass(frozen=True, slots=True)
class OnRank:
    """What a rank saw: laps of the optimizer's steps, laps of whole steps, what one step of an optimizer takes."""

    optimizers: Training
    steps: Training
    counts: dict[str, Counts]


def on_rank(mesh: DeviceMesh, quick: bool, num_rounds: int) -> OnRank:
    """All systems side by side. A whole step is timed in two parts, with a barrier before each."""
    workload = workloads(quick)[0]
    trainees = {name: trainee(name, workload, mesh) for name in contenders()}
    wholes: dict[str, list[Lap]] = {name: [] for name in trainees}
    losses: dict[str, list[Tensor]] = {name: [] for name in trainees}

    def lap(name: str, _: int) -> Lap:
        this, number = trainees[name], len(losses[name])
        batch = this.batch(seed=1000 * number + dist.get_rank())
        dist.barrier()
        begun, loss = timed(lambda: this.forward_backward(batch), this.device)
        losses[name].append(loss)
        dist.barrier()
        stepped, _ = timed(this.optimizer.step, this.device)
        this.drop_gradients()
        wholes[name].append(Lap(begun.wall_ms + stepped.wall_ms, begun.cpu_ms + stepped.cpu_ms))
        return stepped

    runners = {name: partial(lap, name) for name in trainees} | {WIRE: wire(trainees[SHERD.name].model, mesh)}
    with without_collector():
        first = interleaved(runners, NUM_WARMUPS)
        laps = interleaved(runners, num_rounds)
    seen = {name: [float(loss) for loss in taken] for name, taken in losses.items()}
    steps = {name: taken[NUM_WARMUPS:] for name, taken in wholes.items()}
    first_ms = {name: taken[0].wall_ms for name, taken in first.items()}
    counts = {name: counts_of(this, mesh.size()) for name, this in trainees.items()}
    return OnRank(Training(first_ms, laps, seen), Training(first_ms, steps, seen), counts)


def wire(model: nn.Module, mesh: DeviceMesh) -> Callable[[int], Lap]:
    """Returns a runner of a bare all-to-all that sends as many bytes as `Shard` does in one direction."""
    numel = sum(p.numel() for p in divided(model)[0])
    sent = torch.zeros(mesh.size(), numel // mesh.size() ** 2, dtype=torch.bfloat16)
    received = torch.empty_like(sent)

    def lap(_: int) -> Lap:
        dist.barrier()
        return timed(lambda: dist.all_to_all_single(received, sent, group=mesh.get_group()), sent.device)[0]

    return lap


def rows_of_time(ranks: Sequence[OnRank]) -> Iterator[Row]:
    """The optimizer's steps, beside FSDP2's and beside their bounds; whole steps, beside FSDP2's and AdamW's."""
    optimizers, steps = [rank.optimizers for rank in ranks], [rank.steps for rank in ranks]
    sent = {name: max(rank.counts[name].sent for rank in ranks) for name in OURS}
    for what, of_ranks, remark in (("", slowest_wall, "slowest rank"), ("CPU time of the ", mean_cpu, "mean of ranks")):
        laps = of_ranks(optimizers)
        bare = laps.pop(WIRE)
        bounds = {
            name: [
                plain / len(ranks) + one_way * sent[name] / (sent["Shard"] / 2)
                for plain, one_way in zip(laps[DDP.name], bare, strict=True)
            ]
            for name in OURS
        }
        title, limit = f"Muon: {what}optimizer step", [Aim(1.15, of=name) for name in OURS]
        shown = three_digits(median(bare))
        of = f"DDP's over {len(ranks)}, and its bytes by bare all-to-alls, {shown} ms for Shard's there"
        yield row_of_rounds(title, "ms", laps, None, remark)
        yield _over(f"{title}, of its bound", laps, bounds, limit, of)
    whole = slowest_wall(steps)
    yield row_of_rounds("Muon: step", "ms", whole, None, "slowest rank; forward and backward too")
    for what, laps in (("", whole), ("CPU time of a ", mean_cpu(steps))):
        yield _over(f"Muon: {what}step, of AdamW's", laps, dict.fromkeys(OURS, laps["AdamW"]), None, "sherd's, default")
    last = {name: fmean(each.losses[name][-1] for each in steps) for name in steps[0].losses}
    yield row_of_counts("Muon: loss", "nats", last, None, f"of step {len(steps[0].losses[DDP.name])}")


def _over(
    title: str, wall: Mapping[str, Sequence[float]], rivals: Mapping[str, Sequence[float]], aims: Aims, remark: str
) -> Row:
    """Times of ours over others, round by round."""
    values = {
        name: median(own / other for own, other in zip(wall[name], rival, strict=True))
        for name, rival in rivals.items()
    }
    return Row(title, "times", values, aim=aims, remark=remark)


def differences(ranks: Sequence[Training]) -> dict[str, float]:
    """Returns by how much the losses of each Muon differ from DDP's at most, relative to these."""
    return {
        name: max(
            abs(own - whole) / abs(whole)
            for rank in ranks
            for own, whole in zip(rank.losses[name], rank.losses[DDP.name], strict=True)
        )
        for name in ranks[0].losses
        if name not in (DDP.name, "AdamW")
    }


# Counts


@dataclass(frozen=True, slots=True)
class Counts:
    """Of one step of an optimizer on one rank. `sent` is in units of N, the bytes of all parameters."""

    gflop: float
    collectives: int
    sent: float


def counts_of(this: Trainee, num_ranks: int) -> Counts:
    """Steps once, with gradients of zeros: made-up ranks cannot gather unequal parts for a forward."""
    for parameter in this.model.parameters():
        parameter.grad = zeros_as_gradient(parameter, parameter.dtype)
    with torch.device("meta"):
        unit = num_bytes(this.workload.build())
    with _eagerly(), MovedBytes(num_ranks, dist.get_rank()) as moved:
        this.optimizer.step()
    this.drop_gradients()
    return Counts(moved.flops / 1e9, moved.calls.total(), moved.sent.total() / unit)


def _eagerly() -> AbstractContextManager[None]:
    """A context without torch.compile, which the packages use: within it nothing is counted."""
    return nullcontext() if len(MISSING) == len(PACKAGES) else torch.compiler.set_stance("force_eager")


def counted_on_made_up_ranks(
    workload: Workload, num_ranks: int, names: Sequence[str] | None = None
) -> list[dict[str, Counts]]:
    """Every rank in turn. Where all ranks do the same, and DTensor's dispatch takes long, rank 0 alone."""
    ranks = []
    for rank in range(num_ranks):
        with imagined_ranks(num_ranks, rank):
            mesh = init_device_mesh("cpu", (num_ranks,))
            here = names or contenders(DDP.name, *([FSDP2.name] if rank else []))
            ranks.append({name: counts_of(trainee(name, workload, mesh), num_ranks) for name in here})
    return ranks


def rows_of_counts(where: str, ranks: Sequence[Mapping[str, Counts]]) -> Iterator[Row]:
    """A row for each thing that is counted: the rank that has most."""
    for what, unit in (("gflop", "GFLOP"), ("collectives", "calls"), ("sent", "N")):
        most = {name: max(getattr(rank[name], what) for rank in ranks if name in rank) for name in ranks[0]}
        yield row_of_counts(f"Muon: {TITLES[what]}, {where}", unit, most, None, "the rank that has most")


TITLES = {"gflop": "products", "collectives": "collectives", "sent": "bytes sent"}
