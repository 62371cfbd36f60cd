"""The settings of a training that a plan chooses among."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from math import isqrt
from typing import Any

from sherd.errors import PolicyError
from sherd.policy import CODECS, CommPolicy, CPUOffloadPolicy, Disk, OffloadPolicy, Place, Reduction
from sherd.tools.simulate.values import Kind, at_least, limited, one_of


@dataclass(frozen=True, slots=True)
class Mesh:
    """The axes of ranks, from the outermost, whose ranks are furthest apart.

    pp          layers: each rank has some of them
    replicate   samples; parameters are replicated
    shard       samples; parameters are sharded
    cp          tokens of the same samples; parameters are sharded over these ranks too
    tp          parts of each layer, for the same tokens
    """

    shard: int
    replicate: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def num_ranks(self) -> int:
        return self.pp * self.num_data * self.cp * self.tp

    @property
    def num_data(self) -> int:
        """The number of ranks that read different samples."""
        return self.replicate * self.shard

    def __str__(self) -> str:
        return self.in_words()

    def in_words(self, has_replicas: bool = True) -> str:
        """Returns the mesh in words. Without replicas, parameters are sharded over `replicate` too."""
        if self.num_ranks == self.num_data:  # no other axes: names of axes say no more
            shards = f"{self.shard} rank{'' if self.shard == 1 else 's'}"
            if self.replicate == 1:
                return shards
            if self.shard == 1:
                return f"{self.replicate} {'replicas' if has_replicas else 'ranks'}"
            return f"{self.replicate} {'replicas ' if has_replicas else ''}x {shards}"
        return ", ".join(f"{name}={size}" for name, field in AXES.items() if (size := getattr(self, field)) > 1)


AXES = {"pp": "pp", "replicate": "replicate", "dp": "shard", "cp": "cp", "tp": "tp"}
"""The axes of a mesh: users' names, and the names in `Mesh`."""


UNITS = {
    "auto": "units as usual",
    "pairs": "pairs of blocks as units",
    "parts": "parts of blocks as units",
    "ends": "embedding and head as units",
}
SHARES = tuple(eighth / 8 for eighth in range(9))
"""The shares of blocks that may be computed again."""
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
"""Sherd's own names of strategies by all their names: DeepSpeed's stages and the strategies of torch's FSDP1."""
HYBRID = ("hsdp", "hybrid_shard")
"""The names of strategies on a mesh with replicas."""


OFFLOADS: dict[str, tuple[OffloadPolicy, str]] = {
    "nothing": (OffloadPolicy(), "shards on the device"),
    "state": (OffloadPolicy(optimizer="host"), "optimizer state in host memory"),
    "masters": (
        OffloadPolicy(optimizer="host", masters="host"),
        "bfloat16 weights, their masters and state on the host",
    ),
    "step": (OffloadPolicy(gradients="host"), "gradients, state and step on the host"),
    "everything": (CPUOffloadPolicy(), "shards and state in host memory"),
    "activations": (OffloadPolicy(activations="host"), "what forward saves in host memory"),
}
"""By the first word of `offload`: the policy, and words."""
_OFFLOAD = re.compile(rf"({'|'.join(OFFLOADS)})(?::(0|1|0?\.\d+|1\.0+))?(?:@(.+))?")


def parts_of_offload(value: str) -> tuple[str, float, str]:
    """Returns what is offloaded, the share of it, and the folder of a disk, "" for none."""
    match = _OFFLOAD.fullmatch(value)
    assert match is not None, "values of settings are checked"
    return match[1], 1.0 if match[2] is None else float(match[2]), match[3] or ""


def _is_offload(value: str) -> bool:
    match = _OFFLOAD.fullmatch(value)
    if match is None or (match[3] and match[1] in ("nothing", "activations")):  # those rest on no disk
        return False
    with suppress(PolicyError):  # a folder of a user who is unknown
        offload_policy(value)
        return True
    return False


def offload_policy(value: str) -> OffloadPolicy:
    """Returns the policy of a value of `offload`."""
    what, share, folder = parts_of_offload(value)
    policy = OFFLOADS[what][0]
    if folder:
        disk = Disk(folder)
        shards: Place = disk if policy.parameters == "host" else policy.parameters
        policy = replace(policy, parameters=shards, optimizer=disk, masters=policy.masters and disk)
    return replace(policy, share=share)


