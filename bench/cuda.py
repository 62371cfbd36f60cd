"""How do steps and memory compare on one GPU? A stack shaped like Llama 3 8 B, one process as rank 0 of many fake ones.

Memory, launches and streams are real, values are not. Without CUDA a tiny stack goes the same way on the CPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .models import LanguageModel, LlamaBlock, Model, Workload
from .peak import MIB, peak_of_step
from .ranks import Conditions, on_fake_ranks
from .rounds import Lap, interleaved, timed, without_collector
from .systems import FLAT, FSDP1, FSDP1_FLAT, FSDP2, SHERD, SHERD_COALESCED, WRAPPERS, System, Trainee
from .table import Aim, Figure, Row, row_of_counts, row_of_rounds

SIZES = (8, 64)
COMPARED = (FSDP1, FSDP1_FLAT, FSDP2, SHERD, SHERD_COALESCED, FLAT, *WRAPPERS)
OURS = (SHERD, SHERD_COALESCED, FLAT, *WRAPPERS)
NUM_WARMUPS = 2
AIMS = [Aim(1.0, system=system.name) for system in OURS]
"""For the stacks that are measured on CUDA; a dry run has nothing to reach."""
NOT_CUDA = "a tiny stack on the CPU: it shows that the figure can be measured, not what it is on CUDA"


@dataclass(frozen=True, slots=True)
class Shape:
    """A stack of Llama blocks in bfloat16 on one row of tokens. Without rotary embedding and grouped keys."""

    num_layers: int
    width: int
    hidden: int
    num_heads: int
    vocab: int
    num_tokens: int

    @property
    def title(self) -> str:
        """As a row is called."""
        return f"Llama, {self.num_layers} layers of width {self.width:,}, {self.num_tokens:,} tokens"

    def on(self, device: torch.device) -> Workload:
        """Built where it will be sharded: in host memory it would take minutes."""

        def build() -> Model:
            with torch.device(device):
                blocks: list[nn.Module] = [
                    LlamaBlock(self.width, self.hidden, self.num_heads).bfloat16() for _ in range(self.num_layers)
                ]
                return LanguageModel(self.vocab, self.width, blocks, nn.RMSNorm).bfloat16()

        return Workload(self.title, build, self._batch)

    def _batch(self, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(self.vocab, (1, self.num_tokens + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]


LLAMA_8B = Shape(num_layers=8, width=4096, hidden=14336, num_heads=32, vocab=128256, num_tokens=4096)
SMALLER = Shape(num_layers=4, width=2048, hidden=7168, num_heads=16, vocab=32000, num_tokens=2048)
TINY = Shape(num_layers=2, width=64, hidden=128, num_heads=4, vocab=128, num_tokens=16)


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one rank, by system: bytes at the peak of a step before the optimizer and with it, and laps of steps."""

    peaks: Mapping[str, tuple[float, float]]
    laps: Mapping[str, list[Lap]]


def shape_for(conditions: Conditions) -> Shape:
    """What the device and `--quick` leave time for."""
    if conditions.device != "cuda":
        return TINY
    return SMALLER if conditions.quick else LLAMA_8B


def measure(conditions: Conditions) -> Figure:
    """With 8 and with 64 ranks: milliseconds of a step, and its peak."""
    shape = shape_for(conditions)
    found = {size: on_fake_ranks(conditions, size, measure_systems, shape, conditions.rounds) for size in SIZES}
    aims = AIMS if conditions.device == "cuda" else []
    rows = [row for size, measured in found.items() for row in rows_of(shape, size, measured, aims)]
    return Figure(rows, {"ranks": found}, [] if conditions.device == "cuda" else [NOT_CUDA])


def rows_of(shape: Shape, size: int, measured: Measured, aims: list[Aim]) -> list[Row]:
    """Step time, host time, and the two peaks."""
    title, few = f"{shape.title}, {size} fake ranks", "the fake group's own copies included"
    wall = {name: [lap.wall_ms for lap in laps] for name, laps in measured.laps.items()}
    host = {name: [lap.cpu_ms for lap in laps] for name, laps in measured.laps.items()}
    rows = [
        row_of_rounds(f"{title}: step", "ms", wall, aims, few),
        row_of_rounds(f"{title}: CPU time of a step", "ms", host, aims, few),
    ]
    for which, span in enumerate(("forward and backward", "a step")):
        most = {name: peaks[which] / MIB for name, peaks in measured.peaks.items()}
        rows.append(row_of_counts(f"{title}: peak bytes of {span}", "MiB", most, aims))
    return rows


def measure_systems(mesh: DeviceMesh, shape: Shape, num_rounds: int) -> Measured:
    """On a rank: peaks with one system alive at a time, then laps of all side by side."""
    device = torch.device(mesh.device_type)
    workload = shape.on(device)
    peaks = {system.name: _alone(system, workload, mesh) for system in COMPARED}
    trainees = {system.name: Trainee(system, workload, mesh) for system in COMPARED}
    runners: dict[str, Callable[[int], Lap]] = {name: partial(_lap, trainee) for name, trainee in trainees.items()}
    with without_collector():
        interleaved(runners, NUM_WARMUPS)
        laps = interleaved(runners, num_rounds)
    return Measured(peaks, laps)


def _alone(system: System, workload: Workload, mesh: DeviceMesh) -> tuple[float, float]:
    peaks = peak_of_step(Trainee(system, workload, mesh))
    gc.collect()  # or what is left of it in cycles would count for the next one
    return peaks


def _lap(trainee: Trainee, number: int) -> Lap:
    batch = trainee.batch(number)
    return timed(lambda: trainee.step(batch), trainee.device)[0]
