"""A folder of checkpoints: which of them are complete, which is the newest, and which may be removed.

    FOLDER/latest                      a hint for people and tools: the checkpoint of the last save
    FOLDER/.lock                       on a disk: held during a save, a load or a removal
    FOLDER/step-00000100/manifest.json a checkpoint is complete if and only if it has a manifest
    FOLDER/step-00000100/5f3a9c21-00000.safetensors    SAVE_ID-RANK

Only files with these names are ever removed. All other files in the folder stay.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from sherd.errors import CheckpointError, PolicyError, StorageError
from sherd.storage.files import OtherStep, checked_file, read_manifest, step_of
from sherd.storage.manifest import FORMAT, MANIFEST, File, Manifest, OtherFormat
from sherd.storage.places import PART, Lock, Place, place_of, read_exactly

LATEST = "latest"
_DATA = re.compile(r"[0-9a-f]{1,32}-[0-9]{5,10}\.safetensors")
_UNFINISHED = re.compile(rf"({_DATA.pattern}|{re.escape(MANIFEST)}|{LATEST})(\.[0-9a-f]+)?{re.escape(PART)}")
_SAVE_ID = re.compile(rb'\n"save_id": "([0-9a-f]{1,32})"')
_BEGIN_BYTES = 4096
_FILES_AT_ONCE = 8
BRING_BACK = "bring back a copy of a damaged one, or start over in another folder"


def file_name(save_id: str, rank: int) -> str:
    return f"{save_id}-{rank:05d}.safetensors"


@dataclass(frozen=True)
class FoundCheckpoint:
    """The checkpoint of `step`, in `place`. `manifest` is None if it is not complete, for the reason `why`."""

    step: int
    place: Place
    manifest: Manifest | None
    why: str = ""
    is_damaged: bool = False  # it was complete once, so a run that starts over would lose it


def checked(place: Place) -> Manifest:
    """Returns the manifest of the checkpoint in `place`. Raises CheckpointError unless complete (`Folder.found`)."""
    save_id = ""
    while True:
        manifest = read_manifest(place)
        file_faults = faults(place, manifest.files, manifest.block_bytes)
        if not file_faults:
            return manifest
        if manifest.save_id == save_id:
            raise CheckpointError(next(iter(file_faults.values())))
        # Another job may have saved this step between the two reads, and removed the old files. If so, look again.
        save_id = manifest.save_id


class Folder:
    """The checkpoints in `place`, each in a folder of its own."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def folder_of(self, step: int) -> Place:
        """Returns the folder for the checkpoint of `step`, which need not exist."""
        return self.place.below(f"step-{step:08d}")

    def locked(self, *, shared: bool = True, make: bool = False) -> contextlib.AbstractContextManager[Lock]:
        """Hold the folder's lock: shared to save (with `make`) or load, exclusive to remove."""
        return self.place.locked(shared=shared, make=make)

    def steps(self) -> list[int]:
        """Returns the steps with a folder, complete or not, the newest first."""
        return sorted((step for step in map(step_of, self.place.names()) if step is not None), reverse=True)

    def found(self, step: int) -> FoundCheckpoint:
        """Returns the checkpoint of `step`. It is complete if its manifest is intact and all files have their length.

        Raises:
            OtherFormat: a later version wrote it.
            StorageError: a file cannot be read now, and may be intact.
        """
        place = self.folder_of(step)
        try:
            manifest = checked(place)
        except (OtherFormat, StorageError):
            raise
        except CheckpointError as error:
            was_whole = MANIFEST in place.names() and not isinstance(error, OtherStep)
            return FoundCheckpoint(step, place, None, str(error), was_whole)
        return FoundCheckpoint(step, place, manifest)

    def whole(self) -> list[FoundCheckpoint]:
        """Returns the complete checkpoints, the newest first."""
        return [checkpoint for checkpoint in map(self.found, self.steps()) if checkpoint.manifest is not None]

    def newest(
        self, step: int | None = None, damaged: Mapping[int, str] | None = None
    ) -> tuple[FoundCheckpoint | None, list[FoundCheckpoint]]:
        """Returns the newest complete checkpoint (None: there is none), and the newer, incomplete ones; `step` only.

        `damaged` has the steps whose checkpoint a reader has found to be damaged, with the reasons.
        """
        passed_over: list[FoundCheckpoint] = []
        for checkpoint in map(self.found, [each for each in self.steps() if step in (None, each)]):
            if why := (damaged or {}).get(checkpoint.step):
                checkpoint = replace(checkpoint, manifest=None, why=why, is_damaged=True)
            if checkpoint.manifest is not None:
                return checkpoint, passed_over
            passed_over.append(checkpoint)
        return None, passed_over

    def finish(self, step: int, manifest: Manifest) -> None:
        """Write the manifest of `step`, whose files are written, and remove the files of the checkpoint it replaces.

        Files of the same step that no manifest names stay until `sweep`: another job may be writing them.

        Raises:
            OSError: the manifest cannot be written. The files that it names are removed.
        """
        place, own = self.folder_of(step), {file.name for file in manifest.files}
        try:
            replaced = read_manifest(place).files
        except CheckpointError:
            replaced = ()
        raw = manifest.to_bytes()
        try:
            place.write(MANIFEST, lambda: [memoryview(raw)])
        except OSError:
            try:
                # An object store may have taken the manifest, and lost the answer.
                is_written = MANIFEST in place.names() and read_manifest(place).save_id == manifest.save_id
            except (CheckpointError, OSError):
                is_written = True  # maybe: files that a manifest may name must stay
            if not is_written:
                _remove(place, own)
                place.drop()
            raise
        latest = json.dumps({"format": FORMAT, "folder": f"step-{step:08d}", "step": step}).encode() + b"\n"
        with contextlib.suppress(OSError):  # the checkpoint is complete, and no reader relies on the hint
            self.place.write(LATEST, lambda: [memoryview(latest)])
        _remove(place, {file.name for file in replaced} - own)

    def prune(
        self, keep_last: int, keep_every: int | None = None, keep: Collection[int] = (), *, upto: int | None = None
    ) -> list[int]:
        """Remove complete checkpoints that are not to be kept, unless another process is saving or loading in it.

        Returns the removed steps, the newest first.

        Args:
            keep_last: the number of the newest checkpoints to keep, at least 1.
            keep_every: keep each checkpoint whose step is a multiple of this number, too.
            keep: steps to keep, too.
            upto: neither remove nor count later steps, which belong to a run that was rolled back. None: all steps.

        Raises:
            PolicyError: `keep_last` or `keep_every` is less than 1.
        """
        if keep_last < 1 or (keep_every is not None and keep_every < 1):
            raise PolicyError(f"keep_last={keep_last}, keep_every={keep_every}: at least 1 is possible")
        with self.locked(shared=False) as lock:
            if lock is Lock.BUSY:
                return []
            counted = [checkpoint for checkpoint in self.whole() if upto is None or checkpoint.step <= upto]
            removed = []
            for checkpoint in counted[keep_last:]:
                if checkpoint.step in keep or (keep_every is not None and checkpoint.step % keep_every == 0):
                    continue
                try:
                    # First, so that a checkpoint which is half removed is never taken for a complete one.
                    checkpoint.place.remove(MANIFEST)
                except OSError:
                    continue
                assert checkpoint.manifest is not None, "only complete checkpoints are counted"
                _remove(checkpoint.place, {file.name for file in checkpoint.manifest.files})
                checkpoint.place.drop()
                removed.append(checkpoint.step)
            return removed

    def sweep(self, *, by_hand: bool = False) -> list[str]:
        """Remove the files of unfinished and replaced saves, unless another process is saving or loading in it.

        Returns their paths. `by_hand`: no process saves, so a place without locks, as an object store, is swept, too.
        """
        with self.locked(shared=False) as lock:
            if lock is Lock.BUSY or (lock is Lock.NONE and not by_hand):
                return []
            swept = _remove(self.place, {name for name in self.place.names() if _UNFINISHED.fullmatch(name)})
            for step in self.steps():
                place = self.folder_of(step)
                try:
                    names = set(place.names())
                    if MANIFEST in names and _are_of_one_save(place, names):
                        continue
                    named = {file.name for file in read_manifest(place).files} if MANIFEST in names else set()
                except (CheckpointError, OSError):
                    continue  # a damaged checkpoint: a person decides what its files are worth
                swept += _remove(place, names - named)
                if MANIFEST not in names:
                    place.drop()
            return swept


