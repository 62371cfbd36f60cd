"""What has changed in a model's weights, as it travels: one tensor at a time, in a chain that a receiver checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sherd.errors import ModuleError, PlacementError, StateError
from sherd.layout.boxes import Box, whole
from sherd.requirements import require_type

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """Returns the memory of `values` as integers: -0.0 differs from 0.0, and NaN may equal NaN.

    A complex128 is two integers, in a dim of their own, and `values` must be contiguous then.
    """
    bits = values.view(_WORDS[values.itemsize])
    return bits.view(*values.shape, 2) if values.itemsize == 16 else bits


@dataclass(frozen=True, slots=True, eq=False)
class WeightDelta:
    """What has changed in one tensor of a model since it was last sent; `WeightReceiver.apply` writes it.

    It may be pickled, or sent field by field and made again by `WeightDelta(...)`.

    Attributes:
        name: the name of the tensor in the plain model.
        shape: the shape of the unsharded tensor.
        since: the mark that the receiver must have reached, as "stream:number"; number 0 begins a stream.
        until: the mark that the receiver has reached with this delta.
        values: the new values: 1-D, one for each of `positions`; or, without positions, all values of a box.
        positions: 1-D, the places of `values` in the flattened unsharded tensor, each once, in no particular order.
            int32, or int64 for a tensor of 2^31 elements and more. None: `values` is a box.
        offsets: the index of the first element of the box. The unsharded tensor begins at 0 in each dim.
        part: the rank whose shards were compared, with `own_part=True`. None: the shards of all ranks.
    """

    name: str
    shape: tuple[int, ...]
    since: str
    until: str
    values: torch.Tensor
    positions: torch.Tensor | None = None
    offsets: tuple[int, ...] = ()
    part: int | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of values and positions."""
        return self.values.nbytes + (0 if self.positions is None else self.positions.nbytes)

    def to(self, device: torch.device) -> WeightDelta:
        """Returns the delta with its tensors on `device`."""
        positions = None if self.positions is None else self.positions.to(device)
        return replace(self, values=self.values.to(device), positions=positions)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        # A view would be pickled with its bucket, and pickle does not know the 8-bit floats (torch 2.13).
        values = self.values.clone()
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        own["values"] = values.view(torch.uint8) if values.itemsize == 1 else values
        return _unpickled, (values.dtype, own)


def _unpickled(dtype: torch.dtype, own: dict[str, Any]) -> WeightDelta:
    return WeightDelta(**{**own, "values": own["values"].view(dtype)})


class WeightReceiver:
    """Unsharded tensors that follow a model's weights by deltas: those of an inference engine, or a copy for one.

        receiver = sherd.WeightReceiver(engine_model)
        for delta in arriving:
            receiver.apply(delta)

    It needs no process group. After a delta that was lost, doubled or reordered, the next delta raises an error. If
    `receiver.at` is the sender's `mark.at`, all deltas have arrived.

    Args:
        tensors: the unsharded tensors by name, of any dtype and device, or the module that has them as parameters and
            buffers. They are written in place, so views fill fused tensors: `{"q": qkv[:n], "k": qkv[n:]}`.

    Raises:
        PolicyTypeError: `tensors` is neither a mapping nor a module.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor] | nn.Module) -> None:
        require_type(
            "WeightReceiver(tensors=...): expected a dict of tensors or a module", tensors, Mapping | nn.Module
        )
        self._tensors = tensors
        self._reached: dict[int | None, str] = {}

    @property
    def at(self) -> str:
        """The mark that was reached, "" at first. With deltas of several parts: those of all, joined by spaces."""
        return " ".join(self._reached.values())

    @torch.no_grad()
    def apply(self, delta: WeightDelta) -> None:
        """Write `delta` into the tensor of its name.

        Raises:
            StateError: `delta` does not begin at the mark that this receiver has reached. Nothing is written.
            ModuleError: no tensor has its name.
            PlacementError: the tensor has another shape, or is sharded.
        """
        require_type("WeightReceiver.apply(delta=...): expected a WeightDelta", delta, WeightDelta)
        is_start = self._require_next(delta)
        target = self._target_of(delta)
        if delta.positions is None:
            box = Box(delta.offsets, tuple(delta.values.shape))
            target[box.within(whole(delta.shape))].copy_(delta.values)
        else:
            positions = delta.positions.to(target.device, torch.int64)
            values = delta.values.to(target.device, target.dtype)
            if target.is_contiguous():
                bits_of(target.view(-1)).index_copy_(0, positions, bits_of(values))
            else:
                at = torch.unravel_index(positions, target.shape)
                target, values = (each if each.itemsize == 16 else bits_of(each) for each in (target, values))
                target[at] = values  # as bits: torch has no index_put of all dtypes
        if is_start:
            self._reached = {} if delta.part is None else {p: at for p, at in self._reached.items() if p is not None}
        self._reached[delta.part] = delta.until

    def _require_next(self, delta: WeightDelta) -> bool:
        """Returns whether `delta` begins a stream. Raises StateError if it neither does so nor is the next one."""
        reached, (stream, _, number) = self._reached.get(delta.part, ""), delta.since.rpartition(":")
        is_start = number == "0" and stream != reached.rpartition(":")[0]
        if is_start or delta.since == reached:
            return is_start
        of = "" if delta.part is None else f" of rank {delta.part}"
        raise StateError(
            f"WeightReceiver.apply(): the delta{of} of {delta.name} begins at mark {delta.since}, but this receiver is "
            f"at {reached or 'none'}: a delta was lost, doubled or reordered; call reset() of the sender's WeightMark, "
            "whose next loop sends everything again"
        )

    def _target_of(self, delta: WeightDelta) -> torch.Tensor:
        tensors, name = self._tensors, delta.name
        try:
            target: torch.Tensor = attrgetter(name)(tensors) if isinstance(tensors, nn.Module) else tensors[name]
        except (AttributeError, KeyError):
            raise ModuleError(
                f"WeightReceiver.apply(): no tensor is called {name}; pass the receiver a dict that has a tensor, or a "
                "view of one, under this name"
            ) from None
        if isinstance(target, DTensor) or tuple(target.shape) != delta.shape:
            found = "sharded" if isinstance(target, DTensor) else f"of shape {tuple(target.shape)}"
            raise PlacementError(
                f"WeightReceiver.apply(): {name} is {found}, but the delta is for a plain tensor of shape "
                f"{delta.shape}; pass the receiver a plain tensor of that shape"
            )
        return target.detach()
