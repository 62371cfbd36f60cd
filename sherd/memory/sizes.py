"""How much memory do units hold, now and at most? Sizes of the real buffers, and a watch over them during a step."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sherd._torch import local_tensor
from sherd.comm.collectives import UsersCollectives
from sherd.comm.transport import Transport
from sherd.engine.moves.gradients import Gradients
from sherd.engine.moves.reduce_buffer import BATCH_BYTES
from sherd.engine.moves.selfgather import SelfGatheredWeights
from sherd.engine.moves.weights import Weights
from sherd.engine.run.runtime import Runtime, runtime_over
from sherd.engine.run.seal import runtime_of, unit_of
from sherd.engine.run.unit import Unit
from sherd.engine.state.group import Group
from sherd.engine.state.parameter import ShardedParameter, record_of
from sherd.errors import StateError
from sherd.policy import UnitPolicy
from sherd.schedule import actions as do
from sherd.schedule.actions import AfterForward, BeforeForward, EndBackward, Event, Reset
from sherd.schedule.forecast import Arrival, Forecast, GroupSizes, MemoryKind, Moment, begins_step, forecast, step_of
from sherd.schedule.state import Live

Held = dict[int, tuple[MemoryKind, int]]
"""Storages that are alive, by address: what for, and how many bytes."""


# What is there now


def held_by(unit: Unit) -> Held:
    """The storages of `unit` that are allocated; one that weights and gradients share is counted for the weights."""
    return _together(_held_for_gradients(unit), *_held_by_groups(unit))


def _held_by_groups(unit: Unit) -> list[Held]:
    """What each group's weights hold."""
    return [_alive(weights.held()) for weights in unit.weights]


def _held_for_gradients(unit: Unit) -> Held:
    of_groups = [each for gradients in unit.gradients for each in gradients.held()]
    of_optimizer_params = [
        (MemoryKind.GRADIENTS, optimizer_param.grad)
        for optimizer_param in unit.shards.optimizer_params
        if optimizer_param.grad is not None
    ]
    return _alive(of_groups + of_optimizer_params)


def _together(*parts: Held) -> Held:
    return {address: held for part in parts for address, held in part.items()}


def _alive(tensors: Iterable[tuple[MemoryKind, torch.Tensor]]) -> Held:
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


def bytes_of(held: Held) -> dict[MemoryKind, int]:
    """Bytes by kind."""
    sums: Counter[MemoryKind] = Counter()
    for kind, nbytes in held.values():
        sums[kind] += nbytes
    return dict(sums)


def _total(held: Held) -> int:
    return sum(nbytes for _, nbytes in held.values())


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
    lived = _runtime_of(units)
    step = None if lived is None else _watched.get(lived)
    if step is None:
        step = step_of(_guess(root, units, lived), sizes)
    return forecast(state.specs, state.limits, sizes, step, batch_bytes=BATCH_BYTES, unsynced=unsynced)


def _runtime_of(units: Sequence[Unit]) -> Runtime | None:
    """The one that has just these units, if they are sealed: numbers of units mean the same there."""
    runtime = runtime_over(units[0])
    return runtime if runtime is not None and runtime.units == tuple(units) else None


def sizes_of(unit: Unit) -> list[GroupSizes]:
    """The sizes of `unit`'s buffers when they are allocated. Asks for its transport, as its first gather does."""
    return [_sizes(*of_group, unit.policy) for of_group in zip(unit.weights, unit.gradients, strict=True)]


