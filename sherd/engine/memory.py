"""How much memory do units hold, now and at most? Sizes of the real buffers, and a watch over them during a step."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sherd._torch import local_tensor
from sherd.comm.collectives import UsersCollectives
from sherd.comm.transport import Transport
from sherd.engine.gradients import BATCH_BYTES, Gradients
from sherd.engine.group import Group
from sherd.engine.parameter import ShardedParameter, record_of
from sherd.engine.runtime import Runtime
from sherd.engine.seal import runtime_of, unit_of
from sherd.engine.selfgather import SelfGatheredWeights
from sherd.engine.unit import Unit
from sherd.engine.weights import Weights
from sherd.errors import StateError
from sherd.policy import UnitPolicy
from sherd.schedule.actions import (
    Action,
    Await,
    BeforeForward,
    EndBackward,
    Event,
    Forget,
    Reduce,
    Reset,
    Settle,
    Shrink,
)
from sherd.schedule.forecast import Arrival, Call, Forecast, GroupSizes, Kind, Moment, Use, forecast, step_of
from sherd.schedule.state import Live

Held = dict[int, tuple[Kind, int]]
"""Storages that are alive, by address: what for, and how many bytes."""


def units_below(root: nn.Module) -> list[Unit]:
    """The units at and below `root`, in the order of `named_modules`, as a runtime has them."""
    units = {unit.id: unit for module in root.modules() if (unit := unit_of(module)) is not None}
    return list(units.values())


# What is there now


def held_by(unit: Unit) -> Held:
    """The storages of `unit` that are allocated; one that is held for two things is counted for the first."""
    return _alive(_tensors_of(unit))


def _alive(tensors: Iterable[tuple[Kind, torch.Tensor]]) -> Held:
    held: Held = {}
    for kind, tensor in tensors:
        for storage in _storages(tensor):
            if storage.nbytes():
                held.setdefault(storage.data_ptr(), (kind, storage.nbytes()))
    return held


def _storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """Where the elements of `tensor` are; those of a subclass that is made of other tensors are in these."""
    if tensor.is_meta:
        return
    if isinstance(tensor, DTensor):
        yield from _storages(local_tensor(tensor))
    elif hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _storages(getattr(tensor, name))
    else:
        yield tensor.untyped_storage()


def bytes_of(held: Held) -> dict[Kind, int]:
    """Bytes by kind."""
    sums: Counter[Kind] = Counter()
    for kind, nbytes in held.values():
        sums[kind] += nbytes
    return dict(sums)


def _tensors_of(unit: Unit) -> Iterator[tuple[Kind, torch.Tensor]]:
    for weights in unit.weights:
        yield from weights.held()
    for gradients in unit.gradients:
        yield from gradients.held()
    for leaf in unit.leaves:
        gradient = leaf.grad
        if gradient is not None:
            yield Kind.GRADIENTS, gradient


def optimizer_bytes(state: dict[Any, Any]) -> dict[int | None, int]:
    """Bytes of an optimizer's tensors by the id of the unit whose parameter they are kept for; None for no unit's."""
    sums: Counter[int | None] = Counter()
    seen: set[int] = set()
    for parameter, values in state.items():
        record = record_of(parameter) if isinstance(parameter, torch.Tensor) else None
        owner = None if record is None or record.owner is None else record.owner.id
        for value in values.values() if isinstance(values, dict) else ():
            for storage in _storages(value) if isinstance(value, torch.Tensor) else ():
                if storage.nbytes() and storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    sums[owner] += storage.nbytes()
    return dict(sums)


def staging_bytes(units: Iterable[Unit]) -> int:
    """Memory that the units' transports share with other ranks, of whatever model."""
    meshes = dict.fromkeys(mesh for unit in units for mesh in unit.meshes)
    transports = {id(each): each for mesh in meshes for each in (mesh.shard_transport, mesh.replicate_transport)}
    return sum(each.nbytes for each in transports.values())


# What there will be


def forecast_for(root: nn.Module, units: Sequence[Unit], unsynced: int = 0) -> Forecast:
    """The peak of a training step of `root`; units are numbered as in `units`.

    A step that was watched before is taken as it was, else one is made up from the order in which modules were
    registered, or have run.
    """
    # No unit is sealed into this one: it reads their policies as the next step will.
    state = Runtime(units).schedule.state
    sizes = [sizes_of(unit) for unit in units]
    lived = units[0].runtime
    if lived is not None and list(lived.units) != list(units):
        lived = None
    step = None if lived is None else _watched.get(lived)
    if step is None:
        step = step_of(_guess(root, units, lived), sizes)
    return forecast(state.specs, state.limits, sizes, step, batch_bytes=BATCH_BYTES, unsynced=unsynced)


