"""What a model does to its schedule, and what the schedule may answer: events of steps, and a strict engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sherd.schedule.actions import (
    Action,
    AfterBackward,
    AfterForward,
    Await,
    BeforeBackward,
    BeforeForward,
    Collect,
    Discard,
    EndBackward,
    EndForward,
    Event,
    FinishReduce,
    Free,
    FreeGroup,
    Gather,
    GatherMore,
    GradientsReady,
    Reduce,
    Shrink,
)
from sherd.schedule.decide import decide
from sherd.schedule.schedule import Schedule
from sherd.schedule.state import Keep, Limits, Live, UnitSpec


def specs(num_units: int, unsharded_bytes: int = 100, **root: object) -> tuple[UnitSpec, ...]:
    """A root that keeps its parameters for backward, and `num_units - 1` blocks that do not."""
    choices: dict[str, object] = {"after_forward": Keep.FOR_BACKWARD, **root}
    return (UnitSpec(unsharded_bytes, **choices), *[UnitSpec(unsharded_bytes)] * (num_units - 1))  # type: ignore[arg-type]


def answers(schedule: Schedule, events: Iterable[Event]) -> list[Action]:
    """All actions that `events` ask for, in order."""
    return [action for event in events for action in schedule.on(event)]


def forward(blocks: Sequence[int], *, differentiable: bool = True) -> list[Event]:
    """The root, unit 0, calls `blocks` one after the other."""
    calls = [event for unit in blocks for event in (BeforeForward(unit), AfterForward(unit))]
    return [BeforeForward(0), *calls, AfterForward(0), EndForward(differentiable)]


def backward(blocks: Sequence[int], *, last: bool = True) -> list[Event]:
    """Autograd goes through `blocks`; the root's own gradients come last, and none of its inputs needs one."""
    passed = [event for unit in blocks for event in (BeforeBackward(unit), GradientsReady(unit), AfterBackward(unit))]
    return [BeforeBackward(0), *passed, GradientsReady(0), EndBackward(last)]


def step(num_units: int) -> list[Event]:
    """Forward through all blocks in order, backward in reverse."""
    blocks = range(1, num_units)
    return [*forward(blocks), *backward(blocks[::-1])]


@dataclass
class StrictEngine:
    """Carries actions out on integers, and refuses what the real engine could not do.

    `needed`: units whose modules are running, or that backward has entered and not left. `passed`: whole ones of which
    a group was freed. `left`: how many groups of a unit are yet to be gathered.
    """

    specs: tuple[UnitSpec, ...]
    limits: Limits = field(default_factory=Limits)
    needed: list[int] = field(default_factory=list)
    live: dict[int, Live] = field(default_factory=dict)
    passed: set[int] = field(default_factory=set)
    left: dict[int, int] = field(default_factory=dict)
    reducing: set[int] = field(default_factory=set)
    collected: set[int] = field(default_factory=set)
    reduced: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.schedule = Schedule(self.specs, self.limits)
        self.live = dict.fromkeys(range(len(self.specs)), Live.SHARDED)

    def run(self, events: Iterable[Event]) -> None:
        """Feed events; the schedule's cached answer must be what a fresh decision says."""
        for event in events:
            if isinstance(event, GradientsReady):
                self.collected.add(event.unit)
            before = self.schedule.state
            actions = self.schedule.on(event)
            assert decide(before, event) == (self.schedule.state, actions), "cached and fresh answers differ"
            for action in actions:
                self.perform(action)
            self.follow(event)
            self.check()

    def perform(self, action: Action) -> None:
        unit = action.unit
        live = self.live[unit]
        match action:
            case Gather(left=left):
                assert live in (Live.SHARDED, Live.SHRUNK) or unit in self.passed, f"{action} while {live}"
                assert left < self.specs[unit].num_parts
                assert not any(self.left.values()), "a collective comes between the parts of another"
                self.passed.discard(unit)
                self.live[unit], self.left[unit] = Live.GATHERING, left
            case GatherMore(left=left):
                assert live is Live.GATHERING, f"{action} while {live}"
                assert left <= self.left[unit]
                self.left[unit] = left
            case Collect():
                assert unit in self.passed, f"{action} of a unit of which nothing was freed"
            case Await():
                assert live is Live.GATHERING, f"{action} while {live}"
                assert not self.left[unit], f"{action} while some groups are not gathered"
                self.live[unit] = Live.UNSHARDED
            case Free():
                assert not self.left.get(unit), f"{action}, and other ranks gather what is left"
                assert live is not Live.SHARDED, f"{action} while {live}"
                self.passed.discard(unit)
                self.live[unit] = Live.SHARDED
            case FreeGroup():
                assert live is Live.UNSHARDED, f"{action} while {live}"
                self.passed.add(unit)
            case Shrink():
                assert live is Live.UNSHARDED, f"{action} while {live}"
                self.live[unit] = Live.SHRUNK
            case Reduce():
                assert unit not in self.reducing, f"{action} while its last reduction is in flight"
                assert not any(self.left.values()), "a collective comes between the parts of another"
                self.reducing.add(unit)
                self.collected.discard(unit)
            case FinishReduce():
                assert unit in self.reducing, f"{action} with no reduction in flight"
                self.reducing.remove(unit)
                self.reduced.append(unit)
            case Discard():
                self.reducing.discard(unit)
                self.collected.discard(unit)

    def follow(self, event: Event) -> None:
        """Note who needs its parameters after `event`."""
        match event:
            case BeforeForward(unit, recomputing):
                assert unit not in self.passed, f"unit {unit} computes without one of its groups"
                if not (recomputing and unit in self.needed):
                    self.needed.append(unit)
            case BeforeBackward(unit):
                if unit not in self.needed:
                    self.needed.append(unit)
            case AfterForward(unit, recomputing):
                if not recomputing:  # a recomputed unit's backward follows at once
                    self.needed.remove(unit)
            case AfterBackward(unit):
                if unit in self.needed:
                    self.needed.remove(unit)
            case EndForward() | EndBackward():
                self.needed.clear()

    @property
    def bytes_live(self) -> int:
        """Bytes of unsharded parameters allocated."""
        allocated = (Live.GATHERING, Live.UNSHARDED)
        return sum(self.specs[unit].unsharded_bytes for unit, live in self.live.items() if live in allocated)

    def check(self) -> None:
        """What must hold between any two events."""
        state = self.schedule.state
        assert tuple(self.live.values()) == state.live, "the schedule is wrong about where parameters are"
        assert self.passed == state.passed
        assert self.reducing == set(state.reducing)
        assert len(self.reducing) <= self.limits.reduce_buffers
        for unit in self.needed:
            for each in (unit, *self.specs[unit].tied_owners):
                assert self.live[each] is Live.UNSHARDED, f"unit {unit} computes while unit {each} is {self.live[each]}"
