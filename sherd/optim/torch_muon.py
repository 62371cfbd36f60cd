"""Steps of `torch.optim.Muon` over sharded matrices: whole matrices, as `sherd.Muon` steps them.

torch's own step over DTensors gathers each matrix 15 times, repeats its products on every rank, and rounds otherwise
than in one process. Nothing changes but the step: parameter groups, state and their names are torch's.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from sherd._torch import register_optimizer_step_pre_hook
from sherd.errors import OptimizerError
from sherd.tensor.sharded import OwnDTensor

if TYPE_CHECKING:
    from sherd.optim.muon import TorchMuonStep

_steps: weakref.WeakKeyDictionary[Optimizer, TorchMuonStep | None] = weakref.WeakKeyDictionary()
"""The steps of optimizers that have stepped sharded matrices; None for one that torch steps by itself."""


class _Shadow:
    """Stands for an optimizer in torch's step: it steps all matrices, and leaves none to torch."""

    def __init__(self, step: TorchMuonStep) -> None:
        self._step = step

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        self._step.step()
        return []


def _step_whole_matrices(
    optimizer: Optimizer, args: Sequence[object], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    # A closure, the second argument, makes gradients: such a step is the optimizer's own.
    if type(optimizer) is not torch.optim.Muon or len(args) > 1 or kwargs or torch.compiler.is_compiling():
        return None
    if optimizer not in _steps:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        _steps[optimizer] = _step_of(optimizer) if any(isinstance(each, OwnDTensor) for each in parameters) else None
    step = _steps[optimizer]
    return None if step is None else ((_Shadow(step),), kwargs)


def _step_of(optimizer: Optimizer) -> TorchMuonStep | None:
    from sherd.optim.muon import TorchMuonStep  # loaded with the first step: few programs make one

    try:
        return TorchMuonStep(optimizer)
    except OptimizerError:  # matrices that several axes of tensor parallelism cut, which torch's own step gathers
        return None


@functools.cache
def serve_torch_muon() -> None:
    """Step the sharded matrices of every `torch.optim.Muon` from now on."""
    if hasattr(torch.optim, "Muon"):
        register_optimizer_step_pre_hook(_step_whole_matrices)
