"""A training step as a list of moments, and the sizes of the buffers that it uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from sherd.schedule.actions import (
    AfterBackward,
    AfterForward,
    BeforeBackward,
    BeforeForward,
    EndBackward,
    EndForward,
    Event,
    GradientsReady,
    GroupPassed,
)


class MemoryKind(str, Enum):
    """The purpose of some bytes. The value is its name in tables. It is a str because a str remembers its hash, which
    many sums ask for."""

    SHARDS = "shards"
    SENT = "shards as sent"
    """The input of an all-gather, where it is not the shards themselves: a copy in compute's dtype, or a kept part."""
    ROWS = "gathered rows"
    UNSHARDED = "unsharded"
    PART = "kept part"
    """Of a smaller mesh (`reshard_after_forward=k`)."""
    ARRIVED = "gradients arrived"
    """Unsharded gradients that autograd has made and that are not in the rows yet."""
    GRADIENT_ROWS = "gradient rows"
    """The input of a reduction: rows of our own, or a large gradient as autograd has left it."""
    REDUCED = "reduced"
    """This rank's sum, while it is being made."""
    GRADIENTS = "gradients"
    """The shards' `.grad`."""
    TRANSPORT = "transport"
    """Memory that a collective receives into, besides its result."""
    OPTIMIZER = "optimizer state"


@dataclass(frozen=True, slots=True)
class GroupSizes:
    """Bytes of one group's buffers on this rank, when they are allocated; 0 for a buffer that the group does without.

    `kept` are unsharded parameters that are not given up between uses; `unsharded` is 0 then.
    `rows` is 0 where an all-gather fills the unsharded buffer itself, `sent` where it sends the shards themselves.
    `lands`: the unsharded buffer is filled while this collective or a later one is awaited, and not before.
    `arriving` are the unsharded gradients of the group's trainable parameters, in the order of its parameters. A
    group that `borrows` sends its only gradient from where it is. A group that `collects_late` has no rows until it is
    reduced, in a step that reduces it; if a `lane_owns_rows`, they go as soon as the reduction is queued. `scratch` is
    what the transport takes during a reduction. One that `is_offloaded` has its shards and their gradients in host
    memory; if it `stores_at_once`, the sum goes there as soon as the reduction is queued.
    """

    shards: int
    unsharded: int
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
    lane_owns_rows: bool = False
    is_offloaded: bool = False
    stores_at_once: bool = False


@dataclass(frozen=True, slots=True)
class Arrival:
    """Autograd has made the unsharded gradient of a parameter: the `index`-th trainable one of the unit's `group`.

    In forward: that parameter is used.
    """

    unit: int
    group: int
    index: int


Moment = Event | Arrival


def step_of(forward: Sequence[Moment], sizes: Sequence[Sequence[GroupSizes]]) -> tuple[Moment, ...]:
    """Returns the moments of forward and backward, as autograd goes through them.

    `forward` is the beginning and the end of each call of a unit, and in between an `Arrival` for each use of a
    trainable parameter.
    """
    calls = (moment for moment in forward if not isinstance(moment, Arrival))
    return (*calls, EndForward(), *_backward(forward, sizes), EndBackward())


class Gradients:
    """The gradients that one backward brings.

    Args:
        uses: the trainable parameters that forward has used.
        sizes: of the groups of each unit.
        run_again: units of which a part of forward may run again in backward, as in checkpoints: it reads what forward
            has read, so no group passes alone.
    """

    def __init__(
        self, uses: Iterable[Arrival], sizes: Sequence[Sequence[GroupSizes]], run_again: Container[int] = ()
    ) -> None:
        used = frozenset(uses)
        self._sizes, self._run_again = sizes, run_again
        self._missing = Counter(use.unit for use in used)
        self._missing_in_group = Counter((use.unit, use.group) for use in used)

    def arrive(self, arrival: Arrival) -> Iterator[Moment]:
        """Yields the arrival of a whole gradient, and the event of its unit if it was the last of it, or the last
        of one of its groups."""
        unit, group = arrival.unit, arrival.group
        self._missing[unit] -= 1
        self._missing_in_group[unit, group] -= 1
        yield arrival
        if self._missing_in_group[unit, group]:
            return
        if not self._missing[unit]:
            is_done_in_backward = all(each.is_all_trainable for each in self._sizes[unit])
            yield AfterBackward(unit, unreduced=True) if is_done_in_backward else GradientsReady(unit)
        elif unit not in self._run_again and self._sizes[unit][group].is_all_trainable:
            yield GroupPassed(unit, group)


def _backward(forward: Sequence[Moment], sizes: Sequence[Sequence[GroupSizes]]) -> Iterator[Moment]:
    """Yields the moments of backward. Autograd does not reach calls that end before anything trainable was used, and a
    gradient is there once backward has passed the first use of its parameter."""
    uses = Counter(moment for moment in forward if isinstance(moment, Arrival))
    gradients = Gradients(uses, sizes)
    num_ahead = uses.total()
    reached: list[bool] = []
    for moment in reversed(forward):
        match moment:
            case AfterForward(unit):
                reached.append(num_ahead > 0)
                if reached[-1]:
                    yield BeforeBackward(unit)
            case BeforeForward(unit):
                if reached.pop():
                    yield AfterBackward(unit)
            case Arrival():
                num_ahead -= 1
                uses[moment] -= 1
                if not uses[moment]:
                    yield from gradients.arrive(moment)


def begins_step(moment: Moment) -> bool:
    """Returns whether the root's forward begins with `moment`."""
    return isinstance(moment, BeforeForward) and moment.unit == 0 and not moment.recomputing
