"""`flatten_optimizer`: an optimizer that steps a few long vectors, views of the shard buffers, instead of many shards.

An element-wise optimizer (Adam, SGD with momentum, ...) does the same to every element. So it may step a span of a
shard buffer in one call, instead of the span's shards one by one.

    shard buffer     | w1 | w2 | w3 | . | b1 | b2 | n |      the shards that the optimizer was built from
    stepped spans    |    span 0    |   |    span 1   |      two parameter groups (with weight decay, without)

The optimizer keeps its class, its parameter groups and its per-parameter state, as views of the spans' states, for
schedulers, `GradScaler`, `state_dict` and checkpoints. The optimizer has spans as parameters only while it computes a
step.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sherd._torch import gradients_of, hooked_step, local_gradients, local_tensor
from sherd.engine import Group, ShardedParameter, Unit
from sherd.errors import OptimizerError, PolicyTypeError
from sherd.layout.extent import Extent
from sherd.tensor.optimizers import ELEMENTWISE, are_same, params_replaced
from sherd.tensor.placement import in_dtype
from sherd.tensor.ragged import as_dtensor, local_part, own_view
from sherd.tensor.span import Span
from sherd.tensor.state_kind import State, StateKind, copy_of, state_kind

if TYPE_CHECKING:
    _Optimizer = Optimizer
else:
    _Optimizer = object  # the user's own class, which follows among the bases, is an Optimizer

Key = TypeVar("Key")

States = MutableMapping[torch.Tensor, State]
"""The state of an optimizer, by parameter."""

NOT_ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.Adafactor,
    torch.optim.LBFGS,
    torch.optim.SparseAdam,
    *((torch.optim.Muon,) if hasattr(torch.optim, "Muon") else ()),
)


def flatten_optimizer(optimizer: Optimizer, *, elementwise: bool = False) -> Optimizer:
    """Let `optimizer` step spans of the shard buffers: neighbouring shards of one parameter group as one vector.

    Flat parameters, gradients and states under an element-wise optimizer are known from ZeRO (Rajbhandari et al. 2020).
    Here the optimizer's parameters stay the shards.

    Call it once, before a scheduler is built around the optimizer. The optimizer may have stepped before, or have
    loaded a state. Parameters that are not sharded are stepped as before. In a step without some of the gradients, the
    spans are split, so that only shards with a gradient are stepped. State may be loaded, cleared, and written in
    place; an entry that is replaced by hand (`optimizer.state[p]["exp_avg"] = ...`) has no effect. A copy or a pickle
    of the optimizer has the original class and steps tensor by tensor.

    Args:
        optimizer: of a class that treats every element alike: torch's Adam, AdamW, SGD, Adagrad, RMSprop and others.
        elementwise: confirms that your own class treats every element alike. The step may depend on a parameter's
            elements, gradient and state, one by one, but not on the parameter's shape.

    Returns:
        `optimizer`, changed in place: its class becomes a subclass of the original class.

    Raises:
        OptimizerError: `optimizer` is not element-wise (Adafactor, Muon), not known to be, flattened already,
            differentiable, or its `step` was replaced by a scheduler.
        PolicyTypeError: `optimizer` is no optimizer of torch.
    """
    if not isinstance(optimizer, Optimizer):
        raise PolicyTypeError(f"flatten_optimizer expects a torch.optim.Optimizer, got a {type(optimizer).__name__}")
    cls, name = type(optimizer), type(optimizer).__name__
    if isinstance(optimizer, FlatStep):
        raise OptimizerError(f"this {name} is flattened already; call flatten_optimizer once")
    if isinstance(optimizer, NOT_ELEMENTWISE):
        raise OptimizerError(
            f"{name} looks at whole tensors, rows or indices, and would compute something else on a flat "
            "buffer; leave it as it is (under placement=Owned() each tensor has one owner)"
        )
    if not (elementwise or _is_known(cls)):
        raise OptimizerError(
            f"{name} is not known to treat every element alike, and might compute something else on a flat "
            "buffer; leave it as it is, or pass elementwise=True for a class of your own that does"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise OptimizerError(
            f"{name}(differentiable=True) is to be differentiated through, which a flat buffer does not "
            "allow; build it with differentiable=False, or leave it as it is"
        )
    if "step" in vars(optimizer):
        raise OptimizerError(
            f"{name}.step was replaced on this object (by a learning-rate scheduler?); call flatten_optimizer "
            "before building the scheduler"
        )
    optimizer.__class__ = _flat_class(cls)  # type: ignore[arg-type]  # classes are hashable
    return optimizer


def _is_known(cls: type[Optimizer]) -> bool:
    """Returns whether `cls` is one of `ELEMENTWISE`, or a subclass of one without a `step` of its own."""
    return any(
        issubclass(cls, known) and inspect.unwrap(cls.step) is inspect.unwrap(known.step) for known in ELEMENTWISE
    )


class FlatStep(_Optimizer):
    """The base class that `flatten_optimizer` puts in front of an optimizer's class."""

    _sherd_kind: type[Optimizer]

    @functools.cached_property
    def _sherd_stepper(self) -> _Stepper:
        return _Stepper(self._sherd_kind)

    def state_dict(self) -> dict[str, object]:
        """Returns the optimizer's own state dict, where each shard has its own count of steps."""
        state_dict = super().state_dict()  # the shards of a span share one count
        return {**state_dict, "state": _unshared(state_dict["state"])}

    def __reduce__(self) -> tuple[object, ...]:
        # A copy is of the original class: the spans are views of this model's buffers.
        attributes = self._sherd_kind.__getstate__(self)
        return object.__new__, (self._sherd_kind,), {**attributes, "state": _unshared(attributes["state"])}


