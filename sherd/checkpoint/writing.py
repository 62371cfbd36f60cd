"""A save: ranks plan who writes what, all of them write, and the first rank makes the files a checkpoint."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import threading
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial, reduce
from itertools import count, zip_longest

import torch
from torch import nn

from sherd.checkpoint.encoding import CHUNK_BYTES, Json, SavedPart, Tensors, chunks_of, dtype_name, encoded
from sherd.checkpoint.items import Item, numbers_of
from sherd.checkpoint.pieces import Choice, Described, Layouts, Party, choose, is_written_here, pieces_here, sampled
from sherd.checkpoint.ranks import Ranks
from sherd.errors import CheckpointError, CommError, in_short
from sherd.layout.boxes import Box, Grid, Piece
from sherd.layout.placement import Shape
from sherd.storage.files import Content, write_file
from sherd.storage.folder import Folder, faults, file_name
from sherd.storage.manifest import MANIFEST, Entry, File, Manifest, name_in_file, parsed
from sherd.storage.places import Chunks, Place
from sherd.tensor.ragged import memory_of

PER_RANK = "per_rank"
"""The key of the ranks' own values in a manifest, by rank."""
GIVEN, RANDOM, STATES = "given", "random", "states"
"""Of a single rank's values: the keys of the user's `per_rank`, of the random generators, and of the items' own."""


# Planning


@dataclass(frozen=True)
class Parts:
    """The content of this rank's file, and what it tells the first rank about that.

    Args:
        tensors: the content of its file, by the names in it; of masters they are made when they are read.
        listed: the boxes of tensors whose ranks list their own parts.
        private: dtype and shape of the tensors that only this rank has.
        values: this rank's own values, as JSON.
    """

    tensors: dict[str, SavedPart]
    listed: dict[str, list[Box]]
    private: dict[str, tuple[str, Shape]]
    values: Json


@dataclass(frozen=True)
class SavePlan:
    """A save as one rank sees it. All ranks have the same `described`, `choices`, `aliases` and `values`."""

    step: int
    save_id: str
    described: Mapping[str, Described]
    choices: Mapping[str, Choice]
    aliases: Mapping[str, str]
    values: Mapping[str, Json]
    user: Json
    parts: Parts


def plan(items: Sequence[Item], ranks: Ranks, step: int, user: Json, own: Mapping[str, object]) -> SavePlan:
    """Returns the plan of a save. All ranks must call it.

    Ranks exchange digests of their tensors' descriptions, and the descriptions only if digests differ. `own` are this
    rank's own values, by name.

    Raises:
        CheckpointError: an item holds what cannot be saved.
    """
    flags = ranks.each(lambda: [item.needs_comparison() for item in items], "the look at what is saved")
    tensors = Tensors()
    described: dict[str, Described] = {}
    values: dict[str, Json] = {}
    aliases: dict[str, str] = {}

    def collect() -> tuple[bytes, str]:
        layouts = Layouts(ranks.numbers)
        for item, *flags_of_item in zip(items, *flags, strict=True):
            values[item.name] = item.contents(tensors, compare=any(flags_of_item))
            aliases.update(item.aliases())
        described.update({name: layouts.described(name, tensor) for name, tensor in tensors.items()})
        return _digest(described, values), secrets.token_hex(4)

    answers = ranks.each(collect, "the comparison of what is saved")
    digests, save_id = [digest for digest, _ in answers], answers[0][1]
    parties = [Party(tuple(range(ranks.size)), described)]
    if len(set(digests)) > 1:
        # The first rank with a digest speaks for all ranks that have the same.
        is_leader = digests.index(digests[ranks.rank]) == ranks.rank
        description = (described, values, aliases) if is_leader else None
        leaders = [each for each in ranks.gather(description, "the exchange of what is saved") if each is not None]
        members = [tuple(r for r, d in enumerate(digests) if d == digest) for digest in dict.fromkeys(digests)]
        parties = [Party(who, of_leader) for who, (of_leader, _, _) in zip(members, leaders, strict=True)]
        values = reduce(_together, [of_leader for _, of_leader, _ in leaders])
        for item in items:
            alike = [of_leader[item.name] for _, of_leader, _ in leaders if item.name in of_leader]
            values[item.name] = item.with_own_options(values[item.name], alike)
        aliases = {name: other for _, _, of_leader in leaders for name, other in of_leader.items()}
        _require_same_copies(tensors, parties, ranks)
    choices = choose(parties)
    parts: list[Parts] = []

    def take_apart() -> None:
        states = {item.name: item.own for item in items if item.own}
        parts.append(_parts(tensors, described, choices, ranks.rank, {**own, **({STATES: states} if states else {})}))

    ranks.each(take_apart, "the look at what this rank saves")
    everything = {name: tensor for party in reversed(parties) for name, tensor in party.tensors.items()}
    ordered = {name: everything[name] for name in choices}
    return SavePlan(step, save_id, ordered, choices, aliases, values, user, parts[0])