def _sizes(weights: Weights | SelfGatheredWeights, gradients: Gradients, policy: UnitPolicy) -> GroupSizes:
    group = weights.group
    packing, trainable, mesh = group.packing, _trainable(group.parameters), group.mesh
    own = mesh.shard_transport
    sender: Transport = own if policy.all_gather is None else UsersCollectives(policy.all_gather, None)
    reducer: Transport = own if policy.reduce_scatter is None else UsersCollectives(policy.reduce_scatter, None)
    unsharded, rows, sent, part = _gathered_bytes(weights, sender, policy.reshard_after_forward)
    compute, reduce, flags = group.compute_dtype, group.reduce_dtype, group.num_flags
    summed = group.shard_numel + flags
    sums = [numel + flags * mesh.num_owners for numel in group.shard_sizes]
    is_sent_alone = not flags and packing.gathered_numel == packing.slots[0].cut.numel
    return GroupSizes(
        shards=_shard_bytes(group),
        unsharded=0 if mesh.keeps_unsharded else unsharded,
        kept=_kept_bytes(group, unsharded),
        rows=rows,
        sent=sent,
        part=part,
        arriving=tuple(each.shape.numel() * compute.itemsize for each in trainable),
        borrows=gradients.may_borrow and compute == reduce and is_sent_alone,
        gradient_rows=(packing.gathered_numel + packing.num_ranks * flags) * reduce.itemsize,
        reduced=(sums[mesh.shard_rank] + summed * mesh.shards_replicas) * reducer.sum_dtype(reduce).itemsize,
        gradients=summed * group.dtype.itemsize,
        scratch=reducer.scratch_bytes(sums, mesh.shard_rank, reduce.itemsize),
        is_all_trainable=len(trainable) == len(group.parameters),
        lands=sender.shares_memory and isinstance(weights, Weights),
        collects_late=gradients.collects_late,
    )


def _gathered_bytes(
    weights: Weights | SelfGatheredWeights, sender: Transport, reshard: bool | int | None
) -> tuple[int, int, int, int]:
    """The unsharded parameters, the rows they are copied out of, what is sent, and the part kept for a smaller mesh."""
    group, num_parts = weights.group, 0 if reshard is None or isinstance(reshard, bool) else reshard
    packing, itemsize = group.packing, group.compute_dtype.itemsize
    if isinstance(weights, SelfGatheredWeights):
        gathered = sum(tensor.nbytes for kind, tensor in weights.held() if kind is MemoryKind.UNSHARDED)
        return max(group.unsharded_bytes, gathered), 0, 0, weights.part_bytes(num_parts) if num_parts else 0
    rows = 0 if weights.fills_itself(sender) else packing.gathered_numel * itemsize
    sent = 0 if _is_sent_as_it_is(group) or group.mesh.shards_replicas else group.shard_numel * itemsize
    return group.unsharded_bytes, rows, sent, packing.unsharded_numel // num_parts * itemsize if num_parts else 0


def _is_sent_as_it_is(group: Group) -> bool:
    return group.compute_dtype == group.dtype and group.place.device == group.device


def _shard_bytes(group: Group) -> int:
    """What is kept of the group between steps: its shards, and where replicas own pieces all of these."""
    fetched = group.fetched
    if group.unsharded_memory is not None:
        return group.unsharded_memory.nbytes if group.is_one_piece else 0
    if fetched is None:
        return group.shard_buffer.nbytes
    return fetched.numel * group.compute_dtype.itemsize + (0 if _is_sent_as_it_is(group) else group.shard_buffer.nbytes)


def _kept_bytes(group: Group, unsharded: int) -> int:
    """Unsharded parameters that are not given up."""
    if group.unsharded_memory is not None:
        return 0 if group.is_one_piece else group.unsharded_memory.nbytes
    return unsharded if group.mesh.keeps_unsharded else 0


def _trainable(parameters: Sequence[ShardedParameter]) -> list[ShardedParameter]:
    return [each for each in parameters if each.requires_grad]


# A step, as far as it can be known before it was watched


def _guess(root: nn.Module, units: Sequence[Unit], lived: Runtime | None) -> list[Moment]:
    """What happens in forward. Units run in the order in which they have run, or else are registered; so do a unit's
    parameters, but that all of them except for the first are used after the units that it calls.

    That is the worst case: their gradients are the first to come, and wait for the first one's.
    """
    learnt = None if lived is None else lived.schedule.state
    calls = [] if learnt is None else _as_run(learnt.forward.learnt, learnt.finished.learnt)
    uses = [_uses_of(unit, number) for number, unit in enumerate(units)]
    moments: list[Moment] = []
    for call in calls or _as_registered(root, units):
        first, *others = uses[call.unit] or (None,)
        if isinstance(call, AfterForward):
            moments += [*others, call]
        else:
            moments += [call] if first is None else [call, first]
    return moments


