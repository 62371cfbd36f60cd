"""The settings of a training that a plan chooses among."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Mesh:
    """The ranks: each of `replicate` replicas of the model is sharded over `shard` ranks, which are neighbours."""

    shard: int
    replicate: int = 1

    @property
    def num_ranks(self) -> int:
        """All ranks of both axes."""
        return self.shard * self.replicate

    def __str__(self) -> str:
        ranks = f"{self.shard} rank{'' if self.shard == 1 else 's'}"
        return ranks if self.replicate == 1 else f"{self.replicate} replicas x {ranks}"


@dataclass(frozen=True, slots=True)
class Settings:
    """One way to train a model with batches of a given size.

    Attributes:
        placement: "shard" or "flat": how parameters are cut.
        reshard: unsharded parameters are freed after forward, but for the root's.
        checkpointing: blocks keep only their inputs for backward, and compute the rest again.
        offload: shards, gradients and optimizer state are in host memory.
        prefetch: units that are gathered ahead.
        micro_batch: samples in one forward of one rank.
        micro_batches: forwards in a step.
    """

    mesh: Mesh
    placement: str = "shard"
    reshard: bool = True
    checkpointing: bool = False
    offload: bool = False
    prefetch: int = 1
    micro_batch: int = 1
    micro_batches: int = 1

    def __str__(self) -> str:
        return ", ".join(self.in_words().values())

    def in_words(self) -> dict[str, str]:
        """Returns each setting in words, by its name."""
        return {name: _words(name, getattr(self, name)) for name in NAMES}

    def differing(self, other: Settings) -> list[str]:
        """Returns the names of the settings that `other` has otherwise."""
        return [name for name in NAMES if getattr(self, name) != getattr(other, name)]


NAMES = tuple(each.name for each in fields(Settings))


def _words(name: str, value: object) -> str:
    match name, value:
        case "mesh", _:
            return str(value)
        case "placement", _:
            return f"{value} placement"
        case "reshard", True:
            return "freed after forward"
        case "reshard", False:
            return "kept for backward"
        case "checkpointing", True:
            return "blocks computed again"
        case "checkpointing", False:
            return "activations kept"
        case "offload", True:
            return "shards in host memory"
        case "offload", False:
            return "shards on the device"
        case "prefetch", _:
            return f"{value} prefetched"
        case "micro_batch", _:
            return f"{value} sample{'' if value == 1 else 's'} at once"
        case _:
            return f"{value} time{'' if value == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class Space:
    """The settings that may be chosen for a training of `batch` samples in each step on `num_ranks` ranks, which are
    `per_node` to a node. `fixed`: names of settings that are as they are. `most_samples`: in one forward of a rank."""

    num_ranks: int
    batch: int
    per_node: int
    fixed: frozenset[str] = frozenset()
    most_samples: int = 64

    def meshes(self) -> Iterator[Mesh]:
        """Yields the meshes of all ranks, as replicas that are whole nodes, or equal parts of one."""
        for shard in divisors(self.num_ranks):
            if shard == self.num_ranks or shard % self.per_node == 0 or self.per_node % shard == 0:
                yield Mesh(shard, self.num_ranks // shard)

    def neighbours(self, settings: Settings) -> Iterator[Settings]:
        """Yields the settings that differ from `settings` in one choice."""
        for name, values in self._choices():
            if name not in self.fixed:
                yield from (replace(settings, **{name: value}) for value in values)
        if "micro_batch" not in self.fixed:
            each = self.batch // self.num_ranks
            for size in divisors(each):
                if size <= self.most_samples:
                    yield replace(settings, micro_batch=size, micro_batches=each // size)

    def _choices(self) -> Iterator[tuple[str, Iterable[Any]]]:
        yield "mesh", self.meshes()
        yield "placement", ("shard", "flat")
        yield "reshard", (True, False)
        yield "checkpointing", (True, False)
        yield "offload", (True, False)
        yield "prefetch", (0, 1, 2)


def divisors(number: int) -> Iterator[int]:
    """Yields the whole numbers that divide `number`."""
    return (each for each in range(1, number + 1) if number % each == 0)