def locked_to_read(path: str | os.PathLike[str]) -> contextlib.AbstractContextManager[Lock]:
    """Returns the lock to hold while `path`, a folder of checkpoints or one checkpoint in it, is read."""
    place = place_of(path)
    if os.path.isfile(path):
        raise CheckpointError(f"{path} is a file: `sherd convert {path} FOLDER` makes a checkpoint of it")
    if MANIFEST not in place.names():
        return Folder(place).locked()
    above, name = os.path.split(os.fspath(path).rstrip("/"))
    # No prune or sweep removes a checkpoint that was copied to another name.
    return Folder(place_of(above or ".")).locked() if step_of(name) is not None else contextlib.nullcontext(Lock.NONE)


def faults(place: Place, files: Sequence[File], block_bytes: int, *, verify: bool = False) -> dict[int, str]:
    """Returns the faults of `files`, by number: a missing file, another length or, with `verify`, other bytes.

    Raises:
        StorageError: a file cannot be read now, and may be intact.
    """

    def fault(file: File) -> str:
        try:
            with contextlib.closing(checked_file(place, file, block_bytes)) as checked_bytes:
                block = memoryview(bytearray(min(block_bytes, file.nbytes) if verify else 0))
                for start in range(0, file.nbytes if verify else 0, block_bytes):
                    checked_bytes.read_into(start, block[: file.nbytes - start])
        except StorageError:
            raise
        except CheckpointError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(_FILES_AT_ONCE, "sherd files") as pool:
        return {number: why for number, why in enumerate(pool.map(fault, files)) if why}


def _are_of_one_save(place: Place, names: Collection[str]) -> bool:
    """Returns True if all files `names` of a checkpoint are of the save that the manifest names.

    This reads only the begin of the manifest: a sweep after each save looks at all checkpoints, however large.
    """
    if any(_UNFINISHED.fullmatch(name) for name in names):
        return False
    with contextlib.closing(place.open(MANIFEST)) as file:
        begin = bytearray(min(file.nbytes, _BEGIN_BYTES))
        read_exactly(file, 0, memoryview(begin))
    save_id = _SAVE_ID.search(begin)
    save_ids = {name.partition("-")[0] for name in names if _DATA.fullmatch(name)}
    return save_id is not None and save_ids <= {save_id[1].decode()}


def _remove(place: Place, names: Collection[str]) -> list[str]:
    """Remove the files among `names` that are a checkpoint's, and return their paths. Failures are left to a sweep."""
    removed = []
    for name in sorted(names):
        if _DATA.fullmatch(name) or _UNFINISHED.fullmatch(name):
            with contextlib.suppress(OSError):
                place.remove(name)
                removed.append(f"{place}/{name}")
    return removed
