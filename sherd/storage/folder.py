"""A folder of checkpoints: which of them are whole, which is the newest, and which may be removed.

    FOLDER/latest                      a hint for people and tools: the checkpoint that was saved last
    FOLDER/.lock                       on a disk: held by who saves, loads or removes
    FOLDER/step-00000100/manifest.json with it, and only with it, the checkpoint is whole
    FOLDER/step-00000100/5f3a9c21-00000.safetensors    SAVE_ID-RANK

Only files with such names are ever removed; whatever else lies in the folder stays.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from sherd.errors import CheckpointError, PolicyError, StorageError
from sherd.storage.blocks import Checked
from sherd.storage.manifest import FORMAT, MANIFEST, File, Manifest, OtherFormat
from sherd.storage.opened import read_manifest, step_of
from sherd.storage.place import read_exactly, unreadable
from sherd.storage.places import PART, Lock, Place, place_of

LATEST = "latest"
_DATA = re.compile(r"[0-9a-f]{1,32}-[0-9]{5,10}\.safetensors")
_UNFINISHED = re.compile(rf"({_DATA.pattern}|{re.escape(MANIFEST)}|{LATEST})(\.[0-9a-f]+)?{re.escape(PART)}")
_SAVE_ID = re.compile(rb'\n"save_id": "([0-9a-f]{1,32})"')
_BEGIN_BYTES = 4096
_FILES_AT_ONCE = 8


def file_name(save_id: str, rank: int) -> str:
    """Returns the name of the file that `rank` writes in the save `save_id`."""
    return f"{save_id}-{rank:05d}.safetensors"


@dataclass(frozen=True)
class Found:
    """The checkpoint of `step`, in `place`: its manifest; None if it is not whole, and `why`."""

    step: int
    place: Place
    manifest: Manifest | None
    why: str = ""


def checked(place: Place, *, verify: bool = False) -> Manifest:
    """Returns the manifest of the checkpoint in `place`. Raises CheckpointError if it is not whole, as `Folder.found`
    checks it."""
    save_id = ""
    while True:
        manifest = read_manifest(place)
        wrong = faults(place, manifest.files, manifest.block_bytes, verify=verify)
        if not wrong:
            return manifest
        if manifest.save_id == save_id:
            raise CheckpointError(next(iter(wrong.values())))
        save_id = manifest.save_id  # unless another job has saved it anew meanwhile, and removed the old files


class Folder:
    """The checkpoints in `place`, each in a folder of its own."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def folder_of(self, step: int) -> Place:
        """Returns the folder of the checkpoint of `step`, which need not exist."""
        return self.place.below(f"step-{step:08d}")

    def locked(self, *, shared: bool = True, make: bool = False) -> contextlib.AbstractContextManager[Lock]:
        """Hold the folder's lock: shared to save (`make` the folder then) or load, alone to remove."""
        return self.place.locked(shared=shared, make=make)

    def steps(self) -> list[int]:
        """Returns the steps that have a folder, whole or not, the newest first."""
        return sorted((step for step in map(step_of, self.place.names()) if step is not None), reverse=True)

    def found(self, step: int, *, verify: bool = False) -> Found:
        """Returns the checkpoint of `step`. It is whole if its manifest is not damaged and its files have their length,
        and, with `verify`, if all bytes that they have are those of their checksums. Raises `OtherFormat`, and
        StorageError if that cannot be told."""
        place = self.folder_of(step)
        try:
            manifest = checked(place, verify=verify)
        except (OtherFormat, StorageError):
            raise
        except CheckpointError as error:
            return Found(step, place, None, str(error))
        return Found(step, place, manifest)

    def each(self, *, verify: bool = False) -> Iterator[Found]:
        """Yields all checkpoints, whole or not, the newest first."""
        return (self.found(step, verify=verify) for step in self.steps())

    def whole(self) -> list[Found]:
        """Returns the whole checkpoints, the newest first."""
        return [found for found in self.each() if found.manifest is not None]

    def newest(self, *, verify: bool = False) -> tuple[Found | None, list[Found]]:
        """Returns the newest whole checkpoint, None if there is none, and the newer ones that were passed over."""
        passed_over: list[Found] = []
        for found in self.each(verify=verify):
            if found.manifest is not None:
                return found, passed_over
            passed_over.append(found)
        return None, passed_over

    def finish(self, step: int, manifest: Manifest) -> None:
        """Make the checkpoint of `step` whole, whose files are written, and remove those of the one that it replaces.

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
            if not _may_be_of(place, manifest):
                _remove(place, own)
                place.drop()
            raise
        latest = json.dumps({"format": FORMAT, "folder": f"step-{step:08d}", "step": step}).encode() + b"\n"
        with contextlib.suppress(OSError):  # the checkpoint is whole, and nothing relies on the hint
            self.place.write(LATEST, lambda: [memoryview(latest)])
        _remove(place, {file.name for file in replaced} - own)

    def prune(
        self, keep_last: int, keep_every: int | None = None, keep: Collection[int] = (), *, upto: int | None = None
    ) -> list[int]:
        """Remove whole checkpoints that are not to be kept, unless somebody else is saving or loading here.

        Args:
            keep_last: how many of the newest are kept, at least 1.
            keep_every: those whose step is a multiple of it are kept; None: none for that reason.
            keep: steps that are kept.
            upto: the step that was just saved: later ones, of a run that was rolled back, are neither removed nor
                counted. None: all are.

        Returns:
            the steps that were removed, the newest first.

        Raises:
            PolicyError: `keep_last` or `keep_every` is less than 1.
        """
        if keep_last < 1 or (keep_every is not None and keep_every < 1):
            raise PolicyError(f"keep_last={keep_last}, keep_every={keep_every}: at least 1 is possible")
        with self.locked(shared=False) as lock:
            if lock is Lock.BUSY:
                return []
            counted = [each for each in self.whole() if upto is None or each.step <= upto]
            old = [each for each in counted[keep_last:] if each.step not in keep]
            return [each.step for each in old if (keep_every is None or each.step % keep_every) and _dropped(each)]

    def sweep(self, *, by_hand: bool = False) -> list[str]:
        """Remove what saves have left that were never finished, or were replaced, if nobody else saves or loads here.

        Args:
            by_hand: also where there is no lock, as in an object store. Whoever asks must know that nobody saves.

        Returns:
            the paths of what was removed.
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
                    continue  # it is damaged: what its files are worth is for a person to say
                swept += _remove(place, names - named)
                if MANIFEST not in names:
                    place.drop()
            return swept


