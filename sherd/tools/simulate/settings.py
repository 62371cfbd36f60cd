"""The settings of a training that a plan chooses among."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from math import isqrt
from typing import Any


@dataclass(frozen=True, slots=True)
class Mesh:
    """The axes of ranks, from the outermost, whose ranks are furthest apart.

    pp          layers: each rank has some of them
    replicate   samples; parameters are replicated
    shard       samples; parameters are sharded
      ep        a part of `shard`: each rank has some of the experts
    cp          tokens of the same samples; parameters are sharded over these ranks too
    tp          parts of each layer, for the same tokens
    """

    shard: int
    replicate: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def num_ranks(self) -> int:
        """The number of ranks on all axes."""
        return self.pp * self.num_data * self.cp * self.tp

    @property
    def num_data(self) -> int:
        """The number of ranks that read different samples."""
        return self.replicate * self.shard

    def __str__(self) -> str:
        return self.in_words()

    def in_words(self, has_replicas: bool = True) -> str:
        """Returns the mesh in words. Without replicas, parameters are sharded over `replicate` too."""
        if self.num_ranks == self.num_data and self.ep == 1:  # no other axes: names of axes say no more
            shards = f"{self.shard} rank{'' if self.shard == 1 else 's'}"
            if self.replicate == 1:
                return shards
            if self.shard == 1:
                return f"{self.replicate} {'replicas' if has_replicas else 'ranks'}"
            return f"{self.replicate} {'replicas ' if has_replicas else ''}x {shards}"
        return ", ".join(f"{name}={size}" for name, field in AXES.items() if (size := getattr(self, field)) > 1)


AXES = {"pp": "pp", "replicate": "replicate", "dp": "shard", "ep": "ep", "cp": "cp", "tp": "tp"}
"""The axes of a mesh: users' names, and the names in `Mesh`."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One way to train a model with batches of a given size.

    Attributes:
        strategy: the name of what is sharded over the data-parallel axes; "auto": zero3, over two axes hsdp.
        placement: "shard", "flat" or "whole": how parameters are cut; "whole": each has one owner.
        replicate_below: bytes; each rank keeps the whole of smaller parameters.
        wrapping: the units, as in `sherd.tools.plan.axes.auto_units`: "auto", "pairs", "parts" or "ends".
        reshard: unsharded parameters are freed after forward, except those of the root.
        checkpointing: the share of blocks, 0 to 1, that keep only their inputs for backward, and compute the rest
            again. These blocks are spread evenly.
        recompute: the part that these blocks compute again: "full" for all, or "selective" for all but attention and
            every second matrix product, whose results they keep. "own": the model's own activation checkpointing.
        offload: shards, gradients and optimizer state are in host memory.
        prefetch: the number of units that are gathered ahead.
        micro_batch: samples in one forward of one rank.
        micro_batches: forwards in a step.
    """

    mesh: Mesh
    strategy: str = "auto"
    placement: str = "shard"
    replicate_below: int = 0
    wrapping: str = "auto"
    reshard: bool = True
    checkpointing: float = 0.0
    recompute: str = "full"
    offload: bool = False
    prefetch: int = 1
    micro_batch: int = 1
    micro_batches: int = 1

    def __str__(self) -> str:
        return ", ".join(self.in_words().values())

    @property
    def num_samples(self) -> int:
        """The samples of a step, over all ranks."""
        return self.micro_batch * self.micro_batches * self.mesh.num_data

    @property
    def conflict(self) -> str:
        """The setting that contradicts the strategy; empty if none does."""
        # Parameters that each rank keeps cannot be different experts on different ranks, or rest on the host.
        if self.strategy == "auto":
            return ""
        return f"ep={self.mesh.ep}" if self.mesh.ep > 1 else "offload" if self.offload else ""

    @property
    def without_effect(self) -> set[str]:
        """The names of settings that change nothing."""
        # Without checkpointing no block computes again; all strategies but "auto" keep parameters anyway.
        has_none = {"recompute": not self.checkpointing, "reshard": self.strategy != "auto"}
        has_none["replicate_below"] = not self.replicate_below
        return {name for name, is_so in has_none.items() if is_so}

    def in_words(self) -> dict[str, str]:
        """Returns the settings that have an effect in words, by name."""
        without_effect = self.without_effect
        names = [name for name in NAMES if name in _WORDS and name not in without_effect]
        words = {name: _WORDS[name](getattr(self, name)) for name in names}
        words["mesh"] = self.mesh.in_words(has_replicas=self.strategy == "auto")
        words["micro_batch"] = f"{_number(self.micro_batches, 'micro-batch', 'es')} of {words['micro_batch']}"
        if self.strategy == "auto" and self.mesh.shard * self.mesh.cp == 1 and self.mesh.num_data > 1:
            words["strategy"] = "not sharded"
        return words

    def differing(self, other: Settings) -> list[str]:
        """Returns the names of the settings that differ in `other` and have an effect there."""
        without_effect = other.without_effect
        names = (name for name in NAMES if name not in without_effect)
        return [name for name in names if getattr(self, name) != getattr(other, name)]


UNITS = {
    "auto": "units as usual",
    "pairs": "pairs of blocks as units",
    "parts": "parts of blocks as units",
    "ends": "embedding and head as units",
}
NAMES = tuple(each.name for each in fields(Settings))


_WORDS: dict[str, Callable[[Any], str]] = {
    "mesh": str,
    "strategy": lambda strategy: "all sharded" if strategy == "auto" else str(strategy),
    "placement": lambda placement: f"{placement} placement",
    "replicate_below": lambda below: f"whole below {below:,} bytes",
    "wrapping": lambda wrapping: UNITS[wrapping],
    "reshard": lambda frees: "freed after forward" if frees else "kept for backward",
    "checkpointing": lambda share: {0: "activations kept", 1: "blocks computed again"}.get(
        share, f"{share:.0%} of blocks computed again"
    ),
    "recompute": lambda part: {"selective": "selectively recomputed", "own": "as the model does"}.get(
        part, "fully recomputed"
    ),
    "offload": lambda offloads: "shards in host memory" if offloads else "shards on the device",
    "prefetch": lambda num: f"{num} prefetched",
    "micro_batch": lambda num: _number(num, "sample"),
}
"""By the name of a setting: its value in words."""


def _number(num: int, what: str, plural: str = "s") -> str:
    return f"{num:,} {what}{'' if num == 1 else plural}"


SHARES = tuple(eighth / 8 for eighth in range(9))
"""The shares of blocks that may be computed again."""


@dataclass(frozen=True, slots=True)
class Space:
    """The possible settings of a training with `batch` samples a step on `num_ranks` ranks, `per_node` to a node.

    Attributes:
        fixed: the names of settings that are not chosen.
        most_samples: the most samples in one forward of a rank.
        axes: the axes of a mesh, besides `replicate` and `shard`, that may have several ranks.
        wrappings: the ways to make units that the model allows.
        placements: the ways to cut parameters that are worth a try.
        shares: the shares of blocks that may be computed again.
        fits: returns True if the model can be laid over a mesh.
    """

    num_ranks: int
    batch: int
    per_node: int
    fixed: frozenset[str] = frozenset()
    most_samples: int = 64
    axes: tuple[str, ...] = ()
    wrappings: tuple[str, ...] = ("auto",)
    placements: tuple[str, ...] = ("shard", "flat")
    shares: tuple[float, ...] = SHARES
    fits: Callable[[Mesh], bool] = lambda mesh: True

    def meshes(self, near: Mesh) -> Iterator[Mesh]:
        """Yields the meshes of all ranks that differ from `near` in the number of replicas, or in one other axis."""
        return (mesh for meshes in self._meshes_by_axis(near) for mesh in meshes)

    def _meshes_by_axis(self, near: Mesh) -> Iterator[Iterator[Mesh]]:
        yield filter(self.fits, self._replicas(near))
        for axis in self.axes:
            yield filter(self.fits, self._along(axis, near))

    def _along(self, axis: str, near: Mesh) -> Iterator[Mesh]:
        # The ranks of the axis come from, or go to, the ranks that read different samples.
        most = self.per_node if axis == "tp" else self.num_ranks
        for size in divisors(self.num_ranks, min(most, MOST_RANKS)):
            if axis != "ep":
                kept = replace(near, **{axis: 1, "ep": 1}).num_ranks // near.num_data * size
                data, rest = divmod(self.num_ranks, kept)
                mesh = replace(near, shard=data, replicate=1, **{axis: size})
            else:
                mesh, rest = replace(near, ep=size), near.shard % size
            if not rest and mesh != near:
                yield mesh

    def _replicas(self, near: Mesh) -> Iterator[Mesh]:
        inside = near.cp * near.tp
        for replicas in divisors(near.num_data):
            shard = near.num_data // replicas
            ranks = shard * inside
            is_even = ranks % self.per_node == 0 or self.per_node % ranks == 0  # whole nodes, or equal parts of one
            # A user who asks for a strategy asks that something is sharded.
            is_asked = "strategy" not in self.fixed or shard * near.cp > 1 or near.num_data == 1
            if shard % near.ep == 0 and (shard == near.num_data or is_even) and is_asked:
                yield replace(near, shard=shard, replicate=replicas)

    def with_values(self, settings: Settings, values: Mapping[str, Any]) -> Settings | None:
        """Returns `settings` with other values and the resulting number of micro-batches. None: they are impossible."""
        changed = replace(settings, **values)
        if not changed.checkpointing and "recompute" not in self.fixed:
            changed = replace(changed, recompute="full")
        times, rest = divmod(self.batch, changed.mesh.num_data * changed.micro_batch)
        is_possible = times >= changed.mesh.pp and not rest and not changed.conflict
        return replace(changed, micro_batches=times) if is_possible else None

    @property
    def choices(self) -> list[str]:
        """The names of settings that may be chosen."""
        return [name for name in ("mesh", "micro_batch", *VALUES) if name not in self.fixed]

    def neighbours(self, settings: Settings) -> Iterator[Settings]:
        """Yields the settings that differ from `settings` in one choice."""
        for name in self.choices:
            yield from self.changed(settings, name)

    def changed(self, settings: Settings, name: str) -> Iterator[Settings]:
        """Yields `settings` with each other value of one choice."""
        return (each for line in self.lines(settings, name) for each in line)

    def lines(self, settings: Settings, name: str) -> Iterator[Iterator[Settings]]:
        """Yields `settings` with each other value of one choice, in ascending order: a line for each axis of a mesh."""
        values: Iterable[Any] = VALUES.get(name, ())
        if name == "wrapping":
            values = self.wrappings
        elif name == "placement":
            values = self.placements
        elif name == "checkpointing":
            values = self.shares
        elif name == "micro_batch":
            values = divisors(self.batch // settings.mesh.num_data, self.most_samples)
        for line in self._meshes_by_axis(settings.mesh) if name == "mesh" else [iter(values)]:
            others = (value for value in line if value != getattr(settings, name))
            changed = (self.with_values(settings, {name: value}) for value in others)
            yield (each for each in changed if each is not None)


MOST_RANKS = 16
"""The most ranks of an axis, except the axes of samples."""

VALUES: dict[str, tuple[Any, ...]] = {
    "checkpointing": SHARES,
    "recompute": ("full", "selective"),
    "strategy": ("auto", "zero2", "zero1", "ddp"),
    "placement": ("shard", "flat", "whole"),
    "wrapping": tuple(UNITS),
    "reshard": (True, False),
    "prefetch": (0, 1, 2),
    "offload": (True, False),
}

STRATEGIES = {
    "auto": "auto",
    "zero3": "auto",
    "fsdp": "auto",
    "full_shard": "auto",
    "hsdp": "auto",
    "hybrid_shard": "auto",
    "zero2": "zero2",
    "shard_grad_op": "zero2",
    "zero1": "zero1",
    "ddp": "ddp",
    "no_shard": "ddp",
}
"""The strategies of `VALUES` by all their names: DeepSpeed's stages and the strategies of torch's FSDP1."""
HYBRID = ("hsdp", "hybrid_shard")
"""The names of strategies on a mesh with replicas."""


def usual_name(strategy: object) -> str:
    """Returns the name of a strategy, or of a member of torch's `ShardingStrategy`, in the form of `STRATEGIES`."""
    return str(getattr(strategy, "name", strategy)).lower().replace("-", "_").replace("zero_", "zero")


def divisors(number: int, most: int | None = None) -> Iterator[int]:
    """Yields the whole numbers that divide `number`, up to `most`."""
    most, root = number if most is None else min(number, most), isqrt(number)
    for each in range(1, min(most, root) + 1):
        if number % each == 0:
            yield each
    if most > root:
        for each in range(root, 0, -1):
            if number % each == 0 and root < number // each <= most:
                yield number // each
