"""A load: the first rank chooses a checkpoint, all open it, and each reads what it holds."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sherd.checkpoint.items import Item, ValueItem, restore_random_state
from sherd.checkpoint.ranks import OtherRankFailed, Ranks
from sherd.checkpoint.tensor_bytes import read_tensor
from sherd.checkpoint.tree import decoded
from sherd.checkpoint.writing import GIVEN, PER_RANK, RANDOM
from sherd.comm.agreement import in_short
from sherd.errors import CheckpointError, NoCheckpointError, StorageError
from sherd.storage.files import Opened, read_manifest
from sherd.storage.folder import Folder, faults
from sherd.storage.manifest import MANIFEST
from sherd.storage.places import Place


@dataclass(frozen=True)
class Restored:
    """The result of `load`.

    Args:
        step: the step that the checkpoint was saved with.
        path: its folder.
        world_size: the number of ranks that saved it.
        user: what `save` was given as `user`.
        values: the items that are neither modules nor have a state, by name, as they were saved.
        per_rank: what this rank gave to `save` as `per_rank`, where as many ranks load; else {}.
        passed_over: newer checkpoints that were not taken, each with the reason.
    """

    step: int
    path: str
    world_size: int
    user: Any = None
    values: dict[str, Any] = field(default_factory=dict)
    per_rank: dict[str, Any] = field(default_factory=dict)
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chosen:
    """The checkpoint that the first rank has chosen: its `step`, None if the place itself is a checkpoint; the
    `save_id` of its manifest; and what was passed over."""

    step: int | None
    save_id: str
    passed_over: tuple[str, ...]


@dataclass(frozen=True)
class Search:
    """The search for a checkpoint in `place`: of `step`, or the newest."""

    place: Place
    step: int | None

    def folder_of(self, step: int | None) -> Place:
        """Returns where the checkpoint of `step` is, or the place itself."""
        return self.place if step is None else Folder(self.place).folder_of(step)

    def chosen(self, damaged: Mapping[int, str]) -> Chosen:
        """Returns the newest whole checkpoint. Steps that are `damaged` are passed over for the reasons given there."""
        if MANIFEST in self.place.names():
            return Chosen(None, read_manifest(self.place).save_id, ())
        passed_over: list[str] = []
        folder = Folder(self.place)
        for found in map(folder.found, folder.steps() if self.step is None else {self.step} & set(folder.steps())):
            why = damaged.get(found.step, found.why)
            if found.manifest is not None and not why:
                return Chosen(found.step, found.manifest.save_id, tuple(passed_over))
            passed_over.append(f"step {found.step}: {why}")
        of_step = "" if self.step is None else f" of step {self.step}"
        told = f" ({'; '.join(passed_over)})" if passed_over else ""
        raise NoCheckpointError(f"{self.place} holds no whole checkpoint{of_step}{told}; save one first, or begin anew")

    def is_replaced(self, chosen: Chosen) -> bool:
        """Returns whether another job has saved that step anew since it was chosen."""
        try:
            return read_manifest(self.folder_of(chosen.step)).save_id != chosen.save_id
        except CheckpointError:
            return False


def restore(search: Search, items: list[Item], ranks: Ranks, staging_bytes: int, random: bool) -> Restored:
    """Load the checkpoint that `search` finds, or the one before if it turns out to be damaged. All ranks must call it.

    Raises:
        as `sherd.load`.
    """
    damaged: dict[int, str] = {}
    what = f"the look for a checkpoint in {search.place}"
    while True:
        chosen = ranks.first(lambda: search.chosen(damaged), what)
        try:
            with contextlib.ExitStack() as files:
                source = _opened(search.folder_of(chosen.step), chosen.save_id, ranks, files)
                if any(item.takes_what_fits for item in items):
                    _require_undamaged(source, ranks)  # or the one before would be mixed into what this one has
                restored = _loaded(source, items, ranks, staging_bytes, random, chosen.passed_over)
                if chosen.passed_over and ranks.rank == 0:
                    passed = "; ".join(chosen.passed_over)
                    told = f"{search.place}: {passed}; step {restored.step} is loaded instead"
                    warnings.warn(told, stacklevel=3)
                return restored
        except _Damaged as error:
            if ranks.first(lambda at=chosen: search.is_replaced(at), what):  # type: ignore[misc]
                continue
            if chosen.step is None or search.step is not None:
                raise CheckpointError(Exception.__str__(error)) from error
            damaged[chosen.step] = Exception.__str__(error)


class _Damaged(CheckpointError):
    """A checkpoint that looked whole, and is not."""


def _opened(place: Place, save_id: str, ranks: Ranks, files: contextlib.ExitStack) -> Opened:
    """Returns the checkpoint in `place`, open until `files` is closed. Raises `_Damaged` on all ranks if one of them
    cannot read its manifest, or reads that of another save: it would load values that the others do not have."""
    opened: list[Opened] = []

    def take() -> None:
        opened.append(files.enter_context(Opened(place)))
        if opened[0].manifest.save_id != save_id:
            raise CheckpointError("it reads another checkpoint than the first rank; all ranks need to share the folder")

    _read_on_each(take, f"the load of {place}", ranks)
    return opened[0]


def _read_on_each(read: Callable[[], None], what: str, ranks: Ranks) -> None:
    """Have each rank `read`. Raises `_Damaged` if what it reads is not what was written."""
    try:
        ranks.each(read, what)
    except (OtherRankFailed, StorageError):
        raise
    except CheckpointError as error:
        raise _Damaged(Exception.__str__(error)) from error


def _require_undamaged(source: Opened, ranks: Ranks) -> None:
    """Read all files, each on one rank. Raises `_Damaged` on all ranks if one is not what was written."""
    manifest = source.manifest
    mine = manifest.files[ranks.rank :: ranks.size]
    what = f"the check of {source.place}"
    found = ranks.each(lambda: list(faults(source.place, mine, manifest.block_bytes, verify=True).values()), what)
    if any(found):
        raise _Damaged("; ".join(text for of_rank in found for text in of_rank))


def _loaded(
    source: Opened, items: list[Item], ranks: Ranks, staging_bytes: int, random: bool, passed_over: tuple[str, ...]
) -> Restored:
    """Load from `source`. Raises `_Damaged` on all ranks if a file of it is not what was written."""
    what = f"the load of {source.place}"
    misfits = ranks.each(lambda: [item.misfit(source) for item in items], what)
    for item, *of_ranks in zip(items, *misfits, strict=True):
        missing = [name for each in of_ranks for name in each.missing]
        unexpected = sorted(frozenset.intersection(*(each.unexpected for each in of_ranks)))
        wrong = [text for each in of_ranks for text in each.wrong]
        told = (("it lacks", missing), ("the model lacks", unexpected), ("in it", wrong))
        words = "; ".join(f"{side} {in_short(list(dict.fromkeys(names)))}" for side, names in told if names)
        if words:
            raise CheckpointError(
                f"{source.place}, item {item.name!r}, is of another model: {words}; load with strict=False to take the "
                "names that both have"
            )
    values: dict[str, object] = {}
    own: dict[str, Any] = {}

    def take() -> None:
        for item in items:
            value = item.load(source, staging_bytes)
            if isinstance(item, ValueItem):
                values[item.name] = value
        if source.manifest.world_size == ranks.size:
            of_ranks = source.manifest.values.get(PER_RANK, {})
            held = of_ranks.get(str(ranks.rank), {}) if isinstance(of_ranks, dict) else None
            found = decoded(held, lambda name: read_tensor(source, name))
            if not isinstance(found, dict) or not isinstance(found.get(GIVEN, {}), dict):
                raise CheckpointError(f"{source.place}: {PER_RANK} is not what sherd writes")
            own.update(found)
            if random and RANDOM in own:
                restore_random_state(own[RANDOM])

    _read_on_each(take, what, ranks)
    manifest = source.manifest
    return Restored(
        manifest.step,
        str(source.place),
        manifest.world_size,
        manifest.user,
        values,
        own.get(GIVEN, {}),
        passed_over,
    )
