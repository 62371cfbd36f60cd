"""The manifest of a checkpoint, and the last whole checkpoint of a run. Reads no tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sherd import __version__
from sherd.train.config import FREE, Config, InputError

__all__ = ["MANIFEST", "Checkpoint", "Manifest", "NoCheckpoint", "folder_of", "going_on", "newest", "whole"]

FORMAT = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint."""

    step: int
    ranks: int
    config: dict[str, dict[str, Any]]
    text: str  # digest of the corpus
    parameters: str  # digest of their names and shapes
    files: dict[str, int]  # name -> bytes
    sums: dict[str, int] = field(default_factory=dict)  # name -> CRC-32; none in checkpoints of before there were any
    sherd: str = __version__
    torch: str = field(default_factory=lambda: version("torch"))
    format: int = FORMAT


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint, and a note for each newer one that was left half-written."""

    path: Path
    manifest: Manifest
    notes: tuple[str, ...] = ()

    def check_model(self, config: Config) -> None:
        """Raises InputError when it is of another model than `config`'s."""
        # Through a Config: a field that is newer than the checkpoint has its default there.
        saved, wanted = (each.from_anywhere().tree()["model"] for each in (Config.of(self.manifest.config), config))
        differ = [f"model.{k} is {saved[k]!r} there and {v!r} here" for k, v in wanted.items() if saved[k] != v]
        if differ:
            raise InputError(f"{self.path} is a checkpoint of another model: {', '.join(differ)}; use another --out")

    def check_text(self, digest: str, source: str) -> None:
        """Raises InputError when it was trained on another text than this one, read from `source`."""
        if digest != self.manifest.text:
            raise InputError(
                f"{self.path} was trained on another text than {source} holds now; give the same text, "
                "or use another --out"
            )

    def changes(self, config: Config) -> list[str]:
        """Fields that decide the losses and differ from the saved run's, as `section.field: old -> new`."""
        saved = Config.of(self.manifest.config).tree()
        return [
            f"{section}.{name}: {saved[section][name]} -> {value}"
            for section, values in config.tree().items()
            for name, value in values.items()
            if section != "shard" and f"{section}.{name}" not in FREE and saved[section][name] != value
        ]


class NoCheckpoint(InputError):
    """A folder without a whole checkpoint."""


def folder_of(out: Path, step: int) -> Path:
    """Returns where the run in `out` keeps the checkpoint of a step."""
    return out / "checkpoints" / f"step-{step:08}"


def whole(path: Path) -> Checkpoint:
    """The checkpoint in the folder `path`.

    Raises:
        NoCheckpoint: it is half-written.
        InputError: it is of another format.
    """
    try:
        return Checkpoint(path, _read_manifest(path))
    except _Half as reason:
        raise NoCheckpoint(f"{path} is no whole checkpoint ({reason})") from None


def newest(out: Path, damaged: Mapping[Path, str] | None = None) -> Checkpoint:
    """The last whole checkpoint of the run in `out`: every file is there, and as long as it was.

    `damaged` are those whose contents are known not to be what was written, each with the reason.

    Raises:
        NoCheckpoint: there is none.
        InputError: it is of another format.
    """
    notes: list[str] = []
    # Names sort as steps do: they have leading zeros, and "step-00000250.part" comes after "step-00000250".
    for path in sorted((out / "checkpoints").glob("step-*"), reverse=True):
        if damaged and path in damaged:
            notes.append(f"{path} is damaged ({damaged[path]})")
            continue
        try:
            return Checkpoint(path, _read_manifest(path), tuple(notes))
        except _Half as reason:
            notes.append(f"{path} is half-written ({reason})")
    if notes:
        raise NoCheckpoint(f"{'; '.join(notes)}, and there is no older whole checkpoint; start anew with another --out")
    if out.is_dir() and any(out.iterdir()):
        raise NoCheckpoint(
            f"{out} holds no checkpoint to resume from; --resume-or-start begins anew in it, --out names another run"
        )
    raise NoCheckpoint(f"{out} holds no checkpoint to resume from; start without --resume, or name the run's --out")


def going_on(out: Path) -> str:
    """Returns what can be gone on from after an end that was not planned, to put behind the words on it."""
    try:
        return f"; step {newest(out).manifest.step} is whole, --resume goes on from it"
    except InputError:
        return "; nothing was saved before"


class _Half(Exception):
    """Why a folder is no whole checkpoint."""


def _read_manifest(path: Path) -> Manifest:
    if path.suffix:
        raise _Half("it was never finished")
    try:
        values = json.loads((path / MANIFEST).read_text())
        if values["format"] != FORMAT:
            raise InputError(f"{path} has format {values['format']}; this version reads format {FORMAT}")
        values.setdefault("sums", {})
        manifest = Manifest(**{f.name: values[f.name] for f in fields(Manifest)})
    except FileNotFoundError:
        raise _Half(f"{MANIFEST} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise _Half(f"{MANIFEST} is damaged") from None
    for name, size in manifest.files.items():
        if not (path / name).is_file():
            raise _Half(f"{name} is missing")
        if (found := (path / name).stat().st_size) != size:
            raise _Half(f"{name} has {found} of {size} bytes")
    return manifest
