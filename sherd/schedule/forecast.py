"""How many bytes will a training step need, of what kind and in which unit? The schedule is asked; integers only.

A step is a list of moments: the events that the schedule knows, and between them each gradient's arrival. It is walked
through the very `Schedule` that runs the model; what its actions do to the buffers is added up after each of them.

    moment            bytes that come                          bytes that go
    Gather            whole, if filled in place; else rows
    Await             whole, if copied out of rows             rows
    Shrink            the kept part                            whole
    Free                                                       whole, rows, the kept part
    FreeGroup                                                  one group's whole
    Arrival           one gradient, then gradient rows         gradients, once copied into the rows
    Reduce            gradient rows, if they come late;        gradients, once copied into the rows
                      this rank's sum; the transport's own
    Settle            the shards' gradient                     gradient rows, the sum, the transport's own
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from sherd.schedule.actions import (
    Action,
    AfterBackward,
    AfterForward,
    Await,
    BeforeBackward,
    BeforeForward,
    EndBackward,
    EndForward,
    Event,
    Forget,
    Free,
    FreeGroup,
    Gather,
    GradientsReady,
    GroupPassed,
    Reduce,
    Settle,
    ShardsChanged,
    Shrink,
)
from sherd.schedule.schedule import Schedule
from sherd.schedule.state import Limits, UnitSpec


class Kind(Enum):
    """What bytes are for; the value is its name in tables."""

    SHARDS = "shards"
    SENT = "shards as sent"
    """What an all-gather sends, where that is not the shards themselves: a copy in compute's dtype, or a kept part."""
    ROWS = "gathered rows"
    WHOLE = "whole"
    PART = "kept part"
    """Of a smaller mesh (`reshard_after_forward=k`)."""
    ARRIVED = "gradients arrived"
    """Whole gradients that autograd has made and that are not in the rows yet."""
    GRADIENT_ROWS = "gradient rows"
    """What a reduction sends: rows of our own, or a large gradient as autograd has left it."""
    REDUCED = "reduced"
    """This rank's sum, while it is being made."""
    GRADIENTS = "gradients"
    """The shards' `.grad`."""
    TRANSPORT = "transport"
    """What a collective receives into besides its result."""
    OPTIMIZER = "optimizer state"


@dataclass(frozen=True, slots=True)
class GroupSizes:
    """Bytes of one group's buffers on this rank, each when it is allocated; 0 for one that the group does without.

    `kept` are whole parameters that are not given up between uses; `whole` is 0 then.
    `rows` is 0 where an all-gather fills the whole buffer itself, `sent` where it sends the shards themselves. `lands`:
    the whole buffer is filled while a collective is awaited, this one or a later one, and not before.
    `arriving` are the whole gradients of the group's trainable parameters, in the order of its parameters; a group that
    `borrows` sends its only gradient from where it is; one that `collects_late` has no rows until it is reduced,
    in a step that reduces it. `scratch` is what the transport takes during a reduction.
    """

    shards: int
    whole: int
    kept: int = 0
    rows: int = 0
    sent: int = 0
    part: int = 0
    arriving: tuple[int, ...] = ()
    borrows: bool = False
    gradient_rows: int = 0
    reduced: int = 0
    gradients: int = 0
    scratch: int = 0
    is_all_trainable: bool = True
    lands: bool = False
    collects_late: bool = False

    @property
    def is_alone(self) -> bool:
        """Whether it is one trainable parameter."""
        return len(self.arriving) == 1 and self.is_all_trainable


@dataclass(frozen=True, slots=True)
class Arrival:
    """Autograd has made the whole gradient of a parameter: the `index`-th trainable one of the unit's `group`."""

    unit: int
    group: int
    index: int


Moment = Event | Arrival


@dataclass(frozen=True, slots=True)
class Use:
    """Compute with a trainable parameter: the `index`-th of its unit's `group`."""

    group: int
    index: int


@dataclass(frozen=True, slots=True)
class Call:
    """A forward of a unit: what it uses and which units it calls, in this order."""

    unit: int
    inner: tuple[Call | Use, ...] = ()


@dataclass(frozen=True, slots=True)
class Forecast:
    """The most bytes alive at once, the moment when they are, and what they are for: `(unit, kind)` to bytes."""

    peak: int
    moment: Moment | None
    parts: dict[tuple[int, Kind], int]


