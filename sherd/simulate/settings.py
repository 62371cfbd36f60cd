"""The settings of a training that a plan chooses among."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace


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
        return f"{self.shard} ranks" if self.replicate == 1 else f"{self.replicate} replicas x {self.shard} ranks"


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
    """All settings of a training of `batch` samples in each step on `num_ranks` ranks. `most_samples` at once."""

    num_ranks: int
    batch: int
    per_node: int
    most_samples: int = 64
    has_host_memory: bool = True

    def meshes(self) -> Iterator[Mesh]:
        """Yields the meshes that sharding may use: all ranks, or whole nodes, or parts of a node, as replicas."""
        for shard in _divisors(self.num_ranks):
            if shard == self.num_ranks or shard % self.per_node == 0 or self.per_node % shard == 0:
                yield Mesh(shard, self.num_ranks // shard)

    def micro_batches(self, mesh: Mesh) -> Iterator[tuple[int, int]]:
        """Yields the samples in one forward, and the forwards in one step. None if ranks do not divide the batch."""
        each, rest = divmod(self.batch, mesh.num_ranks)
        if rest == 0:
            yield from ((size, each // size) for size in _divisors(each) if size <= self.most_samples)

    def neighbours(self, settings: Settings) -> Iterator[Settings]:
        """Yields the settings that differ from `settings` in one choice."""
        for mesh in self.meshes():
            yield replace(settings, mesh=mesh)
        for size, times in self.micro_batches(settings.mesh):
            yield replace(settings, micro_batch=size, micro_batches=times)
        for placement in ("shard", "flat"):
            yield replace(settings, placement=placement)
        for reshard in (True, False):
            yield replace(settings, reshard=reshard)
        for checkpointing in (True, False):
            yield replace(settings, checkpointing=checkpointing)
        for offload in (True, False) if self.has_host_memory else ():
            yield replace(settings, offload=offload)
        for prefetch in (0, 1, 2):
            yield replace(settings, prefetch=prefetch)


def _divisors(number: int) -> Iterator[int]:
    return (each for each in range(1, number + 1) if number % each == 0)
