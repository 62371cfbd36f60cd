"""Which bytes a step trains on, and which are kept to judge the model.

Text is bytes, a token is a byte. Every document begins with a NUL, which no text holds, so 256 tokens are
enough.
Documents stand in the order of their hashes, and the tail of that row is held out:

    | NUL doc NUL doc ... NUL doc NUL do | c NUL doc NUL doc |
      training                             held out

The order is a fair draw that no file name decides, equal documents come to stand side by side and so on one
side, and a text of a single file needs no rule of its own.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from sherd.train.config import Data, InputError

__all__ = ["VOCABULARY", "Corpus", "Windows", "batch", "read_corpus", "seeded"]

VOCABULARY = 256
SEPARATOR = b"\0"
NOT_SOURCES = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def seeded(*key: object) -> torch.Generator:
    """A generator on the CPU that depends on `key` alone: not on ranks, devices or what was drawn before."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))


@dataclass(frozen=True)
class Corpus:
    """Text, cut in two. `train` and `held_out` are 1-D, uint8, on the CPU; `digest` names their content."""

    train: Tensor
    held_out: Tensor
    num_documents: int
    digest: str
    source: str


def read_corpus(data: Data) -> Corpus:
    """The text at `data.path`: a file, the text files of a folder, or the standard library's sources.

    Raises:
        InputError: nothing readable there, or too little for one sample on either side of the cut.
    """
    source = data.path or sysconfig.get_path("stdlib")
    documents = sorted(_documents(Path(source), sources_only=not data.path), key=lambda d: hashlib.sha256(d).digest())
    row = b"".join(SEPARATOR + document for document in documents)
    cut = len(row) - int(len(row) * data.held_out)
    for share, size in (("training", cut), ("held-out", len(row) - cut)):
        if size <= data.context:
            raise InputError(
                f"{source} holds {len(row)} bytes of text in {len(documents)} documents, which leaves {size} "
                f"{share} bytes; a sample needs {data.context + 1}: give more text, or a smaller data.context"
            )
    whole = torch.frombuffer(bytearray(row), dtype=torch.uint8)
    digest = hashlib.sha256(row).hexdigest()[:16]
    return Corpus(whole[:cut], whole[cut:], len(documents), digest, source)


def _documents(path: Path, sources_only: bool) -> Iterator[bytes]:
    """Every text under `path`: not hidden, not empty, without a NUL."""
    try:
        if path.is_file():
            text = path.read_bytes()
            if SEPARATOR in text:
                raise InputError(f"{path} holds NUL bytes, so it is no text; give a text file or a folder")
            yield text
            return
        for file in _files(path):
            if sources_only and (file.suffix != ".py" or NOT_SOURCES.intersection(file.relative_to(path).parts)):
                continue
            text = file.read_bytes()
            if text and SEPARATOR not in text:
                yield text
    except OSError as error:
        raise InputError(f"cannot read the text {error.filename}: {error.strerror}") from error


def _files(folder: Path) -> Iterator[Path]:
    """The files under `folder`, but for hidden ones. A folder that cannot be listed raises OSError."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry.path))
        elif entry.is_file():
            yield Path(entry.path)


def batch(text: Tensor, context: int, seed: int, first: int, num: int) -> tuple[Tensor, Tensor]:
    """Samples `first` to `first + num` of an endless row that `seed` alone decides: inputs and targets.

    Step s of a run with batches of b takes samples s*b to (s+1)*b, and rank r of n the r-th n-th of those, so
    neither resuming nor another number of ranks changes what a step trains on. An epoch visits each window of
    `context` bytes once.

    Args:
        text: 1-D, uint8, more than `context` long.

    Returns:
        Two int64 tensors of shape [num, context]; a target is the byte after its input.
    """
    num_windows = (len(text) - 1) // context
    starts = []
    for sample in range(first, first + num):
        epoch, place = divmod(sample, num_windows)
        starts.append(int(_order(num_windows, seed, epoch)[place]) * context)
    samples = torch.stack([text[start : start + context + 1] for start in starts]).long()
    return samples[:, :-1], samples[:, 1:]


@lru_cache(maxsize=2)  # a batch may straddle two epochs
def _order(num_windows: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(num_windows, generator=seeded("order", seed, epoch))


class Windows:
    """Overlapping windows over a text, each byte scored exactly once, the later half of a window at a time.

        window 0   | NULs......|scored 0|
        window 1         | seen |scored 1|          seen: context // 2 bytes or a little more
        window 2                 | seen  |scored 2|

    So a byte is predicted from at least half a context, and no window starts blind.
    """

    def __init__(self, text: Tensor, context: int) -> None:
        self.context, self.num_bytes = context, len(text)
        self.stride = max(1, context // 2)
        self.num = -(-len(text) // self.stride)
        tail = self.num * self.stride - len(text)
        self._row = torch.cat([text.new_zeros(context), text, text.new_zeros(tail)])

    def batch(self, windows: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs and targets (int64), and weights (float32, 1 where scored): each [len(windows), context].

        A window from `num` on is empty, its weights zero, for ranks that have fewer windows than others.
        """
        starts = [min(window, self.num - 1) * self.stride for window in windows]
        # A window's last target is the last byte of its stride; the row numbers it `context` higher.
        rows = torch.stack([self._row[s + self.stride - 1 :][: self.context + 1] for s in starts]).long()
        place = torch.tensor(windows)[:, None] * self.stride + torch.arange(self.context) - (self.context - self.stride)
        old = torch.arange(self.context) < self.context - self.stride
        weights = (~old & (place < self.num_bytes)).float()
        return rows[:, :-1], rows[:, 1:], weights
