"""What do many small parameters cost? An AdamW step, and clipping, over 200 of 16 x 16 on one of two fake ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW, Optimizer

from .models import Model
from .ranks import Conditions, on_fake_ranks
from .rounds import Lap, interleaved, timed, without_collector
from .systems import FLAT, FLAT_VIEW, FSDP2, PLAIN, SHERD, System
from .table import Aim, Figure, Row, row_of_rounds

NUM_PARAMETERS = 200
WIDTH = 16
NUM_RANKS = 2
STEPS_PER_LAP = 10
NUM_WARM_CLIPS = 20
CLIPPED = (FSDP2, SHERD, FLAT)
KINDS = ("foreach", "fused")
ON_CPU = Conditions(device="cpu")  # whatever the device asked for: what is measured is the host's work


class SmallParameters(Model):
    """All in one unit, the root: there are no blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(NUM_PARAMETERS))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x + torch.tanh(x @ weight)
        return x.square().mean()


class OneVector(nn.Module):
    """A rank's share of them as one plain tensor: what torch's own step over a flat view takes at least."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(numel))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x.mean()).sum()


ONE_VECTOR = System("one vector", lambda model, mesh: OneVector(NUM_PARAMETERS * WIDTH * WIDTH // mesh.size()))
STEPPED = (PLAIN, ONE_VECTOR, FSDP2, SHERD, FLAT, FLAT_VIEW)


def with_gradients(system: System, mesh: DeviceMesh) -> nn.Module:
    """The model after a forward and a backward."""
    torch.manual_seed(0)
    model = system.distribute(SmallParameters(), mesh)
    model(torch.randn(4, WIDTH)).backward()
    return model


# The optimizer


def measure_optimizer(conditions: Conditions) -> Figure:
    """AdamW with `foreach` and with `fused`; the flat view beside every parameter by itself."""
    laps = on_fake_ranks(ON_CPU, NUM_RANKS, lap_optimizers, 3 * conditions.rounds)  # laps are short
    return Figure([row_of_steps(kind, laps) for kind in KINDS], {"laps": laps})


def row_of_steps(kind: str, laps: dict[str, list[Lap]]) -> Row:
    """Milliseconds of one step; the aims are against FSDP2's in the same run, and as milliseconds."""
    per_step = {system.name: [lap.wall_ms / STEPS_PER_LAP for lap in laps[_label(kind, system)]] for system in STEPPED}
    view = FLAT_VIEW.name
    aims = [Aim(0.15, of=view), *([Aim(0.038, system=view)] if kind == "foreach" else [])]
    title = f"AdamW({kind}=True).step, {NUM_PARAMETERS} parameters of {WIDTH} x {WIDTH}"
    return row_of_rounds(title, "ms", per_step, aims, f"{NUM_RANKS} fake ranks")


def lap_optimizers(mesh: DeviceMesh, num_rounds: int) -> dict[str, list[Lap]]:
    """On a rank: all systems and kinds side by side. Gradients stay as they are from step to step."""
    runners: dict[str, Callable[[int], Lap]] = {}
    for kind in KINDS:
        for system in STEPPED:
            model = with_gradients(system, mesh)
            optimizer: Optimizer = AdamW(model.parameters(), lr=1e-4, **{kind: True})
            if system.finish is not None:
                optimizer = system.finish(optimizer)
            runners[_label(kind, system)] = partial(_lap, model, optimizer)
    with without_collector():
        interleaved(runners, 1)  # the first steps make states and DTensor's plans
        return interleaved(runners, num_rounds)


def _lap(model: nn.Module, optimizer: Optimizer, _: int) -> Lap:
    """Several steps. The model is kept alive with its optimizer."""

    def steps() -> None:
        for _ in range(STEPS_PER_LAP):
            optimizer.step()

    return timed(steps, torch.device("cpu"))[0]


def _label(kind: str, system: System) -> str:
    return f"{kind}, {system.name}"


# Clipping


def measure_clip(conditions: Conditions) -> Figure:
    """The first call in a fresh process, which plans, and later ones."""
    num_rounds = 1 if conditions.quick else min(conditions.rounds, 3)
    samples: dict[str, list[tuple[float, float]]] = {system.name: [] for system in CLIPPED}
    for _ in range(num_rounds):
        for system in CLIPPED:
            samples[system.name].append(on_fake_ranks(ON_CPU, NUM_RANKS, ms_to_clip, system))
    first = {name: [each[0] for each in taken] for name, taken in samples.items()}
    later = {name: [each[1] for each in taken] for name, taken in samples.items()}
    aims = [Aim(10.0, of=FLAT.name), Aim(0.06, system=FLAT.name)]
    what = f"clip_grad_norm_, {NUM_PARAMETERS} parameters"
    return Figure(
        [
            row_of_rounds(f"first {what}", "ms", first, aims, "a fresh process"),
            row_of_rounds(f"later {what}", "ms", later, None, f"median of {NUM_WARM_CLIPS}"),
        ],
        {"first and later, ms": samples},
    )


def ms_to_clip(mesh: DeviceMesh, system: System) -> tuple[float, float]:
    """On a rank: milliseconds of the first call, and the median of later ones."""
    model = with_gradients(system, mesh)
    with without_collector():
        first, *later = [_ms_of_clip(model) for _ in range(1 + NUM_WARM_CLIPS)]
    return first, median(later)


def _ms_of_clip(model: nn.Module) -> float:
    start = time.perf_counter()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    return 1e3 * (time.perf_counter() - start)
