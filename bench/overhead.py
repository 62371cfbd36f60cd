"""What does the engine itself cost? CPU time of forward and backward, less the plain module's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median

from torch.distributed.device_mesh import DeviceMesh

from . import silent_group
from .models import Workload, bottleneck, gpt
from .ranks import Conditions, first_ranks, on_fake_ranks
from .rounds import Lap, interleaved, timed, without_collector
from .systems import FLAT, FSDP1, FSDP1_FLAT, FSDP2, PLAIN, SHERD, WRAPPERS, System, Trainee
from .table import Aim, Figure, Row, row_of_differences

FEW, MANY, MOST = 2, 16, 4096
PLAIN_STEP = "plain, batch of a step"
COMPARED = (FSDP1, FSDP1_FLAT, FSDP2, SHERD, FLAT, *WRAPPERS)
AIMS_OF_THE_ENGINE = (Aim(0.6), Aim(0.4, system=FLAT.name), *(Aim(0.6, system=each.name) for each in WRAPPERS))
Contender = tuple[System, int]  # a system, and how many ranks it believes in
Runner = Callable[[int], Lap]


def measure_overhead(conditions: Conditions) -> Figure:
    """Over plain, in milliseconds and in percent of the plain module: on torch's fake group of 2 and of 16 ranks, whose
    collectives copy, and on a group of 16 whose collectives do nothing."""
    kinds = {
        f"{FEW} fake ranks": (FEW, lap_on_fake_group, "the fake group's copies included", None),
        f"{MANY} fake ranks": (MANY, lap_on_fake_group, "the fake group's copies included", None),
        f"{MANY} silent ranks": (MANY, lap_engines_on_silent_group, "collectives do nothing", AIMS_OF_THE_ENGINE),
    }
    every: dict[str, dict[str, list[Lap]]] = {}
    rows: list[Row] = []
    for kind, (num_ranks, lap, remark, aims) in kinds.items():
        # In a process for each: with twice as many models in one, its heap is cut back in nearly every lap.
        every[kind] = laps = on_fake_ranks(conditions, num_ranks, lap, conditions.quick, conditions.rounds)
        plain = median(lap.cpu_ms for lap in laps[PLAIN_STEP])
        over = over_plain(laps, num_ranks)
        title = f"engine overhead, {kind}"
        rows.append(row_of_differences(title, "ms CPU", over, aims, f"over plain; {remark}"))
        rows.append(row_of_differences(f"{title}, of plain", "%", percent(over, plain), None, f"of {plain:.0f} ms"))
        rows.append(row_of_page_faults(f"page faults of a step, {kind}", laps, num_ranks))
    return Figure(rows, {"laps": every})


def row_of_page_faults(title: str, laps: Mapping[str, list[Lap]], num_ranks: int) -> Row:
    """Of forward and backward, the plain module's beside them."""
    names = {PLAIN.name: PLAIN.name} | {each.name: _label(each.name, num_ranks) for each in COMPARED}
    counts = {name: float(median(lap.page_faults for lap in laps[label])) for name, label in names.items()}
    return Row(title, "faults", counts, remark="the median lap; activations and gradients are autograd's")


def percent(over: Mapping[str, list[float]], plain: float) -> dict[str, list[float]]:
    """Milliseconds over the plain module in percent of `plain`."""
    return {name: [100 * each / plain for each in samples] for name, samples in over.items()}


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
    num_blocks = 4 if quick else 12
    runners = runners_of(gpt(1, 32, num_blocks), [(system, mesh.size()) for system in COMPARED], {mesh.size(): mesh})
    runners[PLAIN_STEP] = _runner(Trainee(PLAIN, gpt(2, 128, num_blocks), mesh))
    return _lap(runners, num_rounds)


def lap_engines_on_silent_group(mesh: DeviceMesh, quick: bool, num_rounds: int) -> dict[str, list[Lap]]:
    """As on the fake group."""
    silent_group.register(mesh.device_type)
    return lap_on_fake_group(first_ranks(mesh, mesh.size(), silent_group.NAME), quick, num_rounds)


def lap_on_silent_group(mesh: DeviceMesh, num_rounds: int) -> dict[str, list[Lap]]:
    silent_group.register(mesh.device_type)
    contenders = [(system, size) for size in (MANY, MOST) for system in (FSDP2, SHERD, FLAT)]
    meshes = {size: first_ranks(mesh, size, silent_group.NAME) for size in (MANY, MOST)}
    return _lap(runners_of(bottleneck(num_blocks=48), contenders, meshes), num_rounds)


def _lap(runners: Mapping[str, Runner], num_rounds: int) -> dict[str, list[Lap]]:
    with without_collector():
        interleaved(runners, 2)  # the first steps make what later ones reuse
        return interleaved(runners, num_rounds)


def runners_of(workload: Workload, contenders: list[Contender], meshes: Mapping[int, DeviceMesh]) -> dict[str, Runner]:
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