def locked_to_read(path: str | os.PathLike[str]) -> contextlib.AbstractContextManager[Lock]:
    """Returns the lock to hold while `path` is read: that of the folder of checkpoints. `path` may be one of them."""
    place = place_of(path)
    if MANIFEST not in place.names():
        return Folder(place).locked()
    above, name = os.path.split(os.fspath(path).rstrip("/"))
    # A copy of a checkpoint under another name is nobody's to remove.
    return Folder(place_of(above or ".")).locked() if step_of(name) is not None else contextlib.nullcontext(Lock.NONE)


def faults(place: Place, files: Sequence[File], block_bytes: int, *, verify: bool = False) -> dict[int, str]:
    """Returns what is wrong with `files` of the checkpoint in `place`, by their number: one is missing or of another
    length or, with `verify`, not what was written."""

    def fault(file: File) -> str:
        try:
            _check(place, file, block_bytes, verify)
        except StorageError:
            raise
        except CheckpointError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(_FILES_AT_ONCE, "sherd files") as pool:
        return {number: why for number, why in enumerate(pool.map(fault, files)) if why}


def _are_of_one_save(place: Place, names: Collection[str]) -> bool:
    """Returns whether all files `names` of a checkpoint are of the save that its manifest says it is of. Only its begin
    is read, which takes no longer for large ones: a sweep comes after each save, and looks at all checkpoints."""
    if any(_UNFINISHED.fullmatch(name) for name in names):
        return False
    with contextlib.closing(place.open(MANIFEST)) as file:
        begin = bytearray(min(file.nbytes, _BEGIN_BYTES))
        read_exactly(file, 0, memoryview(begin))
    said = _SAVE_ID.search(begin)
    return said is not None and {name.partition("-")[0] for name in names if _DATA.fullmatch(name)} <= {
        said[1].decode()
    }


def _may_be_of(place: Place, manifest: Manifest) -> bool:
    """Returns whether `place` may have `manifest`, though writing it has failed: an object store may have taken it."""
    try:
        return MANIFEST in place.names() and read_manifest(place).save_id == manifest.save_id
    except (CheckpointError, OSError):
        return True


def _dropped(found: Found) -> bool:
    """Remove a checkpoint. Returns False if that cannot be done."""
    try:
        found.place.remove(MANIFEST)  # first, so that what is half removed is not taken for whole
    except OSError:
        return False
    _remove(found.place, {file.name for file in found.manifest.files} if found.manifest else ())
    found.place.drop()
    return True


def _remove(place: Place, names: Collection[str]) -> list[str]:
    """Remove those of the files `names` that are of checkpoints; returns their paths. What fails is left to a sweep."""
    removed = []
    for name in sorted(names):
        if _DATA.fullmatch(name) or _UNFINISHED.fullmatch(name):
            with contextlib.suppress(OSError):
                place.remove(name)
                removed.append(f"{place}/{name}")
    return removed


def _check(place: Place, of: File, block_bytes: int, verify: bool) -> None:
    """Raises CheckpointError if a file is missing, of another length or, with `verify`, not what was written."""
    try:
        file = place.open(of.name)
    except OSError as error:
        raise unreadable(f"{place}: {of.name} cannot be read", error) from error
    with contextlib.closing(file):
        checked = Checked(file, of.nbytes, of.crc32, block_bytes)
        block = memoryview(bytearray(min(block_bytes, of.nbytes) if verify else 0))
        for start in range(0, of.nbytes if verify else 0, block_bytes):
            checked.read_into(start, block[: of.nbytes - start])
