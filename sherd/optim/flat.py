"""`flatten_optimizer`: an optimizer that steps a few long vectors, views of the shard buffers, instead of many shards.

An element-wise optimizer (Adam, SGD with momentum, ...) does the same to every element. So it may step a span of a
shard buffer in one call instead of the shards in it, one by one.

    shard buffer     | w1 | w2 | w3 | . | b1 | b2 | n |      the seven shards that the optimizer was built from
    what is stepped  |    span 0    |   |    span 1   |      two parameter groups (with weight decay, without)

The optimizer keeps its class, its parameter groups and its per-parameter state, as views of the spans' states, so that
schedulers, `GradScaler`, `state_dict` and checkpoints see what they always saw. It sees spans instead of shards only
while it computes a step.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sherd._torch import hooked_step
from sherd.engine.run.unit import Unit
from sherd.engine.state.group import Group
from sherd.engine.state.parameter import record_of
from sherd.engine.state.span import ShardState, ShardView, States, SteppedSpan
from sherd.errors import OptimizerError, PolicyTypeError
from sherd.tensor.local_step import ELEMENTWISE, are_same
from sherd.tensor.state_kind import State, copy_of

if TYPE_CHECKING:
    _Optimizer = Optimizer
else:
    _Optimizer = object  # the class of the user's own optimizer, which follows, brings Optimizer along

Key = TypeVar("Key")

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
    loaded a state. Parameters that are not sharded are stepped as before. In a step where some gradients are missing,
    the spans are split, so that only shards with a gradient are stepped. State may be loaded, cleared, and written in
    place; an entry that is replaced by hand (`optimizer.state[p]["exp_avg"] = ...`) is ignored. A copy of the
    optimizer, or one from a pickle, has the original class and steps tensor by tensor.

    Args:
        optimizer: of a class that treats every element alike: torch's Adam, AdamW, SGD, Adagrad, RMSprop and others.
        elementwise: confirms that your own class treats every element alike. Its step may depend on a parameter's
            elements, gradient and state, one by one, but not on the parameter's shape.

    Returns:
        `optimizer`, changed in place: its class becomes a subclass of its class.

    Raises:
        OptimizerError: it is not element-wise (Adafactor, Muon), not known to be, flattened already, differentiable, or
            its `step` was replaced by a scheduler.
        PolicyTypeError: it is not an optimizer of torch.
    """
    if not isinstance(optimizer, Optimizer):
        raise PolicyTypeError(f"flatten_optimizer expects a torch.optim.Optimizer, got a {type(optimizer).__name__}")
    kind = type(optimizer)
    _require_flat_form(optimizer, kind, elementwise)
    optimizer.__class__ = _flat_class(kind)  # type: ignore[arg-type]  # classes are hashable
    return optimizer


