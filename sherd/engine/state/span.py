"""How are neighbouring shards one vector, with their gradients and optimizer states? Views of a shard buffer.

shard buffer     | w1 | w2 | w3 | . | b1 | b2 | n |
runs            |     run 0    |   |    run 1    |      parameters, gradients and states lie alike
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sherd._torch import dtensor_spec, gradients_of, local_gradients, local_tensor
from sherd.engine.state.group import Group, own_view
from sherd.engine.state.parameter import ShardedParameter
from sherd.layout.extent import Extent
from sherd.tensor.ragged import as_dtensor, local_part
from sherd.tensor.state_kind import State, StateKind, copy_of, kind_of

States = MutableMapping[Any, Any]
"""An optimizer's state: by parameter, a `State`."""


@dataclass(frozen=True, slots=True)
class Seat:
    """One shard in its group's shard buffer. `place`: which parameter group of the optimizer it is in."""

    record: ShardedParameter
    group: Group
    extent: Extent
    place: int

    @property
    def shard(self) -> nn.Parameter:
        """What the user's optimizer holds."""
        return self.record.shard

    @property
    def is_filled(self) -> bool:
        """Whether this rank holds anything of it."""
        return self.extent.numel > 0

    @property
    def is_taken(self) -> bool:
        """Whether the shard lies in the buffer; after `module.to()` it does not, until the next forward."""
        local, shard_buffer = self.record.local, self.group.shard_buffer
        if local.dtype != shard_buffer.dtype or local.device != shard_buffer.device:
            return False
        return (
            not self.is_filled
            or local.data_ptr() == shard_buffer.data_ptr() + self.extent.start * shard_buffer.itemsize
        )

    def fits(self, gradient: Any) -> bool:
        """Whether a gradient is laid out as the shard is."""
        return isinstance(gradient, DTensor) and local_tensor(gradient).shape == self.record.local.shape

    def has_elements(self, key: str, value: object) -> bool:
        """Whether `value`, kept by the optimizer under `key`, has an element for each of the shard's."""
        return kind_of(key, value, self.shard.shape, self.record.local.shape) is StateKind.ELEMENTS

    def dtensor(self, local: torch.Tensor) -> DTensor:
        """This rank's part of something that is laid out as the parameter is; `local` is 1-D, and is not copied."""
        spec = self.record.shard_spec
        if local.dtype != self.record.dtype:
            spec = dtensor_spec(spec.mesh, spec.placements, spec.shape, local.dtype)
        return as_dtensor(own_view(local).view(self.record.local.shape), spec)


@dataclass(frozen=True, slots=True)
class Home:
    """Where the state of a shard is: `part` is what the optimizer has of it, `views` the same in the run's vectors."""

    shard: nn.Parameter
    part: State
    views: dict[str, torch.Tensor]


