"""The state of a unit's comparisons with the other ranks (`guard/checker.py`)."""

from __future__ import annotations

from collections.abc import Callable


class Compared:
    """The part of that state which the unit itself changes, on this rank.

    Attributes:
        digest: a number for the unit's terms, None after a change.
        has_replicas: other ranks hold copies of some shards.
        num_steps: the optimizer steps that its shards have had.
        replicas_may_differ: replicas have not compared their values since they were made or loaded.
        are_loaded: shards were loaded since the last collective.
    """

    __slots__ = ("are_loaded", "digest", "has_replicas", "num_steps", "replicas_may_differ")

    def __init__(self) -> None:
        self.has_replicas = self.replicas_may_differ = self.are_loaded = False
        self.digest: int | None = None
        self.num_steps = 0

    def have_replicas(self, have: bool) -> None:
        """Note whether other ranks hold copies of some shards."""
        self.replicas_may_differ |= have and not self.has_replicas
        self.has_replicas = have

    def stepped(self) -> None:
        self.num_steps += 1

    def loaded(self) -> None:
        """Shards have values that came to each rank by itself."""
        self.are_loaded = True
        self.doubt_replicas()

    def take_load(self) -> bool:
        were_loaded, self.are_loaded = self.are_loaded, False
        return were_loaded

    def doubt_replicas(self) -> None:
        """Let replicas compare their values, if there are any, at the next collective."""
        self.replicas_may_differ = self.has_replicas

    def changed(self) -> None:
        self.digest = None

    def know(self, digest: Callable[[], int]) -> int:
        """Returns the digest, and asks for it if there is none."""
        if self.digest is None:
            self.digest = digest()
        return self.digest

    def agreed(self) -> None:
        """All ranks have compared this unit."""
        self.replicas_may_differ = False