@functools.cache
def _flat_class(cls: type[Optimizer]) -> type[Optimizer]:
    return type(f"Flat{cls.__name__}", (FlatStep, cls), {"step": hooked_step(_step), "_sherd_kind": cls})


def _step(self: FlatStep, closure: Callable[[], object] | None = None) -> object:
    """Step the spans. As in torch, `closure` computes the loss again, and `_step` returns the loss."""
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    self._sherd_stepper.step(self)
    return loss


class _Stepper:
    """The spans of one optimizer. Methods take the optimizer, which holds the stepper: no reference cycle."""

    def __init__(self, cls: type[Optimizer]) -> None:
        self._plain_step: Callable[[Optimizer], object] = cls.step.__wrapped__  # type: ignore[attr-defined]  # torch has hooked it
        self._knows_forms = _is_known(cls)
        self.spans: list[SteppedSpan] = []
        self._known_states: dict[int, ShardState] = {}
        self._idle: list[nn.Parameter] = []
        self._groups: list[list[nn.Parameter]] | None = None
        self._stepped: list[list[nn.Parameter]] = []
        self._alone: list[list[nn.Parameter]] = []
        self._buffers: list[tuple[weakref.ref[Unit], list[Group]]] = []

    def step(self, optimizer: Optimizer) -> None:
        if not (
            self._is_current(optimizer)
            and all(span.take_gradient() for span in self.spans)
            and all(shard.grad is None for shard in self._idle)
        ):
            self._build(optimizer)
        num_states = len(optimizer.state)
        self._step_with(optimizer, self._stepped)
        if any(self._alone):
            # In a call of their own: an operation on a list cannot mix DTensors with plain tensors.
            self._step_with(optimizer, self._alone)
        if len(optimizer.state) != num_states:
            # In the order of the parameters: spans differ between ranks, and ranks gather states in order.
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                if parameter in optimizer.state:
                    optimizer.state[parameter] = optimizer.state.pop(parameter)

    def _step_with(self, optimizer: Optimizer, stepped: list[list[nn.Parameter]]) -> None:
        """Step with `stepped` as the parameters of the optimizer's groups, and restore the optimizer afterwards."""
        groups, state_of = optimizer.param_groups, optimizer.state
        # For a single tensor the list form of a step takes longer.
        singles = [
            group
            for group, parameters in zip(groups, stepped, strict=True)
            if len(parameters) == 1 and self._knows_forms and group.get("foreach")
        ]
        for group in singles:
            group["foreach"] = False
        for span in self.spans:
            span.lend_state(state_of)
        try:
            with params_replaced(optimizer, stepped):
                self._plain_step(optimizer)
        finally:
            for group in singles:
                group["foreach"] = True
            for span in self.spans:
                span.take_back(state_of)
                span.flat.grad = None

    def _is_current(self, optimizer: Optimizer) -> bool:
        groups, before = [group["params"] for group in optimizer.param_groups], self._groups
        return (
            before is not None
            and len(groups) == len(before)
            and all(map(are_same, groups, before))
            and all(_groups_of(unit()) == groups for unit, groups in self._buffers)
            and all(span.has_its_state(optimizer.state) for span in self.spans)
        )

    def _build(self, optimizer: Optimizer) -> None:
        """Build spans of neighbours in one parameter group that have gradients and the same count of steps."""
        state_of = optimizer.state
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        # States of shards in present and earlier spans, without states that were loaded since.
        states = [*self._known_states.values(), *(state for span in self.spans for state in span.shard_states())]
        self._known_states = {id(known.shard): known for known in states if state_of.get(known.shard) is known.state}
        records = [ShardedParameter.of(parameter) for group in self._groups for parameter in group]
        owners = [record.owner for record in records if record is not None]
        units = {owner.id: owner for owner in owners if isinstance(owner, Unit)}.values()
        self._buffers = [(weakref.ref(unit), _groups_of(unit)) for unit in units]
        group_index_of = {id(parameter): at for at, group in enumerate(self._groups) for parameter in group}
        self.spans = [
            SteppedSpan(members)
            for _, groups in self._buffers
            for group in groups
            for members in _neighbours(_shard_views(group, group_index_of), state_of)
        ]
        in_spans = {id(shard) for span in self.spans for shard in span.shards}
        others = [[parameter for parameter in group if id(parameter) not in in_spans] for group in self._groups]
        shards = [[parameter for parameter in group if isinstance(parameter, DTensor)] for group in others]
        sharded = {id(shard) for group in shards for shard in group}
        self._stepped = [[parameter for parameter in group if id(parameter) not in sharded] for group in others]
        self._idle = [shard for group in shards for shard in group if shard.grad is None]
        self._alone = [[shard for shard in group if shard.grad is not None] for group in shards]
        for shard in (shard for group in self._alone for shard in group if id(shard) in self._known_states):
            # The shard leaves a span, and with it the count of steps that the span's shards share.
            numbers = {key: copy_of(value) for key, value in state_of[shard].items() if not isinstance(value, DTensor)}
            state_of[shard].update(numbers)
            del self._known_states[id(shard)]
        for span in self.spans:
            self._stepped[span.members[0].group_index].append(span.flat)
            span.take_state(state_of, self._known_states)
            taken = span.take_gradient()
            assert taken, "only shards with a gradient are in a span"


