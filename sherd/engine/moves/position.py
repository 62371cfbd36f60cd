"""Where the parameters of one group are, and which moves are legal."""

from __future__ import annotations

from sherd.errors import StateError
from sherd.schedule.state import Live

MOVES = {
    Live.SHARDED: {Live.GATHERING},
    Live.GATHERING: {Live.UNSHARDED, Live.SHARDED},
    Live.UNSHARDED: {Live.SHARDED, Live.SHRUNK},
    Live.SHRUNK: {Live.GATHERING, Live.SHARDED},
}


class Position:
    """Where the parameters of one group are (`live`). A move that is not in the table raises with both names."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.live = Live.SHARDED

    def move(self, to: Live) -> None:
        """Go to `to`. Raises `StateError` if there is no such move."""
        if to not in MOVES[self.live]:
            raise StateError(f"parameters of {self._name} cannot go from {self.live.name} to {to.name}")
        self.live = to
