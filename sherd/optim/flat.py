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
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sherd._torch import hooked_step
from sherd.engine import Group, ShardedParameter, Unit, watcher
from sherd.errors import OptimizerError, PolicyTypeError
from sherd.layout.extent import Extent
from sherd.tensor.local_step import LocalStep, SteppedSpan, fits, is_elementwise, params_replaced
from sherd.tensor.optimizers import adopt_state, is_elementwise_class
from sherd.tensor.ragged import local_part
from sherd.tensor.state_kind import State, copy_of

if TYPE_CHECKING:
    from sherd.optim.chunks import Chunk, Lists, States

    _Optimizer = Optimizer
else:
    _Optimizer = object  # the user's own class, which follows among the bases, is an Optimizer

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
            f"{name} looks at full tensors, rows or indices, and would compute something else on a flat "
            "buffer; leave it as it is (under placement=Owned() each tensor has one owner)"
        )
    if not (elementwise or is_elementwise_class(cls)):
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
    # The same object, which the user's schedulers and scalers refer to, with another step.
    optimizer.__class__ = _flat_class(cls)  # type: ignore[arg-type]  # classes are hashable
    return optimizer


class FlatStep(_Optimizer):
    """The base class that `flatten_optimizer` puts in front of an optimizer's class."""

    _sherd_kind: type[Optimizer]
    _sherd_around: Callable[..., object] | None = None

    # No `__init__` makes it: an optimizer gets this class when it exists already.
    @functools.cached_property
    def _sherd_stepper(self) -> Stepper:
        return Stepper(self._sherd_kind)

    def _sherd_step_inside(self, around: Callable[..., object] | None) -> None:
        """Let each step be `around(step, *args)` from now on."""
        self._sherd_around = around

    def state_dict(self) -> dict[str, object]:
        """Returns the optimizer's own state dict, where each shard has its own count of steps."""
        return with_own_counts(super().state_dict())

    def __reduce__(self) -> tuple[object, ...]:
        # A copy is of the original class: the spans are views of this model's buffers.
        attributes = self._sherd_kind.__getstate__(self)
        return object.__new__, (self._sherd_kind,), {**attributes, "state": _unshared(attributes["state"])}


def with_own_counts(state_dict: dict[str, object]) -> dict[str, object]:
    """Returns a state dict where each shard has its own count of steps, which the shards of a span share."""
    return {**state_dict, "state": _unshared(state_dict["state"])}  # type: ignore[arg-type]  # a dict of states


# Cached, so that two optimizers of one class are still of one class when both are flattened.
@functools.cache
def _flat_class(cls: type[Optimizer]) -> type[Optimizer]:
    return type(f"Flat{cls.__name__}", (FlatStep, cls), {"step": hooked_step(_step), "_sherd_kind": cls})


def _step(self: FlatStep, closure: Callable[[], object] | None = None) -> object:
    step, given = partial(step_spans, self._sherd_stepper, self), () if closure is None else (closure,)
    return step(*given) if self._sherd_around is None else self._sherd_around(step, *given)


def step_spans(stepper: Stepper, optimizer: Optimizer, closure: Callable[[], object] | None = None) -> object:
    """Step the spans. As in torch, `closure` computes the loss again, and the loss is returned."""
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    stepper.step(optimizer)
    return loss


