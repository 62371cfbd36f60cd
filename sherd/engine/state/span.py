"""Spans: neighbouring shards of a buffer as one vector, with their gradients and their optimizer states.

shard buffer     | w1 | w2 | w3 | . | b1 | b2 | n |
spans            |    span 0    |   |    span 1   |      parameters, gradients and states lie alike
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sherd._torch import gradients_of, local_gradients, local_tensor
from sherd.engine.state.group import Group, own_view
from sherd.engine.state.parameter import ShardedParameter, in_dtype
from sherd.layout.extent import Extent
from sherd.tensor.ragged import as_dtensor, local_part
from sherd.tensor.state_kind import State, StateKind, copy_of, kind_of

States = MutableMapping[torch.Tensor, State]
"""The state of an optimizer, by parameter."""


@dataclass(frozen=True, slots=True)
class Span:
    """The extents of the members of a vector of `numel` elements. There may be gaps between members."""

    numel: int
    extents: tuple[Extent, ...]

    @property
    def gaps(self) -> list[Extent]:
        """The extents between members."""
        in_order = sorted((extent for extent in self.extents if extent.numel), key=lambda extent: extent.start)
        return [Extent(one.stop, other.start - one.stop) for one, other in pairwise(in_order) if one.stop < other.start]

    def views(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Returns the members' parts of `vector`, 1-D and uncopied."""
        return [vector[extent.start : extent.stop] for extent in self.extents]

    def vector(self, parts: Sequence[torch.Tensor | None], dtype: torch.dtype) -> torch.Tensor:
        """Returns a vector with copies of the members' parts. Gaps, and members whose part is None, are zero."""
        device = next(part.device for part in parts if part is not None)
        vector = torch.zeros(self.numel, dtype=dtype, device=device)
        for view, part in zip(self.views(vector), parts, strict=True):
            if part is not None:
                view.copy_(part.reshape(-1))
        return vector


@dataclass(frozen=True, slots=True)
class ShardView:
    """A shard as a view of its group's shard buffer.

    `group_index` is the index of the optimizer's parameter group with the shard, -1 for a shard of another optimizer.
    """

    record: ShardedParameter
    group: Group
    extent: Extent
    group_index: int

    @property
    def shard(self) -> nn.Parameter:
        """The parameter in the user's optimizer."""
        return self.record.shard

    @property
    def is_empty(self) -> bool:
        """True if this rank holds nothing of the shard."""
        return not self.extent.numel

    @property
    def is_in_buffer(self) -> bool:
        """True if the shard lies in the buffer. After `module.to()` it lies elsewhere until the next forward."""
        return self.group.has_at(self.extent.start, self.record.local)

    def fits(self, gradient: object) -> bool:
        """Returns whether `gradient` is laid out as the shard is."""
        return isinstance(gradient, DTensor) and local_tensor(gradient).shape == self.record.local.shape

    def is_elementwise(self, key: str, value: object) -> bool:
        """Returns whether `value`, the optimizer's state under `key`, has an element for each of the shard's."""
        return kind_of(key, value, self.shard.shape, self.record.local.shape) is StateKind.ELEMENTS

    def dtensor(self, local: torch.Tensor) -> DTensor:
        """Returns a DTensor around `local`, 1-D and uncopied, that is laid out as the shard is."""
        return as_dtensor(own_view(local).view(self.record.local.shape), in_dtype(self.record.shard_spec, local.dtype))


@dataclass(frozen=True, slots=True)
class ShardState:
    """The state of a shard in a span: the optimizer's `state`, and the shard's `views` of the span's vectors."""

    shard: nn.Parameter
    state: State
    views: dict[str, torch.Tensor]


