"""A load: the first rank chooses a checkpoint, all ranks open it, and each reads its own parts."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sherd.checkpoint.encoding import decoded, read_tensor
from sherd.checkpoint.items import Item, ValueItem, restore_random_state
from sherd.checkpoint.ranks import OtherRankFailed, Ranks
from sherd.checkpoint.writing import GIVEN, PER_RANK, RANDOM, STATES
from sherd.errors import CheckpointError, NoCheckpointError, StorageError, in_short
from sherd.storage.files import Opened, read_manifest
from sherd.storage.folder import BRING_BACK, Folder, faults
from sherd.storage.manifest import MANIFEST
from sherd.storage.places import Place


@dataclass(frozen=True)
class Restored:
    """The result of `load`.

    Args:
        step: the step that the checkpoint was saved with.
        path: its folder.
        world_size: the number of ranks that saved it.
        user: the argument `user` of `save`.
        values: the items that are neither modules nor have a state, by name, as they were saved.
        per_rank: this rank's argument `per_rank` of `save`, if as many ranks load as saved; else {}.
        passed_over: newer checkpoints that were not loaded, each with the reason.
        missing: with `strict=False`, the names of the modules' tensors that the checkpoint lacks, and that kept their
            values: "model/head.weight".
        unexpected: with `strict=False`, the names in the checkpoint's modules that no rank's modules have.
    """

    step: int
    path: str
    world_size: int
    user: Any = None
    values: dict[str, Any] = field(default_factory=dict)
    per_rank: dict[str, Any] = field(default_factory=dict)
    passed_over: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chosen:
    """The checkpoint that the first rank chooses, and newer ones that it passed over, with reasons.

    `step` is None if the place itself is a checkpoint.
    """

    step: int | None
    save_id: str
    passed_over: tuple[str, ...]


@dataclass(frozen=True)
class Search:
    """The search for a checkpoint in `place`: of `step`; None: the newest."""

    place: Place
    step: int | None

    def folder_of(self, step: int | None) -> Place:
        """Returns the folder of the checkpoint of `step`; None: the place itself."""
        return self.place if step is None else Folder(self.place).folder_of(step)

    def chosen(self, damaged: Mapping[int, str]) -> Chosen:
        """Returns the newest complete checkpoint, except for the steps `damaged`, which has the reason for each."""
        names = self.place.names()
        if MANIFEST in names:
            return Chosen(None, read_manifest(self.place).save_id, ())
        found, newer = Folder(self.place).newest(self.step, damaged)
        passed_over = tuple(f"step {each.step}: {each.why}" for each in newer)
        others = [name for name in names if name.startswith((".metadata", "model.safetensors", "model-0"))]
        if others and found is None and not newer:
            make = f"`sherd convert {self.place} FOLDER` makes a checkpoint of it"
            raise CheckpointError(f"{self.place} has {others[0]}, which is another library's: {make}")
        if found is not None and found.manifest is not None:
            return Chosen(found.step, found.manifest.save_id, passed_over)
        of_step = "" if self.step is None else f" of step {self.step}"
        why = f" ({'; '.join(passed_over)})" if passed_over else ""
        none = f"{self.place} holds no complete checkpoint{of_step}{why}"
        if damaged or any(each.is_damaged for each in newer):
            raise CheckpointError(f"{none}; {BRING_BACK}")
        raise NoCheckpointError(f"{none}; save one first, or start over")

    def is_replaced(self, chosen: Chosen) -> bool:
        """Returns True if another job has saved that step again since it was chosen."""
        try:
            return read_manifest(self.folder_of(chosen.step)).save_id != chosen.save_id
        except StorageError:
            raise
        except CheckpointError:
            return False


def restore(search: Search, items: list[Item], ranks: Ranks, staging_bytes: int, random: bool) -> Restored:
    """Load the checkpoint that `search` finds, or the one before it if a rank finds damage. All ranks must call it.

    Raises:
        as `sherd.load`.
    """
    damaged: dict[int, str] = {}
    task = f"the look for a checkpoint in {search.place}"
    while True:
        chosen = ranks.first(lambda: search.chosen(damaged), task)
        try:
            with contextlib.ExitStack() as files:
                source = _opened(search.folder_of(chosen.step), chosen.save_id, ranks, files)
                if any(item.takes_what_fits for item in items):
                    # First, because damage that is found halfway sends all ranks to an older checkpoint. If that lacks
                    # some names, such an item would keep the values that it has read from this one.
                    _require_undamaged(source, ranks)
                restored = _loaded(source, items, ranks, staging_bytes, random, chosen.passed_over)
                if chosen.passed_over and ranks.rank == 0:
                    why = "; ".join(chosen.passed_over)
                    warnings.warn(f"{search.place}: {why}; step {restored.step} is loaded instead", stacklevel=3)
                return restored
        except _Damaged as error:
            if ranks.first(lambda at=chosen: search.is_replaced(at), task):  # type: ignore[misc]
                continue
            if chosen.step is None or search.step is not None:
                raise CheckpointError(Exception.__str__(error)) from error
            damaged[chosen.step] = Exception.__str__(error)


class _Damaged(CheckpointError):
    """A checkpoint that looked complete has damage."""


def _opened(place: Place, save_id: str, ranks: Ranks, files: contextlib.ExitStack) -> Opened:
    """Returns the checkpoint in `place`, open until `files` is closed.

    Raises:
        _Damaged: on all ranks, if a rank cannot read the manifest, or reads the manifest of another save.
    """
    opened: list[Opened] = []

    def open_here() -> None:
        opened.append(files.enter_context(Opened(place)))
        if opened[0].manifest.save_id != save_id:
            raise CheckpointError("it reads another checkpoint than the first rank; all ranks need to share the folder")

    _read_on_each(open_here, f"the load of {place}", ranks)
    return opened[0]


def _read_on_each(read: Callable[[], None], task: str, ranks: Ranks) -> None:
    """Call `read` on all ranks. Raises `_Damaged` on all ranks if one of them finds damage."""
    try:
        ranks.each(read, task)
    except (OtherRankFailed, StorageError):
        raise
    except CheckpointError as error:
        raise _Damaged(Exception.__str__(error)) from error


def _require_undamaged(source: Opened, ranks: Ranks) -> None:
    """Read all files, each on one rank. Raises `_Damaged` on all ranks if a file has other bytes than were written."""
    manifest = source.manifest
    mine = manifest.files[ranks.rank :: ranks.size]
    task = f"the check of {source.place}"
    texts = ranks.each(lambda: list(faults(source.place, mine, manifest.block_bytes, verify=True).values()), task)
    if any(texts):
        raise _Damaged("; ".join(text for of_rank in texts for text in of_rank))


def _loaded(
    source: Opened, items: list[Item], ranks: Ranks, staging_bytes: int, random: bool, passed_over: tuple[str, ...]
) -> Restored:
    """Load from `source`. Raises `_Damaged` on all ranks if a file has other bytes than were written."""
    task = f"the load of {source.place}"
    misfits = ranks.each(lambda: [item.misfit(source) for item in items], task)
    left_out: dict[str, list[str]] = {"it lacks": [], "the model lacks": []}
    for item, *of_ranks in zip(items, *misfits, strict=True):
        missing = list(dict.fromkeys(name for misfit in of_ranks for name in misfit.missing))
        unexpected = sorted(frozenset.intersection(*(misfit.unexpected for misfit in of_ranks)))
        wrong = list(dict.fromkeys(text for misfit in of_ranks for text in misfit.wrong))
        names = {"it lacks": missing, "the model lacks": unexpected}
        remedy = "load with strict=False to take the names that both have"
        if item.takes_what_fits:
            for side, of_item in names.items():
                left_out[side] += of_item
            names = {}
        if wrong:
            remedy = (
                "build the model as it was saved: strict=False passes over names that differ, and over nothing else"
            )
        if words := _in_words({**names, "in it": wrong}):
            raise CheckpointError(f"{source.place}, item {item.name!r}, is of another model: {words}; {remedy}")
    values: dict[str, object] = {}
    own: dict[str, Any] = {}

    def load_here() -> None:
        for item in items:
            value = item.load(source, staging_bytes)
            if isinstance(item, ValueItem):
                values[item.name] = value
        if source.manifest.world_size == ranks.size:
            per_rank = source.manifest.values.get(PER_RANK, {})
            json = per_rank.get(str(ranks.rank), {}) if isinstance(per_rank, dict) else None
            decoded_own = decoded(json, lambda name: read_tensor(source, name))
            if not isinstance(decoded_own, dict) or not isinstance(decoded_own.get(GIVEN, {}), dict):
                raise CheckpointError(f"{source.place}: {PER_RANK} is not what sherd writes")
            own.update(decoded_own)
        for item in items:
            item.load_own(own.get(STATES, {}).get(item.name), source)
        if random and RANDOM in own:
            restore_random_state(own[RANDOM])

    _read_on_each(load_here, task, ranks)
    step, path, world_size = source.manifest.step, str(source.place), source.manifest.world_size
    given = own.get(GIVEN, {})
    if (words := _in_words(left_out)) and ranks.rank == 0:
        rest = "What the checkpoint lacks keeps its values" if left_out["it lacks"] else "All else is loaded"
        warnings.warn(f"{path}: strict=False has left out names: {words}. {rest}", stacklevel=4)
    return Restored(
        step, path, world_size, source.manifest.user, values, given, passed_over, *map(tuple, left_out.values())
    )


def _in_words(names: Mapping[str, list[str]]) -> str:
    return "; ".join(f"{side} {in_short(each)}" for side, each in names.items() if each)
