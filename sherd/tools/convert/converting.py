"""A checkpoint from one format to another, by parts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from sherd.errors import CheckpointError
from sherd.tools.convert import of_hf
from sherd.tools.convert.contents import MOST_BYTES, Named, Sink, Source, chunks_of
from sherd.tools.convert.formats import FORMATS
from sherd.tools.convert.mapped import Mapped
from sherd.tools.convert.mapping import Rule

Progress = Callable[[str, int], None]
"""Is told the name of a tensor, and how many more of its bytes are done."""


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
    """Write what `source` holds to `target`, which is there when this returns, whole, and not before.

    Args:
        source: a checkpoint that is open.
        target: a path that is not there, or an empty folder.
        to: the name of a format that is written.
        rules: how tensors are renamed and reshaped.
        progress: is told of each part.
        most_bytes: the bytes of a tensor that are in memory at once.
        step: the step that the checkpoint is of, where the source does not say.
        model_only: whether all but models is left out.
        shard_bytes: the most bytes of a file of the format hf.

    Returns what was left out, in sentences.

    Raises:
        CheckpointError: the source is damaged, the target is there, or the format cannot hold what the source does.
        OSError: the target cannot be written.
    """
    write = FORMATS[to].write
    if write is None:
        raise CheckpointError(f"the format {to} is read alone; name another one")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} is there already, and nothing is overwritten; choose another name")
    if not target.absolute().parent.is_dir():
        raise CheckpointError(f"{target.parent} is no folder; make it first, or choose another name")
    if to == of_hf.FORMAT:
        write = partial(of_hf.write, shard_bytes=shard_bytes)
    mapped = Mapped(source, rules or [])
    return _written(target, write, mapped, progress, most_bytes, step, model_only)


def _written(
    target: Path, write: Sink, source: Mapped, progress: Progress, most_bytes: int, step: int | None, model_only: bool
) -> list[str]:
    contents = source.contents
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
        for chunk in chunks_of(Named(source, name), most_bytes):
            yield chunk
            progress(name, len(chunk))

    part = target.absolute().with_name(f".part-{os.getpid()}-{target.name}")
    try:
        left_out = [note for note in source.notes() if " is left out: " in note]
        left_out += write(part, contents, read)
        if target.exists():
            target.rmdir()
        part.rename(target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        part.unlink(missing_ok=True)
        raise
    return left_out
