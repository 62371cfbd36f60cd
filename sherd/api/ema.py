"""`Ema`: an exponential moving average of a model's parameters. Each rank averages its own shards; nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sherd._torch import spec_of
from sherd.api.module import require_module
from sherd.checkpoint.catalog import ModelTensors
from sherd.engine import ShardedParameter, Unit, watcher
from sherd.errors import ModuleError, StateError, in_short
from sherd.requirements import require_bool, require_floating_dtype, require_number, require_type
from sherd.tensor.ragged import local_part
from sherd.tensor.relayout import Named, around, laid_out, put

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

    Averages have the layout of the parameters, and begin with the values of the parameters. A tied parameter has one
    average. The average of a parameter that the model gets later (`sherd.refresh`) begins with the value at the next
    call; averages of removed parameters are dropped. The model may be sharded later, or not at all.

    `num_updates` counts the calls of `update`.

    Args:
        model: the model, by either front end. It must not be on the meta device.
        decay: a number from 0 to 1, or a function of the number of earlier updates that returns one:
            `lambda n: min(0.999, (1 + n) / (10 + n))` warms up, `lambda n: n / (n + 1)` makes the mean of all updates,
            and `lambda n: 0.0 if n < 100 else 0.999` copies at first.
        dtype: the floating-point dtype of the averages. None: the parameter's dtype, or float32 for narrower dtypes, in
            which `1 - decay` would be lost. Averages of complex parameters are complex.
        device: the device of the averages; "cpu" for host memory. None: the device of the parameter.
        buffers: average floating-point buffers too; otherwise `applied` and `copy_to` use the model's own buffers.
        trainable_only: average the parameters that are trainable when `Ema` first sees them. The model's own frozen
            parameters are used, and take no memory.

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
            PolicyError, PolicyTypeError: the function `decay` returned something else than a number from 0 to 1.
        """
        tensors, decay = self._follow("Ema.update()"), self._decay
        values = tensors.by_name
        if callable(decay):
            decay = decay(self.num_updates)
            require_number(f"Ema(decay=...): the function returned {{}} for {self.num_updates}", decay, 0, 1)
        owners = [owner for record in self._records.values() if isinstance(owner := record.owner, Unit)]
        alone = {owner.id for owner in owners if not owner.mesh.holds_copies}  # one replica may average by itself
        watcher.note("an Ema averages with decay={}, after {} updates", (decay, self.num_updates), list(alone))
        exact = {name for name, record in tensors.records.items() if record.masters is not None}
        pairs = [(local_part(average), local_part(values[name]), name) for name, average in self._averages.items()]
        alike = [each for each in pairs if each[2] not in exact and _is_alike(*each[:2])]
        others = [each for each in pairs if each[2] in exact or not _is_alike(*each[:2])]
        # In batches, so that no second copy of all values is there at once.
        batches = [alike, *(others[start : start + _BATCH] for start in range(0, len(others), _BATCH))]
        for batch in filter(None, batches):
            averages = [average for average, _, _ in batch]
            targets = [local_part(tensors.exact(name)) if name in exact else value for _, value, name in batch]
            weight = 1 - decay
            if weight == 1:
                torch._foreach_copy_(averages, targets)  # a step from an infinite average to its value would be nan
                continue
            if batch is not alike:
                converted = [torch.empty_like(average) for average in averages]
                torch._foreach_copy_(converted, targets)
                targets = converted
            torch._foreach_lerp_(averages, targets, weight)
        self.num_updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the averages stand in for the model's parameters within this context: for evaluation, or a checkpoint.

        After the context, also when the body raises, the parameters have their own values again, which meanwhile take
        memory of the shards' size. Values that the body writes to parameters are lost. A state dict of the body shares
        memory with the parameters, so save it within the context too.

        Raises:
            StateError: as `update`.
        """
        tensors = self._follow("Ema.applied()")
        own = {name: _copied(tensors.exact(name)) for name in tensors.by_name if name in self._averages}
        self._is_applied = True
        try:
            tensors.take(self._averages)
            yield
        finally:
            self._is_applied = False
            now = ModelTensors(self._model)  # the body may have changed the model
            shapes = {name: tensor.shape for name, tensor in now.by_name.items()}
            now.take({name: value for name, value in own.items() if shapes.get(name) == value.shape})

    def copy_to(self, model: nn.Module) -> None:
        """Copy the averages to `model`; a tensor without an average, such as a buffer, gets the averaged model's value.

        Nothing is sent if both models are sharded alike, as a model and its `copy.deepcopy` are. Otherwise shards are
        gathered one by one, and all ranks must call the method.

        Args:
            model: the averaged model, or another model with the same names and shapes, sharded or not.

        Raises:
            ModuleError: names or shapes differ. Nothing is copied.
            StateError: as `update`, for either model.
        """
        require_module("Ema.copy_to expects a module", model)
        own, target = self._follow("Ema.copy_to()"), ModelTensors(model)
        target.require_at_rest("Ema.copy_to()")
        target.take(_matched("Ema.copy_to()", {**own.by_name, **self._averages}, target.by_name))

    def state_dict(self) -> dict[str, Any]:
        """Returns `num_updates`, and the averages by name, uncopied; no arguments such as `decay`.

        torch's checkpointing saves and loads the averages like the parameters of a sharded model.
        """
        return {"num_updates": self.num_updates, "averages": dict(self._averages)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of averages, in any layout or unsharded. All ranks must call it.

        Raises:
            ModuleError: names or shapes differ from those of the averages. Nothing is loaded.
            StateError: as `update`.
        """
        self._follow("Ema.load_state_dict()")
        put(self._averages, _matched("Ema.load_state_dict()", state_dict.get("averages", {}), self._averages))
        self.num_updates = int(state_dict["num_updates"])

    @torch.no_grad()
    def _follow(self, call: str) -> ModelTensors:
        """Returns the model's tensors, and brings the averages in step with the model.

        A new parameter gets an average, a removed parameter loses it, and a parameter that was sharded since gets a
        sharded average.
        """
        if self._is_applied:
            raise StateError(f"{call} inside Ema.applied(), where the parameters are the averages; leave it first")
        tensors = ModelTensors(self._model)
        tensors.require_at_rest(call)
        averages: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.by_name.items():
            average, record = self._averages.get(name), self._records.get(name)
            if average is not None and average.shape == tensor.shape and record in (None, tensors.records.get(name)):
                if isinstance(tensor, DTensor) and not isinstance(average, DTensor):
                    average = laid_out(average, spec_of(tensor), average.device)
                averages[name] = average
                continue
            if name in tensors.buffers:
                is_averaged = self._buffers and tensor.is_floating_point()
            else:
                is_number = tensor.is_floating_point() or tensor.is_complex()
                is_averaged = is_number and (name in tensors.trained or not self._trainable_only)
            if is_averaged:
                dtype = None if tensor.is_complex() else self._dtype
                averages[name] = _copied(
                    tensors.exact(name), dtype or torch.promote_types(tensor.dtype, torch.float32), self._device
                )
        self._averages, self._records = averages, tensors.records
        return tensors


@torch.no_grad()
def _copied(tensor: torch.Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None) -> torch.Tensor:
    """Returns a copy with the layout of `tensor`. None means the tensor's own dtype, or device."""
    local = local_part(tensor).detach()
    copied = local.to(device or local.device, dtype or local.dtype, copy=True)
    return around(copied, spec_of(tensor)) if isinstance(tensor, DTensor) else copied


def _is_alike(average: torch.Tensor, value: torch.Tensor) -> bool:
    return average.dtype is value.dtype and average.device == value.device


def _matched(call: str, given: Named, wanted: Named) -> dict[str, torch.Tensor]:
    """Returns the tensors `given` for the names of `wanted`. Raises `ModuleError` if names or shapes differ."""
    shapes, expected = ({name: tensor.shape for name, tensor in each.items()} for each in (given, wanted))
    wrong = [name for name in {**expected, **shapes} if shapes.get(name) != expected.get(name)]
    if wrong:
        raise ModuleError(f"{call}: {in_short(wrong)}: only one side has it, or shapes differ; use models made alike")
    return {name: given[name] for name in wanted}
