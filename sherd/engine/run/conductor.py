"""The runtime, as its units know it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

Unit = TypeVar("Unit")


class Conductor(Protocol[Unit]):
    """The runtime that a unit is sealed into, as the unit knows it."""

    def show_shards(self, unit: Unit) -> None:
        """Free the unit's unsharded parameters, for somebody who will read or write shards."""

    def shards_written(self, unit: Unit) -> None:
        """Note that the unit's unsharded parameters, if there are any, are older than its shards."""

    def before_backward(self, unit: Unit) -> None:
        """Note that backward has reached the unit."""

    def finish_unshard(self, unit: Unit) -> None:
        """Wait for the unit's all-gather, if one is in flight."""

    def reset(self) -> None:
        """Have shards, and nothing in flight."""

    @property
    def units(self) -> Sequence[Unit]:
        """All units that are sealed into it."""

    @property
    def is_idle(self) -> bool:
        """Whether no forward, backward or reduction is under way."""
