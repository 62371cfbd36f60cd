"""How near is AdamW on the host, over shards of large matrices, to what the host's memory allows?

The bound is a plain copy of as many bytes, with as many threads: a step reads weight, gradient and two moments and
writes all but the gradient, 28 bytes an element in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW, Optimizer

from .models import Model
from .ranks import Conditions, on_fake_ranks
from .rounds import Lap, interleaved, timed, without_collector
from .small import ON_CPU
from .systems import FLAT_VIEW, FSDP2, PLAIN, SHERD, System
from .table import Aim, Figure, row_of_rounds

NUM_MATRICES, WIDTH = 8, 2048
NUMEL = NUM_MATRICES * WIDTH * WIDTH
STEPPED = (PLAIN, FSDP2, SHERD, FLAT_VIEW)
BYTES = 28
BOUND = "copy"


class Matrices(Model):
    """All in one unit, the root."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(NUM_MATRICES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(x @ weight).mean() for weight in self.weights]).sum()


def measure(conditions: Conditions) -> Figure:
    """The default form, a loop over operations, and the fused one, which passes each element once."""
    laps = on_fake_ranks(ON_CPU, 1, lap, conditions.rounds)
    rows = []
    bound = [each.wall_ms for each in laps[BOUND]]
    for kind in ("default", "fused"):
        per_step = {system.name: [lap.wall_ms for lap in laps[f"{kind}, {system.name}"]] for system in STEPPED}
        to_copy = {
            name: [ours / copy for ours, copy in zip(taken, bound, strict=True)] for name, taken in per_step.items()
        }
        title = f"AdamW on the host ({kind}), {NUMEL / 1e6:.0f} M elements in {NUM_MATRICES} matrices"
        aims = [Aim(1.3, of=name) for name in (SHERD.name, FLAT_VIEW.name)] if kind == "fused" else []
        rows.append(row_of_rounds(title, "ms", per_step, None, f"a copy of as many bytes: {median(bound):.0f} ms"))
        rows.append(row_of_rounds(f"{title}: copies of as many bytes", "", to_copy, aims))
    return Figure(rows, {"laps": laps})


def lap(mesh: DeviceMesh, num_rounds: int) -> dict[str, list[Lap]]:
    """On a rank: all systems and forms in turns. Gradients stay as they are from step to step."""
    source = torch.randn(BYTES // 8 * NUMEL)
    target = torch.empty_like(source)
    runners: dict[str, Callable[[int], Lap]] = {BOUND: partial(_lap, lambda: target.copy_(source))}
    for kind in ("default", "fused"):
        for system in STEPPED:
            optimizer = _made(system, mesh, {"fused": True} if kind == "fused" else {})
            runners[f"{kind}, {system.name}"] = partial(_lap, optimizer.step)
    with without_collector():
        interleaved(runners, 1)  # the first steps make states
        return interleaved(runners, num_rounds)


def _made(system: System, mesh: DeviceMesh, options: dict[str, bool]) -> Optimizer:
    torch.manual_seed(0)
    model = system.distribute(Matrices(), mesh)
    model(torch.randn(1, WIDTH)).backward()
    optimizer: Optimizer = AdamW(model.parameters(), lr=1e-4, **options)
    return optimizer if system.finish is None else system.finish(optimizer)


def _lap(step: Callable[[], object], _: int) -> Lap:
    return timed(step, torch.device("cpu"))[0]
