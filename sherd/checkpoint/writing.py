"""A save: what each rank writes is found out first, then all write, then the first rank makes it a checkpoint."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import reduce
from itertools import zip_longest

import torch
from torch import nn

from sherd.checkpoint.choosing import Choice, Party, choose, is_written_here
from sherd.checkpoint.items import Item
from sherd.checkpoint.pieces import Described, Layouts, grid_of, pieces_here, sampled
from sherd.checkpoint.ranks import Ranks
from sherd.checkpoint.tensor_bytes import dtype_name
from sherd.checkpoint.tree import Json, Tensors, encoded
from sherd.comm.agreement import in_short
from sherd.errors import CheckpointError, CommError
from sherd.layout.boxes import Box, Grid, Piece
from sherd.layout.placement import Shape
from sherd.storage.folder import Folder, faults, file_name
from sherd.storage.manifest import MANIFEST, Entry, File, Manifest, name_in_file, parsed
from sherd.storage.places import Chunks, Place
from sherd.storage.writing import Content, write_file

PER_RANK = "per_rank"
"""Where the values have what belongs to single ranks, by their number."""
GIVEN, RANDOM = "given", "random"
"""Under these names a rank keeps what the user gave as `per_rank`, and its random generators."""


@dataclass(frozen=True)
class Parts:
    """The tensors that this rank writes: parts by their name in the file. `listed` are the boxes of tensors of which
    each rank lists its own, and `private` the tensors that only this rank has."""

    tensors: dict[str, torch.Tensor]
    listed: dict[str, list[Box]]
    private: dict[str, tuple[str, Shape]]
    values: Json


@dataclass(frozen=True)
class Plan:
    """A save as one rank sees it. What is the same on all ranks is `described`, `choices`, `aliases` and `values`."""

    step: int
    save_id: str
    described: Mapping[str, Described]
    choices: Mapping[str, Choice]
    aliases: Mapping[str, str]
    values: Mapping[str, Json]
    user: Json
    parts: Parts


def plan(items: Sequence[Item], ranks: Ranks, step: int, user: Json, own: Mapping[str, object]) -> Plan:
    """Returns what is to be saved. All ranks must call it; they exchange a digest, and what differs where that does.

    Args:
        items: the items.
        ranks: the ranks that save.
        step: the number of the step.
        user: JSON.
        own: what this rank has for itself, by name.

    Raises:
        CheckpointError: an item holds what cannot be saved.
    """

    flags = ranks.each(lambda: [item.needs_comparison() for item in items], "the look at what is saved")
    held = _Held()

    def hold() -> tuple[bytes, str]:
        layouts = Layouts(ranks.numbers)
        for item, *of_ranks in zip(items, *flags, strict=True):
            held.take(item, compare=any(of_ranks), layouts=layouts)
        return _digest(held.described), secrets.token_hex(4)

    told = ranks.each(hold, "the comparison of what is saved")
    digests, save_id = [digest for digest, _ in told], told[0][1]
    parties, values, aliases = [Party(tuple(range(ranks.size)), held.described)], held.values, held.aliases
    if len(set(digests)) > 1:
        leads = digests.index(digests[ranks.rank]) == ranks.rank
        mine = (held.described, values, aliases) if leads else None
        leaders = [each for each in ranks.gather(mine, "the exchange of what is saved") if each is not None]
        members = [tuple(r for r, d in enumerate(digests) if d == digest) for digest in dict.fromkeys(digests)]
        parties = [Party(who, of) for who, (of, _, _) in zip(members, leaders, strict=True)]
        values = reduce(_together, [each for _, each, _ in leaders])
        aliases = {name: other for _, _, each in leaders for name, other in each.items()}
        _require_one(held, parties, ranks)
    choices = choose(parties)
    parts: list[Parts] = []
    ranks.each(lambda: parts.append(_parts(held, choices, ranks.rank, own)), "the look at what this rank saves")
    everything = {name: tensor for party in reversed(parties) for name, tensor in party.tensors.items()}
    ordered = {name: everything[name] for name in choices}
    return Plan(step, save_id, ordered, choices, aliases, values, user, parts[0])


def _require_one(held: _Held, parties: Sequence[Party], ranks: Ranks) -> None:
    """Compare parameters that some ranks hold in one way and some in another, as norms under tensor parallelism.

    Raises:
        CheckpointError: they have other shapes, or elements further apart than rounding brings copies of one tensor.
    """
    variants: dict[str, set[tuple[object, ...]]] = {}
    for party in parties:
        for name, of in party.tensors.items():
            variants.setdefault(name, set()).update([of.variant] if of.copies else [])
    several = [name for name, each in variants.items() if len(each) > 1]
    mine = {name: each for name in several if isinstance(each := held.tensors.get(name), nn.Parameter)}
    told = ranks.each(lambda: {name: sampled(name, each) for name, each in mine.items()}, "the comparison of copies")
    for name in several:
        found = [each[name] for each in told if name in each]
        one = ChainMap(*found)
        far = max(map(abs, one.values()), default=0) / 100
        if any(abs(value - one[at]) > far for each in found for at, value in each.items()):
            firsts = [ranks.numbers[party.ranks[0]] for party in parties if name in party.tensors]
            raise CheckpointError(
                f"{name} is not one tensor: ranks {firsts} hold other values of it, each on a mesh of its own. Make it "
                "a DTensor over the mesh axis that tells them apart, as experts are in docs/understand/strategies.md, "
                "or give it another name on each of them"
            )


class _Held:
    """The tensors and values of all items, as this rank holds them."""

    def __init__(self) -> None:
        self.tensors = Tensors()
        self.described: dict[str, Described] = {}
        self.values: dict[str, Json] = {}
        self.aliases: dict[str, str] = {}

    def take(self, item: Item, compare: bool, layouts: Layouts) -> None:
        """Add an item."""
        tensors, self.values[item.name] = item.held(compare)
        for name, tensor in tensors.items():
            self.tensors.keep(name, tensor)
        self.described |= {name: layouts.described(name, tensor) for name, tensor in tensors.items()}
        self.aliases |= item.aliases()


def _digest(described: Mapping[str, Described]) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    meshes: dict[int, bytes] = {}
    for name, tensor in described.items():
        copies = tensor.copies
        if id(copies) not in meshes:
            of_mesh = copies and (copies.files, copies.firsts, copies.cuts)
            meshes[id(copies)] = hashlib.blake2b(repr(of_mesh).encode(), digest_size=16).digest()
        found.update(f"{name}\0{tensor.dtype}{tensor.shape}".encode() + meshes[id(copies)])
    return found.digest()


def _parts(held: _Held, choices: Mapping[str, Choice], rank: int, own: Mapping[str, object]) -> Parts:
    parts: dict[str, torch.Tensor] = {}
    listed: dict[str, list[Box]] = {}
    for name, tensor in held.tensors.items():
        of = held.described[name]
        if not is_written_here(of, choices[name], rank):
            continue
        for box, part in pieces_here(name, tensor):
            key = name_in_file(name, of.shape, box)
            if key in parts:
                raise CheckpointError(f"two tensors would be called {key} in a file; rename a module or item")
            parts[key] = part
            if of.copies is not None and of.copies.cuts is None:
                listed.setdefault(name, []).append(box)
    private = Tensors()
    values = encoded(dict(own), f"{PER_RANK}/{rank}", private.keep)
    kinds = {name: (dtype_name(tensor.dtype, name), tuple(tensor.shape)) for name, tensor in private.items()}
    return Parts(parts | private, listed, kinds, values)


def _together(first: dict[str, Json], other: dict[str, Json]) -> dict[str, Json]:
    """Returns the JSON of two ranks as one: what both have is that of the first, but an optimizer has the parameters of
    both (stages of a pipeline have different ones)."""
    merged = {**other, **first}
    for name in first.keys() & other.keys():
        mine, theirs = first[name], other[name]
        if mine["kind"] == theirs["kind"] == "optimizer":
            none: dict[str, Json] = {"params": []}
            groups = [
                {**b, **a, "params": list(dict.fromkeys([*a["params"], *b["params"]]))}
                for a, b in zip_longest(mine["param_groups"], theirs["param_groups"], fillvalue=none)
            ]
            merged[name] = {**mine, "state": {**theirs["state"], **mine["state"]}, "param_groups": groups}
    return merged


# Carrying it out


@dataclass(frozen=True)
class Written:
    """The file that one rank has written, as it tells the others."""

    file: File
    listed: dict[str, list[Box]]
    private: dict[str, tuple[str, Shape]]
    values: Json


def contents_of(parts: Parts, chunks: Callable[[str, torch.Tensor], Chunks]) -> dict[str, Content]:
    """Returns the contents of this rank's file; `chunks(name, tensor)` says where the bytes come from."""
    return {
        name: Content(dtype_name(tensor.dtype, name), tuple(tensor.shape), chunks(name, tensor))
        for name, tensor in parts.tensors.items()
    }


