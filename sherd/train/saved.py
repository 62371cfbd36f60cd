"""The checkpoints of a run: where they are, which of them are whole, and which is the newest. Loads no torch.

    OUT/checkpoints/step-00000250/     a checkpoint, of the format sherd/1: sherd.storage.folder
    OUT/checkpoints/best.json          names the best one: `Best`

Any number of ranks can read a checkpoint. On several machines OUT is a folder that all of them share. With
`run.checkpoints` they are elsewhere, in an object store for example, and OUT/checkpoints is a file that says where.
"""

from __future__ import annotations

import contextlib
import json
import math
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sherd.errors import CheckpointError, StorageError
from sherd.storage.files import Opened
from sherd.storage.folder import BRING_BACK, Folder, FoundCheckpoint, checked
from sherd.storage.manifest import FORMAT, MANIFEST, Manifest
from sherd.storage.places import Disk, Place, mode_of, place_of, says_absent
from sherd.train.config import FREE, Config, InputError

__all__ = [
    "CHECKPOINTS",
    "Best",
    "Checkpoint",
    "NoCheckpoint",
    "going_on",
    "newest",
    "newest_in",
    "place_in",
    "point",
    "read_best",
    "whole",
    "write_best",
]

CHECKPOINTS = "checkpoints"
_FACTS = {"config", "text", "parameters"}


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint of a run.

    Attributes:
        place: its folder.
        manifest: its manifest; `user` has what `sherd train` adds to it.
        folder: the checkpoints of its run; None for a checkpoint that was named by itself.
        notes: a line for each newer one that was passed over.
    """

    place: Place
    manifest: Manifest
    folder: Place | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return str(self.place)

    @property
    def step(self) -> int:
        """The number of steps that were done."""
        return self.manifest.step

    @property
    def config(self) -> dict[str, dict[str, Any]]:
        """The config of the run, for `Config.of`."""
        config: dict[str, dict[str, Any]] = self.manifest.user["config"]
        return config

    @property
    def text(self) -> str:
        """The digest of the text that was trained on."""
        return str(self.manifest.user["text"])

    @property
    def parameters(self) -> str:
        """The digest of the names and shapes of the parameters."""
        return str(self.manifest.user["parameters"])

    @contextlib.contextmanager
    def opened(self) -> Iterator[Opened]:
        """Open it for reading; meanwhile its run does not remove it."""
        with contextlib.ExitStack() as stack:
            if self.folder is not None:
                stack.enter_context(Folder(self.folder).locked())
            yield stack.enter_context(Opened(self.place))

    def check_model(self, config: Config) -> None:
        """Raises InputError when it is of another model than `config`'s."""
        # Through a Config: a field that is newer than the checkpoint has its default there.
        saved, wanted = (each.from_anywhere().tree()["model"] for each in (Config.of(self.config), config))
        differ = [f"model.{k} is {saved[k]!r} there and {v!r} here" for k, v in wanted.items() if saved[k] != v]
        if differ:
            raise InputError(f"{self} is a checkpoint of another model: {', '.join(differ)}; use another --out")

    def check_text(self, digest: str, source: str) -> None:
        """Raises InputError when it was trained on another text than this one, read from `source`."""
        if digest != self.text:
            raise InputError(
                f"{self} was trained on another text than {source} holds now; give the same text, or use another --out"
            )

    def changes(self, config: Config) -> list[str]:
        """Fields that decide the losses and differ from the saved run's, as `section.field: old -> new`."""
        saved = Config.of(self.config).tree()
        return [
            f"{section}.{name}: {saved[section][name]} -> {value}"
            for section, values in config.tree().items()
            for name, value in values.items()
            if section != "shard" and f"{section}.{name}" not in FREE and saved[section][name] != value
        ]


class NoCheckpoint(InputError):
    """A folder in which no save has ended, so that a run may begin anew."""


# Where they are


