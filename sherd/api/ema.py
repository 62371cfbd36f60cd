"""`Ema`: an exponential moving average of a model's parameters. Each rank averages its own shards; nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import compress
from operator import not_
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sherd._torch import spec_of
from sherd.api.module import require_module
from sherd.checkpoint.model_tensors import ModelTensors, Named, put
from sherd.checkpoint.relayout import around, laid_out
from sherd.comm.agreement import in_short
from sherd.engine import ShardedParameter
from sherd.errors import ModuleError, StateError
from sherd.requirements import require_bool, require_floating_dtype, require_number, require_type
from sherd.tensor.ragged import local_part

_BATCH = 32
"""The number of tensors that are converted at once, where averages are of another dtype or on another device."""


class Ema:
    """An exponential moving average of a model's parameters: `average = decay * average + (1 - decay) * parameter`.

        ema = sherd.Ema(model, decay=0.999)
        for batch in batches:
            ...
            optimizer.step()
            ema.update()
        with ema.applied():
            evaluate(model)

    Averages lie as the parameters do, and begin with the values that these have when the `Ema` is made. A tied
    parameter has one average. Parameters that the model gets later (`sherd.refresh`) begin with their values at the
    next call, and those that are gone are forgotten. The model may be sharded later, or not at all.

    `num_updates` counts the calls of `update`.

    Args:
        model: the model, by either front end. It must not be on the meta device.
        decay: a number from 0 to 1, or a function of the number of earlier updates that returns one:
            `lambda n: min(0.999, (1 + n) / (10 + n))` warms up, `lambda n: n / (n + 1)` makes the mean of all updates,
            and `lambda n: 0.0 if n < 100 else 0.999` copies at first.
        dtype: the dtype of the averages, a floating-point one. None: the parameter's, but float32 where that has fewer
            bits, in which `1 - decay` would be lost. Averages of complex parameters are complex.
        device: where the averages are; "cpu" for host memory. None: where the parameter is.
        buffers: average floating-point buffers, too; else they are the model's own.
        trainable_only: average what is trained when it is first seen; frozen parameters are the model's own, and take
            no memory.

    Raises:
        PolicyError, PolicyTypeError: an argument is out of range, or of another type.
        ModuleError: the model has nothing to average.
        StateError: a parameter is on the meta device; or as `update`.
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float | Callable[[int], float] = 0.999,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        buffers: bool = False,
        trainable_only: bool = False,
    ) -> None:
        require_module("Ema expects a module", model)
        if not callable(decay):
            require_number("Ema(decay={})", decay, 0, 1)
        require_floating_dtype("Ema(dtype={})", dtype)
        require_type("Ema(device=...): expected a device or its name", device, torch.device | str | None)
        require_bool("Ema(buffers={})", buffers)
        require_bool("Ema(trainable_only={})", trainable_only)
        self.num_updates = 0
        self._model, self._decay, self._dtype = model, decay, dtype
        self._device = None if device is None else torch.device(device)
        self._buffers, self._trainable_only = buffers, trainable_only
        self._averages: dict[str, torch.Tensor] = {}
        self._records: dict[str, ShardedParameter] = {}
        self._is_applied = False
        self._follow("Ema()")
        if not self._averages:
            raise ModuleError(
                f"Ema: {type(model).__name__} has nothing to average; pass the module with the parameters"
            )

    @torch.no_grad()
    def update(self) -> None:
        """Average once more, after an optimizer's step. All averages of one dtype take a few kernels.

        Raises:
            StateError: inside `applied` or `sherd.unsharded`, or in the middle of a forward or backward.
            PolicyError, PolicyTypeError: the function given as `decay` returned something else than 0 to 1.
        """
        values, decay = self._follow("Ema.update()").by_name, self._decay
        if callable(decay):
            decay = decay(self.num_updates)
            require_number(f"Ema(decay=...): the function returned {{}} for {self.num_updates}", decay, 0, 1)
        _move([(local_part(each), local_part(values[name])) for name, each in self._averages.items()], 1 - decay)
        self.num_updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the averages stand in for the model's parameters within this context: for evaluation, or a checkpoint.

        After it, also when its body raises, the parameters have their own values again, which are kept meanwhile in
        memory of the shards' size. What was written to them inside is lost. A state dict that is taken inside shows the
        same memory, so it is saved inside, too.

        Raises:
            StateError: as `update`.
        """
        found = self._follow("Ema.applied()")
        own = {name: _copied(tensor) for name, tensor in found.by_name.items() if name in self._averages}
        self._is_applied = True
        try:
            found.take(self._averages)
            yield
        finally:
            self._is_applied = False
            now = ModelTensors(self._model)  # which may have changed inside
            shapes = {name: tensor.shape for name, tensor in now.by_name.items()}
            now.take({name: value for name, value in own.items() if shapes.get(name) == value.shape})

    def copy_to(self, model: nn.Module) -> None:
        """Make `model` what the averaged one is inside `applied`. What has no average, such as a buffer, gets the
        averaged model's own value.

        Nothing is sent where the two are sharded alike, as a model and its `copy.deepcopy` are. Otherwise shards are
        gathered one by one, and all ranks must call it.

        Args:
            model: the averaged model, or another one with the same names and shapes, sharded or not.

        Raises:
            ModuleError: names or shapes differ. Nothing was copied then.
            StateError: as `update`, for either model.
        """
        require_module("Ema.copy_to expects a module", model)
        own, target = self._follow("Ema.copy_to()"), ModelTensors(model)
        target.require_at_rest("Ema.copy_to()")
        target.take(_matched("Ema.copy_to()", {**own.by_name, **self._averages}, target.by_name))

    def state_dict(self) -> dict[str, Any]:
        """Returns `num_updates`, and the averages themselves by name. torch's checkpointing saves and loads them as it
        does a sharded model's parameters. The arguments, `decay` and so on, are not in it."""
        return {"num_updates": self.num_updates, "averages": dict(self._averages)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take averages that `state_dict` returned, in any layout, or unsharded ones. All ranks must call it.

        Raises:
            ModuleError: names or shapes are not those of the averages. Nothing was taken then.
            StateError: as `update`.
        """
        self._follow("Ema.load_state_dict()")
        put(self._averages, _matched("Ema.load_state_dict()", state_dict.get("averages", {}), self._averages))
        self.num_updates = int(state_dict["num_updates"])

    @torch.no_grad()
    def _follow(self, call: str) -> ModelTensors:
        """Returns the model's tensors. Averages of those that are new begin, and of those that are gone are dropped;
        what was sharded since has its average sharded."""
        if self._is_applied:
            raise StateError(f"{call} inside Ema.applied(), where the parameters are the averages; leave it first")
        found = ModelTensors(self._model)
        found.require_at_rest(call)
        averages: dict[str, torch.Tensor] = {}
        for name, tensor in found.by_name.items():
            average, was = self._averages.get(name), self._records.get(name)
            if average is not None and average.shape == tensor.shape and was in (None, found.records.get(name)):
                if isinstance(tensor, DTensor) and not isinstance(average, DTensor):
                    average = laid_out(average, spec_of(tensor), average.device)
                averages[name] = average
            elif self._is_averaged(name, tensor, found):
                averages[name] = _copied(tensor, self._dtype_of(tensor), self._device)
        self._averages, self._records = averages, found.records
        return found

    def _is_averaged(self, name: str, tensor: torch.Tensor, found: ModelTensors) -> bool:
        if name in found.buffers:
            return self._buffers and tensor.is_floating_point()
        is_number = tensor.is_floating_point() or tensor.is_complex()
        return is_number and (name in found.trained or not self._trainable_only)

    def _dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        own = torch.promote_types(tensor.dtype, torch.float32)
        return own if self._dtype is None or tensor.is_complex() else self._dtype


@torch.no_grad()
def _copied(tensor: torch.Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None) -> torch.Tensor:
    """Returns a copy that lies as `tensor` does. None: in its own dtype, on its own device."""
    local = local_part(tensor).detach()
    copied = local.to(device or local.device, dtype or local.dtype, copy=True)
    return around(copied, spec_of(tensor)) if isinstance(tensor, DTensor) else copied


def _move(pairs: list[tuple[torch.Tensor, torch.Tensor]], weight: float) -> None:
    """Move the first of each pair towards the second: all that are alike at once, and in batches what must be
    converted, so that not all of it is there twice."""
    are_alike = [each.dtype is value.dtype and each.device == value.device for each, value in pairs]
    alike = list(compress(pairs, are_alike))
    others = list(compress(pairs, map(not_, are_alike)))
    for batch in filter(None, (alike, *(others[at : at + _BATCH] for at in range(0, len(others), _BATCH)))):
        averages, values = map(list, zip(*batch, strict=True))
        if weight == 1:
            torch._foreach_copy_(averages, values)  # a step towards a value from infinity would be nan
            continue
        if batch is not alike:
            given, values = values, [torch.empty_like(each) for each in averages]
            torch._foreach_copy_(values, given)
        torch._foreach_lerp_(averages, values, weight)


def _matched(call: str, given: Named, wanted: Named) -> dict[str, torch.Tensor]:
    """Returns what is `given` for the names of `wanted`. Raises `ModuleError` if names or shapes differ."""
    shapes, expected = ({name: tensor.shape for name, tensor in each.items()} for each in (given, wanted))
    wrong = [name for name in {**expected, **shapes} if shapes.get(name) != expected.get(name)]
    if wrong:
        raise ModuleError(f"{call}: {in_short(wrong)}: only one side has it, or shapes differ; use models made alike")
    return {name: given[name] for name in wanted}
