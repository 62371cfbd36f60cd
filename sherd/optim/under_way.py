"""Steps that wait for an exchange while a backward goes on.

    backward of    block 3        block 2        block 1        block 0
    step of 3                     to owners      products       apply
    step of 2                                    to owners      products       apply

The exchange of one block overlaps the products of the block after it, and the backward of the blocks before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Parts = Iterator[None]
"""A step, which yields where it would wait for what other ranks send."""


class StepsUnderWay:
    """Steps that were begun and wait for an exchange, the oldest first."""

    def __init__(self) -> None:
        self._steps: deque[Parts] = deque()

    def __bool__(self) -> bool:
        return bool(self._steps)

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """Make steps in this context up to their first wait; then go on with each earlier one up to its next."""
        earlier, self._steps = self._steps, deque()
        token = _taking.set(self)
        try:
            yield
            self._go_on(earlier)
        except BaseException:
            self._steps.clear()
            raise
        finally:
            _taking.reset(token)

    def begin(self, step: Parts) -> None:
        """Make a step up to its first wait."""
        self._steps.extend(_still_waiting([step]))

    def finish(self) -> None:
        """Make all steps to their ends. Updates of the newest are sent first, as forward reads its unit first."""
        while self._steps:
            earlier, self._steps = self._steps, deque()
            self._go_on(earlier)

    def _go_on(self, earlier: deque[Parts]) -> None:
        # The newest first: what an older one waits for has been under way for longer when its turn comes.
        self._steps.extendleft(_still_waiting(reversed(earlier)))


def _still_waiting(steps: Iterable[Parts]) -> list[Parts]:
    """Makes the next part of each step. Returns those that wait once more."""
    is_over = object()
    return [step for step in steps if next(step, is_over) is not is_over]


_taking: ContextVar[StepsUnderWay | None] = ContextVar("sherd_steps_under_way", default=None)


def carry_out(step: Parts) -> None:
    """Make a step to its end; inside of `StepsUnderWay.beginning` up to its first wait."""
    steps = _taking.get()
    if steps is None:
        deque(step, 0)
    else:
        steps.begin(step)