def forecast(
    specs: tuple[UnitSpec, ...],
    limits: Limits,
    sizes: Sequence[Sequence[GroupSizes]],
    step: Sequence[Moment],
    *,
    batch_bytes: int,
    unsynced: int = 0,
) -> Forecast:
    """The peak of one training step whose order is learnt, from shards without gradients to shards with gradients.

    `sizes` are each unit's groups; `step` is forward and backward, by `step_of` or as it was recorded. `unsynced` such
    passes go before it whose gradients stay unreduced. Small gradients wait for one another until they are
    `batch_bytes`.
    """
    assert len(specs) == len(sizes), "every unit has sizes"
    syncing = tuple(replace(spec, reduces=True) for spec in specs)
    waiting = tuple(replace(spec, reduces=False) for spec in specs)
    schedule = Schedule(syncing, limits)
    buffers = Buffers(sizes, batch_bytes)
    for is_learnt in (False, True):
        buffers.begin_step()
        for event in [ShardsChanged(unit) for unit in range(len(specs))] if is_learnt else []:
            buffers.live_through(schedule, event)
        for choices in (*(waiting,) * unsynced, syncing):
            schedule.move_to(replace(schedule.state, specs=choices))
            for moment in step:
                buffers.live_through(schedule, moment)
    return buffers.forecast()


# What happens in a step


def step_of(root: Call, sizes: Sequence[Sequence[GroupSizes]]) -> tuple[Moment, ...]:
    """The moments of forward and backward, as autograd goes through them if `root` is what happens in forward."""
    reached = _reached_by_backward(root)
    uses = Counter(_uses(root))
    backward = _Backward(uses, sizes, reached)
    return (*_forward(root), EndForward(), *backward.of(root), EndBackward())


def _forward(call: Call) -> Iterator[Event]:
    yield BeforeForward(call.unit)
    for each in call.inner:
        if isinstance(each, Call):
            yield from _forward(each)
    yield AfterForward(call.unit)


def _uses(call: Call) -> Iterator[tuple[int, Use]]:
    for each in call.inner:
        if isinstance(each, Call):
            yield from _uses(each)
        else:
            yield call.unit, each


def _reached_by_backward(root: Call) -> set[int]:
    """The calls, by id, whose result depends on something trainable: used in them, or before them."""
    reached: set[int] = set()

    def visit(call: Call, learns: bool) -> bool:
        for each in call.inner:
            learns = visit(each, learns) if isinstance(each, Call) else True
        if learns:
            reached.add(id(call))
        return learns

    visit(root, False)
    return reached


class _Backward:
    """Autograd's way back through calls. A gradient is there once the first use of its parameter was gone through."""

    def __init__(
        self, uses: Counter[tuple[int, Use]], sizes: Sequence[Sequence[GroupSizes]], reached: set[int]
    ) -> None:
        self._uses = uses
        self._sizes = sizes
        self._reached = reached
        self._missing = Counter(unit for unit, _ in uses)

    def of(self, call: Call) -> Iterator[Moment]:
        if id(call) not in self._reached:
            return
        yield BeforeBackward(call.unit)
        for each in reversed(call.inner):
            yield from self.of(each) if isinstance(each, Call) else self._of_use(call.unit, each)
        yield AfterBackward(call.unit)

    def _of_use(self, unit: int, use: Use) -> Iterator[Moment]:
        self._uses[unit, use] -= 1
        if self._uses[unit, use]:
            return
        yield Arrival(unit, use.group, use.index)
        self._missing[unit] -= 1
        if not self._missing[unit]:
            is_past = all(group.is_all_trainable for group in self._sizes[unit])
            yield AfterBackward(unit, unreduced=True) if is_past else GradientsReady(unit)
        elif self._sizes[unit][use.group].is_alone:
            yield GroupPassed(unit, use.group)


# What it does to the buffers


@dataclass(slots=True)
class _Group:
    """What a group's buffers depend on besides the schedule. `is_current`: what is kept of it whole is of the shards'
    present values."""

    sizes: GroupSizes
    waiting: int = 0
    num_arrived: int = 0
    has_rows: bool = False
    in_reduction: bool = False
    has_gradients: bool = False
    is_whole: bool = False
    is_gathering: bool = False
    is_current: bool = False
    is_shrunk: bool = False
    is_landing: bool = False