def nearest_offload(policies: Iterable[tuple[OffloadPolicy, int]]) -> str:
    """Returns the value of `offload` for units with these policies, each with its bytes."""
    of_axes: Counter[tuple[bool, ...]] = Counter()
    folder = ""
    for policy, nbytes in policies:
        of_axes[_axes(policy)] += nbytes
        for place in (policy.optimizer, policy.masters):
            folder = f"@{place.path}" if isinstance(place, Disk) else folder
    words = {_axes(policy): word for word, (policy, _) in OFFLOADS.items()}
    (most, nbytes), *_ = Counter({axes: of_axes[axes] for axes in of_axes if any(axes)}).most_common(1) or [((), 0)]
    share = nbytes / max(1, of_axes.total())
    word = words.get(most, "nothing")
    return word + (f":{share:.2f}" if 0 < share < 1 else "") + folder * (word != "nothing")


def _axes(policy: OffloadPolicy) -> tuple[bool, ...]:
    places = (policy.parameters, policy.step_place, policy.state_place, policy.masters or "device", policy.activations)
    return tuple(place != "device" for place in places)


def _offload_in_words(value: str) -> str:
    what, share, folder = parts_of_offload(value)
    of = "" if share in (0.0, 1.0) else f" ({share:.0%})"
    words = OFFLOADS[what if share else "nothing"][1]
    if folder and what != "step":
        words = words.replace("in host memory", "on a disk").replace("on the host", "on a disk")
    return f"{words}{of}{', state on a disk' * (what == 'step' and bool(folder))}"


FORMATS: dict[str, tuple[str, ...]] = {
    "gather": ("own", *CODECS),
    "reduce": ("own", "bf16", *CODECS),
    "reduce_replicas": ("same", "own", "bf16", *CODECS),
}
"""The formats of each message that may have fewer bits. The first one changes no value."""
COSTS = {
    "bf16": (0.5, "1/256 of the value"),
    "int8": (0.254, "largest/250 of a block"),
    "fp8_e4m3": (0.254, "1/16 of the value"),
    "fp8_e5m2": (0.254, "1/8 of the value"),
    "int4": (0.141, "largest/13.9 of a block"),
}
"""By format, the bytes as a part of those of float32, and the most that an element is off by, about."""


def comm_policy(choice: Any, bf16: Any, **options: Any) -> CommPolicy:
    """Returns the policy with the formats of `choice`, a `Settings` or a record with the same fields of formats.

    `bf16` is torch's dtype: settings are read without torch.
    """
    order = "ranks" if choice.reproducible else "any"

    def reduction(word: str) -> Reduction:
        return Reduction({"own": None, "bf16": bf16}.get(word, word), order=order)

    of_shards, of_replicas = choice.reduce, choice.reduce_replicas
    return CommPolicy(
        gather=None if choice.gather == "own" else choice.gather,
        reduce=None if (of_shards, order) == ("own", "any") else reduction(of_shards),
        reduce_replicas=None if of_replicas in ("same", of_shards) else reduction(of_replicas),
        **options,
    )


def _format(name: str, about: str, what: str) -> Any:
    default, *_ = FORMATS[name]
    words = {"own": f"{what} as they are", "same": f"{what} as the others"}
    return limited(default, about, one_of(*FORMATS[name]), words=lambda word: words.get(word, f"{word} {what}"))


