"""A folder that all ranks save to: files wait in a part of it until all are complete, and then take their places."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from sherd.api.module import FSDPModule
from sherd.checkpoint.catalog import without_wrappers
from sherd.checkpoint.ranks import Ranks
from sherd.storage.places import flush

_PART = ".save_pretrained.part"


@contextmanager
def written_beside(folder: Path) -> Iterator[tuple[Path, Ranks, str]]:
    """Yields a folder inside of `folder` for files that are not complete, which the first rank makes and removes, the
    ranks, and what they do, for messages. All ranks must enter it. Raises CheckpointError if it cannot be made."""
    part, ranks, what = folder / _PART, Ranks(), f"save_pretrained to {folder}"

    def begin() -> None:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)

    ranks.first(begin, what)
    try:
        yield part, ranks, what
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(part, ignore_errors=True)
        raise
    ranks.first(lambda: shutil.rmtree(part, ignore_errors=True), what)  # before the other ranks go on


def publish(part: Path, folder: Path, config: str, weights: re.Pattern[str]) -> None:
    """Move all files from `part` into `folder`. Files there whose names match `weights`, of an older export, are
    removed. Without `config`, which goes first and comes last, the folder does not load."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / config).unlink(missing_ok=True)
    new = sorted(os.listdir(part), key=lambda name: name == config)
    for name in os.listdir(folder):
        if weights.fullmatch(name) and name not in new:
            (folder / name).unlink()
    for name in new:
        if name == config:
            flush(folder)
        os.replace(part / name, folder / name)
    flush(folder)


def beneath_wrappers(model: nn.Module, package: str, name: str) -> Any:
    """Returns the module of the class `name` of `package` that `model` is beneath its wrappers, or None. A package that
    nobody has imported has made no model."""
    cls = getattr(sys.modules.get(package), name, None)
    found = None
    for path, module in model.named_modules():
        if cls is not None and not without_wrappers(path) and isinstance(module, cls):
            found = module
    return found


def plain_class(module: nn.Module) -> type:
    """Returns the module's class before it was sharded."""
    cls = type(module)
    return cls.__mro__[2] if isinstance(module, FSDPModule) else cls