class Run:
    """Neighbouring shards that are stepped as one vector, `flat`, a view of their shard buffer.

    Shards that this rank holds nothing of come last; they take part in the count of steps.
    """

    def __init__(self, seats: Sequence[Seat]) -> None:
        filled = [seat.extent for seat in seats if seat.is_filled]
        first, stop = (filled[0].start, filled[-1].stop) if filled else (0, 0)
        self.seats = tuple(seats)
        self.shards = [seat.shard for seat in seats]
        self.flat = nn.Parameter(seats[0].group.shard_buffer[first:stop].detach(), requires_grad=True)
        self._extents = [Extent(each.start - first, each.numel) for each in filled]
        self._starts = [each.start for each in self._extents]
        self._is_filled = len(self._starts) == len(self.seats)
        self._shape = self.flat.shape
        # Parts that begin where the shards do may have their elements in another order, unless they are neighbours
        # with a single dimension.
        self._may_be_turned = len(filled) == 1 or any(seat.record.local.dim() > 1 for seat in seats)
        self.padding = self._indices_between()
        self._addresses: list[int] = []
        self.state: State = {}
        self._given: State = {}
        self._parts: list[State] = []

    def _indices_between(self) -> torch.Tensor | None:
        """Which elements are no shard's, if any."""
        gaps = [torch.arange(one.stop, next_.start) for one, next_ in pairwise(self._extents) if one.stop < next_.start]
        return torch.cat(gaps).to(self.flat.device) if gaps else None

    def _parts_of(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """What each shard has of a vector as long as `flat`: views."""
        parts = [vector[extent.start : extent.stop] for extent in self._extents]
        return parts + [vector[:0]] * (len(self.seats) - len(parts))

    def _as_vector(self, parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The vector that `parts` are views of, uncopied, if they lie there as the shards do in their buffer."""
        first = parts[0]
        if not self._starts:
            return first.new_empty(0)
        addresses = list(map(torch.Tensor.data_ptr, parts if self._is_filled else parts[: len(self._starts)]))
        if addresses != self._addresses:
            itemsize = first.itemsize
            self._addresses = [addresses[0] + start * itemsize for start in self._starts]
            if addresses != self._addresses:
                return None
        if self._may_be_turned and not all(map(torch.Tensor.is_contiguous, parts)):
            return None
        try:
            # An address within the memory of a living storage is that storage's.
            return first.as_strided(self._shape, (1,))
        except RuntimeError:  # it ends before the last of them
            return None

    def _copied(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        vector = torch.zeros(self.flat.numel(), dtype=dtype, device=parts[0].device)
        for place, part in zip(self._parts_of(vector), parts, strict=True):
            place.copy_(part.reshape(-1))
        return vector

    # Gradients

    def take_gradient(self) -> bool:
        """Let `flat` have the shards' gradients, uncopied where they lie in one buffer; False if one is missing."""
        try:
            parts = local_gradients(self.shards)
        except AttributeError:  # None, or one that is no DTensor
            return False
        gradient = self._as_vector(parts) if parts[0].dtype is self.flat.dtype else None
        if gradient is None:
            if not all(map(Seat.fits, self.seats, gradients_of(self.shards))):
                return False
            gradient = self._copied(parts, self.flat.dtype)
        elif self.padding is not None:
            # The reduction leaves there what it finds. No element would see it, but a sum over the buffer might.
            gradient.index_fill_(0, self.padding, 0)
        self.flat.grad = gradient
        return True

    # State

    def take_state(self, state_of: States, homes: dict[int, Home]) -> None:
        """Make the run's state of the shards', uncopied where it lies in one buffer; then they have views of it."""
        states = [state_of.get(shard) or {} for shard in self.shards]
        vectors: State = {}
        for key, value in states[0].items():
            if self.seats[0].has_elements(key, value):
                parts = [
                    homes[id(shard)].views[key] if id(shard) in homes else local_part(state[key]).reshape(-1)
                    for shard, state in zip(self.shards, states, strict=True)
                ]
                vector = self._as_vector(parts)
                vectors[key] = self._copied(parts, parts[0].dtype) if vector is None else vector
            else:
                # A copy: two runs that were one must not share their count of steps.
                vectors[key] = copy_of(value)
        if vectors:
            self._hand_out(vectors, state_of)

    def homes(self) -> Iterator[Home]:
        """Where each shard's state is."""
        vectors = {key: self._parts_of(value) for key, value in self.state.items() if self._is_vector(value)}
        for index, (shard, part) in enumerate(zip(self.shards, self._parts, strict=False)):
            yield Home(shard, part, {key: views[index] for key, views in vectors.items()})

    def has_its_state(self, state_of: States) -> bool:
        """Whether the shards still have the state that they were given: none was loaded or cleared since."""
        state = state_of.get(self.shards[0])
        return state is self._parts[0] if self._parts else not state

    def lend_state(self, state_of: States) -> None:
        """Let the optimizer find the run's state."""
        if self._parts:
            state_of[self.flat] = self.state

    def take_back(self, state_of: States) -> None:
        """The step is over: the shards have their parts of what is new in the state."""
        state = state_of.pop(self.flat, None)
        if state is not None:
            self._hand_out(state, state_of)

    def _hand_out(self, state: State, state_of: States) -> None:
        if not self._parts:
            self._parts = [{} for _ in self.seats]
            state_of.update(zip(self.shards, self._parts, strict=True))
        for key, value in state.items():
            if key in self._given and self._given[key] is value:
                continue
            if self._is_vector(value):
                views = zip(self.seats, self._parts_of(value), strict=True)
                for part, (seat, view) in zip(self._parts, views, strict=True):
                    part[key] = seat.dtensor(view)
            else:
                for part in self._parts:
                    part[key] = value
        self.state, self._given = state, dict(state)

    def _is_vector(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.shape == self.flat.shape
