"""What does the engine itself cost? CPU time of forward and backward, less the plain module's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from . import silent_group
from .models import Workload, bottleneck, gpt
from .ranks import Conditions, first_ranks, on_fake_ranks
from .rounds import Lap, interleaved, timed, without_collector
from .systems import FLAT, FSDP1, FSDP1_FLAT, FSDP2, PLAIN, SHERD, WRAPPERS, System, Trainee
from .table import Aim, Figure, Row, row_of_differences

FEW, MANY, MOST = 2, 16, 4096
GROUP = "fake group"
PLAIN_STEP = "plain, batch of a step"
NO_COPIES = "without the fake group's own: the aim is for no communication (FSDP2 was 14.7 % when it was set)"
COMPARED = (FSDP1, FSDP1_FLAT, FSDP2, SHERD, FLAT, *WRAPPERS)
Contender = tuple[System, int]  # a system, and how many ranks it believes in
Runner = Callable[[int], Lap]


def measure_overhead(conditions: Conditions) -> Figure:
    """Over plain, on the fake group with 2 and with 16 ranks; in milliseconds, and in percent of the plain module."""
    every: dict[str, dict[str, list[Lap]]] = {}
    in_ms: list[Row] = []
    in_percent: list[Row] = []
    faults: list[Row] = []
    for num_ranks in (FEW, MANY):
        # In a process for each: with twice as many models in one, its heap is cut back in nearly every lap.
        laps = on_fake_ranks(conditions, num_ranks, lap_on_fake_group, conditions.quick, conditions.rounds)
        every[f"{num_ranks} ranks"] = laps
        plain = median(lap.cpu_ms for lap in laps[PLAIN_STEP])
        own = median(lap.cpu_ms for lap in laps[_label(GROUP, num_ranks)])
        over = over_plain(laps, num_ranks)
        title = f"engine overhead, {num_ranks} fake ranks"
        faults.append(row_of_page_faults(f"page faults of a step, {num_ranks} fake ranks", laps, num_ranks))
        in_ms.append(
            row_of_differences(
                title, "ms CPU", over, Aim(0.8), f"over plain; {own:.0f} are the fake group's own copies"
            )
        )
        whole, rest = percent(over, plain), percent(over, plain, less=own)
        in_percent.append(row_of_differences(f"{title}, of plain", "%", whole, None, f"of {plain:.0f} ms"))
        in_percent.append(
            row_of_differences(f"{title}, of plain, no copies", "%", rest, Aim(5.0, of=FLAT.name), NO_COPIES)
        )
    return Figure([*in_ms, *in_percent, *faults], {"laps": every})


def row_of_page_faults(title: str, laps: Mapping[str, list[Lap]], num_ranks: int) -> Row:
    """Of forward and backward, the plain module's beside them."""
    names = {PLAIN.name: PLAIN.name} | {each.name: _label(each.name, num_ranks) for each in COMPARED}
    counts = {name: float(median(lap.page_faults for lap in laps[label])) for name, label in names.items()}
    return Row(title, "faults", counts, remark="the median lap; activations and gradients are autograd's")


def percent(over: Mapping[str, list[float]], plain: float, less: float = 0.0) -> dict[str, list[float]]:
    """Milliseconds over the plain module, without `less` of them, in percent of `plain`."""
    return {name: [100 * (each - less) / plain for each in samples] for name, samples in over.items()}


def measure_scale(conditions: Conditions) -> Figure:
    """The engine's work with 4,096 ranks beside that with 16, on a group that does nothing."""
    laps = on_fake_ranks(conditions, MOST, lap_on_silent_group, 3 * conditions.rounds)  # laps are short
    few, many = over_plain(laps, MANY), over_plain(laps, MOST)
    growth = {name: median(many[name]) / median(few[name]) for name in many}
    rows = [
        row_of_differences(f"engine work, {MANY} silent ranks", "ms CPU", few, None, "over plain"),
        row_of_differences(f"engine work, {MOST:,} silent ranks", "ms CPU", many, None, "over plain"),
        Row("  growth between the two", "times", growth, aim=[Aim(1.2, of="sherd"), Aim(1.2, of=FLAT.name)]),
    ]
    return Figure(rows, {"laps": laps})


def lap_on_fake_group(mesh: DeviceMesh, quick: bool, num_rounds: int) -> dict[str, list[Lap]]:
    """In one process. The batch is small: overhead does not depend on it, noise does.

    A share of the plain module's time does depend on the batch: it is of the batch that `steps` trains on.
    """
    size = mesh.size()
    contenders = [(system, size) for system in COMPARED]
    num_blocks = 4 if quick else 12
    workload = gpt(1, 32, num_blocks)
    runners = _runners(workload, contenders, {size: mesh})
    runners[PLAIN_STEP] = _runner(Trainee(PLAIN, gpt(2, 128, num_blocks), mesh))
    runners[_label(GROUP, size)] = group_alone(workload, mesh)
    return _lap(runners, num_rounds)


def lap_on_silent_group(mesh: DeviceMesh, num_rounds: int) -> dict[str, list[Lap]]:
    silent_group.register(mesh.device_type)
    contenders = [(system, size) for size in (MANY, MOST) for system in (FSDP2, SHERD, FLAT)]
    meshes = {size: first_ranks(mesh, size, silent_group.NAME) for size in (MANY, MOST)}
    return _lap(_runners(bottleneck(num_blocks=48), contenders, meshes), num_rounds)


def _lap(runners: Mapping[str, Runner], num_rounds: int) -> dict[str, list[Lap]]:
    with without_collector():
        interleaved(runners, 2)  # the first steps make what later ones reuse
        return interleaved(runners, num_rounds)


def _runners(workload: Workload, contenders: list[Contender], meshes: Mapping[int, DeviceMesh]) -> dict[str, Runner]:
    """Forward and backward of the plain module and of all contenders."""
    any_mesh = next(iter(meshes.values()))
    trainees = {PLAIN.name: Trainee(PLAIN, workload, any_mesh)}
    for system, size in contenders:
        trainees[_label(system.name, size)] = Trainee(system, workload, meshes[size])

    return {name: _runner(trainee) for name, trainee in trainees.items()}


def _runner(trainee: Trainee) -> Runner:
    def lap(number: int) -> Lap:
        batch = trainee.batch(number)
        taken, _ = timed(lambda: trainee.forward_backward(batch), trainee.device)
        trainee.drop_gradients()
        return taken

    return lap


def group_alone(workload: Workload, mesh: DeviceMesh) -> Runner:
    """Two gathers and one reduce-scatter of all parameters with no engine: what the fake group costs."""
    device = torch.device(mesh.device_type)
    shard = torch.zeros(sum(p.numel() for p in workload.build().parameters()) // mesh.size(), device=device)
    whole = shard.repeat(mesh.size())
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def collectives() -> None:
        for _ in range(2):
            gather(whole, shard, group=mesh.get_group())
        scatter(shard, whole, group=mesh.get_group())

    return lambda number: timed(collectives, device)[0]


def _label(name: str, num_ranks: int) -> str:
    return f"{name} of {num_ranks}"


def over_plain(laps: Mapping[str, list[Lap]], num_ranks: int) -> dict[str, list[float]]:
    """CPU milliseconds of each system with `num_ranks` ranks less the plain module's, round by round."""
    plain = laps[PLAIN.name]
    return {
        system.name: [
            lap.cpu_ms - bare.cpu_ms for lap, bare in zip(laps[_label(system.name, num_ranks)], plain, strict=True)
        ]
        for system in COMPARED
        if _label(system.name, num_ranks) in laps
    }