def _groups_of(unit: Unit | None) -> list[Group]:
    """Returns the groups that have the unit's shards in a shard buffer."""
    return [] if unit is None else [each.group for each in unit.weights if not each.group.gathers_itself]


def _shard_views(group: Group, group_index_of: dict[int, int]) -> list[ShardView]:
    """Returns all shards of a group in the order of the buffer. Shards that are empty on this rank come last."""
    extents = [slot.held(group.mesh.piece) for slot in group.packing.slots]
    views = [
        ShardView(record, group, extent, group_index_of.get(id(record.shard), -1))
        for record, extent in zip(group.parameters, extents, strict=True)
    ]
    return sorted(views, key=lambda view: (view.is_empty, view.extent.start))


def _neighbours(views: Sequence[ShardView], state_of: States) -> list[list[ShardView]]:
    """Returns the shards of each span: neighbours in the buffer with one `_span_key`.

    A shard that is empty on this rank goes to any span with its key, since other ranks may count its steps in it.
    """
    numbers: dict[int, object] = {}
    keyed = [(_span_key(view, state_of, numbers), view) for view in views]
    nonempty = ((key, view) for key, view in keyed if not view.is_empty)
    spans = [(key, [view for _, view in members]) for key, members in groupby(nonempty, key=itemgetter(0))]
    spans = [(key, members) for key, members in spans if key is not None]
    for key, view in keyed:
        if view.is_empty and key is not None:
            members = next((members for other, members in spans if other == key), None)
            if members is None:
                spans.append((key, [view]))
            else:
                members.append(view)
    return [members for _, members in spans]