def sizes_of(unit: Unit) -> list[GroupSizes]:
    """The sizes of `unit`'s buffers when they are allocated. Asks for its transport, as its first gather does."""
    policy = unit.policy
    keeps = policy.reshard_after_forward
    parts = keeps if isinstance(keeps, int) and not isinstance(keeps, bool) else 0
    return [
        _sizes_of_group(weights, gradients, policy, parts)
        for weights, gradients in zip(unit.weights, unit.gradients, strict=True)
    ]


def _sizes_of_group(
    weights: Weights | SelfGatheredWeights, gradients: Gradients, policy: UnitPolicy, parts: int
) -> GroupSizes:
    group = weights.group
    packing, trainable, mesh = group.packing, _trainable(group.parameters), group.mesh
    own = mesh.shard_transport
    sender: Transport = own if policy.all_gather is None else UsersCollectives(policy.all_gather, None)
    reducer: Transport = own if policy.reduce_scatter is None else UsersCollectives(policy.reduce_scatter, None)
    compute, reduce = group.compute_dtype, group.reduce_dtype
    whole, rows, sent, part = group.whole_bytes, 0, 0, 0
    if isinstance(weights, SelfGatheredWeights):
        gathered = sum(tensor.nbytes for kind, tensor in weights.held() if kind is Kind.WHOLE)
        whole = max(whole, gathered)
        part = weights.part_bytes(parts) if parts else 0
    else:
        rows = 0 if weights.fills_itself(sender) else packing.rows_numel * compute.itemsize
        is_sent_as_it_is = (compute == group.dtype and group.place.device == group.device) or mesh.spreads
        sent = 0 if is_sent_as_it_is else group.rest_numel * compute.itemsize
        part = packing.whole_numel // parts * compute.itemsize if parts else 0
    flags = group.num_flags
    summed = group.rest_numel + flags
    reduced = group.shard_sizes[mesh.shard_rank] + flags * mesh.num_owners + (summed if mesh.spreads else 0)
    return GroupSizes(
        shards=_shard_bytes(group, compute),
        whole=0 if mesh.keeps_whole else whole,
        kept=_kept_bytes(group, whole),
        rows=rows,
        sent=sent,
        part=part,
        arriving=tuple(each.shape.numel() * compute.itemsize for each in trainable),
        borrows=gradients.may_borrow
        and compute == reduce
        and not flags
        and packing.rows_numel == packing.slots[0].cut.numel,
        gradient_rows=(packing.rows_numel + packing.num_ranks * flags) * reduce.itemsize,
        reduced=reduced * reducer.sum_dtype(reduce).itemsize,
        gradients=summed * group.dtype.itemsize,
        scratch=reducer.scratch_bytes(
            [numel + flags * mesh.num_owners for numel in group.shard_sizes], mesh.shard_rank, reduce.itemsize
        ),
        is_all_trainable=len(trainable) == len(group.parameters),
        lands=sender.shares_memory and isinstance(weights, Weights),
        collects_late=gradients.collects_late,
    )


def _shard_bytes(group: Group, compute: torch.dtype) -> int:
    """What is kept of the group between steps: its shards, and where replicas own pieces all of these."""
    fetched = group.fetched
    if group.resident is not None:
        return group.resident.nbytes if group.is_one_piece else 0
    if fetched is None:
        return group.rest.nbytes
    is_part_of_it = compute == group.dtype and group.place.device == group.device
    return fetched.numel * compute.itemsize + (0 if is_part_of_it else group.rest.nbytes)


def _kept_bytes(group: Group, whole: int) -> int:
    """Whole parameters that are not given up."""
    if group.resident is not None:
        return 0 if group.is_one_piece else group.resident.nbytes
    return whole if group.mesh.keeps_whole else 0


def _trainable(parameters: Sequence[ShardedParameter]) -> list[ShardedParameter]:
    return [each for each in parameters if each.requires_grad]


# A step, as far as it can be known before it was watched


def _guess(root: nn.Module, units: Sequence[Unit], lived: Runtime | None) -> Call:
    """What happens in forward. Units run in the order in which they have run, or else are registered; so do a unit's
    parameters, but that all of them except for the first are used after the units that it calls.

    That is the worst case: their gradients are the first to come, and wait for the first one's.
    """
    nested = None
    if lived is not None:
        state = lived.schedule.state
        nested = _as_run(state.forward.learnt, state.finished.learnt)
    return _with_uses(nested or _as_registered(root, units), [_uses_of(unit) for unit in units])


def _uses_of(unit: Unit) -> list[Use]:
    """Its trainable parameters, in the order of registration."""
    places = {
        id(each): Use(number, index)
        for number, weights in enumerate(unit.weights)
        for index, each in enumerate(_trainable(weights.group.parameters))
    }
    return [places[id(each)] for each in unit.parameters if id(each) in places]


