"""Other work made of work that was read: with activation checkpointing, or for another number of samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from sherd.tools.simulate.work import (
    Allocate,
    EndForward,
    Enter,
    Event,
    Gradient,
    Leave,
    Op,
    Passed,
    Reached,
    Release,
    TensorKind,
    Work,
)

__all__ = ["Keeper", "checkpointed", "scaled"]

_KEPT = (TensorKind.ACTIVATION, TensorKind.LOGITS)

Keeper = Callable[[str], bool]
"""Tells of one operation after the other, by its name, whether its results are kept."""


def checkpointed(work: Work, modules: Collection[int], keeper: Callable[[], Keeper] | None = None) -> Work:
    """Returns `work` with activation checkpointing of `modules`, as `torch.utils.checkpoint` does it without reentry.

    The inputs of such a module are kept. What its forward keeps for backward is freed at the end of forward, its
    outputs apart. Backward runs the forward again when it comes to the module's first operation. It stops early as
    torch does: once all that is kept is there, in front of the next operation that makes a tensor. Modules inside of
    one of `modules` are not checkpointed once more.

    With selective checkpointing the results of some operations are kept, and not computed again. `keeper`, called for
    each forward of a module, returns what tells of one operation after the other, by name, whether its results are.

    Torch frees what a checkpointed forward keeps bit by bit, and here it is freed at the end. The peak of a step is not
    there: backward has all of it again, and gradients. Torch also makes an output again that the module itself
    saves, as ReLU does; here outputs are thought to be saved by what reads them.
    """
    numbers = count(1 + max((event.tensor for event in work.events if isinstance(event, Allocate)), default=-1))
    inserted: dict[int, list[Event]] = {}  # in front of the event at a position
    renamed: dict[int, int] = {}
    held: dict[int, int] = {}  # what is kept for longer -> the position at which it is released
    moved: set[int] = set()  # what is released when the forward runs again
    for span in _spans(work.events, frozenset(modules), keeper):
        again, new = span.again(numbers)
        inserted.setdefault(span.end, []).extend(Release(tensor) for tensor in span.freed)
        inserted.setdefault(span.reached, []).extend(again)
        renamed |= new
        only_kept = {tensor for tensor in span.kept if span.released[tensor] < span.reached}  # others are read
        moved |= only_kept.intersection(event.tensor for event in again if isinstance(event, Release))
        held |= dict.fromkeys(only_kept - moved, span.is_over)
        for tensor in span.inputs:
            if span.released[tensor] < span.is_over:
                held[tensor] = max(held.get(tensor, 0), span.is_over)
    for tensor, position in held.items():
        inserted.setdefault(position, []).append(Release(tensor))
    return replace(work, events=tuple(_rewritten(work.events, inserted, renamed, moved.union(held))))


def _rewritten(
    events: Sequence[Event], inserted: dict[int, list[Event]], renamed: dict[int, int], held: Collection[int]
) -> Iterator[Event]:
    """Yields `events` with what is inserted. Held tensors are released by that, and renamed ones by their new names."""
    for position, event in enumerate(events):
        yield from inserted.get(position, ())
        if isinstance(event, Release):
            if event.tensor not in held:
                yield Release(renamed.get(event.tensor, event.tensor))
        elif isinstance(event, Allocate) and event.tensor in held and event.kind is TensorKind.TEMPORARY:
            yield replace(event, kind=TensorKind.ACTIVATION)
        else:
            yield event


@dataclass
class _Span:
    """A forward of a checkpointed module: its events, and the positions of what matters to it.

    Attributes:
        end: the position behind its Leave.
        reached: that of the first event of its backward.
        saved: the tensors that it keeps for backward, and does not return.
        kept: results that are not made again.
        skipped: the positions of the operations that made them, within the events.
        inputs: the tensors that it was given.
        released: the position at which each tensor of the step is released.
    """

    events: Sequence[Event]
    end: int
    reached: int
    saved: list[int]
    kept: frozenset[int]
    skipped: frozenset[int]
    inputs: tuple[int, ...]
    released: dict[int, int]

    @property
    def freed(self) -> list[int]:
        """What is freed behind it, and made again."""
        return [tensor for tensor in self.saved if tensor not in self.kept]

    @property
    def is_over(self) -> int:
        """The position at which backward has released all that the forward had kept."""
        return max((self.released[tensor] for tensor in self.saved), default=self.reached)

    def again(self, numbers: Iterator[int]) -> tuple[list[Event], dict[int, int]]:
        """Returns its forward run again, up to where all that is kept is there, and the new numbers of that."""
        again, new, alive, calls = list[Event](), dict[int, int](), set[int](), list[int]()
        missing, freed = set(self.saved), self.freed
        for at, event in enumerate(self.events):
            if isinstance(event, Allocate) and not missing:
                break
            match event:
                case Allocate(tensor) if tensor in self.kept:
                    missing.discard(tensor)
                case Allocate(tensor):
                    new[tensor] = next(numbers)
                    alive.add(tensor)
                    missing.discard(tensor)
                    again.append(replace(event, tensor=new[tensor]))
                case Release(tensor):
                    if tensor in alive:
                        alive.remove(tensor)
                        again.append(Release(new[tensor]))
                    elif tensor in self.kept:
                        again.append(event)
                case Enter(module, _, inputs):
                    calls.append(module)
                    again.append(Enter(module, True, tuple(new.get(each, each) for each in inputs)))
                case Leave(module, _, outputs):
                    calls.pop()
                    again.append(Leave(module, True, tuple(new.get(each, each) for each in outputs)))
                case _ if at not in self.skipped:
                    again.append(event)
        again += [Release(new[tensor]) for tensor in alive.difference(freed)]
        again += [Leave(module, again=True) for module in reversed(calls)]
        return again, {tensor: new[tensor] for tensor in freed}


def _spans(events: Sequence[Event], modules: Collection[int], keeper: Callable[[], Keeper] | None) -> Iterator[_Span]:
    """Yields each forward of one of `modules` that is inside of no other."""
    released = {event.tensor: at for at, event in enumerate(events) if isinstance(event, Release)}
    end_forward = next(at for at, event in enumerate(events) if isinstance(event, EndForward))
    backwards = _backwards(events, end_forward, modules)
    start, inside = 0, None
    for at, event in enumerate(events[:end_forward]):
        if inside is None and isinstance(event, Enter) and event.module in modules:
            start, inside = at, event.module
        elif isinstance(event, Leave) and event.module == inside:
            inside = None
            if not backwards.get(event.module):
                continue  # backward never comes here
            reached = backwards[event.module].pop()  # the last call comes first in backward
            enter, forward = events[start], events[start : at + 1]
            assert isinstance(enter, Enter)
            made = _kept(forward, keeper()) if keeper else {}
            kept = frozenset(tensor for tensors in made.values() for tensor in tensors)
            saved = [
                each.tensor
                for each in forward
                if isinstance(each, Allocate)
                and each.kind in _KEPT
                and at < released[each.tensor]
                and each.tensor not in event.outputs
            ]
            yield _Span(forward, at + 1, reached, saved, kept, frozenset(made), enter.inputs, released)


def _kept(events: Sequence[Event], keeps: Keeper) -> dict[int, list[int]]:
    """Returns the positions of operations whose results are kept, and these. What an operation makes stands just in
    front of it."""
    found: dict[int, list[int]] = {}
    made: list[int] = []
    for at, event in enumerate(events):
        if isinstance(event, Op) and keeps(event.name):
            found[at] = made
        made = [*made, event.tensor] if isinstance(event, Allocate) else []
    return found


def _backwards(events: Sequence[Event], end_forward: int, modules: Collection[int]) -> dict[int, list[int]]:
    """Returns of each of `modules` the positions at which its backwards begin to compute."""
    found: dict[int, list[int]] = {}
    waiting: list[int] = []
    for at, event in enumerate(events[end_forward:], end_forward):
        if isinstance(event, Reached) and event.module in modules:
            waiting.append(event.module)
        elif isinstance(event, (Allocate, Op, Gradient, Passed)):
            for module in waiting:
                found.setdefault(module, []).append(at)
            waiting.clear()
    return found


def scaled(work: Work, factor: float) -> Work:
    """Returns `work` for `factor` times as many samples, by a rule of three.

    All scales, but for gradients of parameters, and other temporaries of backward that are as large as a parameter. So
    the bytes of operations are too many where weights are most of what they read: reading the model anew is exact.
    """
    sizes = {parameter.nbytes for parameter in work.parameters if parameter.is_trainable}
    in_backward, events = False, list[Event]()
    for event in work.events:
        in_backward = in_backward or isinstance(event, EndForward)
        if isinstance(event, Op):
            event = replace(event, flops=round(event.flops * factor), nbytes=round(event.nbytes * factor))
        elif isinstance(event, Allocate) and not (
            in_backward and event.kind is TensorKind.TEMPORARY and event.nbytes in sizes
        ):
            event = replace(event, nbytes=round(event.nbytes * factor))
        events.append(event)
    return replace(work, events=tuple(events), samples=round(work.samples * factor), tokens=round(work.tokens * factor))
