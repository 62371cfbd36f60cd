"""Steps of torch's element-wise optimizers, taken on this rank's plain tensors.

A list of tensors of a class of ours reaches Python once for each operation: 900 tensors add three quarters to the time
of a foreach step. So the second step and later ones compute on this rank's parts of parameters, gradients and state.
The user sees the same optimizer: a shadow of it computes, with its options and hooks.

    the optimizer   param_groups: shards    state: {shard: {"exp_avg": DTensor, "step": tensor}}
    its shadow      param_groups: chunks    state: {chunk: {"exp_avg": its chunk, "step": the same}}
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sherd._torch import (
    local_tensor,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from sherd.tensor.ragged import local_part
from sherd.tensor.sharded import OwnDTensor
from sherd.tensor.state_kind import State, StateKind, elementwise_keys, kind_of

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""Optimizers known to treat every element alike. AdamW is an Adam."""

STEPPED = frozenset((*ELEMENTWISE, torch.optim.AdamW))
"""The optimizers that are stepped here. The `step` of a subclass may not treat every element alike."""


class _Local:
    """This rank's parts of one optimizer's parameters, gradients and state."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._user_state = optimizer.state
        self._params = _params_of(optimizer)
        self._own = [each for each in self._params if isinstance(each, OwnDTensor)]
        self._own_chunks = list(map(local_tensor, self._own))
        self._chunks = list(map(local_part, self._params))
        self._is_known = all(isinstance(each, OwnDTensor) or not isinstance(each, DTensor) for each in self._params)
        self.state: defaultdict[torch.Tensor, State] = defaultdict(dict)
        for parameter, chunk in zip(self._params, self._chunks, strict=True):
            state = self._user_state.get(parameter)
            if state is not None:
                pieces = [value for value in state.values() if isinstance(value, DTensor)]
                self._is_known &= all(isinstance(parameter, OwnDTensor) and parameter.lies_as(each) for each in pieces)
                # A plain parameter is its own chunk: both have one state.
                local = {key: local_part(value) for key, value in state.items()}
                self.state[chunk] = state if parameter is chunk else local
        self._note()

    def _note(self) -> None:
        """Remember all state, to notice what a user or a step replaces."""
        self._states = list(self._user_state.values())
        self._user_pieces, self._pieces = _pieces_of(self._states), _pieces_of(self.state.values())

    def is_of(self, optimizer: Optimizer) -> bool:
        """Returns True if the optimizer still has the same parameters and state."""
        return (
            optimizer.state is self._user_state
            and are_same(_params_of(optimizer), self._params)
            and are_same(list(map(local_tensor, self._own)), self._own_chunks)
            and are_same(list(self._user_state.values()), self._states)
            and are_same(_pieces_of(self._states), self._user_pieces)
        )

    def take_gradients(self) -> bool:
        """Give each chunk this rank's part of the gradient.

        Returns False, and gives no gradient, if a gradient or a piece of state has other placements than its parameter
        or another dtype, or if a parameter is a DTensor of torch.
        """
        gradients: list[Any] = [each.grad for each in self._own]
        pairs = [(own, grad) for own, grad in zip(self._own, gradients, strict=True) if grad is not None]
        if not self._is_known or not all(issubclass(each, OwnDTensor) for each in {type(grad) for _, grad in pairs}):
            return False
        # The spec is the parameter's own object, except for gradients that a user makes.
        if not all(own._spec is grad._spec or (own.dtype is grad.dtype and own.lies_as(grad)) for own, grad in pairs):
            return False
        for chunk, gradient in zip(self._own_chunks, gradients, strict=True):
            chunk.grad = None if gradient is None else gradient._local_tensor
        return True

    def groups_of(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """Returns the parameter groups with the chunks in the place of the parameters."""
        chunks = iter(self._chunks)
        return [{**group, "params": [next(chunks) for _ in group["params"]]} for group in optimizer.param_groups]

    def end(self) -> None:
        """Drop the gradients, and put new objects in the chunks' state into the user's state, too."""
        for chunk in self._own_chunks:
            chunk.grad = None
        if are_same(_pieces_of(self.state.values()), self._pieces):
            return
        pairs = [(each, chunk) for each, chunk in zip(self._params, self._chunks, strict=True) if chunk in self.state]
        elementwise = elementwise_keys((each, self.state[chunk]) for each, chunk in pairs)
        for parameter, chunk in pairs:
            user_state = self._user_state[parameter]
            for key, value in self.state[chunk].items():
                if key in user_state and local_part(user_state[key]) is value:
                    continue
                kind = kind_of(key, value, parameter.shape, chunk.shape, elementwise)
                if isinstance(parameter, OwnDTensor) and kind is StateKind.ELEMENTS:
                    value = parameter.around(value)
                user_state[key] = value
        self._note()


def are_same(now: Sequence[object], before: Sequence[object]) -> bool:
    """Returns True if both hold the same objects, in order."""
    return len(now) == len(before) and all(map(is_, now, before))


def _pieces_of(states: Iterable[State]) -> list[object]:
    return list(chain.from_iterable(map(dict.values, states)))


def _params_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return list(chain.from_iterable([group["params"] for group in optimizer.param_groups]))


class _OnChunks:
    """The shadow of an optimizer. It looks up what to step when `step` asks for it, after all hooks."""

    def __init__(self, optimizer: Optimizer) -> None:
        vars(self).update(vars(optimizer))
        self._optimizer = optimizer

    @functools.cached_property
    def local(self) -> _Local | None:
        """The parts to step. None: the optimizer steps its own tensors."""
        local = _locals.get(self._optimizer)
        if local is None or not local.is_of(self._optimizer):
            local = _locals[self._optimizer] = _Local(self._optimizer)
        return local if local.take_gradients() else None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups if self.local is None else self.local.groups_of(self._optimizer)

    @property
    def state(self) -> defaultdict[torch.Tensor, State]:
        return self._optimizer.state if self.local is None else self.local.state


@functools.cache
def _class_on_chunks(optimizer_class: type) -> type[_OnChunks]:
    return type(optimizer_class.__name__, (_OnChunks, optimizer_class), {})


_locals: weakref.WeakKeyDictionary[Optimizer, _Local] = weakref.WeakKeyDictionary()
_stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Have a shadow step in the optimizer's place."""
    # A closure, the second argument, makes gradients: such a step is the optimizer's own.
    if type(optimizer) not in STEPPED or len(args) > 1 or kwargs or torch.compiler.is_compiling():
        return None
    if optimizer not in _stepped:  # its first step, which makes the state, is its own
        _stepped.add(optimizer)
        return None
    if not any(isinstance(each, OwnDTensor) for each in _params_of(optimizer)):
        return None
    optimizer_class: Any = type(optimizer)
    return (_class_on_chunks(optimizer_class)(optimizer),), kwargs


def _after_step(optimizer: Optimizer, args: Sequence[object], kwargs: dict[str, object]) -> None:
    for shadow in args:
        if isinstance(shadow, _OnChunks) and shadow.local is not None:
            shadow.local.end()


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
