"""Recurrent layers (RNN, LSTM, GRU) as cuDNN runs them: one operation of torch in forward and one in backward, and
within these a kernel for each time step of each layer. On meta torch would compose them of many more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sherd.simulate.work import Op

__all__ = ["FLOPS", "LAYERS", "WITHOUT_KERNELS", "steps_of"]

_ATEN = torch.ops.aten
_FORWARD, _BACKWARD = _ATEN._cudnn_rnn, _ATEN._cudnn_rnn_backward
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
"""Numbers of cuDNN's."""
_GATES = (1, 1, 4, 3)
"""By the mode: numbers that are computed for each one of the state."""


def _layers(
    mode: int,
    x: Tensor,
    states: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    is_bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    hidden, cell = (states, None) if isinstance(states, Tensor) else states
    size = hidden.shape[-1] if cell is None else cell.shape[-1]
    projected = hidden.shape[-1] if hidden.shape[-1] != size else 0
    each = len(weights) // (num_layers * (1 + is_bidirectional))
    sizes = (mode, size, projected, num_layers, batch_first, dropout, train, is_bidirectional)
    out, last, last_cell, *_ = _FORWARD(x, weights, each, None, hidden, cell, *sizes, [], None)
    return (out, last) if cell is None else (out, last, last_cell)


LAYERS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    f"{name}.input": partial(_layers, mode) for name, mode in _MODES.items()
}
"""Replacements on the meta device for operators that torch composes of others, by their names."""


def _forward(
    x: Tensor,
    weights: Sequence[Tensor],
    _stride: int,
    _buffer: Tensor | None,
    hidden: Tensor,
    cell: Tensor | None,
    mode: int,
    size: int,
    projected: int,
    num_layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    is_bidirectional: bool,
    *_: Any,
) -> tuple[Tensor, ...]:
    """Returns the output, the last states, what cuDNN keeps for backward (all gates), and weights side by side."""
    directions = 1 + is_bidirectional
    out = x.new_empty(*x.shape[:2], directions * (projected or size))
    kept = directions * num_layers * _GATES[mode] * size * _num_steps(x) * x.itemsize if train else 0
    side_by_side = x.new_empty(sum(each.numel() for each in weights))
    last_cell = x.new_empty(0) if cell is None else torch.empty_like(cell)
    return out, torch.empty_like(hidden), last_cell, x.new_empty(kept, dtype=torch.uint8), side_by_side


def _backward(
    x: Tensor, weights: Sequence[Tensor], _stride: int, _buffer: Tensor, hidden: Tensor, cell: Tensor | None, *rest: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None, list[Tensor]]:
    """Returns the gradients of those whose flags, the last argument, are set."""
    of_x, of_hidden, of_cell, of_weights = rest[-1]
    return (
        torch.empty_like(x) if of_x else None,
        torch.empty_like(hidden) if of_hidden else None,
        torch.empty_like(cell) if of_cell and cell is not None else None,
        [torch.empty_like(each) for each in weights] if of_weights else [],
    )


WITHOUT_KERNELS: dict[Any, Callable[..., Any]] = {_FORWARD.default: _forward, _BACKWARD.default: _backward}
"""Replacements on the meta device for cuDNN's operations, which have no kernels there."""


def _num_steps(x: Tensor) -> int:
    """Returns the time steps of all samples."""
    return x.shape[0] * x.shape[1]


def _flops(x: Tensor, weights: Sequence[Tensor], *_: Any, **__: Any) -> int:
    return 2 * _num_steps(x) * sum(each.numel() for each in weights if each.dim() > 1)


FLOPS: dict[Any, Callable[..., int]] = {
    _FORWARD: _flops,
    _BACKWARD: lambda *args, **kwargs: 2 * _flops(*args, **kwargs),
}
"""By operations: their floating-point operations."""


def steps_of(op: Op, func: Any, args: tuple[Any, ...]) -> Iterator[Op]:
    """Yields the kernels of `op`, which was `func` with these arguments: itself, or of a recurrent layer one for each
    step of each layer, in all directions at once, for a step waits for the one before."""
    number = 1
    if func.overloadpacket in FLOPS:
        at = 9 if func.overloadpacket is _FORWARD else 13
        num_layers, batch_first = args[at : at + 2]
        number = max(1, num_layers * args[0].shape[1 if batch_first else 0])
    for step in range(number):
        flops, nbytes = (size // number + (step < size % number) for size in (op.flops, op.nbytes))
        yield op if number == 1 else replace(op, flops=flops, nbytes=nbytes)
