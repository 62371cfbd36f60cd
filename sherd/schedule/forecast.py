"""The bytes that a training step needs, by kind and unit, predicted by the schedule in integers only.

A step is a list of moments: the schedule's events, and between them the arrival of each gradient. The `Schedule` that
runs the model answers the events, and the effects of its actions on the buffers are added up.

    moment            bytes that come                          bytes that go
    Gather(More)      unsharded, if filled in place; else rows
    Await             unsharded, if copied out of rows         rows
    Shrink            the kept part                            unsharded
    Free                                                       unsharded, rows, the kept part
    FreeGroup                                                  unsharded, of one group
    Arrival           one gradient, then gradient rows         gradients, once copied into the rows
    Reduce            gradient rows, if they come late;        gradients, once copied into the rows; rows
                      this rank's sum; the transport's own     and the transport's own, that a lane owns
    FinishReduce      the shards' gradient                     gradient rows, the sum, the transport's own
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from sherd.schedule import actions as do
from sherd.schedule.actions import EndBackward
from sherd.schedule.moments import Arrival, GroupSizes, MemoryKind, Moment, OptimizerStep, begins_step
from sherd.schedule.schedule import Schedule
from sherd.schedule.state import Limits, Live, UnitSpec


@dataclass(frozen=True, slots=True)
class Forecast:
    """The most bytes alive at once, the moment of that peak, and its parts: `(unit, kind)` to bytes."""

    peak: int
    moment: Moment | None
    parts: dict[tuple[int, MemoryKind], int]


def forecast(
    specs: tuple[UnitSpec, ...],
    limits: Limits,
    sizes: Sequence[Sequence[GroupSizes]],
    step: Sequence[Moment],
    *,
    batch_bytes: int,
    unsynced: int = 0,
    in_flight: Sequence[tuple[int, int]] = (),
) -> Forecast:
    """Returns the peak of one training step with a learnt order, from shards without gradients to shards with them.

    Args:
        specs: the units.
        limits: the limits of the schedule.
        sizes: the groups of each unit.
        step: the moments of forward and backward, by `step_of` or recorded.
        batch_bytes: small gradients are collected until they are this many bytes.
        unsynced: the number of passes before `step` whose gradients stay unreduced.
        in_flight: the units, and the bytes of each, of which something comes for the optimizer's step.
    """
    assert len(specs) == len(sizes), "every unit has sizes"
    player = SchedulePlayer(specs, limits, sizes, batch_bytes)
    for _ in ("learns the order", "knows it"):
        player.begin_step()
        for reduces in (*[False] * unsynced, True):
            player.change(replace(spec, reduces=reduces) for spec in specs)
            for moment in step:
                player.live_through(moment)
    player.ledger.begin(OptimizerStep())
    for unit, nbytes in in_flight:
        player.ledger.add(unit, MemoryKind.IN_FLIGHT, nbytes)
    return player.ledger.peak


class _Group:
    """The buffers of one group as bytes by kind. `changed(kind, more)` is called when bytes come, or go below 0."""

    def __init__(self, sizes: GroupSizes, batch_bytes: int, changed: Callable[[MemoryKind, int], None]) -> None:
        self._sizes = sizes
        self._batch_bytes = batch_bytes
        self._changed = changed
        self._held: Counter[MemoryKind] = Counter()
        self._live = Live.SHARDED
        self._is_current = False
        self._num_arrived = 0
        self._reducing = 0
        self._is_reducing = False
        self._hold(MemoryKind.SHARDS, sizes.shards)
        self._hold(MemoryKind.LOST, sizes.lost)
        self._hold(MemoryKind.UNSHARDED, sizes.kept)

    def _hold(self, kind: MemoryKind, nbytes: int) -> None:
        before, self._held[kind] = self._held[kind], nbytes
        self._changed(kind, nbytes - before)

    def _drop(self, *kinds: MemoryKind) -> None:
        for kind in kinds:
            self._hold(kind, 0)

    # Weights

    def mark_shards_written(self) -> None:
        """Note that the shards may be written, so kept unsharded parameters are out of date."""
        self._is_current = False

    def gather(self) -> None:
        if self._live in (Live.GATHERING, Live.UNSHARDED):
            return
        sizes, before, self._live = self._sizes, self._live, Live.GATHERING
        if before is Live.SHRUNK:
            self._drop(MemoryKind.PART)
            self._hold(MemoryKind.SENT, sizes.part)
            self._become_unsharded()
        elif not self._is_current:
            self._is_current = sizes.kept > 0 and not sizes.is_renewed
            self._hold(MemoryKind.SENT, sizes.sent)
            if sizes.rows or sizes.lands:
                self._hold(MemoryKind.ROWS, sizes.rows)
            else:
                self._become_unsharded()

    def land(self) -> None:
        """Fill the unsharded buffer: a collective is awaited, and all earlier ones end with it."""
        if self._live is Live.GATHERING and self._sizes.lands:
            self._become_unsharded()

    def wait(self) -> None:
        if self._live is Live.GATHERING:
            self._live = Live.UNSHARDED
            self._become_unsharded()
            if self._sizes.decoding and self._held[MemoryKind.ROWS]:
                self._hold(MemoryKind.ROWS, self._sizes.rows + self._sizes.decoding)
            self._drop(MemoryKind.ROWS, MemoryKind.SENT)

    def _become_unsharded(self) -> None:
        self._hold(MemoryKind.UNSHARDED, self._sizes.kept + self._sizes.unsharded)

    def free(self) -> None:
        self._live = Live.SHARDED
        self._drop(MemoryKind.ROWS, MemoryKind.SENT, MemoryKind.PART)
        self._hold(MemoryKind.UNSHARDED, self._sizes.kept)

    def shrink(self) -> None:
        self._live = Live.SHRUNK
        self._hold(MemoryKind.PART, self._sizes.part)
        self._hold(MemoryKind.UNSHARDED, self._sizes.kept)

    # Gradients

    @property
    def _rows(self) -> int:
        """The bytes of rows into which gradients are collected, without rows in reduction."""
        return self._held[MemoryKind.GRADIENT_ROWS] - self._reducing

    def _collect(self, nbytes: int) -> None:
        self._hold(MemoryKind.GRADIENT_ROWS, self._reducing + nbytes)

    def arrive(self, index: int, reduces: bool) -> None:
        """Take gradient number `index`. `reduces`: this backward reduces the gradient."""
        sizes, nbytes = self._sizes, self._sizes.arriving[index]
        self._num_arrived += 1
        if sizes.borrows and not self._rows:
            self._collect(nbytes)
        else:
            self._hold(MemoryKind.ARRIVED, self._held[MemoryKind.ARRIVED] + nbytes)
        is_complete = self._num_arrived >= len(sizes.arriving)
        waits = sizes.collects_late and reduces and not self._rows
        if not waits and (is_complete or self._held[MemoryKind.ARRIVED] >= self._batch_bytes):
            self._copy()
        if is_complete:
            self._num_arrived = 0

    def _copy(self) -> None:
        if self._held[MemoryKind.ARRIVED]:
            self._collect(self._rows or self._sizes.gradient_rows)
            self._drop(MemoryKind.ARRIVED)

    def end_backward(self) -> None:
        self._copy()
        self._num_arrived = 0

    def collect(self) -> None:
        """Copy into rows that a lane owns: all groups do, before the first is reduced."""
        if self._sizes.lane_owns_rows:
            self._copy()

    def collect_passed(self) -> None:
        if self._live is Live.SHARDED:
            self.collect()

    def reduce(self) -> None:
        self.end_backward()
        if self._rows:
            self._is_reducing = True
            self._hold(MemoryKind.REDUCED, self._sizes.reduced)
            self._hold(MemoryKind.TRANSPORT, self._sizes.scratch)
            if self._sizes.lane_owns_rows:
                self._drop(MemoryKind.TRANSPORT)
                self._collect(0)
            else:
                self._reducing += self._rows
            if self._sizes.stores_at_once:
                self._become_gradients()

    def finish_reduce(self) -> None:
        if not self._is_reducing:
            return
        rows, self._reducing, self._is_reducing = self._rows, 0, False
        self._drop(MemoryKind.TRANSPORT)
        self._collect(rows)
        if not self._sizes.stores_at_once:
            self._become_gradients()

    def _become_gradients(self) -> None:
        sizes = self._sizes
        if sizes.reduced != sizes.gradients:  # cast, else the sum itself becomes the gradient
            self._hold(MemoryKind.GRADIENTS, self._held[MemoryKind.GRADIENTS] + sizes.gradients)
        self._drop(MemoryKind.REDUCED)
        self._hold(MemoryKind.GRADIENTS, 0 if sizes.is_offloaded else sizes.gradients)

    def discard(self) -> None:
        self._num_arrived = self._reducing = 0
        self._is_reducing = False
        self._drop(MemoryKind.ARRIVED, MemoryKind.GRADIENT_ROWS, MemoryKind.REDUCED, MemoryKind.TRANSPORT)

    def drop_gradients(self) -> None:
        self._drop(MemoryKind.GRADIENTS)


DO: dict[type[do.Action], Callable[[_Group], None]] = {
    do.Gather: _Group.gather,
    do.GatherMore: _Group.gather,
    do.Await: _Group.wait,
    do.Free: _Group.free,
    do.FreeGroup: _Group.free,
    do.Collect: _Group.collect_passed,
    do.Shrink: _Group.shrink,
    do.Reduce: _Group.reduce,
    do.FinishReduce: _Group.finish_reduce,
    do.Discard: _Group.discard,
}
"""By type of action: the method that is called on each group of the unit, or on the group that the action names."""


class _Ledger:
    """The bytes of all buffers.

    It is an object of its own, which knows no group: without a circle of references, thousands of forecasts in a
    search are freed at once.

    Attributes:
        now: the bytes that are alive.
        changes: the bytes that came, or went below 0, each with its unit and kind.
    """

    def __init__(self) -> None:
        self.now = 0
        self.changes: list[tuple[tuple[int, MemoryKind], int]] = []
        self.begin(None)
        self.forget_peak()

    def begin(self, moment: Moment | None) -> None:
        """Note that `moment` begins: bytes that come or go from now on belong to it."""
        self._moment = moment

    def add(self, unit: int, kind: MemoryKind, more: int) -> None:
        self.changes.append(((unit, kind), more))
        self.now += more
        if self.now > self._peak:
            self.forget_peak()

    def forget_peak(self) -> None:
        # The parts are added up only on demand: every unit's first gradient is a new peak.
        self._peak, self._peak_moment, self._num_changes_to_peak = self.now, self._moment, len(self.changes)

    @property
    def peak(self) -> Forecast:
        """The most bytes at once since the last `forget_peak`."""
        parts: Counter[tuple[int, MemoryKind]] = Counter()
        for part, more in self.changes[: self._num_changes_to_peak]:
            parts[part] += more
        return Forecast(self._peak, self._peak_moment, {part: nbytes for part, nbytes in parts.items() if nbytes})


class SchedulePlayer:
    """Plays steps: the schedule answers each moment, its actions change buffers, and `ledger` adds up their bytes."""

    def __init__(
        self, specs: tuple[UnitSpec, ...], limits: Limits, sizes: Sequence[Sequence[GroupSizes]], batch_bytes: int
    ) -> None:
        self.ledger = _Ledger()
        self._schedule = Schedule(specs, limits)
        self._units = [
            [_Group(group_sizes, batch_bytes, partial(self.ledger.add, unit)) for group_sizes in groups]
            for unit, groups in enumerate(sizes)
        ]

    @property
    def _groups(self) -> Iterator[_Group]:
        return (group for groups in self._units for group in groups)

    def begin_step(self) -> None:
        """Begin a step: the optimizer has stepped and dropped the gradients, and the peak counts from here."""
        for group in self._groups:
            group.drop_gradients()
        self.ledger.begin(None)
        self.ledger.forget_peak()
        for unit in range(len(self._units)):
            self.live_through(do.Reshard(unit))

    def change(self, specs: Iterable[UnitSpec]) -> None:
        """Follow other policies of the units from now on."""
        self._schedule.move_to(replace(self._schedule.state, specs=tuple(specs)))

    def drop_gradients(self, unit: int) -> None:
        """Drop the gradients of the shards of `unit`, which the optimizer has stepped."""
        for group in self._units[unit]:
            group.drop_gradients()

    def live_through(self, moment: Moment) -> tuple[do.Action, ...]:
        """Carry out the schedule's answer to `moment`, or take a gradient. Returns the actions."""
        return tuple(self.acting(moment))

    def acting(self, moment: Moment) -> Iterator[do.Action]:
        """Carry out the schedule's answer to `moment`, or take a gradient. Yields each action that is carried out."""
        assert not isinstance(moment, OptimizerStep), "the schedule knows no optimizer"
        self.ledger.begin(moment)
        if isinstance(moment, Arrival):
            reduces = self._schedule.state.specs[moment.unit].reduces
            self._units[moment.unit][moment.group].arrive(moment.index, reduces)
            return
        if begins_step(moment):
            for group in self._groups:
                group.mark_shards_written()
        if isinstance(moment, EndBackward):
            for group in self._groups:
                group.end_backward()
        for action in self._schedule.on(moment):
            groups = self._units[action.unit]
            if isinstance(action, do.FreeGroup):
                groups = [groups[action.group]]
            if isinstance(action, do.Gather | do.GatherMore):
                groups = groups[: len(groups) - action.left]
            if isinstance(action, do.FinishReduce):
                for group in self._groups:
                    group.land()
            for group in groups if isinstance(action, do.Reduce) else ():
                group.collect()
            for group in groups:
                DO[type(action)](group)
            yield action
