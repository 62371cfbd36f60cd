"""How long is a step? Wall and CPU time of all systems, alive at once in the same ranks, turn by turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .models import Workload, deep_narrow, gpt
from .ranks import Conditions, on_ranks
from .rounds import Lap, interleaved, timed, without_collector
from .systems import FLAT_VIEW, PLAIN, WRAPPERS, Trainee, contenders
from .table import Aim, Figure, row_of_rounds

NUM_WARMUPS = 2
WALL_AIMS = [
    Aim(limit, system=name)
    for name, limit in {"sherd": 0.72, "sherd gloo": 0.92, "Flat": 0.68, "Flat gloo": 0.80}.items()
]
CPU_AIMS = [Aim(0.83, system=aim.system) for aim in WALL_AIMS]
WRAPPER_AIMS = [Aim(0.85, system=system.name) for system in WRAPPERS]
AGREEMENT = 1e-4  # the largest relative difference of losses between systems that passes as the same training


@dataclass(frozen=True, slots=True)
class Training:
    """What one rank saw: laps and losses of each system, the first step's time apart."""

    first_ms: dict[str, float]
    laps: dict[str, list[Lap]]
    losses: dict[str, list[float]]


def workloads(quick: bool) -> list[Workload]:
    """The two models; `quick` has a third of their blocks, and less data."""
    if quick:
        return [gpt(1, 64, num_blocks=4), deep_narrow(1, 16, num_blocks=40)]
    return [gpt(2, 128), deep_narrow(2, 32)]


def measure(conditions: Conditions) -> Figure:
    ranks = on_ranks(conditions, train, conditions.quick, conditions.rounds)
    rows, notes, sound = [], [], True
    for title in ranks[0]:
        trainings = [rank[title] for rank in ranks]
        wall, cpu = slowest_wall(trainings), mean_cpu(trainings)
        rows.append(row_of_rounds(f"{title}: step", "ms", wall, _aims(WALL_AIMS, wall), "slowest rank"))
        rows.append(row_of_rounds(f"{title}: CPU time of a step", "ms", cpu, _aims(CPU_AIMS, cpu), "mean of ranks"))
        difference, note = disagreement(trainings, conditions.group_is_real)
        notes.append(f"{title}: {note}")
        sound = sound and difference <= AGREEMENT
    return Figure(rows, {"ranks": ranks}, notes, sound)


def _aims(aims: list[Aim], samples: Mapping[str, object]) -> list[Aim]:
    """Those for the systems that ran; but for gloo and shared memory there are none, for the aims are CPU ranks'."""
    return [*aims, *WRAPPER_AIMS] if all(aim.system in samples for aim in aims) else []


def train(mesh: DeviceMesh, quick: bool, num_rounds: int) -> dict[str, Training]:
    """On a rank: each workload in turn, all systems side by side."""
    return {workload.title: train_one(mesh, workload, num_rounds) for workload in workloads(quick)}


def train_one(mesh: DeviceMesh, workload: Workload, num_rounds: int) -> Training:
    """All systems side by side on this rank's batches."""
    trainees = {system.name: Trainee(system, workload, mesh) for system in (*contenders(mesh), FLAT_VIEW)}
    return laps_of(trainees, dist.get_rank(), num_rounds)


def laps_of(trainees: Mapping[str, Trainee], part: int, num_rounds: int) -> Training:
    """A lap is one step: forward, backward, AdamW (foreach), zero_grad. `part`: which of the data is this rank's."""
    losses: dict[str, list[Tensor]] = {name: [] for name in trainees}

    def lap(name: str, _: int) -> Lap:
        trainee, number = trainees[name], len(losses[name])
        batch = trainee.batch(seed=1000 * number + part)
        dist.barrier()  # a rank that is late from the step before must not be charged to this one
        taken, loss = timed(lambda: trainee.step(batch), trainee.device)
        losses[name].append(loss)
        return taken

    runners = {name: partial(lap, name) for name in trainees}
    with without_collector():
        warmups = interleaved(runners, NUM_WARMUPS)
        laps = interleaved(runners, num_rounds)
    return Training(
        first_ms={name: taken[0].wall_ms for name, taken in warmups.items()},
        laps=laps,
        losses={name: [float(loss) for loss in taken] for name, taken in losses.items()},
    )


def slowest_wall(ranks: list[Training]) -> dict[str, list[float]]:
    """Per system and round, milliseconds of the rank that took longest."""
    return {name: [max(lap.wall_ms for lap in laps) for laps in _rounds(ranks, name)] for name in ranks[0].laps}


def mean_cpu(ranks: list[Training]) -> dict[str, list[float]]:
    """Per system and round, CPU milliseconds of a rank, all its threads, averaged over the ranks."""
    return {name: [fmean(lap.cpu_ms for lap in laps) for laps in _rounds(ranks, name)] for name in ranks[0].laps}


def _rounds(ranks: list[Training], name: str) -> Iterator[tuple[Lap, ...]]:
    return zip(*(rank.laps[name] for rank in ranks), strict=True)


def disagreement(ranks: list[Training], group_is_real: bool) -> tuple[float, str]:
    """The largest relative difference of any loss between data-parallel systems, and a sentence on it.

    The plain module trains on its rank's data alone, so only its first loss is held against the others.
    """
    if not group_is_real:
        return 0.0, "losses not compared: a fake group does not reduce"
    worst = 0.0
    for rank in ranks:
        names = [name for name in rank.losses if name != PLAIN.name]
        for step, losses in enumerate(zip(*(rank.losses[name] for name in names), strict=True)):
            plain = rank.losses[PLAIN.name][:1] if step == 0 and PLAIN.name in rank.losses else []
            seen = [*losses, *plain]
            worst = max(worst, (max(seen) - min(seen)) / abs(min(seen)))
    num_steps = len(next(iter(ranks[0].losses.values())))
    verdict = "agree" if worst <= AGREEMENT else "DISAGREE"
    return worst, (f"losses of all systems {verdict} over {num_steps} steps, to {worst:.1e} (limit {AGREEMENT:.0e})")
