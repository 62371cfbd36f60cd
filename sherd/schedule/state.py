"""The state of the schedule: what each unit's policy asks for, and one frozen record of what a decision depends on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum, auto


class Live(IntEnum):
    """The form of a unit's parameters. An int, because ints hash fast, and a state has one for each unit."""

    SHARDED = auto()
    SHRUNK = auto()
    """Resharded to a smaller mesh: this rank keeps more than its shard."""
    GATHERING = auto()
    UNSHARDED = auto()


class Keep(Enum):
    """The part of a unit's unsharded parameters that stays after its forward."""

    NOTHING = auto()
    PART = auto()
    """The part of a smaller mesh (`reshard_after_forward=k`)."""
    FOR_BACKWARD = auto()
    """All of them if a backward may follow. The root's default, because backward begins with it."""
    ALWAYS = auto()

    @classmethod
    def under(cls, reshard: bool | int | None, is_root: bool, num_shards: int) -> Keep:
        """Returns the part that `reshard_after_forward` keeps of a unit over `num_shards` ranks."""
        if reshard is None:
            return cls.FOR_BACKWARD if is_root else cls.NOTHING
        if isinstance(reshard, bool):
            return cls.NOTHING if reshard else cls.ALWAYS
        if reshard == num_shards:
            return cls.NOTHING
        return cls.ALWAYS if reshard == 1 else cls.PART


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """One unit as the schedule sees it.

    Attributes:
        unsharded_bytes: the bytes of the gathered parameters.
        tied_owners: the units that own a parameter which this unit uses too (tied weights). They are unsharded whenever
            this unit is.
        forward_prefetch: the units to gather behind this one in forward. None leaves the choice to the learnt order.
        backward_prefetch: the same in backward.
        num_parts: the number of groups, if they are gathered one by one in backward, as those of the unit before go.
    """

    unsharded_bytes: int
    after_forward: Keep = Keep.NOTHING
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    reduces: bool = True
    tied_owners: tuple[int, ...] = ()
    forward_prefetch: tuple[int, ...] | None = None
    backward_prefetch: tuple[int, ...] | None = None
    num_parts: int = 1


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of prefetching and of collectives in flight.

    Attributes:
        forward_depth, backward_depth: the number of units that are gathered ahead.
        bytes_in_flight: the most bytes of unsharded parameters in gathers that are not awaited yet. None: no bound.
        reduce_buffers: the most units in reduction at once. 0: each reduction is finished as soon as it is started.
        after_backward: in backward, gather ahead once a unit is freed, not when its backward begins.
    """

    forward_depth: int = 1
    backward_depth: int = 1
    bytes_in_flight: int | None = None
    reduce_buffers: int = 1
    after_backward: bool = False


@dataclass(frozen=True, slots=True)
class Order:
    """The order in which units run in one phase, as the last pass taught it, and the place of the present pass in it.

    A pass that leaves the learnt order becomes the new order, so a model that changes its mind costs prefetching for
    one pass and no more.

    Attributes:
        learnt: the units of the last complete pass.
        at: the number of learnt units that have run in this pass, as long as `strayed` is None.
        strayed: all units of this pass, once one of them was not the learnt one.
    """

    learnt: tuple[int, ...] = ()
    at: int = 0
    strayed: tuple[int, ...] | None = None

    def after(self, unit: int) -> Order:
        """Returns the order once `unit` has run."""
        if self.strayed is not None:
            return replace(self, strayed=(*self.strayed, unit))
        if self.at < len(self.learnt) and self.learnt[self.at] == unit:
            return replace(self, at=self.at + 1)
        return replace(self, strayed=(*self.learnt[: self.at], unit))

    def rewound(self) -> Order:
        """Returns the order at the start of the next pass."""
        return Order(learnt=self.learnt if self.strayed is None else self.strayed)

    def upcoming(self) -> tuple[int, ...]:
        """Returns the units expected next, nearest first; none if nothing is learnt or this pass has strayed."""
        return self.learnt[self.at :] if self.strayed is None else ()


@dataclass(frozen=True, slots=True)
class State:
    """Everything that a decision depends on.

    Attributes:
        forward: the order in which forwards begin.
        finished: the order in which forwards end. Reversed, it is the first guess of `backward`.
        entered: the units that the present backward has reached.
        reducing: the units whose reduction is in flight, oldest first.
        passed: unsharded units of which backward has freed some groups.
        running: the units whose forward is under way.
        parted: units whose groups went one by one, to the last but one, when backward was in them last.
        partly: the unit of which some groups are gathered, and others are to follow.
    """

    # Not hashed: all states of a step have the same specs, and to hash those of a thousand units takes long.
    specs: tuple[UnitSpec, ...] = field(hash=False)
    limits: Limits = field(hash=False)
    live: tuple[Live, ...]
    forward: Order = Order()
    finished: Order = Order()
    backward: Order = Order()
    entered: frozenset[int] = frozenset()
    reducing: tuple[int, ...] = ()
    # Units and not groups: a state for each group that has gone would fill the graph of states, which is then dropped
    # in every step. test_groups_that_go_one_by_one_need_no_more_states_than_one_that_goes.
    passed: frozenset[int] = frozenset()
    running: frozenset[int] = frozenset()
    parted: frozenset[int] = frozenset()
    partly: int | None = None

    @classmethod
    def at_rest(cls, specs: tuple[UnitSpec, ...], limits: Limits = Limits()) -> State:
        """Returns the state in which all units are sharded and nothing is learnt."""
        return cls(specs, limits, (Live.SHARDED,) * len(specs))

    def with_live(self, unit: int, live: Live) -> State:
        changed = (*self.live[:unit], live, *self.live[unit + 1 :])
        return replace(self, live=changed, passed=self.passed - {unit})

    @property
    def bytes_in_flight(self) -> int:
        """The bytes of unsharded parameters in all-gathers that are started and not awaited."""
        return sum(
            spec.unsharded_bytes for spec, live in zip(self.specs, self.live, strict=True) if live is Live.GATHERING
        )

    @property
    def borrowed(self) -> frozenset[int]:
        return frozenset(companion for spec in self.specs for companion in spec.tied_owners)