def _with_uses(call: Call, uses: Sequence[Sequence[Use]]) -> Call:
    own = uses[call.unit]
    calls = [_with_uses(each, uses) for each in call.inner if isinstance(each, Call)]
    return Call(call.unit, (*own[:1], *calls, *own[1:]))


def _as_registered(root: nn.Module, units: Sequence[Unit]) -> Call:
    """Units called by the units around them. One of several modules runs when the first of these does."""
    numbers = {unit.id: number for number, unit in enumerate(units)}
    seen = {0}

    def calls_in(module: nn.Module) -> Iterator[Call]:
        for child in module.children():
            unit = unit_of(child)
            number = 0 if unit is None else numbers[unit.id]
            inner = tuple(calls_in(child))
            if number in seen:
                yield from inner
            else:
                seen.add(number)
                yield Call(number, inner)

    return Call(0, tuple(calls_in(root)))


def _as_run(begun: Sequence[int], finished: Sequence[int]) -> Call | None:
    """Calls nested so that they begin and end in the order that was learnt; None if that was not one whole forward."""
    ahead = list(begun[::-1])
    around: list[tuple[int, list[Call]]] = []
    for unit in finished:
        while not around or around[-1][0] != unit:
            if not ahead:
                return None
            around.append((ahead.pop(), []))
        _, inner = around.pop()
        call = Call(unit, tuple(inner))
        if not around:
            return call if unit == 0 and not ahead else None
        around[-1][1].append(call)
    return None


# A watched step

_watched: weakref.WeakKeyDictionary[Runtime, tuple[Moment, ...]] = weakref.WeakKeyDictionary()
"""By runtime: the last forward and backward that was watched to its end."""
_peaks: weakref.WeakKeyDictionary[Runtime, Forecast] = weakref.WeakKeyDictionary()


def last_peak(unit: Unit) -> Forecast | None:
    """The peak of what was watched last of `unit`'s model, if that is still sealed as it was then."""
    return None if unit.runtime is None else _peaks.get(unit.runtime)


class Watch:
    """What was seen of a model's buffers since it began: `nbytes` now, and the peak with its moment and parts.

    Only the buffers that the engine knows: no activations, and of a transport what `sizes_of` says it takes.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = tuple(units)
        self._number = {unit.id: number for number, unit in enumerate(self.units)}
        self._held = [held_by(unit) for unit in self.units]
        self._bytes = [_total(held) for held in self._held]
        self._scratch = [0] * len(self.units)
        self._step: list[Moment] = []
        self._moment: Moment | None = None
        self.peak = Forecast(0, None, {})
        self._note()

    @property
    def nbytes(self) -> int:
        """Bytes alive, as of the last look."""
        return sum(self._bytes) + sum(self._scratch)

    def happens(self, moment: Moment) -> None:
        """`moment` is about to be lived through."""
        self._moment = moment
        if isinstance(moment, BeforeForward) and moment.unit == 0 and not moment.recomputing:
            self._step = []
            for number in range(len(self.units)):  # an optimizer may have stepped, gradients may have been dropped
                self._look(number)
            self._note()
        self._step.append(moment)
        if isinstance(moment, Reset):
            self._step = []

    def number_of(self, unit: Unit) -> int:
        """The unit's index."""
        return self._number[unit.id]

    def look(self, number: int) -> Held:
        """Look at a unit; what it holds now."""
        self._look(number)
        self._note()
        return self._held[number]

    def look_at_turns(self, number: int, turns: Iterable[Held]) -> None:
        """What a unit held at some moments that have passed, and what it holds now."""
        for held in turns:
            self._held[number], self._bytes[number] = held, _total(held)
            self._note()
        self.look(number)

    def arrives(self, number: int, nbytes: int, arrival: Arrival) -> None:
        """Autograd has made a gradient, and nobody has it yet."""
        self.happens(arrival)
        self._look(number)
        self._held[number][-1] = (Kind.ARRIVED, nbytes)
        self._bytes[number] += nbytes
        self._note()

    def reduces(self, number: int, scratch: int) -> None:
        """A reduction takes `scratch` bytes of its transport; 0 when it is over."""
        self._scratch[number] = scratch

    @property
    def step(self) -> tuple[Moment, ...]:
        """What has happened since the root's forward began."""
        return tuple(self._step)

    @property
    def has_whole_step(self) -> bool:
        """Whether that is known."""
        return bool(self._step) and isinstance(self._step[0], BeforeForward)

    def _look(self, number: int) -> None:
        self._held[number] = held_by(self.units[number])
        self._bytes[number] = _total(self._held[number])

    def _note(self) -> None:
        if self.nbytes > self.peak.peak:
            parts = {
                (number, kind): nbytes
                for number, held in enumerate(self._held)
                for kind, nbytes in bytes_of(held).items()
            }
            parts |= {(number, Kind.TRANSPORT): nbytes for number, nbytes in enumerate(self._scratch) if nbytes}
            self.peak = Forecast(self.nbytes, self._moment, parts)