def _uses_of(unit: Unit, number: int) -> list[Arrival]:
    """Its trainable parameters, in the order of registration."""
    uses = {
        id(each): Arrival(number, group, index)
        for group, weights in enumerate(unit.weights)
        for index, each in enumerate(_trainable(weights.group.parameters))
    }
    return [uses[id(each)] for each in unit.parameters if id(each) in uses]


def _as_registered(root: nn.Module, units: Sequence[Unit]) -> list[BeforeForward | AfterForward]:
    """Units called by the units around them. One of several modules runs when the first of these does."""
    numbers = {unit.id: number for number, unit in enumerate(units)}
    calls: list[BeforeForward | AfterForward] = []

    def visit(module: nn.Module) -> None:
        unit = unit_of(module)
        number = None if unit is None else numbers.pop(unit.id, None)
        if number is not None:
            calls.append(BeforeForward(number))
        for child in module.children():
            visit(child)
        if number is not None:
            calls.append(AfterForward(number))

    visit(root)
    return calls


def _as_run(begun: Sequence[int], finished: Sequence[int]) -> list[BeforeForward | AfterForward]:
    """Calls that begin and end in the order that was learnt; none if that was not one whole forward of the root."""
    ahead = list(begun[::-1])
    around: list[int] = []
    calls: list[BeforeForward | AfterForward] = []
    for unit in finished:
        while around[-1:] != [unit]:
            if not ahead:
                return []
            around.append(ahead.pop())
            calls.append(BeforeForward(around[-1]))
        calls.append(AfterForward(around.pop()))
        if not around:
            return calls if unit == 0 and not ahead else []
    return []


# A watched step

_watched: weakref.WeakKeyDictionary[Runtime, tuple[Moment, ...]] = weakref.WeakKeyDictionary()
"""By runtime: the last forward and backward that was watched to its end."""
_peaks: weakref.WeakKeyDictionary[Runtime, Forecast] = weakref.WeakKeyDictionary()


def last_peak(units: Sequence[Unit]) -> Forecast | None:
    """The peak of what was watched last of the model of `units`, if that is still sealed as it was then."""
    runtime = _runtime_of(units)
    return None if runtime is None else _peaks.get(runtime)


class Watch:
    """What was seen of a model's buffers since it began: the `peak` with its moment and parts; and `step`, what has
    happened since the root's forward began.

    Only the buffers that the engine knows: no activations, and of a transport what `sizes_of` says it takes.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = tuple(units)
        self.step: list[Moment] = []
        self.peak = Forecast(0, None, {})
        self._moment: Moment | None = None
        self._scratch = [0] * len(self.units)
        self._held: list[Held] = [{}] * len(self.units)
        self._bytes = [0] * len(self.units)
        self._look_at_all()

    def happens(self, moment: Moment) -> None:
        """`moment` is about to be lived through."""
        self._moment = moment
        if begins_step(moment):
            self.step.clear()
            self._look_at_all()  # an optimizer may have stepped, gradients may have been dropped
        self.step.append(moment)
        if isinstance(moment, Reset):
            self.step.clear()

    def look(self, number: int, *turns: Held) -> Held:
        """Look at a unit, which held `turns` at moments that have passed; what it holds now."""
        for held in (*turns, held_by(self.units[number])):
            self._see(number, held)
            self._note()
        return held

    def arrives(self, arrival: Arrival, gradient: Held) -> None:
        """Autograd has made a gradient, and nobody has it yet."""
        self.happens(arrival)
        self._see(arrival.unit, _together(gradient, held_by(self.units[arrival.unit])))
        self._note()

    def reduces(self, number: int, scratch: int) -> None:
        """A reduction takes `scratch` bytes of its transport; 0 when it is over."""
        self._scratch[number] = scratch

    def end(self) -> None:
        """See no more. Who goes on to ask for the peak is not to keep the model's memory."""
        self.units = ()

    def _look_at_all(self) -> None:
        for number, unit in enumerate(self.units):
            self._see(number, held_by(unit))
        self._note()

    def _see(self, number: int, held: Held) -> None:
        self._held[number], self._bytes[number] = held, _total(held)

    def _note(self) -> None:
        nbytes = sum(self._bytes) + sum(self._scratch)
        if nbytes > self.peak.peak:
            kinds = enumerate(map(bytes_of, self._held))
            parts = {(number, kind): its for number, of_unit in kinds for kind, its in of_unit.items()}
            parts |= {(number, MemoryKind.TRANSPORT): its for number, its in enumerate(self._scratch) if its}
            self.peak = Forecast(nbytes, self._moment, parts)