def write(plan: Plan, contents: Mapping[str, Content], ranks: Ranks, folder: Folder) -> None:
    """Write this rank's file into `folder`, and have the first rank make the files a checkpoint.

    All ranks must call it.

    Raises:
        CheckpointError: a rank cannot write, or the first rank does not see all files. What was written is removed.
        CommError: a rank has died. What this rank has written stays until the next save removes it: the first rank may
            have heard from all before, and write a manifest that names it.
    """
    place, name = folder.folder_of(plan.step), file_name(plan.save_id, ranks.rank)
    what = f"the save of step {plan.step} to {place}"
    parts, manifests = plan.parts, list[Manifest]()

    def describe() -> None:
        manifests.append(_manifest(plan, written, ranks.size))
        _require_readable(place, manifests[0], ranks)

    try:
        written = ranks.each(
            lambda: Written(write_file(place, name, contents), parts.listed, parts.private, parts.values), what
        )
        ranks.first(describe, what)
    except CommError:
        raise
    except Exception:
        with contextlib.suppress(OSError):
            place.remove(name)
            place.drop()
        raise
    # What it leaves behind if it fails is for the folder to say: the manifest may have been written.
    ranks.first(lambda: folder.finish(plan.step, manifests[0]), what)


def _require_readable(place: Place, manifest: Manifest, ranks: Ranks) -> None:
    """Raises CheckpointError if the manifest is not one that is read (the ranks' pieces do not make up a tensor), or if
    the files that other ranks have written are not seen here."""
    parsed(manifest.to_bytes(), f"{place}/{MANIFEST}")
    wrong = faults(place, manifest.files, manifest.block_bytes)
    if wrong:
        numbers = in_short([str(ranks.numbers[number]) for number in wrong])
        raise CheckpointError(
            f"rank {ranks.numbers[0]} does not see what rank {numbers} has written ({next(iter(wrong.values()))}); all "
            "ranks need to share the folder: give all of them the same one, on a disk that all machines see"
        )


def _manifest(plan: Plan, written: Sequence[Written], world_size: int) -> Manifest:
    entries: dict[str, Entry] = {}
    for name, of in plan.described.items():
        entries[name] = Entry(of.dtype, of.shape, _layout(name, of, plan.choices[name], written))
    for number, each in enumerate(written):
        entries |= {name: Entry(dtype, shape, Grid(number)) for name, (dtype, shape) in each.private.items()}
    per_rank = {str(number): each.values for number, each in enumerate(written)}
    return Manifest(
        step=plan.step,
        save_id=plan.save_id,
        saved=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        world_size=world_size,
        files=tuple(each.file for each in written),
        tensors=entries,
        aliases={name: other for name, other in plan.aliases.items() if name not in entries and other in entries},
        values={**plan.values, PER_RANK: per_rank},
        user=plan.user,
    )


def _layout(name: str, of: Described, choice: Choice, written: Sequence[Written]) -> Grid | tuple[Piece, ...]:
    if of.copies is None:
        return Grid(choice.copy)
    if of.copies.cuts is not None:
        return grid_of(of.copies, choice.copy)
    return tuple((number, box) for number, each in enumerate(written) for box in each.listed.get(name, ()))