def _by_weights(unit: Unit) -> list[Held]:
    return [_alive(weights.held()) for weights in unit.weights]


def _turns(unit: Unit, before: Sequence[Held]) -> Iterator[Held]:
    """What was held while each group in turn had what it has now and not yet dropped what it had before."""
    after = _by_weights(unit)
    others = held_by(unit)
    for each in after:
        others = {address: held for address, held in others.items() if address not in each}
    for turn in range(len(after)):
        groups = [*after[:turn], before[turn] | after[turn], *before[turn + 1 :]]
        yield others | {address: held for group in groups for address, held in group.items()}


def _total(held: Held) -> int:
    return sum(nbytes for _, nbytes in held.values())


class _WatchedRuntime(Runtime):
    """A runtime whose every action is looked at. Objects become this for a while, so that others pay nothing."""

    watcher: Watch

    def on(self, event: Event) -> None:
        self.watcher.happens(event)
        for action in self.schedule.on(event):
            unit = self.units[action.unit]
            self.watcher.look(action.unit)
            before = _by_weights(unit)
            self.perform(action)
            if isinstance(action, Settle):
                self._look_at_gathers(action.unit)
            self._count_scratch(action, unit)
            turns = _turns(unit, before) if isinstance(action, Await | Shrink) else ()
            self.watcher.look_at_turns(action.unit, turns)
        if isinstance(event, EndBackward) and self.watcher.has_whole_step:
            _watched[self] = self.watcher.step

    def _look_at_gathers(self, settled: int) -> None:
        """Those that are under way may have landed while `settled` was awaited, which held all it had until then."""
        for number, unit in enumerate(self.units):
            if number != settled and unit.live is Live.GATHERING:
                self.watcher.look(number)

    def _count_scratch(self, action: Action, unit: Unit) -> None:
        if isinstance(action, Reduce):
            self.watcher.reduces(action.unit, sum(each.scratch for each in sizes_of(unit) if each.arriving))
        elif isinstance(action, Settle | Forget):
            self.watcher.reduces(action.unit, 0)


class _WatchedGradients(Gradients):
    """A group's gradients, each looked at when it comes."""

    watcher: Watch
    owner: weakref.ref[Unit]

    def _take(self, index: int, whole: torch.Tensor) -> None:
        unit, gradient = self.owner(), whole.grad
        if unit is not None and gradient is not None:
            number = self.watcher.number_of(unit)
            trainable = [each.requires_grad for each in self.group.parameters]
            arrival = Arrival(number, unit.gradients.index(self), sum(trainable[:index]))
            self.watcher.arrives(number, _total(_alive([(Kind.ARRIVED, gradient)])), arrival)
        del gradient  # or it would live on until what it is copied for is over
        super()._take(index, whole)

    def _copy_batch(self) -> None:
        unit = self.owner()
        if unit is None or not self._batch:
            return
        number = self.watcher.number_of(unit)
        before = self.watcher.look(number)
        super()._copy_batch()
        self.watcher.look_at_turns(number, (before | held_by(unit),))


@contextmanager
def watched(root: nn.Module, unit: Unit) -> Iterator[Watch]:
    """Look at the buffers of `root`, a module of `unit`, after everything that happens to them inside.

    Raises:
        StateError: it is watched already.
    """
    runtime = runtime_of(unit, root)
    if isinstance(runtime, _WatchedRuntime):
        raise StateError(f"the memory of {runtime.root.name} is tracked already; leave that `with` block first")
    watch = Watch(runtime.units)
    gradients = [(each, owner) for owner in runtime.units for each in owner.gradients]
    _become(runtime, _WatchedRuntime, watcher=watch)
    for each, owner in gradients:
        _become(each, _WatchedGradients, watcher=watch, owner=weakref.ref(owner))
    try:
        yield watch
    finally:
        _peaks[runtime] = watch.peak
        _become(runtime, Runtime, watcher=None)
        for each, _ in gradients:
            _become(each, Gradients, watcher=None, owner=None)


def _become(thing: Any, kind: type, **fields: Any) -> None:
    """Make `thing` one of `kind`; fields that are None go."""
    for name, value in fields.items():
        if value is None:
            vars(thing).pop(name, None)
        else:
            setattr(thing, name, value)
    thing.__class__ = kind
