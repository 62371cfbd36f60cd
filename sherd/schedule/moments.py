"""A training step as a list of moments, in which buffers come and go, and the sizes of these buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from sherd.schedule import actions as do
from sherd.schedule.actions import Event


class MemoryKind(str, Enum):
    """The purpose of some bytes; the value is its name in tables. A str, whose hash is cached: many sums ask for it."""

    SHARDS = "shards"
    SENT = "shards as sent"
    """The input of an all-gather, unless the shards themselves are: a copy in the compute dtype, or a kept part."""
    ROWS = "gathered rows"
    UNSHARDED = "unsharded"
    PART = "kept part"
    """The part of a smaller mesh (`reshard_after_forward=k`)."""
    ARRIVED = "gradients arrived"
    """Unsharded gradients, as autograd made them, that are not copied into the rows yet."""
    GRADIENT_ROWS = "gradient rows"
    """The input of a reduction: rows, or a large gradient as autograd made it."""
    REDUCED = "reduced"
    """The output of a reduction in flight: this rank's sum."""
    GRADIENTS = "gradients"
    """The shards' `.grad`."""
    TRANSPORT = "transport"
    """Memory into which a collective receives, in addition to its result."""
    LOST = "lost on the wire"
    """Losses of gradients by encoding, which are sent with the next ones (`Reduction(feedback=True)`)."""
    OPTIMIZER = "optimizer state"
    MASTERS = "masters"
    """The bits that make bfloat16 shards exact float32 masters."""
    SAVED = "saved activations"
    """Buffers in host memory for what units save for backward."""
    IN_FLIGHT = "state in flight"
    """Optimizer state and masters that rest elsewhere, while they are where the optimizer steps."""


IN_FLIGHT = 3
"""Chunks of a step that are near at a time: one whose state comes, one that is stepped, one that goes."""

CHUNK_NUMEL = 1 << 22
"""The most elements of a shard buffer in one chunk, a multiple of 8. Their AdamW state is 32 MiB, and copies of it last
longer than the host's calls."""


@dataclass(frozen=True, slots=True)
class GroupSizes:
    """The bytes of one group's buffers on this rank while they are allocated; 0 for a buffer that the group lacks.

    Attributes:
        kept: unsharded parameters that are never freed; `unsharded` is 0 then.
        is_renewed: each use gathers what is kept again.
        rows: 0 where the all-gather fills the unsharded buffer itself.
        decoding: what decoding the rows takes, in addition to them and the unsharded buffer.
        sent: 0 where the all-gather sends the shards themselves.
        arriving: the unsharded gradient of each trainable parameter, in the order of the parameters.
        borrows: the only gradient is sent from where autograd made it.
        scratch: the memory of the transport during a reduction.
        lands: the unsharded buffer is written inside `wait()`, so it need not be allocated earlier.
        collects_late: in a step that reduces the group, there are no rows until the reduction.
        lane_owns_rows: the rows go as soon as the reduction is queued.
        may_lack: a rank that lacks the gradients takes part in their reduction.
        is_offloaded: shards and their gradients are in host memory.
        stores_at_once: the sum goes to host memory as soon as the reduction is queued.
        lost: what is kept from one reduction to the next.
    """

    shards: int
    unsharded: int
    kept: int = 0
    is_renewed: bool = False
    rows: int = 0
    decoding: int = 0
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
    may_lack: bool = False
    is_offloaded: bool = False
    stores_at_once: bool = False
    lost: int = 0


@dataclass(frozen=True, slots=True)
class Arrival:
    """Autograd makes the gradient of trainable parameter number `index` of the unit's `group`; in forward: its use."""

    unit: int
    group: int
    index: int


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """The optimizer steps, and chunks of what rests elsewhere come for it."""


Moment = Event | Arrival | OptimizerStep


def step_of(forward: Sequence[Moment], sizes: Sequence[Sequence[GroupSizes]]) -> tuple[Moment, ...]:
    """Returns the moments of forward and backward, in autograd's order.

    Args:
        forward: the beginning and the end of each call of a unit, and in between an `Arrival` for each use of a
            trainable parameter.
        sizes: the groups of each unit.
    """
    calls = (moment for moment in forward if not isinstance(moment, Arrival))
    return (*calls, do.EndForward(), *_backward(forward, sizes))