@dataclass(frozen=True, slots=True)
class Settings:
    """One way to train a model with batches of a given size. Each field has its values, its text and its words.

    `strategy` "auto" is zero3, over two axes hsdp. `recompute` "own" is the model's own activation checkpointing. The
    blocks that compute again are spread evenly. `micro_batches` are the forwards in a step.
    """

    mesh: Mesh
    strategy: str = limited(
        "auto",
        f"what is sharded: {', '.join(STRATEGIES)}; auto: all",
        Kind(str, f"one of {', '.join(STRATEGIES)}", lambda name: usual_name(name) in STRATEGIES),
        words=lambda name: "all sharded" if name == "auto" else name,
    )
    placement: str = limited(
        "shard",
        "a parameter is cut between rows, anywhere, or not at all",
        one_of("shard", "flat", "whole"),
        words=lambda name: f"{name} placement",
    )
    replicate_below: int = limited(
        0,
        "bytes; each rank keeps smaller parameters unsharded",
        at_least(0),
        words=lambda below: f"unsharded below {below:,} bytes",
    )
    wrapping: str = limited(
        "auto",
        "what is a unit: a block, two, also parts of it, or also embedding and head",
        one_of(*UNITS),
        words=UNITS.__getitem__,
    )
    reshard: bool = limited(
        True,
        "free unsharded parameters after forward, but for the root's",
        words=lambda frees: "freed after forward" if frees else "kept for backward",
    )
    checkpointing: float = limited(
        0.0,
        "share of the blocks that keep only their input for backward, and compute the rest again",
        Kind(float, "the share of blocks, 0 to 1", lambda share: 0 <= share <= 1),
        words=lambda share: {0: "activations kept", 1: "blocks computed again"}.get(
            share, f"{share:.0%} of blocks computed again"
        ),
    )
    recompute: str = limited(
        "full",
        "of these: all, or not attention and every second matrix product",
        one_of("full", "selective"),
        words=lambda part: {"selective": "selectively recomputed", "own": "as the model does"}.get(
            part, "fully recomputed"
        ),
    )
    offload: str = limited(
        "nothing",
        "what rests in host memory (for accelerators): docs/do/plan.md",
        Kind(
            str,
            f"one of {', '.join(OFFLOADS)}; :SHARE of it; @FOLDER of a disk in the host's place: state:0.5@/scratch",
            _is_offload,
            others={"true": "everything", "yes": "everything", "false": "nothing", "no": "nothing"},
        ),
        words=_offload_in_words,
    )
    prefetch: int = limited(1, "units gathered ahead", at_least(0), words=lambda num: f"{num} prefetched")
    micro_batch: int = limited(
        1, "samples in one forward of one rank", at_least(1), words=lambda num: _number(num, "sample")
    )
    gather: str = _format("gather", "format of parameters on their way: docs/do/fewer_bits.md", "gathers")
    reduce: str = _format("reduce", "format of gradients on their way to their owners", "reductions")
    reduce_replicas: str = _format(
        "reduce_replicas", "the same between replicas (HSDP); same: as reduce", "reductions between replicas"
    )
    reproducible: bool = limited(
        False,
        "the same bits on any number of ranks: docs/do/reproducible.md",
        words=lambda is_so: "added up in the order of ranks" if is_so else "added up in any order",
    )
    step_in_backward: bool = limited(
        False,
        "step each unit within backward; excludes clipping, so never chosen: docs/do/offload.md",
        words=lambda is_so: "stepped within backward" if is_so else "stepped after backward",
    )
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
        if self.strategy == "auto":
            return ""
        if self.offload != "nothing":
            return "offload"  # what each rank keeps cannot rest there
        return "gather" if self.gather != "own" else ""  # it would be rounded: the shards are parts of it

    @property
    def without_effect(self) -> set[str]:
        """The names of settings that change nothing."""
        # Without checkpointing no block computes again; all strategies but "auto" keep parameters anyway.
        has_none = {"recompute": not self.checkpointing, "reshard": self.strategy != "auto"}
        has_none["replicate_below"] = not self.replicate_below
        has_none["reduce_replicas"] = self.strategy != "auto" or self.mesh.replicate == 1
        has_none |= {name: not getattr(self, name) for name in ("reproducible", "step_in_backward")}
        return {name for name, is_so in has_none.items() if is_so}

    @property
    def formats(self) -> dict[str, str]:
        """The messages that have a format of fewer bits, each with its format."""
        return {name: word for name in FORMATS if (word := getattr(self, name)) in COSTS}

    def in_words(self) -> dict[str, str]:
        """Returns the settings that have an effect in words, by name; of formats those that change values."""
        usual = FORMATS.keys() - self.formats
        return {name: words for name, words in self.all_in_words().items() if name not in usual}

    def all_in_words(self) -> dict[str, str]:
        """Returns the settings that have an effect in words, by name."""
        without_effect = self.without_effect
        words = {"mesh": self.mesh.in_words(has_replicas=self.strategy == "auto")}
        words |= {
            name: of.metadata["words"](getattr(self, name))
            for name, of in _FIELDS.items()
            if name not in without_effect
        }
        words["micro_batch"] = f"{_number(self.micro_batches, 'micro-batch', 'es')} of {words['micro_batch']}"
        if self.strategy == "auto" and self.mesh.shard * self.mesh.cp == 1 and self.mesh.num_data > 1:
            words["strategy"] = "not sharded"
        return words

    def differing(self, other: Settings) -> list[str]:
        """Returns the names of the settings that differ in `other` and have an effect there."""
        without_effect = other.without_effect
        names = (name for name in NAMES if name not in without_effect)
        return [name for name in names if getattr(self, name) != getattr(other, name)]