def _require_same_copies(tensors: Tensors, parties: Sequence[Party], ranks: Ranks) -> None:
    """Compare parameters that ranks hold in different ways, as norms under tensor parallelism.

    Raises:
        CheckpointError: they have other shapes, or elements further apart than rounding brings copies of one tensor; or
            a rank of a tensor's mesh has no part of it.
    """
    variants: dict[str, dict[tuple[object, ...], set[int]]] = {}
    for party in parties:
        for name, tensor in party.tensors.items():
            if tensor.copies is None:
                continue
            holders = variants.setdefault(name, {}).setdefault(tensor.variant, set())
            holders.update(party.ranks)
    for party in parties:
        for name, tensor in party.tensors.items():
            others = set(tensor.copies.files) - variants[name][tensor.variant] if tensor.copies else ()
            if others:
                holder, other = (ranks.numbers[rank] for rank in (party.ranks[0], min(others)))
                raise CheckpointError(
                    f"{name} is {tensor.dtype} {tensor.shape} on rank {holder}, and another tensor or none on rank "
                    f"{other}, which holds a part of it; make the model and the optimizer alike on all ranks"
                )
    several = [name for name, of_name in variants.items() if len(of_name) > 1]
    parameters = [name for name in several if name in tensors.masters or isinstance(tensors.get(name), nn.Parameter)]

    def sample() -> dict[str, dict[int, complex]]:
        return {name: sampled(name, tensors.present(name)) for name in parameters}

    samples = ranks.each(sample, "the comparison of copies")
    for name in several:
        of_ranks = [of_rank[name] for of_rank in samples if name in of_rank]
        reference = ChainMap(*of_ranks)
        tolerance = max(map(abs, reference.values()), default=0) / 100
        if any(abs(value - reference[at]) > tolerance for sample in of_ranks for at, value in sample.items()):
            firsts = [ranks.numbers[party.ranks[0]] for party in parties if name in party.tensors]
            raise CheckpointError(
                f"{name} is not one tensor: ranks {firsts} hold other values of it, each on a mesh of its own. Make it "
                "a DTensor over the mesh axis that tells them apart, as experts are in docs/understand/strategies.md, "
                "or give it another name on each of them"
            )