class Stepper:
    """The spans of one optimizer. Methods take the optimizer, which holds the stepper: no reference cycle.

    Without `in_spans` shards are stepped one by one, but for those of which something comes for the step.
    """

    def __init__(self, cls: type[Optimizer], in_spans: bool = True) -> None:
        self._in_spans = in_spans
        self._plain_step: Callable[[Optimizer], object] = cls.step.__wrapped__  # type: ignore[attr-defined]  # torch has hooked it
        self._knows_forms = is_elementwise_class(cls)
        self._local: LocalStep | None = None
        self._buffers: list[tuple[weakref.ref[Unit], list[Group]]] = []
        self._brought: list[Group] = []
        self._chunks: list[Chunk] = []
        self._idle: list[nn.Parameter] = []
        self._alone: list[list[nn.Parameter]] = []

    @property
    def spans(self) -> Sequence[SteppedSpan]:
        """The spans that were stepped last."""
        return () if self._local is None else self._local.spans

    def step(self, optimizer: Optimizer, in_chunks: bool = True) -> None:
        """Step the spans; `in_chunks`, if state rests elsewhere: else it was brought already."""
        self.ready(optimizer)
        self.compute(optimizer, in_chunks)
        if self._brought and not in_chunks:
            # Of state that goes back: test_the_state_of_muon_comes_for_its_step_and_goes_back_as_planned.
            self._local, self._chunks = None, []

    def ready(self, optimizer: Optimizer) -> bool:
        """Take the gradients, and make spans where they differ. Returns False if shards must be stepped themselves."""
        local = self._local
        if not (
            local is not None
            and all(_groups_of(unit()) == groups for unit, groups in self._buffers)
            and local.is_of(optimizer)
            and local.take_gradients()
            # A shard that was left out for its missing gradient joins a span again.
            and all(shard.grad is None for shard in self._idle)
        ):
            local = self._local = self._made(optimizer)
            if not local.take_gradients():
                assert not self._in_spans, "only shards with a gradient are in a span"
                return False
        return not any(self._alone)

    def compute(self, optimizer: Optimizer, in_chunks: bool = True) -> None:
        """Step what is ready."""
        local, num_states = self._local, len(optimizer.state)
        assert local is not None, "it is ready"
        with local.lent_to(optimizer):
            if in_chunks and self._brought:
                from sherd.optim.chunks import step_chunks  # seldom needed, so loaded late: tests/test_storeys.py

                run, is_first = partial(self._step_lists, optimizer), not num_states
                moments = watcher.num_moments(optimizer) if is_first else 0
                step_chunks(optimizer, self._chunks, self._brought, run, moments)
            else:
                with self._forms(optimizer, local.parts):
                    self._plain_step(optimizer)
        if any(self._alone):
            # In a call of their own: an operation on a list cannot mix DTensors with plain tensors.
            with self._forms(optimizer, self._alone), params_replaced(optimizer, self._alone):
                self._plain_step(optimizer)
        if len(optimizer.state) != num_states:
            local.put_in_order(optimizer)

    def _step_lists(self, optimizer: Optimizer, lists: Lists, state: States) -> None:
        with self._forms(optimizer, lists), params_replaced(optimizer, lists, state):
            self._plain_step(optimizer)

    @contextmanager
    def _forms(self, optimizer: Optimizer, stepped: Sequence[Sequence[torch.Tensor]]) -> Iterator[None]:
        """Within this context groups with a single tensor to step do not use the list form, which takes longer."""
        groups = [
            group
            for group, tensors in zip(optimizer.param_groups, stepped, strict=True)
            if len(tensors) == 1 and self._knows_forms and group.get("foreach")
        ]
        for group in groups:
            group["foreach"] = False
        try:
            yield
        finally:
            for group in groups:
                group["foreach"] = True

    def _made(self, optimizer: Optimizer) -> LocalStep:
        """Returns a local step whose spans are neighbours of one group with gradients and the same count of steps."""
        if not self._in_spans:
            adopt_state(optimizer)
        state_of, lists = optimizer.state, [group["params"] for group in optimizer.param_groups]
        # Parts of present and earlier spans, without states that were loaded since.
        current = set(map(id, state_of.values()))
        views = {} if self._local is None else self._local.views
        views = {shard: each for shard, each in views.items() if id(each[0]) in current}
        records = [ShardedParameter.of(parameter) for own in lists for parameter in own]
        owners = [record.owner for record in records if record is not None]
        units = {owner.id: owner for owner in owners if isinstance(owner, Unit)}.values()
        self._buffers = [(weakref.ref(unit), _groups_of(unit)) for unit in units]
        index_of = {id(parameter): at for at, own in enumerate(lists) for parameter in own}
        by_group = [
            (group, [_span_of(group, members, index_of) for members in _neighbours(group, index_of, state_of)])
            for _, groups in self._buffers
            for group in groups
            if self._in_spans or group.is_brought
        ]
        spans = [span for _, of_group in by_group for span in of_group]
        in_spans = {id(shard) for span in spans for shard in span.shards}
        others: list[list[Any]] = [
            [each for each in own if self._in_spans and isinstance(each, DTensor) and id(each) not in in_spans]
            for own in lists
        ]
        self._idle = [shard for own in others for shard in own if shard.grad is None]
        self._alone = [[shard for shard in own if shard.grad is not None] for own in others]
        for shard in (shard for own in self._alone for shard in own if id(shard) in views):
            # The shard leaves a span, and with it the count of steps that the span's shards share.
            numbers = {key: copy_of(value) for key, value in state_of[shard].items() if not isinstance(value, DTensor)}
            state_of[shard].update(numbers)
            del views[id(shard)]
        local = LocalStep(optimizer, spans=spans, left_out={id(shard) for own in others for shard in own}, views=views)
        self._brought = [group for group, _ in by_group if group.is_brought]
        if self._brought:
            from sherd.optim.chunks import chunks_of

            self._chunks = chunks_of(local, by_group)
        return local


