"""Checkpoints of sherd's own format, `sherd/1`."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import torch

from sherd.checkpoint.tensor_bytes import read_into
from sherd.errors import CheckpointError
from sherd.layout.boxes import Box, Grid
from sherd.storage.files import Content, Opened, write_file
from sherd.storage.folder import Folder, file_name
from sherd.storage.manifest import MANIFEST, Entry, File, Manifest
from sherd.storage.places import place_of
from sherd.tools.convert.contents import Contents, Read, Spec, in_files

FORMAT = "sherd"
FILE_BYTES = 4 << 30
"""A file takes no further tensor once it has as many bytes."""

_STEP = re.compile(r"step-(\d{8,})")
FILE = re.compile(r"[0-9a-f]{8,}-\d{5,}\.safetensors(\.part.*)?")
"""The names of files of tensors."""


class SherdSource:
    """A checkpoint of sherd.

    Args:
        path: its folder, or the folder of several, of which that of the last step is meant.

    Raises:
        CheckpointError: there is none, or its manifest is damaged.
    """

    format = FORMAT

    def __init__(self, path: Path) -> None:
        self.folder = folder_of(path)
        self.opened = Opened(place_of(self.folder))
        manifest = self.opened.manifest
        specs = {name: Spec(entry.dtype, entry.shape) for name, entry in manifest.tensors.items()}
        wrong = next((item for item, value in manifest.values.items() if not isinstance(value, dict)), None)
        if wrong is not None:
            raise CheckpointError(f"{self.folder}/{MANIFEST}: the values of {wrong} are no object")
        self.contents = Contents(specs, manifest.aliases, manifest.values, manifest.step, manifest.user)

    def read_into(self, name: str, part: Box, target: torch.Tensor, most_bytes: int) -> None:
        """Fill `target` with `part` of the tensor `name`. Raises CheckpointError if a block is not what was written."""
        read_into(self.opened, name, part, target, most_bytes)

    def notes(self) -> list[str]:
        """Returns who has saved it, and when."""
        manifest = self.opened.manifest
        return [f"saved by {manifest.world_size} ranks at {manifest.saved}, in {len(manifest.files)} files"]

    def pieces(self) -> Mapping[str, int]:
        """Returns in how many pieces tensors lie, where it is more than one."""
        counted = {name: sum(1 for _ in each.pieces()) for name, each in self.opened.manifest.tensors.items()}
        return {name: number for name, number in counted.items() if number > 1}

    def close(self) -> None:
        """Close all files."""
        self.opened.close()


def folder_of(path: Path) -> Path:
    """Returns the folder of a checkpoint: `path`, or that of the last step below it. Raises CheckpointError."""
    if (path / MANIFEST).exists() or _STEP.fullmatch(path.name):
        return path
    steps = [each for each in path.glob("step-*") if _STEP.fullmatch(each.name) and (each / MANIFEST).exists()]
    if not steps:
        raise CheckpointError(f"{path} holds no checkpoint of sherd: neither {MANIFEST} nor step-00000000/{MANIFEST}")
    return max(steps, key=lambda each: int(each.name.removeprefix("step-")))


def write(path: Path, contents: Contents, read: Read) -> Sequence[str]:
    """Write `path/step-00000000/`, with the step's own number, and `path/latest`. The manifest is written last."""
    step, save_id = contents.step or 0, secrets.token_hex(8)
    folder = Folder(place_of(path))
    place = folder.folder_of(step)
    files: list[File] = []
    entries: dict[str, Entry] = {}
    for names in in_files(contents.tensors, FILE_BYTES):
        for each in names:
            spec = contents.tensors[each]
            entries[each] = Entry(spec.dtype, spec.shape, Grid(len(files)))
        inside = {
            each: Content(contents.tensors[each].dtype, contents.tensors[each].shape, partial(read, each))
            for each in names
        }
        files.append(write_file(place, file_name(save_id, len(files)), inside))
    manifest = Manifest(
        step=step,
        save_id=save_id,
        saved=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        world_size=1,
        files=tuple(files),
        tensors={each: entries[each] for each in contents.tensors},
        aliases=contents.aliases,
        values=contents.values,
        user=contents.user,
    )
    folder.finish(step, manifest)
    return ()
