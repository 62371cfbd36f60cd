"""The formats by name, and how one is recognised by looking at a path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sherd.errors import CheckpointError
from sherd.storage.manifest import MANIFEST
from sherd.tools.convert import of_dcp, of_deepspeed, of_hf, of_sherd, of_torch, of_universal
from sherd.tools.convert.contents import Sink, Source


@dataclass(frozen=True)
class Format:
    """How checkpoints of one format are opened and written.

    Args:
        read: opens one. Raises CheckpointError.
        write: writes one; None if it is read alone.
        is_at: whether there is one at a path, as it looks.
    """

    read: Callable[[Path], Source]
    write: Sink | None
    is_at: Callable[[Path], bool]


def _is_sherd(path: Path) -> bool:
    # One that was not saved to its end has files of tensors only, under names that no other format gives.
    here = any(each.name == MANIFEST or of_sherd.FILE.fullmatch(each.name) for each in path.glob("*"))
    return here or any(path.glob(f"step-*/{MANIFEST}"))


def _is_hf(path: Path) -> bool:
    if path.is_file():
        return path.suffix == ".safetensors" or path.name == of_hf.INDEX
    return (path / of_hf.INDEX).exists() or any(path.glob("*.safetensors"))


FORMATS: Mapping[str, Format] = {
    of_sherd.FORMAT: Format(of_sherd.SherdSource, of_sherd.write, _is_sherd),
    of_dcp.FORMAT: Format(of_dcp.read, of_dcp.write, lambda path: (path / of_dcp.METADATA).is_file()),
    of_deepspeed.FORMAT: Format(of_deepspeed.read, None, of_deepspeed.is_at),
    of_universal.FORMAT: Format(of_universal.read, of_universal.write, of_universal.is_at),
    of_hf.FORMAT: Format(of_hf.read, of_hf.write, _is_hf),
    of_torch.FORMAT: Format(
        of_torch.read, of_torch.write, lambda path: path.is_file() and path.suffix in (".pt", ".pth", ".bin", ".ckpt")
    ),
}


def format_at(path: Path) -> str:
    """Returns the name of the format of the checkpoint at `path`. Raises CheckpointError if it is not known."""
    if not path.exists():
        raise CheckpointError(f"{path} is not there")
    found = next((name for name, each in FORMATS.items() if each.is_at(path)), None)
    if found is None:
        raise CheckpointError(f"{path} is no checkpoint of a known format; name one of {', '.join(FORMATS)}")
    return found


def open_source(path: Path, format: str | None = None) -> Source:
    """Returns the checkpoint at `path`, open for reading. Raises CheckpointError."""
    if not path.exists():
        raise CheckpointError(f"{path} is not there")
    return FORMATS[format or format_at(path)].read(path)
