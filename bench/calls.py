"""How many Python calls does a unit cost? Frames that begin and C functions that Python calls, in a settled step.

A frame that goes on after a `yield` begins again. What C++ does by itself is not counted, nor are classes and weak
references that are called. The count is exact where the garbage collector is off (`rounds.without_collector`): a second
step has the same, or `of_a_settled` raises.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .models import LanguageModel, LlamaBlock, Workload, token_batch
from .systems import PLAIN, System, Trainee

STEPS_TO_SETTLE = 5
FEW, MANY = 3, 6  # blocks, whose difference leaves what a unit costs in the midst of others
Run = Callable[[Trainee], object]
"""Forward and backward of a step, as they are counted."""


def narrow_llama(num_blocks: int) -> Workload:
    """Blocks of nine parameters that are nearly free to compute."""

    def build() -> LanguageModel:
        return LanguageModel(64, 32, [LlamaBlock(32, 64, num_heads=1) for _ in range(num_blocks)], nn.RMSNorm)

    return Workload(f"narrow Llama, {num_blocks} blocks", build, lambda seed: token_batch(seed, 1, 8, vocab=64))


def forward_backward(trainee: Trainee) -> None:
    """One of each, on the same batch each time."""
    trainee.forward_backward(trainee.batch(0))


def per_unit(system: System, mesh: DeviceMesh, run: Run = forward_backward, made_in: str = "") -> int:
    """Returns how many calls of a step a unit makes: those of a few blocks taken from those of more, and the plain
    module's taken off. `made_in`: those alone that are made by files whose path begins so."""

    def of(each: System, num_blocks: int) -> int:
        return of_a_settled(run, Trainee(each, narrow_llama(num_blocks), mesh), made_in)

    calls = of(system, MANY) - of(system, FEW) - of(PLAIN, MANY) + of(PLAIN, FEW)
    units, rest = divmod(calls, MANY - FEW)
    assert not rest, f"{system.name}: {calls} calls are not the same in each of {MANY - FEW} units"
    return units


def of_a_settled(run: Run, trainee: Trainee, made_in: str) -> int:
    """Returns how many calls `run` makes, once several steps have taught the model its way."""
    counts = []
    for _ in range(STEPS_TO_SETTLE + 2):
        counts.append(_calls_of(lambda: run(trainee), made_in))
        trainee.optimizer.step()
        trainee.drop_gradients()
    assert counts[-1] == counts[-2], f"two steps made {counts[-2]} and {counts[-1]} calls: the model has not settled"
    return counts[-1]


def _calls_of(work: Callable[[], object], made_in: str) -> int:
    count = 0

    def seen(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        if event in ("call", "c_call") and frame.f_code.co_filename.startswith(made_in):
            count += 1

    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count