def _digest(described: Mapping[str, Described], values: Mapping[str, Json]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for item in values.values():  # one rank alone may have a list of a parameter that it owns
        if item["kind"] == "optimizer":
            digest.update(repr([(name, sorted(state)) for name, state in item["state"].items()]).encode())
            digest.update(repr([*map(numbers_of, item["param_groups"])]).encode())  # which each rank may compute
    meshes: dict[int, bytes] = {}  # a mesh of many ranks takes long to hash, and thousands of tensors share it
    for name, tensor in described.items():
        copies = tensor.copies
        if id(copies) not in meshes:
            of_mesh = copies and (copies.files, copies.firsts, copies.cuts)
            meshes[id(copies)] = hashlib.blake2b(repr(of_mesh).encode(), digest_size=16).digest()
        digest.update(f"{name}\0{tensor.dtype}{tensor.shape}".encode() + meshes[id(copies)])
    return digest.digest()


def _parts(
    tensors: Tensors,
    described: Mapping[str, Described],
    choices: Mapping[str, Choice],
    rank: int,
    own: Mapping[str, object],
) -> Parts:
    """Returns the content of this rank's file.

    Raises:
        CheckpointError: two parts would have one name in a file, or a value of `own` cannot be saved.
    """
    parts: dict[str, SavedPart] = {}
    listed: dict[str, list[Box]] = {}
    for name, tensor in tensors.items():
        of = described[name]
        if not is_written_here(of, choices[name], rank):
            continue
        for box, part in pieces_here(name, tensor):
            key = name_in_file(name, of.shape, box)
            if key in parts:
                raise CheckpointError(f"two tensors would be called {key} in a file; rename a module or item")
            parts[key] = tensors.part(name, part)
            if of.copies is not None and of.copies.cuts is None:
                listed.setdefault(name, []).append(box)
    private = Tensors()
    values = encoded(dict(own), f"{PER_RANK}/{rank}", private.keep)
    private_shapes = {name: (dtype_name(tensor.dtype, name), tuple(tensor.shape)) for name, tensor in private.items()}
    parts |= {name: private.part(name, tensor) for name, tensor in private.items()}
    return Parts(parts, listed, private_shapes, values)


def _together(first: dict[str, Json], other: dict[str, Json]) -> dict[str, Json]:
    """Returns the JSON of two ranks as one. Of values that both have, the first rank's are taken.

    An optimizer gets the parameters of both, since the stages of a pipeline have different ones.
    """
    merged = {**other, **first}
    for name in first.keys() & other.keys():
        a, b = first[name], other[name]
        if a["kind"] == b["kind"] == "optimizer":
            none: dict[str, Json] = {"params": []}
            groups = [
                {**of_b, **of_a, "params": list(dict.fromkeys([*of_a["params"], *of_b["params"]]))}
                for of_a, of_b in zip_longest(a["param_groups"], b["param_groups"], fillvalue=none)
            ]
            own = {"own": {**b.get("own", {}), **a.get("own", {})}} if "own" in a or "own" in b else {}
            state = {key: {**b["state"].get(key, {}), **each} for key, each in a["state"].items()}
            merged[name] = {**a, **own, "state": {**b["state"], **state}, "param_groups": groups}
    return merged


# Copies in host memory


class Staging:
    """Chunks of tensors that one thread copies to host memory and another thread writes, in the same order.

    The copying thread waits for room if `most_bytes` are copied and not yet written. With this limit, chunks are
    dropped once written, so a failed write cannot be repeated.
    """

    def __init__(self, most_bytes: int | None) -> None:
        self._most_bytes = most_bytes
        self._chunks: dict[str, list[memoryview | None]] = {}
        self._whole: set[str] = set()
        self._held, self._failure = 0, ""
        self._changed = threading.Condition()

    def copy(self, parts: Mapping[str, SavedPart]) -> None:
        """Copy all of `parts`. Returns once all are copied, or after `give_up`."""
        for name, part in parts.items():
            for chunk in _copied(part.read()):
                with self._changed:
                    self._changed.wait_for(lambda: self._failure or self._has_room())
                    if self._failure:
                        return
                    self._chunks.setdefault(name, []).append(chunk)
                    self._held += len(chunk)
                    self._changed.notify_all()
            with self._changed:
                self._whole.add(name)
                self._changed.notify_all()

    def _has_room(self) -> bool:
        return self._most_bytes is None or self._held < self._most_bytes

    def give_up(self, why: str) -> None:
        """End the waits of both threads. A read then raises OSError with the text `why`."""
        with self._changed:
            self._failure = why
            self._changed.notify_all()

    def chunks(self, name: str, part: SavedPart) -> Callable[[], Iterator[memoryview]]:
        """Returns the bytes of a part, for the writing thread, which waits until they are copied."""

        def is_copied(at: int) -> bool:
            return bool(self._failure) or name in self._whole or len(self._chunks.get(name, ())) > at

        def read() -> Iterator[memoryview]:
            for at in count():
                with self._changed:
                    self._changed.wait_for(partial(is_copied, at))
                    if self._failure:
                        raise OSError(self._failure)
                    chunks = self._chunks.get(name, [])
                    if at == len(chunks):
                        return
                    chunk = chunks[at]
                if chunk is None:
                    raise OSError(
                        "a failed write cannot be repeated, as its bytes are not kept; leave out staging_bytes"
                    )
                yield chunk
                if self._most_bytes is not None:
                    with self._changed:
                        chunks[at] = None
                        self._held -= len(chunk)
                        self._changed.notify_all()

        return read


def _copied(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yields the bytes of a tensor in memory of their own."""
    if tensor.device.type == "cpu":
        for chunk in chunks_of(tensor):
            for start in range(0, len(chunk), CHUNK_BYTES):
                yield memoryview(bytearray(chunk[start : start + CHUNK_BYTES]))
    elif tensor.numel():
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor)
        yield memory_of(host)


# Writing


Written = tuple[File, Parts]
"""The file that one rank has written, as it tells the first rank: without the tensors of its parts."""


def contents_of(parts: Parts, chunks: Callable[[str, SavedPart], Chunks]) -> dict[str, Content]:
    """Returns the contents of this rank's file; `chunks(name, part)` returns the bytes of a part."""
    return {
        name: Content(dtype_name(part.dtype, name), tuple(part.shape), chunks(name, part))
        for name, part in parts.tensors.items()
    }


def write(plan: SavePlan, contents: Mapping[str, Content], ranks: Ranks, folder: Folder) -> None:
    """Write this rank's file into `folder`, and have the first rank make the files a checkpoint.

    All ranks must call it.

    Raises:
        CheckpointError: a rank cannot write, or the first rank does not see all files. The files are removed.
        CommError: a rank has died. This rank's file stays until the next save removes it: the first rank may have heard
            from all ranks before, and have written a manifest that names it.
    """
    place, name = folder.folder_of(plan.step), file_name(plan.save_id, ranks.rank)
    task = f"the save of step {plan.step} to {place}"
    manifests: list[Manifest] = []

    def describe() -> None:
        manifests.append(_manifest(plan, written, ranks.size))
        _require_readable(place, manifests[0], ranks)

    try:
        written = ranks.each(lambda: (write_file(place, name, contents), replace(plan.parts, tensors={})), task)
        ranks.first(describe, task)
    except CommError:
        raise
    except Exception:
        with contextlib.suppress(OSError):
            place.remove(name)
            place.drop()
        raise
    # Outside of `try`: if this fails, the manifest may exist, and only the folder knows which files must stay.
    ranks.first(lambda: folder.finish(plan.step, manifests[0]), task)


def _require_readable(place: Place, manifest: Manifest, ranks: Ranks) -> None:
    """Raises CheckpointError if a reader would refuse the manifest, or if this rank does not see all ranks' files.

    A reader refuses a manifest if the ranks' parts do not make up a tensor.
    """
    parsed(manifest.to_bytes(), f"{place}/{MANIFEST}")
    unseen = faults(place, manifest.files, manifest.block_bytes)
    if unseen:
        numbers = in_short([str(ranks.numbers[number]) for number in unseen])
        raise CheckpointError(
            f"rank {ranks.numbers[0]} does not see what rank {numbers} has written ({next(iter(unseen.values()))}); "
            "all ranks need to share the folder: give all of them the same one, on a disk that all machines see"
        )


def _manifest(plan: SavePlan, written: Sequence[Written], world_size: int) -> Manifest:
    entries: dict[str, Entry] = {}
    for name, of in plan.described.items():
        copy = plan.choices[name].copy
        layout: Grid | tuple[Piece, ...]
        if of.copies is None:
            layout = Grid(copy)
        elif of.copies.cuts is not None:
            layout = Grid(of.copies.firsts[copy], of.copies.cuts)
        else:
            layout = tuple((number, box) for number, (_, by) in enumerate(written) for box in by.listed.get(name, ()))
        entries[name] = Entry(of.dtype, of.shape, layout)
    for number, (_, by) in enumerate(written):
        entries |= {name: Entry(dtype, shape, Grid(number)) for name, (dtype, shape) in by.private.items()}
    return Manifest(
        step=plan.step,
        save_id=plan.save_id,
        saved=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        world_size=world_size,
        files=tuple(file for file, _ in written),
        tensors=entries,
        aliases={name: other for name, other in plan.aliases.items() if name not in entries and other in entries},
        values={**plan.values, PER_RANK: {str(number): by.values for number, (_, by) in enumerate(written)}},
        user=plan.user,
    )
