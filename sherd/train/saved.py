"""The checkpoints of a run: where they are, which is the newest, and what each says of its run. Loads no torch.

OUT/checkpoints/step-00000250/ is one, of the format sherd/1 (`sherd.storage.folder`). Any number of ranks can read it.
On several machines OUT is a folder that all of them share.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sherd.errors import CheckpointError
from sherd.storage.folder import BRING_BACK, Folder
from sherd.storage.manifest import Manifest
from sherd.storage.places import DiskPlace, Place
from sherd.train.config import FREE, MODEL, Config, InputError

CHECKPOINTS = "checkpoints"
_FACTS = {"config", "text"}


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint of a run.

    Attributes:
        place: its folder.
        manifest: its manifest; `user` has what `sherd train` adds to it.
        folder: the checkpoints of its run; None for a checkpoint that was named by itself.
        notes: a line for each newer one that was passed over.
    """

    place: Place
    manifest: Manifest
    folder: Folder | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (isinstance(self.manifest.user, dict) and self.manifest.user.keys() >= _FACTS):
            raise InputError(f"{self} is no checkpoint of `sherd train`: another program has saved it with sherd.save")

    def __str__(self) -> str:
        return str(self.place)

    @property
    def step(self) -> int:
        """The number of steps that were done."""
        return self.manifest.step

    @property
    def config(self) -> dict[str, Any]:
        """The config of the run, for `Config.of`."""
        config: dict[str, Any] = self.manifest.user["config"]
        return config

    @property
    def text(self) -> str:
        """The digest of the text that was trained on."""
        return str(self.manifest.user["text"])

    def check_model(self, config: Config) -> None:
        """Raises InputError when it is of another model than `config`'s."""
        differ = [each for each in self.changes(config) if each.partition(":")[0] in MODEL]
        if differ:
            raise InputError(f"{self} is a checkpoint of another model, with {', '.join(differ)}; use another --out")

    def check_text(self, digest: str, source: str) -> None:
        """Raises InputError when it was trained on another text than this one, read from `source`."""
        if digest != self.text:
            raise InputError(
                f"{self} was trained on another text than {source} holds now; give the same text, or use another --out"
            )

    def changes(self, config: Config) -> list[str]:
        """Fields that decide the losses and differ from the saved run's, as `field: old -> new`."""
        saved = Config.of(self.config).from_anywhere().tree()
        return [
            f"{name}: {saved[name]} -> {value}"
            for name, value in config.from_anywhere().tree().items()
            if name not in FREE and saved[name] != value
        ]


@dataclass(frozen=True)
class Start:
    """A run as the words of the command ask for it.

    Attributes:
        config: what to run.
        out: the folder of the run; empty: the first free of runs/1, runs/2, ...
        resumed: the checkpoint that it goes on from, if any.
        quiet: nothing is printed but what goes wrong.
        trace: the step to record; 0: the third from here.
    """

    config: Config
    out: str = ""
    resumed: Checkpoint | None = None
    quiet: bool = False
    trace: int | None = None


class NoCheckpoint(InputError):
    """A folder in which no save has ended, so that a run may start over."""


def folder_in(out: Path) -> Folder:
    return Folder(DiskPlace(out / CHECKPOINTS))


def newest(folder: Folder) -> Checkpoint:
    """The last complete checkpoint in `folder`, with a note for each newer one, which is not.

    Raises:
        NoCheckpoint: no save has ended there.
        InputError: the last one is of another format or program, `folder` cannot be read, or all are damaged.
    """
    try:
        found, others = folder.newest()
    except (OSError, CheckpointError) as error:
        raise InputError(f"{folder.place} cannot be read: {error}") from error
    notes = tuple(each.why for each in others)
    if found is not None and found.manifest is not None:
        return Checkpoint(found.place, found.manifest, folder, notes)
    if any(each.is_damaged for each in others):
        raise InputError(f"{folder.place} holds no complete checkpoint: {'; '.join(notes)}; {BRING_BACK}")
    why = f" ({'; '.join(notes)})" if notes else ""
    raise NoCheckpoint(f"{folder.place} holds no checkpoint{why}")


def going_on(out: Path) -> str:
    """Returns what can be gone on from after an end that was not planned, to put behind the words on it."""
    try:
        return f"; step {newest(folder_in(out)).step} is complete, --resume goes on from it"
    except NoCheckpoint:
        return "; nothing was saved before"
    except InputError as error:
        return f"; what was saved before is not known: {error}"