def _in_turn(unit: Unit, before: Sequence[Held]) -> Iterator[Held]:
    """What was held while each group in turn had what it has now and not yet dropped what it had before."""
    after, others = _held_by_groups(unit), _held_for_gradients(unit)
    for turn in range(len(after)):
        yield _together(others, *after[:turn], before[turn] | after[turn], *before[turn + 1 :])


class _WatchedRuntime(Runtime):
    """A runtime whose every action is looked at. Objects become this for a while, so that others pay nothing."""

    watcher: Watch

    def on(self, event: Event) -> None:
        self.watcher.happens(event)
        super().on(event)
        if isinstance(event, EndBackward) and isinstance(self.watcher.step[0], BeforeForward):
            _watched[self] = tuple(self.watcher.step)

    def perform(self, action: do.Action) -> None:
        unit = self.units[action.unit]
        self.watcher.look(action.unit)
        before = _held_by_groups(unit)
        super().perform(action)
        self._look_beside(action, unit)
        turns = _in_turn(unit, before) if isinstance(action, do.Await | do.Shrink) else ()
        self.watcher.look(action.unit, *turns)

    def _look_beside(self, action: do.Action, unit: Unit) -> None:
        """What `action` did to others: gathers under way may have landed while `unit`, which held all it had until
        then, was settled; and a reduction takes memory of its transport."""
        if isinstance(action, do.FinishReduce):
            for number, other in enumerate(self.units):
                if other is not unit and other.live is Live.GATHERING:
                    self.watcher.look(number)
        if isinstance(action, do.Reduce):
            self.watcher.reduces(action.unit, sum(each.scratch for each in sizes_of(unit) if each.arriving))
        elif isinstance(action, do.FinishReduce | do.Discard):
            self.watcher.reduces(action.unit, 0)


class _WatchedGradients(Gradients):
    """A group's gradients, each looked at when it comes. `place`: the numbers of its unit, and of the group in it."""

    watcher: Watch
    place: tuple[int, int]

    def _take(self, index: int, unsharded: torch.Tensor) -> None:
        assert unsharded.grad is not None, "autograd calls the hook after it has accumulated"
        num_before = len(_trainable(self.group.parameters[:index]))
        # Not by a name here, by which it would live on until what it is copied for is over.
        self.watcher.arrives(Arrival(*self.place, num_before), _alive([(MemoryKind.ARRIVED, unsharded.grad)]))
        super()._take(index, unsharded)

    def _copy_batch(self) -> None:
        if self._pending.waits:
            number, _ = self.place
            before = self.watcher.look(number)
            super()._copy_batch()
            self.watcher.look(number, before | held_by(self.watcher.units[number]))


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
    with ExitStack() as as_they_were:
        as_they_were.enter_context(_become(runtime, _WatchedRuntime, watcher=watch))
        for number, owner in enumerate(runtime.units):
            for group, each in enumerate(owner.gradients):
                as_they_were.enter_context(_become(each, _WatchedGradients, watcher=watch, place=(number, group)))
        try:
            yield watch
        finally:
            _peaks[runtime] = watch.peak
            watch.end()


@contextmanager
def _become(thing: Any, kind: type, **fields: Any) -> Iterator[None]:
    """Make `thing` one of `kind`, with more fields, for a while."""
    before = type(thing)
    vars(thing).update(fields)
    thing.__class__ = kind
    try:
        yield
    finally:
        thing.__class__ = before
        for name in fields:
            del vars(thing)[name]
