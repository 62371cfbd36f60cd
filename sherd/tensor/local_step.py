"""The local step of an optimizer: it steps tensors of this rank, its parts, in the place of shards.

A part is this rank's chunk of one parameter, or a span: neighbouring shards of a buffer as one vector. The optimizer
has the parts while it computes, inside of all step hooks, and no longer:

    outside of a step    param_groups: shards    state: {shard: {"exp_avg": DTensor, "step": tensor}}
    within               param_groups: parts     state: {part: {"exp_avg": its part, "step": the same}}
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sherd._torch import attributes_of, give_attributes, gradients_of, local_gradients, local_tensor, spec_of
from sherd.comm.streams import wait_for_steps
from sherd.layout.extent import Extent
from sherd.tensor.operands import common_owner
from sherd.tensor.placement import Layout, layout_of
from sherd.tensor.ragged import RaggedDTensor, as_result, local_part, own_view
from sherd.tensor.sharded import OwnDTensor
from sherd.tensor.state_kind import State, StateKind, copy_of, elementwise_keys, state_kind


class LocalStep:
    """This rank's parts of one optimizer's parameters, gradients and state, which the optimizer has while it steps.

    Args:
        optimizer: the optimizer. It may have stepped before.
        of_owners: parts are unsharded parameters, and the optimizer has none of those that other ranks hold.
        spans: the shards that are stepped together. All other parameters are stepped one by one.
        left_out: ids of parameters that the optimizer does not have for this step.
        views: of shards that were in a span before, as `views` of that local step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        of_owners: bool = False,
        spans: Sequence[SteppedSpan] = (),
        left_out: Collection[int] = (),
        views: Mapping[int, Views] | None = None,
    ) -> None:
        self.of_owners, self.spans = of_owners, spans
        self.views = dict(views or {})
        """The state of each shard in a span, and its parts of the span's vectors, by the id of the shard."""
        self._user_state = optimizer.state
        self._lists = [list(group["params"]) for group in optimizer.param_groups]
        self._lent_lists: list[list[torch.Tensor]] = []
        in_spans = {id(shard) for span in spans for shard in span.shards}
        self._others = [each for own in self._lists for each in own if id(each) not in in_spans]
        for each in self._others if of_owners else ():
            if not is_here(each):  # What a load has left would not be kept up to date. torch steps if there is nothing.
                self._user_state[each] = {}
        self._params = [each for each in self._others if id(each) not in left_out and (not of_owners or is_here(each))]
        self._own = [each for each in self._params if isinstance(each, OwnDTensor)]
        self._local_others = list(map(local_part, self._others))
        part_of = _as_parameter if of_owners else local_part
        self._chunks = list(map(part_of, self._params))
        chunk_of = dict(zip(map(id, self._params), self._chunks, strict=True))
        self._own_chunks = [chunk_of[id(each)] for each in self._own]
        self.parts = [[chunk_of[id(each)] for each in own if id(each) in chunk_of] for own in self._lists]
        """Chunks and spans of each parameter group: the optimizer has them while it steps."""
        for span in spans:
            self.parts[span.group_index].append(span.flat)
        self._is_known = all(isinstance(each, OwnDTensor) or not isinstance(each, DTensor) for each in self._params)
        self.state: defaultdict[torch.Tensor, State] = defaultdict(dict)
        for parameter, chunk in zip(self._params, self._chunks, strict=True):
            state = self._user_state.get(parameter)
            if state is not None:
                placed = [value for value in state.values() if isinstance(value, DTensor)]
                self._is_known &= all(_is_placed_as(each, parameter) for each in placed)
                # A plain parameter is its own chunk: both have one state.
                local = {key: local_part(value) for key, value in state.items()}
                self.state[chunk] = state if parameter is chunk else local
        for span in spans:
            if state := span.joined_state(self._user_state, self.views):
                self.state[span.flat] = state
                self.views |= span.hand_out(state, self._user_state)
        self.state |= of_no_parameter(self._user_state)
        self._note()

    def _note(self) -> None:
        """Remember all state, to notice what a user or a step replaces."""
        self._states = list(self._user_state.values())
        of_spans = {id(state) for state, _ in self.views.values()}
        # A user may replace an entry of other states. Those of spans are read when the spans are made.
        self._watched = [each for each in self._states if id(each) not in of_spans]
        self._watched_values, self._values = _values_of(self._watched), _values_of(self.state.values())
        self._num_states = len(self.state)

    def is_of(self, optimizer: Optimizer) -> bool:
        """Returns True if the optimizer still has the same parameters and state."""
        lists = [group["params"] for group in optimizer.param_groups]
        return (
            optimizer.state is self._user_state
            and len(lists) == len(self._lists)
            and all(map(are_same, lists, self._lists))
            and are_same(list(map(local_part, self._others)), self._local_others)
            and are_same(list(self._user_state.values()), self._states)
            and are_same(_values_of(self._watched), self._watched_values)
        )

    def take_gradients(self) -> bool:
        """Give each part this rank's part of the gradient.

        Returns False if a gradient or an entry of state has other placements than its parameter or another dtype, if a
        parameter is a DTensor of torch, or if a shard of a span has no gradient. Then the parts are not to be stepped.
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
        return all(span.take_gradient() for span in self.spans)

    @contextmanager
    def lent_to(self, optimizer: Optimizer) -> Iterator[None]:
        """Let `optimizer` have the parts in the place of its own, and afterwards its own with what is new in these."""
        self._lent_lists = [group["params"] for group in optimizer.param_groups]
        for span in self.spans:
            span.clear_padding()
        try:
            with params_replaced(optimizer, self.parts, self.state):
                yield
        finally:
            self._end()

    def around_closure(self, optimizer: Optimizer, closure: Callable[[], object]) -> Callable[[], object]:
        """Returns `closure`, inside of which the optimizer has its own tensors again. The parts get its gradients."""

        def with_own() -> object:
            with params_replaced(optimizer, self._lent_lists, self._user_state):
                loss = closure()
            self.take_gradients()  # the closure's backward has made new ones
            return loss

        return with_own

    def _end(self) -> None:
        """Drop the gradients, and put new objects in the parts' state into the user's state, too."""
        for own, chunk in zip(self._own, self._own_chunks, strict=True):
            if self.of_owners and chunk.grad is None:
                own.grad = None  # the step may have called `zero_grad`
            chunk.grad = None
        for span in self.spans:
            span.flat.grad = None
        if len(self.state) == self._num_states and are_same(_values_of(self.state.values()), self._values):
            return
        self._user_state |= of_no_parameter(self.state)
        pairs = [(each, chunk) for each, chunk in zip(self._params, self._chunks, strict=True) if chunk in self.state]
        elementwise = elementwise_keys((each, self.state[chunk]) for each, chunk in pairs)
        for parameter, chunk in pairs:
            user_state = self._user_state[parameter]
            local = self.state[chunk]
            for key in user_state.keys() - local.keys():
                del user_state[key]
            for key, value in local.items():
                if key in user_state and local_part(user_state[key]) is value:
                    continue
                kind = state_kind(key, value, parameter.shape, chunk.shape, elementwise)
                if isinstance(parameter, OwnDTensor) and kind is StateKind.ELEMENTS:
                    value = parameter.around(value)
                elif self.of_owners and kind is StateKind.OTHER and type(value) is torch.Tensor:
                    value = _at_owner(value, parameter)
                user_state[key] = value
        for span in self.spans:
            if span.flat in self.state:
                self.views |= span.hand_out(self.state[span.flat], self._user_state)
        self._note()

    def put_in_order(self, optimizer: Optimizer) -> None:
        """Order the user's state as the parameters: spans differ between ranks, and ranks gather states in order."""
        for parameter in params_of(optimizer):
            if parameter in self._user_state:
                self._user_state[parameter] = self._user_state.pop(parameter)
        self._note()


