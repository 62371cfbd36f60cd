"""The formats by name, how a format is recognised, and the conversion of a checkpoint from one to another, by parts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from sherd.errors import CheckpointError
from sherd.storage.manifest import MANIFEST
from sherd.storage.places import mode_of
from sherd.tools.convert import of_dcp, of_hf, of_sherd, of_torch, of_universal
from sherd.tools.convert.contents import MOST_BYTES, Progress, Sink, Source, chunks_of
from sherd.tools.convert.mapped import Mapped
from sherd.tools.convert.mapping import Rule


@dataclass(frozen=True)
class Format:
    """How checkpoints of one format are opened and written; `is_at` tells whether a path looks like one."""

    read: Callable[[Path], Source]
    write: Sink
    is_at: Callable[[Path], bool]


def _is_sherd(path: Path) -> bool:
    # A checkpoint whose save did not end has only files of tensors, with names that no other format gives.
    names = os.listdir(path) if path.is_dir() else []  # `glob` takes a folder that cannot be read for an empty one
    return any(name == MANIFEST or of_sherd.FILE.fullmatch(name) for name in names) or any(
        path.glob(f"step-*/{MANIFEST}")
    )


def _is_hf(path: Path) -> bool:
    if path.is_file():
        return path.suffix == ".safetensors" or path.name == of_hf.INDEX
    return (path / of_hf.INDEX).exists() or any(path.glob("*.safetensors"))


FORMATS: Mapping[str, Format] = {
    of_sherd.FORMAT: Format(of_sherd.SherdSource, of_sherd.write, _is_sherd),
    of_dcp.FORMAT: Format(of_dcp.read, of_dcp.write, lambda path: (path / of_dcp.METADATA).is_file()),
    of_universal.FORMAT: Format(of_universal.read, of_universal.write, of_universal.is_at),
    of_hf.FORMAT: Format(of_hf.read, of_hf.write, _is_hf),
    of_torch.FORMAT: Format(
        of_torch.read, of_torch.write, lambda path: path.is_file() and path.suffix in (".pt", ".pth", ".bin", ".ckpt")
    ),
}


def format_at(path: Path) -> str:
    """Returns the name of the format of the checkpoint at `path`. Raises CheckpointError if it is not known."""
    name = next((name for name, format in FORMATS.items() if format.is_at(path)), None)
    if name is None:
        raise CheckpointError(
            f"{path} is no checkpoint of a known format ({', '.join(FORMATS)}); if it is one, say so by --from"
        )
    return name


def open_source(path: Path, format: str | None = None) -> Source:
    """Returns the checkpoint at `path`, open for reading. Raises CheckpointError, and OSError if it cannot be read."""
    if not mode_of(path):
        raise CheckpointError(f"{path} is not there")
    return FORMATS[format or format_at(path)].read(path)


def convert(
    source: Source,
    target: Path,
    to: str,
    rules: list[Rule] | None = None,
    progress: Progress = lambda name, nbytes: None,
    most_bytes: int = MOST_BYTES,
    step: int | None = None,
    model_only: bool = False,
    shard_bytes: int = of_hf.SHARD_BYTES,
) -> list[str]:
    """Write the contents of `source` to `target`, in the format `to`, and return what was left out, in sentences.

    `target` must not exist, or be an empty folder, and appears only when it is complete. `step` replaces the source's,
    at most `most_bytes` of a tensor are in memory at once, and `shard_bytes` limits the files of the format hf.

    Raises:
        CheckpointError: the source is damaged, the target exists, or the format cannot hold the contents.
        OSError: the target cannot be written.
    """
    write = FORMATS[to].write
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} is there already, and nothing is overwritten; choose another name")
    if not target.absolute().parent.is_dir():
        raise CheckpointError(f"{target.parent} is no folder; make it first, or choose another name")
    if to == of_hf.FORMAT:
        write = partial(of_hf.write, shard_bytes=shard_bytes)
    mapped = Mapped(source, rules or [])
    contents = mapped.contents
    if step is not None:
        contents = replace(contents, step=step)
    if model_only:
        models = tuple(f"{item}/" for item in contents.of_kind("module"))
        contents = replace(
            contents,
            tensors={name: spec for name, spec in contents.tensors.items() if name.startswith(models)},
            values={item: value for item, value in contents.values.items() if value.get("kind") == "module"},
        )

    def read(name: str) -> Iterator[memoryview]:
        for chunk in chunks_of(mapped.tensor(name), most_bytes):
            yield chunk
            progress(name, len(chunk))

    part = target.absolute().with_name(f".part-{os.getpid()}-{target.name}")
    try:
        left_out = [note for note in mapped.notes() if " is left out: " in note]
        left_out += write(part, contents, read)
        if target.exists():
            target.rmdir()
        part.rename(target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        part.unlink(missing_ok=True)
        raise
    return left_out
