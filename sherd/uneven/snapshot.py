"""Copies of all state that a step changes, to undo it: buffers, gradients, random states, parameters, optimizers.

Tensors get their elements back in place, because others hold views of them: shard buffers, spans of an optimizer.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from sherd.comm.streams import wait_for_copies_to
from sherd.engine import ShardedParameter, Unit
from sherd.tensor.ragged import local_part
from sherd.tensor.state_kind import Stateful

Undo = Callable[[], None]


class Snapshot:
    """Copies of all state that one step may change on this rank before an optimizer steps.

    Args:
        model: its buffers are kept, and the gradients of parameters that no unit has.
        shards: parameters whose gradients are kept.
        optimizers: the settings of their groups are kept, and the gradients of their parameters.
        others: gradient scalers, and other objects with a state dict.
        device: its random state is kept, together with those of the CPU and of Python.
    """

    def __init__(
        self,
        model: nn.Module,
        shards: Iterable[nn.Parameter],
        optimizers: Sequence[Optimizer],
        others: Sequence[Stateful],
        device: torch.device,
    ) -> None:
        plain = (each for each in model.parameters() if ShardedParameter.of(each) is None)
        stepped = (each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"])
        parameters = {id(each): each for each in (*shards, *plain, *stepped)}.values()
        self.has_gradients = any(each.grad is not None for each in parameters)
        self._undo = [_gradient(each) for each in parameters]
        for module in model.modules():
            buffers = module.named_buffers(recurse=False, remove_duplicate=False)
            self._undo += [_buffer(module, name, buffer) for name, buffer in buffers]
        self._undo += [_entries(group, but=("params",)) for each in optimizers for group in each.param_groups]
        self._undo += [_state(each) for each in others]
        self._undo += _random_states(device)
        self._undo += [undo for unit in Unit.below(model) for undo in unit.narrowings_kept()]

    @torch.no_grad()
    def restore(self) -> None:
        for undo in reversed(self._undo):
            undo()

    @torch.no_grad()
    def keep_stepped(self, optimizer: Optimizer) -> None:
        """Copy the parameters, state and settings of `optimizer`, too, which is about to step."""
        state = optimizer.state
        self._undo += _masters(optimizer)  # undone last, when the weights are back
        for group in optimizer.param_groups:
            self._undo += [_values(each) for each in group["params"]]
            self._undo.append(_entries(group, but=("params",)))
        self._undo += [_entries(state[parameter]) for parameter in state]
        known = set(state)

        def forget_new() -> None:
            for parameter in [each for each in state if each not in known]:
                del state[parameter]

        self._undo.append(forget_new)


def _values(tensor: torch.Tensor) -> Undo:
    part = local_part(tensor)
    wait_for_copies_to(part)  # of a step before
    kept = part.detach().clone()

    def undo() -> None:
        wait_for_copies_to(part)  # of the step that is undone
        if not torch.equal(part, kept):  # an expanded tensor cannot be written, so no step changed it
            part.detach().copy_(kept)

    return undo


def _masters(optimizer: Optimizer) -> list[Undo]:
    """Keeps the low bits of float32 masters, which come back when the weights are back."""
    parameters = (each for group in optimizer.param_groups for each in group["params"])
    records = (record for each in parameters if (record := ShardedParameter.of(each)) is not None)
    found = {id(each.masters[0]): each.masters[0] for each in records if each.masters is not None}
    return [masters.kept() for masters in found.values()]


def _gradient(parameter: nn.Parameter) -> Undo:
    gradient = parameter.grad
    values = None if gradient is None else _values(gradient)

    def undo() -> None:
        parameter.grad = gradient
        if values is not None:
            values()

    return undo


def _buffer(module: nn.Module, name: str, tensor: torch.Tensor) -> Undo:
    values = _values(tensor)
    is_persistent = name not in module._non_persistent_buffers_set

    def undo() -> None:
        values()
        if getattr(module, name, None) is not tensor:
            module.register_buffer(name, tensor, is_persistent)

    return undo


def _entries(of: MutableMapping[str, Any], but: Sequence[str] = ()) -> Undo:
    """Keeps the entries of a group of parameters, or of one parameter's state."""
    before = {key: value for key, value in of.items() if key not in but}
    tensors = [_values(value) for value in before.values() if torch.is_tensor(value)]
    kept = {key: value if torch.is_tensor(value) else copy.deepcopy(value) for key, value in before.items()}

    def undo() -> None:
        for key in [key for key in of if key not in but and key not in kept]:
            del of[key]
        of.update(kept)
        for values in tensors:
            values()

    return undo


def _state(of: Stateful) -> Undo:
    if isinstance(of, torch.amp.GradScaler):
        # Its state dict does not say which gradients were unscaled already, and reads from the device.
        attributes: Mapping[str, Any] = vars(of)
        is_data = (torch.Tensor, dict, int, float, type(None))
        kept = {key: copy.deepcopy(value) for key, value in attributes.items() if isinstance(value, is_data)}
        return lambda: of.__setstate__(copy.deepcopy(kept))
    state = copy.deepcopy(of.state_dict())

    def undo() -> None:
        of.load_state_dict(state)

    return undo


def _random_states(device: torch.device) -> list[Undo]:
    python, cpu = random.getstate(), torch.get_rng_state()
    undo: list[Undo] = [lambda: random.setstate(python), lambda: torch.set_rng_state(cpu)]
    if device.type != "cpu":
        on_device = torch.get_device_module(device)
        kept = on_device.get_rng_state()
        undo.append(lambda: on_device.set_rng_state(kept))
    return undo