def place_in(out: Path, named: str | None = None) -> Place:
    """Returns where the run in `out` keeps its checkpoints.

    Args:
        out: the folder of the run.
        named: `run.checkpoints`, if it is known; None: as the run in `out` has it.

    Raises:
        InputError: a package for this kind of URL is missing, or what the run in `out` has cannot be read.
    """
    path = out / CHECKPOINTS
    try:
        if named is None and stat.S_ISREG(mode_of(path)) and not (named := path.read_text().strip()):
            raise InputError(f"{path} is damaged: it names no place; name it again by run.checkpoints")
        return place_of(named) if named else Disk(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    except CheckpointError as error:
        raise InputError(f"run.checkpoints = {named!r} cannot be used: {error}") from error


def point(out: Path, named: str) -> None:
    """Let `place_in(out)` be `named`, or where checkpoints usually are if that is empty.

    Raises:
        InputError: it cannot be written.
    """
    path = out / CHECKPOINTS
    try:
        if named:
            Disk(out).write(CHECKPOINTS, lambda: [memoryview(f"{named}\n".encode())])
        elif path.is_file():
            path.unlink()
    except OSError as error:
        why = "it is a folder, with checkpoints of before" if path.is_dir() else error.strerror
        raise InputError(f"cannot write {path}, to name run.checkpoints there: {why}; choose another --out") from error


# Which are whole


def whole(place: Place) -> Checkpoint:
    """The checkpoint in the folder `place`.

    Raises:
        InputError: it is not whole, or of another format or program, or the storage gives errors.
    """
    try:
        return _of_a_run(place, checked(place))
    except StorageError as error:
        raise InputError(str(error)) from error
    except CheckpointError as error:
        _require_format(place)
        raise InputError(str(error)) from error


def newest_in(place: Place) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """Returns the last whole checkpoint in `place`, if there is one, and a line for each newer one that is not.

    Whole is one whose files are all there, and as long as they were.

    Raises:
        InputError: the last one is of another format or program, `place` cannot be read, or all are damaged.
    """
    try:
        found, others = Folder(place).newest()
    except (OSError, CheckpointError) as error:
        raise InputError(f"{place} cannot be read: {error}") from error
    notes = tuple(_note(each) for each in others)
    if found is None and any(each.is_damaged for each in others):
        raise InputError(f"{place} holds no whole checkpoint: {'; '.join(notes)}; {BRING_BACK}")
    if found is None or found.manifest is None:
        return None, notes
    return _of_a_run(found.place, found.manifest, place, notes), notes


def newest(out: Path, place: Place | None = None) -> Checkpoint:
    """The last whole checkpoint of the run in `out`, which keeps them in `place`, unless told as `out` has it.

    Raises:
        NoCheckpoint: there is none.
        InputError: as `newest_in`.
    """
    found, notes = newest_in(place or place_in(out))
    if found:
        return found
    if notes:
        raise NoCheckpoint(f"{'; '.join(notes)}, and there is no older whole checkpoint; --resume-or-start begins anew")
    if out.is_dir() and any(out.iterdir()):
        raise NoCheckpoint(
            f"{out} holds no checkpoint to resume from; --resume-or-start begins anew in it, --out names another run"
        )
    raise NoCheckpoint(f"{out} holds no checkpoint to resume from; start without --resume, or name the run's --out")


def going_on(place: Place) -> str:
    """Returns what can be gone on from after an end that was not planned, to put behind the words on it."""
    try:
        found, _ = newest_in(place)
    except InputError as error:
        return f"; what was saved before is not known: {error}"
    return f"; step {found.step} is whole, --resume goes on from it" if found else "; nothing was saved before"


def _note(found: FoundCheckpoint) -> str:
    _require_format(found.place)
    return found.why


def _require_format(place: Place) -> None:
    """Refuse a checkpoint that is not damaged, but of another format: it must not be passed over as if it were none."""
    try:
        values = json.loads(place.read(MANIFEST))
    except (OSError, EOFError, ValueError):
        return
    found = values.get("format", FORMAT) if isinstance(values, dict) else FORMAT
    if found == 1:
        raise InputError(
            f"{place} was written by an earlier sherd train, by torch.distributed.checkpoint; go on with the version "
            "that wrote it, or begin anew with another --out"
        )
    if found != FORMAT:
        raise InputError(f"{place} has format {found!r}; this version reads {FORMAT!r}: take the one that wrote it")


def _of_a_run(place: Place, manifest: Manifest, folder: Place | None = None, notes: tuple[str, ...] = ()) -> Checkpoint:
    if not (isinstance(manifest.user, dict) and manifest.user.keys() >= _FACTS):
        raise InputError(f"{place} is no checkpoint of `sherd train`: another program has saved it with sherd.save")
    return Checkpoint(place, manifest, folder, notes)


# The best of them


NAME = "best.json"


@dataclass(frozen=True)
class Best:
    """The step whose evaluation was the best so far, and its held-out bits per byte.

    `judged` is a digest of what was judged: bits of other bytes, or of another context, are not comparable.
    """

    step: int
    bits: float
    judged: str

    def beats(self, other: Best | None, place: Place) -> bool:
        """Returns whether this is better than `other`, the best in `place` until now.

        Any finite result is better than a checkpoint that is gone or not comparable.
        """
        if other is None or other.judged != self.judged or Folder(place).found(other.step).manifest is None:
            return math.isfinite(self.bits)
        return self.bits < other.bits


def read_best(place: Place) -> Best | None:
    """Returns the best of the checkpoints in `place`; None: none was named, or the file is damaged. Raises OSError."""
    try:
        values = json.loads(place.read(NAME))
        return Best(**{f.name: values[f.name] for f in fields(Best)})
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, OSError) and not says_absent(error):
            raise
        return None


def write_best(place: Place, best: Best) -> str | None:
    """Name another best. Whoever reads meanwhile, and whatever crashes, finds the old one or the new one.

    Returns why it could not be written, which ends no run; None when it is.
    """
    raw = json.dumps(asdict(best)).encode()
    try:
        place.write(NAME, lambda: [memoryview(raw)])
    except OSError as error:
        return error.strerror or str(error)
    return None