class BackwardGradients:
    """The gradients of one backward.

    Args:
        uses: the trainable parameters that forward uses.
        sizes: the groups of each unit.
        run_again: the units of which a part of forward may run again in backward, as under activation checkpointing.
            That part reads all parameters again, so no group is freed alone.
    """

    def __init__(
        self, uses: Iterable[Arrival], sizes: Sequence[Sequence[GroupSizes]], run_again: Container[int] = ()
    ) -> None:
        used = frozenset(uses)
        self._sizes, self._run_again = sizes, run_again
        self._missing = Counter(use.unit for use in used)
        self._missing_in_group = Counter((use.unit, use.group) for use in used)
        self._left: set[int] = set()

    def arrive(self, arrival: Arrival) -> Iterator[Moment]:
        """Yields the arrival of a complete gradient, and an event if that frees a group, or reduces the unit."""
        unit, group = arrival.unit, arrival.group
        self._missing[unit] -= 1
        self._missing_in_group[unit, group] -= 1
        yield arrival
        if self._missing_in_group[unit, group]:
            return
        if not self._missing[unit]:
            if len(self._sizes) > 1 and any(each.may_lack for each in self._sizes[unit]):
                self._left.add(unit)
                return
            is_done_in_backward = all(each.is_all_trainable for each in self._sizes[unit])
            yield do.AfterBackward(unit, unreduced=True) if is_done_in_backward else do.GradientsReady(unit)
        elif unit not in self._run_again and self._sizes[unit][group].is_all_trainable:
            yield do.GroupPassed(unit, group)

    def passed(self, unit: int) -> do.AfterBackward:
        """Returns the event that autograd is past the inputs of `unit`."""
        is_left = unit in self._left
        self._left.discard(unit)
        return do.AfterBackward(unit, is_left)

    def end(self) -> Iterator[Moment]:
        """Yields the events of the end of backward."""
        yield from map(self.passed, sorted(self._left, reverse=True))
        yield do.EndBackward()


def _backward(forward: Sequence[Moment], sizes: Sequence[Sequence[GroupSizes]]) -> Iterator[Moment]:
    """Yields the moments of backward.

    Autograd does not reach calls that end before the first use of a trainable parameter. A gradient is complete once
    backward has passed the first use of its parameter.
    """
    uses = Counter(moment for moment in forward if isinstance(moment, Arrival))
    gradients = BackwardGradients(uses, sizes)
    num_ahead = uses.total()
    reached: list[bool] = []
    for moment in reversed(forward):
        match moment:
            case do.AfterForward(unit):
                reached.append(num_ahead > 0)
                if reached[-1]:
                    yield do.BeforeBackward(unit)
            case do.BeforeForward(unit):
                if reached.pop():
                    yield gradients.passed(unit)
            case Arrival():
                num_ahead -= 1
                uses[moment] -= 1
                if not uses[moment]:
                    yield from gradients.arrive(moment)
    yield from gradients.end()


def begins_step(moment: Moment) -> bool:
    return isinstance(moment, do.BeforeForward) and moment.unit == 0 and not moment.recomputing


def in_words(moment: Moment | None, names: Sequence[str]) -> str:
    """Returns `moment` in words, as "when forward ends". `names` are the units' names."""
    match moment:
        case None:
            return "at rest"
        case do.BeforeForward(unit, recomputing):
            return f"when {'recomputing' if recomputing else 'forward'} of {names[unit]} begins"
        case do.AfterForward(unit):
            return f"when forward of {names[unit]} ends"
        case do.EndForward():
            return "when forward ends"
        case do.BeforeBackward(unit):
            return f"when backward reaches {names[unit]}"
        case Arrival(unit) | do.GroupPassed(unit):
            return f"when a gradient of {names[unit]} arrives"
        case do.GradientsReady(unit) | do.AfterBackward(unit):
            return f"when gradients of {names[unit]} are reduced"
        case do.EndBackward():
            return "when backward ends"
        case OptimizerStep():
            return "when the optimizer steps"
        case _:
            return "between steps"
