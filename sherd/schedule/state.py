"""The knowledge of the schedule: each unit's choices, and one frozen record of the present state."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum, auto

from sherd.schedule.order import Order


class Live(IntEnum):
    """The form of a unit's parameters. An int, which hashes fast: a state has one for each unit."""

    SHARDED = auto()
    SHRUNK = auto()
    """Resharded to a smaller mesh: this rank keeps a larger part than its shard."""
    GATHERING = auto()
    UNSHARDED = auto()


class Keep(Enum):
    """The part of a unit's unsharded parameters that is kept after its forward."""

    NOTHING = auto()
    PART = auto()
    """The part of a smaller mesh (`reshard_after_forward=k`)."""
    FOR_BACKWARD = auto()
    """All, if a backward may follow: the root's default, since backward begins there."""
    ALWAYS = auto()

    @classmethod
    def under(cls, reshard: bool | int | None, is_root: bool, num_shards: int) -> Keep:
        """Returns what is kept under `reshard_after_forward`, by a unit that is cut into `num_shards`."""
        if reshard is None:
            return cls.FOR_BACKWARD if is_root else cls.NOTHING
        if isinstance(reshard, bool):
            return cls.NOTHING if reshard else cls.ALWAYS
        if reshard == num_shards:
            return cls.NOTHING
        return cls.ALWAYS if reshard == 1 else cls.PART


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """One unit as the schedule sees it. `unsharded_bytes`: the bytes of its gathered parameters.

    `companions` are units that own a parameter this one uses too (tied weights); they are unsharded whenever it is.
    `forward_prefetch`, `backward_prefetch`: what to gather behind this unit; None leaves that to the learnt order.
    """

    unsharded_bytes: int
    after_forward: Keep = Keep.NOTHING
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    reduces: bool = True
    companions: tuple[int, ...] = ()
    forward_prefetch: tuple[int, ...] | None = None
    backward_prefetch: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of gathering ahead and of what is in flight: units, bytes (None: no bound), buffers being reduced.

    `reduce_buffers` 0 finishes each reduction as soon as it was started. `after_backward`: units are gathered ahead in
    backward once the one before was freed, not when it begins.
    """

    forward_depth: int = 1
    backward_depth: int = 1
    bytes_in_flight: int | None = None
    reduce_buffers: int = 1
    after_backward: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """Everything a decision depends on.

    `finished` is the order in which forwards ended; reversed, it is the first guess of `backward`. `entered`: units
    that the present backward has reached. `reducing`: units whose reduction is in flight, oldest first. `passed`:
    unsharded units of which backward has freed some groups. `running`: units whose forward is under way.
    """

    # Not hashed: all states of a step have the same, and with a thousand units hashing them is what takes time.
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

    @classmethod
    def at_rest(cls, specs: tuple[UnitSpec, ...], limits: Limits = Limits()) -> State:
        """All sharded, nothing learnt."""
        return cls(specs, limits, (Live.SHARDED,) * len(specs))

    def with_live(self, unit: int, live: Live) -> State:
        """The state once `unit`'s parameters are `live`."""
        changed = (*self.live[:unit], live, *self.live[unit + 1 :])
        return replace(self, live=changed, passed=self.passed - {unit})

    @property
    def bytes_in_flight(self) -> int:
        """Bytes of unsharded parameters whose all-gather was started and not yet awaited."""
        return sum(
            spec.unsharded_bytes for spec, live in zip(self.specs, self.live, strict=True) if live is Live.GATHERING
        )

    @property
    def borrowed(self) -> frozenset[int]:
        """Units that are some other unit's companion."""
        return frozenset(companion for spec in self.specs for companion in spec.companions)
