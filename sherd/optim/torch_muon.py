"""Steps of `torch.optim.Muon` over sharded matrices: full matrices, as `sherd.Muon` steps them.

torch's own step over DTensors gathers each matrix 15 times, repeats its products on every rank, and rounds otherwise
than in one process. Nothing changes but the step: parameter groups, state and their names are torch's.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from sherd.engine import watcher
from sherd.tensor.sharded import OwnDTensor

if TYPE_CHECKING:
    from sherd.optim.muon import TorchMuonStep

Step = Callable[..., object]

_steps: weakref.WeakKeyDictionary[Optimizer, TorchMuonStep] = weakref.WeakKeyDictionary()
"""The steps of optimizers that have stepped sharded matrices."""


def _step_whole_matrices(optimizer: Optimizer, plain: Step, step: Step) -> Step:
    if not isinstance(optimizer, torch.optim.Muon) or torch.compiler.is_compiling():
        return step
    if inspect.unwrap(type(optimizer).step) is not inspect.unwrap(torch.optim.Muon.step):
        return step  # a subclass with a step of its own
    watcher.adopt(optimizer)  # parameters that were sharded since count as shards
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    if not any(isinstance(each, OwnDTensor) for each in parameters):
        return step
    from sherd.optim.muon import TorchMuonStep  # loaded with the first step: few programs make one

    if optimizer not in _steps:
        _steps[optimizer] = TorchMuonStep(optimizer)
    own = _steps[optimizer]
    return functools.partial(plain, own) if own.is_possible else step  # torch's step asks it for groups to step


@functools.cache
def serve_torch_muon() -> None:
    """Step the sharded matrices of every `torch.optim.Muon` from now on."""
    if hasattr(torch.optim, "Muon"):
        watcher.inside_of_steps(_step_whole_matrices)
