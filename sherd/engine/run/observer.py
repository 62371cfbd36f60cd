"""An observer of a running model, such as a watch over its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from sherd.schedule.actions import Action, Event


class Observer(Protocol):
    """Sees what happens in a runtime."""

    def begins(self, event: Event) -> None:
        """`event` is about to be given to the schedule."""

    def perform(self, action: Action, perform: Callable[[], None]) -> None:
        """Have `action` carried out, by `perform()`."""

    def ended(self, event: Event) -> None:
        """All that `event` asked for was done."""