def _span_key(view: ShardView, state_of: States, numbers: dict[int, object]) -> tuple[object, ...] | None:
    """Returns a key that is equal for shards of one span: the parameter group, and the state that is not element-wise.

    The key is None for a shard that belongs to no span: of another optimizer, without a gradient, or moved out of its
    buffer. `numbers` has the values of state tensors that were read already, by id.
    """
    if view.group_index < 0 or not view.fits(view.shard.grad) or not view.is_in_buffer:
        return None
    common: list[object] = [view.group_index]
    for key, value in (state_of.get(view.shard) or {}).items():
        if view.is_elementwise(key, value):
            common.append((key, value.dtype))
        elif isinstance(value, torch.Tensor):
            # Reading a tensor waits for the device. The shards of an earlier span share theirs.
            if id(value) not in numbers:
                numbers[id(value)] = value.tolist()
            common.append((key, numbers[id(value)]))
        else:
            common.append((key, value))
    return tuple(common)


def _unshared(states: Mapping[Key, State]) -> dict[Key, State]:
    """Returns the states, with a copy of each tensor that an earlier state has too."""
    # Shards that load one shared count of steps would raise the count several times in one step.
    seen: set[int] = set()
    own: dict[Key, State] = {}
    for key, state in states.items():
        own[key] = state
        if isinstance(state, dict):
            own[key] = {name: copy_of(value) if id(value) in seen else value for name, value in state.items()}
            seen.update(map(id, own[key].values()))
    return own


# Spans


@dataclass(frozen=True, slots=True)
class ShardView:
    """A shard as a view of its group's shard buffer.

    `group_index` is the index of the parameter group in the optimizer, -1 for a shard of another optimizer.
    """

    record: ShardedParameter
    group: Group
    extent: Extent
    group_index: int

    @property
    def shard(self) -> nn.Parameter:
        return self.record.shard

    @property
    def is_empty(self) -> bool:
        return not self.extent.numel

    @property
    def is_in_buffer(self) -> bool:
        """Returns whether the shard is a view of the buffer. After `module.to()` it is none until the next forward."""
        return self.group.has_at(self.extent.start, self.record.local)

    def fits(self, gradient: object) -> bool:
        return isinstance(gradient, DTensor) and local_tensor(gradient).shape == self.record.local.shape

    def is_elementwise(self, key: str, value: object) -> bool:
        """Returns whether `value`, the optimizer's state under `key`, has one element for each element of the shard."""
        return state_kind(key, value, self.shard.shape, self.record.local.shape) is StateKind.ELEMENTS

    def dtensor(self, local: torch.Tensor) -> DTensor:
        """Returns a DTensor around `local`, 1-D and uncopied, with the layout of the shard."""
        return as_dtensor(own_view(local).view(self.record.local.shape), in_dtype(self.record.shard_spec, local.dtype))


@dataclass(frozen=True, slots=True)
class ShardState:
    """The state of a shard in a span: `state` is the optimizer's, `views` are parts of the span's vectors."""

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
        self._none_is_empty = len(extents) == len(members)
        self._shape = self.flat.shape
        # Gradients at the addresses of the shards may still have their elements in another order (transposed), unless
        # they are neighbours with a single dimension.
        self._may_be_transposed = len(extents) == 1 or any(member.record.local.dim() > 1 for member in members)
        gaps = [torch.arange(gap.start, gap.stop) for gap in self._span.gaps]
        self.padding = torch.cat(gaps).to(self.flat.device) if gaps else None
        self._addresses: list[int] = []
        self.state: State = {}
        self._given: State = {}
        self._states: list[State] = []

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

    # Gradients

    def take_gradient(self) -> bool:
        """Give `flat` the shards' gradients, uncopied if they share one buffer. Returns False if any is missing."""
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
            # The reduction leaves any values in the padding, which an optimizer's sum over the buffer would include:
            # test_what_lies_between_gradients_stays_there.
            gradient.index_fill_(0, self.padding, 0)
        self.flat.grad = gradient
        return True

    # State

    def take_state(self, state_of: States, known: dict[int, ShardState]) -> None:
        """Make the span's state of the shards' states, uncopied if these share one buffer; shards get views of it.

        `known` has the states of shards that were in a span before, by the id of the shard.
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
        views = {key: self._span.views(value) for key, value in self.state.items() if self._is_vector(value)}
        for index, (shard, state) in enumerate(zip(self.shards, self._states, strict=False)):
            yield ShardState(shard, state, {key: parts[index] for key, parts in views.items()})

    def has_its_state(self, state_of: States) -> bool:
        """Returns whether the shards have the state of this span, which a load or a clear replaces."""
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
