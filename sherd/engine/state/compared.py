"""The state of a unit's comparisons with the other ranks (`guard/checker.py`)."""

from __future__ import annotations

from collections.abc import Callable


class Compared:
    """The part of that state which the unit itself changes, on this rank.

    Attributes:
        digest: a number for the unit's terms, None after a change.
        num_steps: the optimizer steps that its shards have had.
        replicas_may_differ: replicas have not compared their values since they were made or loaded.
    """

    __slots__ = ("_has_replicas", "digest", "num_steps", "replicas_may_differ")

    def __init__(self) -> None:
        self._has_replicas = self.replicas_may_differ = False
        self.digest: int | None = None
        self.num_steps = 0

    def have_replicas(self, have: bool) -> None:
        """Note whether other ranks hold copies of some shards."""
        self.replicas_may_differ |= have and not self._has_replicas
        self._has_replicas = have

    def stepped(self) -> None:
        """An optimizer has stepped the shards."""
        self.num_steps += 1

    def loaded(self) -> None:
        """Shards have values that came to each rank by itself."""
        self.replicas_may_differ = self._has_replicas

    def changed(self) -> None:
        """The unit's terms have changed."""
        self.digest = None

    def know(self, digest: Callable[[], int]) -> int:
        """Returns the digest, and asks for it if there is none."""
        if self.digest is None:
            self.digest = digest()
        return self.digest

    def agreed(self) -> None:
        """All ranks have compared this unit."""
        self.replicas_may_differ = False