def _span_of(group: Group, members: Members, index_of: Mapping[int, int]) -> SteppedSpan:
    number, masters = index_of[id(members[0][0])], group.masters
    if masters is None:
        return SteppedSpan(number, group.shard_buffer, members)
    with masters.with_form() as form:
        return SteppedSpan(number, form, members)


def _groups_of(unit: Unit | None) -> list[Group]:
    """Returns the groups that have the unit's shards in a shard buffer."""
    return [] if unit is None else [each.group for each in unit.weights if not each.group.gathers_itself]


Members = list[tuple[nn.Parameter, Extent]]
"""Shards, and their extents in the shard buffer."""


def _neighbours(group: Group, index_of: Mapping[int, int], state_of: States) -> list[Members]:
    """Returns the shards of each span: neighbours in the group's buffer with one `_span_key`, or its flat parameter.

    A shard that is empty on this rank goes to any span with its key, since other ranks may count its steps in it.
    `index_of` has the numbers of the optimizer's parameter groups, by the id of a parameter.
    """
    numbers: dict[int, object] = {}
    keyed = []
    for shard, extent in group.stepped():
        # After `module.to()` a shard is no view of the buffer until the next forward.
        local = local_part(shard)
        is_steppable = id(shard) in index_of and fits(shard, shard.grad) and group.has_at(extent.start, local)
        key = (index_of[id(shard)], *_state_key(shard, state_of, numbers)) if is_steppable else None
        keyed.append((key, shard, extent))
    # The buffer has the shards in an order of its own, in which neighbours become one span.
    keyed = [each for each in keyed if not group.is_flat or each[0] is not None]
    keyed.sort(key=lambda each: each[2].start)
    nonempty = (each for each in keyed if each[2].numel)
    spans = [(key, [each[1:] for each in members]) for key, members in groupby(nonempty, key=itemgetter(0))]
    spans = [(key, members) for key, members in spans if key is not None]
    for key, shard, extent in keyed:
        if not extent.numel and key is not None:
            members = next((members for other, members in spans if other == key), None)
            if members is None:
                spans.append((key, [(shard, extent)]))
            else:
                members.append((shard, extent))
    return [members for _, members in spans]


def _state_key(shard: nn.Parameter, state_of: States, numbers: dict[int, object]) -> list[object]:
    """Returns what is equal for shards of one span: the dtypes of element-wise state, and the values of all other.

    `numbers` has the values of state tensors that were read already, by id.
    """
    common: list[object] = []
    for key, value in (state_of.get(shard) or {}).items():
        if is_elementwise(shard, key, value):
            common.append((key, value.dtype))
        elif isinstance(value, torch.Tensor):
            # Reading a tensor waits for the device. The shards of an earlier span share theirs.
            if id(value) not in numbers:
                numbers[id(value)] = value.tolist()
            common.append((key, numbers[id(value)]))
        else:
            common.append((key, value))
    return common


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