NAMES = tuple(each.name for each in fields(Settings))
_FIELDS = {each.name: each for each in fields(Settings) if each.metadata}
KINDS: dict[str, Kind] = {name: each.metadata["kind"] for name, each in _FIELDS.items()}
"""The values of settings, by name; not those of the mesh, nor of the micro-batches, which follow from the others."""


def setting(name: str) -> Any:
    """Returns the field `name` of `Settings`, for a record of a training that has this setting too."""
    return limited(_FIELDS[name].default, **_FIELDS[name].metadata)


def _number(num: int, what: str, plural: str = "s") -> str:
    return f"{num:,} {what}{'' if num == 1 else plural}"


@dataclass(frozen=True, slots=True)
class Space:
    """The possible settings of a training with `batch` samples a step on `num_ranks` ranks, `per_node` to a node.

    Attributes:
        fixed: the names of settings that are not chosen.
        most_samples: the most samples in one forward of a rank.
        axes: the axes of a mesh, other than `replicate` and `shard`, that may have several ranks.
        wrappings: the ways to make units that the model allows.
        placements: the ways to cut parameters that are worth a try.
        shares: the shares of blocks that may be computed again.
        formats: the formats of fewer bits that may be chosen; they change values.
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
    formats: tuple[str, ...] = ()
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
        others = replace(near, **{axis: 1}).num_ranks // near.num_data
        for size in divisors(self.num_ranks, min(most, MOST_RANKS)):
            data, rest = divmod(self.num_ranks, others * size)
            mesh = replace(near, shard=data, replicate=1, **{axis: size})
            if not rest and mesh != near:
                yield mesh

    def _replicas(self, near: Mesh) -> Iterator[Mesh]:
        inside = near.cp * near.tp
        for replicas in divisors(near.num_data):
            shard = near.num_data // replicas
            ranks = shard * inside
            is_even = ranks % self.per_node == 0 or self.per_node % ranks == 0  # full nodes, or equal parts of one
            # A user who asks for a strategy asks that something is sharded.
            is_asked = "strategy" not in self.fixed or shard * near.cp > 1 or near.num_data == 1
            if (shard == near.num_data or is_even) and is_asked:
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
        names = ("mesh", "micro_batch", *VALUES, *(FORMATS if self.formats else ()))
        return [name for name in names if name not in self.fixed]

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
        elif name == "offload":  # parts of it only once all of it is worth it
            what = parts_of_offload(settings.offload)[0]
            parts = () if what == "nothing" else (f"{what}:{share}" for share in (0.25, 0.5, 0.75))
            values = (*parts, *OFFLOADS)
        elif name in FORMATS:
            values = [word for word in FORMATS[name] if word not in COSTS or word in self.formats]
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
    "recompute": KINDS["recompute"].values,
    "strategy": ("auto", "zero2", "zero1", "ddp"),
    "placement": KINDS["placement"].values,
    "wrapping": KINDS["wrapping"].values,
    "reshard": (True, False),
    "prefetch": (0, 1, 2),
    "offload": tuple(OFFLOADS),
}
"""The values that a search tries, of one choice after the other."""


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