def _require_flat_form(optimizer: Optimizer, kind: type[Optimizer], elementwise: bool) -> None:
    if isinstance(optimizer, FlatStep):
        raise OptimizerError(f"this {kind.__name__} is flattened already; call flatten_optimizer once")
    if isinstance(optimizer, NOT_ELEMENTWISE):
        raise OptimizerError(
            f"{kind.__name__} looks at whole tensors, rows or indices, and would compute something else on a flat "
            "buffer; leave it as it is (under placement=Owned() each tensor has one owner)"
        )
    if not (elementwise or _is_known(kind)):
        raise OptimizerError(
            f"{kind.__name__} is not known to treat every element alike, and might compute something else on a flat "
            "buffer; leave it as it is, or pass elementwise=True for a class of your own that does"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise OptimizerError(
            f"{kind.__name__}(differentiable=True) is to be differentiated through, which a flat buffer does not "
            "allow; build it with differentiable=False, or leave it as it is"
        )
    if "step" in vars(optimizer):
        raise OptimizerError(
            f"{kind.__name__}.step was replaced on this object (by a learning-rate scheduler?); call flatten_optimizer "
            "before building the scheduler"
        )


def _is_known(kind: type[Optimizer]) -> bool:
    """Returns whether `kind` is one of `ELEMENTWISE`, or a subclass of one without a `step` of its own."""
    return any(
        issubclass(kind, known) and inspect.unwrap(kind.step) is inspect.unwrap(known.step) for known in ELEMENTWISE
    )


class FlatStep(_Optimizer):
    """The base class that `flatten_optimizer` puts in front of an optimizer's class."""

    _sherd_kind: type[Optimizer]

    @functools.cached_property
    def _sherd_stepper(self) -> _Stepper:
        return _Stepper(self._sherd_kind)

    def state_dict(self) -> dict[str, object]:
        """Returns the optimizer's own, where each shard has a copy of the count of steps that a span's shards share."""
        state_dict = super().state_dict()
        return {**state_dict, "state": _unshared(state_dict["state"])}

    def __reduce__(self) -> tuple[object, ...]:
        attributes = self._sherd_kind.__getstate__(self)
        return object.__new__, (self._sherd_kind,), {**attributes, "state": _unshared(attributes["state"])}


@functools.cache
def _flat_class(kind: type[Optimizer]) -> type[Optimizer]:
    return type(f"Flat{kind.__name__}", (FlatStep, kind), {"step": hooked_step(_step), "_sherd_kind": kind})


def _step(self: FlatStep, closure: Callable[[], object] | None = None) -> object:
    """Step over the spans. As in torch, `closure` computes the loss again, which is returned."""
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    self._sherd_stepper.step(self)
    return loss


class _Stepper:
    """The spans of one optimizer. The optimizer holds its stepper, so each method is given the optimizer."""

    def __init__(self, kind: type[Optimizer]) -> None:
        self._plain_step: Callable[[Optimizer], object] = kind.step.__wrapped__  # type: ignore[attr-defined]  # torch has hooked it
        self._knows_forms = _is_known(kind)
        self.spans: list[SteppedSpan] = []
        self._known_states: dict[int, ShardState] = {}
        self._idle: list[nn.Parameter] = []
        self._groups: list[list[nn.Parameter]] | None = None
        self._stepped: list[list[nn.Parameter]] = []
        self._alone: list[list[nn.Parameter]] = []
        self._buffers: list[tuple[weakref.ref[Unit], list[Group]]] = []

    def step(self, optimizer: Optimizer) -> None:
        """Step everything that has a gradient."""
        if not (
            self._is_current(optimizer)
            and all(span.take_gradient() for span in self.spans)
            and all(shard.grad is None for shard in self._idle)
        ):
            self._build(optimizer)
        num_states = len(optimizer.state)
        self._step_with(optimizer, self._stepped)
        if any(self._alone):
            # DTensors cannot be in one call with plain tensors.
            self._step_with(optimizer, self._alone)
        if len(optimizer.state) != num_states:
            _put_in_order(optimizer)

    def _step_with(self, optimizer: Optimizer, stepped: list[list[nn.Parameter]]) -> None:
        """Step as if the optimizer had been built from the parameters in `stepped`, and restore it afterwards."""
        groups, state_of = optimizer.param_groups, optimizer.state
        # Stepping a single tensor as a list takes longer than stepping it by itself.
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
        """Returns whether parameters, shards and state are where they were when the spans were built."""
        now, before = [group["params"] for group in optimizer.param_groups], self._groups
        return (
            before is not None
            and len(now) == len(before)
            and all(map(are_same, now, before))
            and all(_groups_of(unit()) == groups for unit, groups in self._buffers)
            and all(span.has_its_state(optimizer.state) for span in self.spans)
        )

    def _build(self, optimizer: Optimizer) -> None:
        """Put neighbours of one parameter group that have gradients and the same count of steps into spans."""
        state_of = optimizer.state
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._remember_states(state_of)
        units = _units_of(parameter for group in self._groups for parameter in group)
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
            # It was in a span, and must not share the span's count of steps any longer.
            numbers = {key: copy_of(value) for key, value in state_of[shard].items() if not isinstance(value, DTensor)}
            state_of[shard].update(numbers)
            del self._known_states[id(shard)]
        for span in self.spans:
            self._stepped[span.members[0].group_index].append(span.flat)
            span.take_state(state_of, self._known_states)
            taken = span.take_gradient()
            assert taken, "only shards with a gradient are in a span"

    def _remember_states(self, state_of: States) -> None:
        """Keep the states of the spans so far, and of idle shards that were in earlier spans, unless the state was
        loaded since."""
        states = [*self._known_states.values(), *(state for span in self.spans for state in span.shard_states())]
        self._known_states = {id(known.shard): known for known in states if state_of.get(known.shard) is known.state}


@contextmanager
def params_replaced(optimizer: Optimizer, parameters: Iterable[list[nn.Parameter]]) -> Iterator[None]:
    """Have each parameter group hold other parameters within this context."""
    before = [(group, group["params"]) for group in optimizer.param_groups]
    try:
        for (group, _), others in zip(before, parameters, strict=True):
            group["params"] = others
        yield
    finally:
        for group, own in before:
            group["params"] = own


def _put_in_order(optimizer: Optimizer) -> None:
    """Order the states as the parameters are. Spans differ between ranks, but ranks gather states together."""
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if parameter in optimizer.state:
            optimizer.state[parameter] = optimizer.state.pop(parameter)


def _units_of(parameters: Iterable[nn.Parameter]) -> list[Unit]:
    """Returns the units whose shards are among `parameters`."""
    owners = [record.owner for parameter in parameters if (record := record_of(parameter)) is not None]
    return list({owner.id: owner for owner in owners if isinstance(owner, Unit)}.values())


def _groups_of(unit: Unit | None) -> list[Group]:
    """Returns the groups that have the unit's shards in a shard buffer."""
    return [] if unit is None else [each.group for each in unit.weights if not each.group.gathers_itself]


def _shard_views(group: Group, group_index_of: dict[int, int]) -> list[ShardView]:
    """Returns all shards of a group in the order of the buffer. Shards that this rank holds nothing of come last."""
    held = [slot.held(group.mesh.piece) for slot in group.packing.slots]
    views = [
        ShardView(record, group, extent, group_index_of.get(id(record.shard), -1))
        for record, extent in zip(group.parameters, held, strict=True)
    ]
    return sorted(views, key=lambda view: (view.is_empty, view.extent.start))


def _neighbours(views: Sequence[ShardView], state_of: States) -> list[list[ShardView]]:
    """Returns the shards of each span: neighbours in the buffer that are alike in everything but their elements.

    A shard that this rank holds nothing of goes to any span of like shards, since other ranks may count its steps
    there.
    """
    numbers: dict[int, object] = {}
    likenesses = [_likeness(view, state_of, numbers) for view in views]
    held = ((alike, view) for alike, view in zip(likenesses, views, strict=True) if not view.is_empty)
    spans = [(alike, [view for _, view in members]) for alike, members in groupby(held, key=itemgetter(0))]
    spans = [(alike, members) for alike, members in spans if alike is not None]
    for alike, view in zip(likenesses, views, strict=True):
        if view.is_empty and alike is not None:
            members = next((members for other, members in spans if other == alike), None)
            if members is None:
                spans.append((alike, [view]))
            else:
                members.append(view)
    return [members for _, members in spans]


def _likeness(view: ShardView, state_of: States, numbers: dict[int, object]) -> tuple[object, ...] | None:
    """Returns a key that is equal for shards of one span: the parameter group, and the state that is not element-wise.

    It is None for a shard that belongs to no span: of another optimizer, without a gradient, or moved out of its
    buffer. `numbers` are the state tensors read so far, by id.
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
    """Returns the states, with a copy of each tensor that an earlier state has too. Otherwise a loaded count of steps
    would be raised several times in one step."""
    seen: set[int] = set()
    own: dict[Key, State] = {}
    for key, state in states.items():
        own[key] = state
        if isinstance(state, dict):
            own[key] = {name: copy_of(value) if id(value) in seen else value for name, value in state.items()}
            seen.update(map(id, own[key].values()))
    return own