@dataclass(slots=True)
class Buffers:
    """All units' buffers as numbers. `now` is bytes alive; the peak is noted whenever something came."""

    sizes: Sequence[Sequence[GroupSizes]]
    batch_bytes: int
    now: int = 0
    _parts: Counter[tuple[int, Kind]] = field(default_factory=Counter)
    _groups: list[list[_Group]] = field(default_factory=list)
    _moment: Moment | None = None
    _peak: Forecast = Forecast(0, None, {})

    def __post_init__(self) -> None:
        self._groups = [[_Group(sizes) for sizes in unit] for unit in self.sizes]
        for unit, groups in enumerate(self.sizes):
            self._add(unit, Kind.SHARDS, sum(each.shards for each in groups))
            self._add(unit, Kind.WHOLE, sum(each.kept for each in groups))

    def begin_step(self) -> None:
        """The optimizer has stepped and dropped the gradients; the peak of what comes is asked for."""
        for unit, groups in enumerate(self._groups):
            for group in groups:
                if group.has_gradients:
                    self._add(unit, Kind.GRADIENTS, -group.sizes.gradients)
                group.has_gradients = False
        self._peak = Forecast(0, None, {})
        self._note(None)

    def live_through(self, schedule: Schedule, moment: Moment) -> None:
        """Let `moment` happen: ask the schedule, or take a gradient."""
        self._moment = moment
        if isinstance(moment, BeforeForward) and moment.unit == 0 and not moment.recomputing:
            for group in (group for groups in self._groups for group in groups):
                group.is_current = False  # somebody may have written the shards
        if isinstance(moment, Arrival):
            self._arrive(moment, schedule.state.specs[moment.unit].reduces)
            return
        if isinstance(moment, EndBackward):
            self._end_backward()
        for action in schedule.on(moment):
            self._do(action)

    def forecast(self) -> Forecast:
        """The peak since the step began."""
        return self._peak

    def _note(self, moment: Moment | None) -> None:
        if self.now > self._peak.peak:
            self._peak = Forecast(self.now, moment, {key: nbytes for key, nbytes in self._parts.items() if nbytes})

    def _add(self, unit: int, kind: Kind, nbytes: int) -> None:
        self._parts[unit, kind] += nbytes
        self.now += nbytes
        assert self._parts[unit, kind] >= 0, f"more {kind.value} of unit {unit} were freed than there were"
        if nbytes > 0:
            self._note(self._moment)

    def _drop(self, unit: int, *kinds: Kind) -> None:
        for kind in kinds:
            self._add(unit, kind, -self._parts[unit, kind])

    # Weights

    def _do(self, action: Action) -> None:
        unit, groups = action.unit, self._groups[action.unit]
        match action:
            case Gather():
                self._gather(unit, groups)
            case Await():
                self._await(unit, groups)
            case Free():
                self._drop(unit, Kind.WHOLE, Kind.ROWS, Kind.SENT, Kind.PART)
                self._add(unit, Kind.WHOLE, sum(group.sizes.kept for group in groups))
                for group in groups:
                    group.is_whole = group.is_gathering = group.is_shrunk = group.is_landing = False
            case FreeGroup():
                group = groups[action.group]
                self._add(unit, Kind.WHOLE, -group.sizes.whole if group.is_whole else 0)
                group.is_whole = False
            case Shrink():
                for group in groups:
                    self._add(unit, Kind.PART, group.sizes.part)
                    self._add(unit, Kind.WHOLE, -group.sizes.whole)
                    group.is_whole, group.is_shrunk = False, True
            case Reduce():
                self._reduce(unit, groups)
            case Settle():
                self._settle(unit, groups)
            case Forget():
                self._drop(unit, Kind.ARRIVED, Kind.GRADIENT_ROWS, Kind.REDUCED, Kind.TRANSPORT)
                for group in groups:
                    group.waiting = group.num_arrived = 0
                    group.has_rows = group.in_reduction = False

    def _gather(self, unit: int, groups: list[_Group]) -> None:
        for group in (each for each in groups if not each.is_whole):
            sizes = group.sizes
            if group.is_current:
                continue
            group.is_gathering, group.is_current = True, sizes.kept > 0
            if group.is_shrunk:
                self._add(unit, Kind.PART, -sizes.part)
            self._add(unit, Kind.SENT, sizes.part if group.is_shrunk else sizes.sent)
            if group.is_shrunk or not (sizes.rows or sizes.lands):
                self._add(unit, Kind.WHOLE, sizes.whole)
            else:
                self._add(unit, Kind.ROWS, sizes.rows)
                group.is_landing = sizes.lands

    def _await(self, unit: int, groups: list[_Group]) -> None:
        for group in (each for each in groups if not each.is_whole):
            group.is_whole = True
            if not group.is_gathering:
                continue
            sizes = group.sizes
            if sizes.rows and not group.is_shrunk:
                self._add(unit, Kind.WHOLE, sizes.whole)
                self._add(unit, Kind.ROWS, -sizes.rows)
            self._land(unit, group)
            self._add(unit, Kind.SENT, -(sizes.part if group.is_shrunk else sizes.sent))
            group.is_gathering = group.is_shrunk = False

    def _land(self, unit: int, group: _Group) -> None:
        if group.is_landing:
            group.is_landing = False
            self._add(unit, Kind.WHOLE, group.sizes.whole)

    # Gradients

    def _arrive(self, arrival: Arrival, reduces: bool) -> None:
        unit, group = arrival.unit, self._groups[arrival.unit][arrival.group]
        nbytes = group.sizes.arriving[arrival.index]
        group.num_arrived += 1
        if group.sizes.borrows and not group.has_rows:
            group.has_rows = True
            self._add(unit, Kind.GRADIENT_ROWS, nbytes)
        else:
            group.waiting += nbytes
            self._add(unit, Kind.ARRIVED, nbytes)
        is_complete = group.num_arrived >= len(group.sizes.arriving)
        waits = group.sizes.collects_late and reduces and not group.has_rows
        if not waits and (is_complete or group.waiting >= self.batch_bytes):
            self._copy(unit, group)
        if is_complete:
            group.num_arrived = 0

    def _copy(self, unit: int, group: _Group) -> None:
        """The gradients that wait go into the rows."""
        if not group.waiting:
            return
        if not group.has_rows:
            group.has_rows = True
            self._add(unit, Kind.GRADIENT_ROWS, group.sizes.gradient_rows)
        self._add(unit, Kind.ARRIVED, -group.waiting)
        group.waiting = 0

    def _end_backward(self) -> None:
        for unit, groups in enumerate(self._groups):
            for group in groups:
                self._copy(unit, group)
                group.num_arrived = 0

    def _reduce(self, unit: int, groups: list[_Group]) -> None:
        for group in groups:
            self._copy(unit, group)
            group.num_arrived = 0
            if group.has_rows:
                group.has_rows, group.in_reduction = False, True
                self._add(unit, Kind.REDUCED, group.sizes.reduced)
                self._add(unit, Kind.TRANSPORT, group.sizes.scratch)

    def _settle(self, unit: int, groups: list[_Group]) -> None:
        # Whoever waits for one collective finishes those that were begun before it.
        for number, earlier in enumerate(self._groups):
            for group in earlier:
                self._land(number, group)
        for group in groups:
            if not group.in_reduction:
                continue
            sizes, group.in_reduction = group.sizes, False
            self._add(unit, Kind.TRANSPORT, -sizes.scratch)
            self._add(unit, Kind.GRADIENT_ROWS, -(sizes.arriving[0] if sizes.borrows else sizes.gradient_rows))
            if sizes.reduced != sizes.gradients:  # cast, else the sum itself becomes the gradient
                self._add(unit, Kind.GRADIENTS, sizes.gradients)
                self._add(unit, Kind.REDUCED, -sizes.reduced)
                if group.has_gradients:
                    self._add(unit, Kind.GRADIENTS, -sizes.gradients)
            else:
                self._add(unit, Kind.REDUCED, -sizes.reduced)
                self._add(unit, Kind.GRADIENTS, 0 if group.has_gradients else sizes.gradients)
            group.has_gradients = True


def total(parts: Iterable[tuple[tuple[int, Kind], int]], kind: Kind | None = None) -> int:
    """Bytes of all units: of one kind, or of all."""
    return sum(nbytes for (_, each), nbytes in parts if kind is None or each is kind)