Views = tuple[State, dict[str, torch.Tensor]]
"""The user's state of a shard in a span, and the shard's parts of the span's vectors, 1-D."""


# Spans
#
# shard buffer     | w1 | w2 | w3 | . | b1 | b2 | n |
# spans            |    span 0    |   |    span 1   |      parameters, gradients and states are laid out alike


@dataclass(frozen=True, slots=True)
class Span:
    """The extents of the members of a vector of `numel` elements. There may be gaps between members."""

    numel: int
    extents: tuple[Extent, ...]

    @property
    def gaps(self) -> list[Extent]:
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


class SteppedSpan:
    """Neighbouring shards that are stepped as one vector, `flat`, a view of their shard buffer.

    Args:
        group_index: the number of the optimizer's parameter group that they are in.
        buffer: the shard buffer.
        members: the shards, and their extents in the buffer. Shards that are empty on this rank come last; they share
            the count of steps.
    """

    def __init__(self, group_index: int, buffer: torch.Tensor, members: Sequence[tuple[nn.Parameter, Extent]]) -> None:
        extents = [extent for _, extent in members if extent.numel]
        first, stop = (extents[0].start, extents[-1].stop) if extents else (0, 0)
        self.group_index, self.buffer = group_index, buffer
        self.shards = [shard for shard, _ in members]
        self.flat = nn.Parameter(buffer[first:stop].detach(), requires_grad=True)
        in_span = (extent.shifted(-first) for extent in extents)
        self._span = Span(stop - first, (*in_span, *[Extent(0, 0)] * (len(members) - len(extents))))
        self._local_shapes = [local_part(shard).shape for shard in self.shards]
        self._starts = [extent.start - first for extent in extents]
        self._none_is_empty = len(extents) == len(members)
        self._shape = self.flat.shape
        # Gradients at the addresses of the shards may still have their elements in another order (transposed), unless
        # they are neighbours with a single dimension.
        self._may_be_transposed = len(extents) == 1 or any(len(shape) > 1 for shape in self._local_shapes)
        gaps = [torch.arange(gap.start, gap.stop) for gap in self._span.gaps]
        self.padding = torch.cat(gaps).to(self.flat.device) if gaps else None
        self._addresses: list[int] = []
        self.state: State = {}
        """The span's state that the shards have parts of."""
        self._views: list[Views] = []

    def _in_place(self, parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Returns the vector that `parts` are views of, or None if their offsets differ from those of the shards."""
        first = parts[0]
        if not self._starts:
            return first.new_empty(0)
        addresses = list(map(torch.Tensor.data_ptr, parts if self._none_is_empty else parts[: len(self._starts)]))
        if addresses != self._addresses:
            itemsize = first.itemsize
            self._addresses = [addresses[0] + start * itemsize for start in self._starts]
            if addresses != self._addresses:
                return None
        if self._may_be_transposed and not all(map(torch.Tensor.is_contiguous, parts)):
            return None
        try:
            # Parts at addresses within the first part's storage belong to that storage.
            return first.as_strided(self._shape, (1,))
        except RuntimeError:  # the storage ends before the last part
            return None

    def take_gradient(self) -> bool:
        """Give `flat` the shards' gradients, uncopied if they share one buffer. Returns False if any is missing."""
        try:
            parts = local_gradients(self.shards)
        except AttributeError:  # a gradient is None or no DTensor
            return False
        gradient = self._in_place(parts) if parts[0].dtype is self.flat.dtype else None
        if gradient is None:
            if not all(map(fits, self.shards, gradients_of(self.shards))):
                return False
            wait_for_steps()  # it may be on its way to host memory
            gradient = self._span.vector(parts, self.flat.dtype)
        self.flat.grad = gradient
        return True

    def clear_padding(self) -> None:
        """Make the gradient zero where the reduction leaves any values, for an optimizer's sum over the buffer."""
        # test_what_lies_between_gradients_stays_there
        if self.padding is not None and self.flat.grad is not None:
            self.flat.grad.index_fill_(0, self.padding, 0)

    def joined_state(self, state_of: Mapping[torch.Tensor, State], views: Mapping[int, Views]) -> State:
        """Returns the span's state, made of the shards' states, uncopied if these share one buffer.

        `views` are those of shards that were in a span before.
        """
        states = [state_of.get(shard) or {} for shard in self.shards]
        joined: State = {}
        for key, value in states[0].items():
            if is_elementwise(self.shards[0], key, value):
                parts = [
                    views[id(shard)][1][key] if id(shard) in views else local_part(state[key]).reshape(-1)
                    for shard, state in zip(self.shards, states, strict=True)
                ]
                vector = self._in_place(parts)
                joined[key] = self._span.vector(parts, parts[0].dtype) if vector is None else vector
            else:
                # A copy: two spans that were one must not share their count of steps.
                joined[key] = copy_of(value)
        return joined

    def hand_out(self, state: State, state_of: dict[torch.Tensor, State]) -> dict[int, Views]:
        """Give the shards their parts of new entries of the span's state.

        Returns:
            All that they have been given, by the id of each shard.
        """
        if not self._views:
            self._views = [({}, {}) for _ in self.shards]
            state_of.update(zip(self.shards, (own for own, _ in self._views), strict=True))
        for key, value in state.items():
            if key in self.state and self.state[key] is value:
                continue  # stepped in place, so the shards' parts are current
            is_vector = isinstance(value, torch.Tensor) and value.shape == self._shape
            parts = self._span.views(value) if is_vector else [value] * len(self.shards)
            for (own, views), shard, shape, part in zip(
                self._views, self.shards, self._local_shapes, parts, strict=True
            ):
                own[key] = shard.around(own_view(part).view(shape)) if is_vector else part  # type: ignore[attr-defined]
                if is_vector:
                    views[key] = part
        self.state = dict(state)
        return dict(zip(map(id, self.shards), self._views, strict=True))


def fits(shard: torch.Tensor, gradient: object) -> bool:
    """Returns True if `gradient` is a DTensor of which this rank holds as much as of `shard`."""
    return isinstance(gradient, DTensor) and local_tensor(gradient).shape == local_part(shard).shape


def is_elementwise(shard: torch.Tensor, key: str, value: object) -> bool:
    """Returns True if `value`, an optimizer's state under `key`, has one element for each element of the shard."""
    return state_kind(key, value, shard.shape, local_part(shard).shape) is StateKind.ELEMENTS


def _as_parameter(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a parameter as a parameter with the same attributes; a plain one as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    # Classes of other packages choose by `requires_grad`, and by attributes that a user has written on parameters.
    part = nn.Parameter(local_tensor(tensor).detach(), tensor.requires_grad)
    give_attributes(part, attributes_of(tensor))
    return part


def owned_layout(tensor: object) -> Layout | None:
    """Returns the layout of a tensor that one rank holds unsharded; None for any other value."""
    layout = layout_of(spec_of(tensor)) if isinstance(tensor, RaggedDTensor) else None
    return layout if layout is not None and layout.owner is not None else None


def is_here(parameter: torch.Tensor) -> bool:
    """Returns True unless another rank owns the parameter."""
    layout = owned_layout(parameter)
    return layout is None or layout.owner == layout.rank


def _is_placed_as(state: DTensor, parameter: torch.Tensor) -> bool:
    """Returns True if state is laid out as the parameter, or, of another shape, is at the parameter's owner."""
    layouts = [each for each in map(owned_layout, (state, parameter)) if each is not None]
    is_laid_as = isinstance(parameter, OwnDTensor) and parameter.lies_as(state)
    return is_laid_as or (len(layouts) == 2 and common_owner(layouts) is not None)


def _at_owner(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Returns state of another shape than its parameter, if that has an owner, as a tensor that the owner holds."""
    layout = owned_layout(parameter)
    return value if layout is None else as_result(value, layout.like(layout.owned_cut(tuple(value.shape))))


def nothing_of(parameter: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype | None) -> RaggedDTensor:
    """Returns this rank's part, which is empty, of state of `shape` that the parameter's owner holds."""
    layout = owned_layout(parameter)
    assert layout is not None, "the parameter has an owner"
    layout = layout.like(layout.owned_cut(shape))
    return as_result(torch.empty(layout.local_shape, dtype=dtype, device=parameter.device), layout)


def are_same(now: Sequence[object], before: Sequence[object]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


def of_no_parameter(states: Mapping[torch.Tensor, Any]) -> dict[torch.Tensor, Any]:
    """Returns what some optimizers keep in their state for no parameter, such as a count of all steps."""
    return {key: each for key, each in states.items() if not isinstance(key, torch.Tensor)}


def _values_of(states: Iterable[State]) -> list[object]:
    return list(chain.from_iterable(each.values() if isinstance(each, dict) else (each,) for each in states))


def params_of(optimizer: Optimizer) -> list[Any]:
    return list(chain.from_iterable([group["params"] for group in optimizer.param_groups]))


@contextmanager
def params_replaced(
    optimizer: Optimizer, parameters: Iterable[Sequence[torch.Tensor]], state: object = None
) -> Iterator[None]:
    """Replace the parameters of each parameter group within this context, their names where groups have any, and state.

    With `state` None, the state stays as it is.
    """
    before = [(group, group["params"], group.get("param_names")) for group in optimizer.param_groups]
    own = optimizer.state
    try:
        optimizer.state = own if state is None else state  # type: ignore[assignment]  # of the same kind
        for (group, own_list, names), others in zip(before, parameters, strict=True):
            group["params"] = others
            if names is not None:
                name_of_id = dict(zip(map(id, own_list), names, strict=False))
                group["param_names"] = [name_of_id.get(id(each), "") for each in others]
        yield
    finally:
        optimizer.state = own
        for group, own_list, names in before:
            group["params"] = own_list
            if names is not None:
                group["param_names"] = names
