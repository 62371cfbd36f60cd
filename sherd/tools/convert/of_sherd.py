"""Checkpoints of sherd's own format, `sherd/1`."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from sherd.checkpoint.encoding import in_buckets, read_into
from sherd.errors import CheckpointError
from sherd.layout.boxes import Grid
from sherd.storage.files import Content, Opened, step_of, write_file
from sherd.storage.folder import Folder, file_name
from sherd.storage.manifest import MANIFEST, Entry, File, Manifest
from sherd.storage.places import mode_of, place_of
from sherd.tools.convert.contents import Contents, Lazy, Read, Source, Spec

FORMAT = "sherd"
FILE_BYTES = 4 << 30
"""The most bytes of a file with several tensors."""

FILE = re.compile(r"[0-9a-f]{8,}-\d{5,}\.safetensors(\.part.*)?")
"""The names of files of tensors."""


class SherdSource(Source):
    """A checkpoint of sherd in the folder `path`, or the last step's of several in it.

    Raises:
        CheckpointError: there is no checkpoint, or its manifest is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.folder = folder_of(path)
        self.opened = Opened(place_of(self.folder))
        manifest = self.opened.manifest
        tensors = {
            name: Lazy(Spec(entry.dtype, entry.shape), partial(read_into, self.opened, name))
            for name, entry in manifest.tensors.items()
        }
        wrong = next((item for item, value in manifest.values.items() if not isinstance(value, dict)), None)
        if wrong is not None:
            raise CheckpointError(f"{self.folder}/{MANIFEST}: the values of {wrong} are no object")
        rest = Contents({}, manifest.aliases, manifest.values, manifest.step, manifest.user)
        note = f"saved by {manifest.world_size} ranks at {manifest.saved}, in {len(manifest.files)} files"
        super().__init__(FORMAT, tensors, rest, self.opened.close, [note])

    def pieces(self) -> Mapping[str, int]:
        """Returns by name the number of parts of each tensor that is in several."""
        counted = {name: sum(1 for _ in entry.pieces()) for name, entry in self.opened.manifest.tensors.items()}
        return {name: number for name, number in counted.items() if number > 1}


def folder_of(path: Path) -> Path:
    """Returns the folder of a checkpoint: `path`, or the last step's below it. Raises CheckpointError."""
    if mode_of(path / MANIFEST) or step_of(path.name) is not None:
        return path
    steps = [step for step in path.iterdir() if step_of(step.name) is not None and mode_of(step / MANIFEST)]
    if not steps:
        raise CheckpointError(f"{path} holds no checkpoint of sherd: neither {MANIFEST} nor step-00000000/{MANIFEST}")
    return max(steps, key=lambda step: step_of(step.name) or 0)


def write(path: Path, contents: Contents, read: Read) -> Sequence[str]:
    """Write `path/step-00000000/`, with the step's own number, and `path/latest`. The manifest is written last."""
    step, save_id = contents.step or 0, secrets.token_hex(8)
    folder = Folder(place_of(path))
    place = folder.folder_of(step)
    files: list[File] = []
    entries: dict[str, Entry] = {}
    for names in in_buckets(contents.tensors, lambda name: contents.tensors[name].nbytes, FILE_BYTES):
        tensors: dict[str, Content] = {}
        for name in names:
            spec = contents.tensors[name]
            entries[name] = Entry(spec.dtype, spec.shape, Grid(len(files)))
            tensors[name] = Content(spec.dtype, spec.shape, partial(read, name))
        files.append(write_file(place, file_name(save_id, len(files)), tensors))
    manifest = Manifest(
        step=step,
        save_id=save_id,
        saved=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        world_size=1,
        files=tuple(files),
        tensors=entries,
        aliases=contents.aliases,
        values=contents.values,
        user=contents.user,
    )
    folder.finish(step, manifest)
    return ()