class SteppedSpan:
    """Neighbouring shards that are stepped as one vector, `flat`, a view of their shard buffer.

    Shards that are empty on this rank come last among the `members`; they share the count of steps.
    """

    def __init__(self, members: Sequence[ShardView]) -> None:
        extents = [member.extent for member in members if not member.is_empty]
        first, stop = (extents[0].start, extents[-1].stop) if extents else (0, 0)
        self.members = tuple(members)
        self.shards = [member.shard for member in members]
        self.flat = nn.Parameter(members[0].group.shard_buffer[first:stop].detach(), requires_grad=True)
        in_span = (extent.shifted(-first) for extent in extents)
        self._span = Span(stop - first, (*in_span, *[Extent(0, 0)] * (len(members) - len(extents))))
        self._starts = [extent.start - first for extent in extents]
        self._has_no_empty = len(extents) == len(members)
        self._shape = self.flat.shape
        # Parts that begin where the shards do may still have their elements in another order (a transposed gradient):
        # only neighbours with a single dimension cannot.
        self._may_be_transposed = len(extents) == 1 or any(member.record.local.dim() > 1 for member in members)
        gaps = [torch.arange(gap.start, gap.stop) for gap in self._span.gaps]
        self.padding = torch.cat(gaps).to(self.flat.device) if gaps else None
        self._addresses: list[int] = []
        self.state: State = {}
        self._given: State = {}
        self._states: list[State] = []

    def _in_place(self, parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Returns the vector that `parts` are views of, or None if the parts lie otherwise than the shards."""
        first = parts[0]
        if not self._starts:
            return first.new_empty(0)
        addresses = list(map(torch.Tensor.data_ptr, parts if self._has_no_empty else parts[: len(self._starts)]))
        if addresses != self._addresses:
            itemsize = first.itemsize
            self._addresses = [addresses[0] + start * itemsize for start in self._starts]
            if addresses != self._addresses:
                return None
        if self._may_be_transposed and not all(map(torch.Tensor.is_contiguous, parts)):
            return None
        try:
            # An address within the memory of a living storage belongs to that storage.
            return first.as_strided(self._shape, (1,))
        except RuntimeError:  # the storage ends before the last part
            return None

    # Gradients

    def take_gradient(self) -> bool:
        """Give `flat` the shards' gradients, uncopied if they lie in one buffer. Returns False if one is missing."""
        try:
            parts = local_gradients(self.shards)
        except AttributeError:  # a gradient is None or no DTensor
            return False
        gradient = self._in_place(parts) if parts[0].dtype is self.flat.dtype else None
        if gradient is None:
            if not all(map(ShardView.fits, self.members, gradients_of(self.shards))):
                return False
            gradient = self._span.vector(parts, self.flat.dtype)
        elif self.padding is not None:
            # The reduction leaves anything in gaps. No element would see it, but a sum over the buffer might:
            # test_what_lies_between_gradients_stays_there.
            gradient.index_fill_(0, self.padding, 0)
        self.flat.grad = gradient
        return True

    # State

    def take_state(self, state_of: States, known: dict[int, ShardState]) -> None:
        """Make the span's state of the shards' states, uncopied if they lie in one buffer. The shards get views of it.

        `known` holds the states of shards that were in a span before, by the id of the shard.
        """
        states = [state_of.get(shard) or {} for shard in self.shards]
        vectors: State = {}
        for key, value in states[0].items():
            if self.members[0].is_elementwise(key, value):
                parts = [
                    known[id(shard)].views[key] if id(shard) in known else local_part(state[key]).reshape(-1)
                    for shard, state in zip(self.shards, states, strict=True)
                ]
                vector = self._in_place(parts)
                vectors[key] = self._span.vector(parts, parts[0].dtype) if vector is None else vector
            else:
                # A copy: two spans that were one must not share their count of steps.
                vectors[key] = copy_of(value)
        if vectors:
            self._hand_out(vectors, state_of)

    def shard_states(self) -> Iterator[ShardState]:
        """Yields the state of each shard."""
        views = {key: self._span.views(value) for key, value in self.state.items() if self._is_vector(value)}
        for index, (shard, state) in enumerate(zip(self.shards, self._states, strict=False)):
            yield ShardState(shard, state, {key: parts[index] for key, parts in views.items()})

    def has_its_state(self, state_of: States) -> bool:
        """Returns whether the shards still have the span's state. If not, a user loaded or cleared state."""
        state = state_of.get(self.shards[0])
        return state is self._states[0] if self._states else not state

    def lend_state(self, state_of: States) -> None:
        """Show the span's state to the optimizer for a step."""
        if self._states:
            state_of[self.flat] = self.state

    def take_back(self, state_of: States) -> None:
        """End a step: give the shards their parts of new state."""
        state = state_of.pop(self.flat, None)
        if state is not None:
            self._hand_out(state, state_of)

    def _hand_out(self, state: State, state_of: States) -> None:
        if not self._states:
            self._states = [{} for _ in self.members]
            state_of.update(zip(self.shards, self._states, strict=True))
        for key, value in state.items():
            if key in self._given and self._given[key] is value:
                continue
            if self._is_vector(value):
                views = zip(self._states, self.members, self._span.views(value), strict=True)
                for own, member, view in views:
                    own[key] = member.dtensor(view)
            else:
                for own in self._states:
                    own[key] = value
        self.state, self._given = state, dict(state)

    def _is_vector(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.shape == self._shape
