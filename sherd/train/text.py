"""The text of a run: which bytes it trains on, and which are kept to judge the model.

Text is bytes, a token is a byte. Every document begins with a NUL, which no text holds, so 256 tokens are enough.
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
from pathlib import Path

from sherd.train.config import Config, InputError
from sherd.train.saved import Checkpoint

VOCABULARY = 256
SEPARATOR = b"\0"
HELD_OUT = 0.01  # of the text
NOT_SOURCES = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Text, cut in two. `digest` names the content of both."""

    train: bytes
    held_out: bytes
    num_documents: int
    digest: str
    source: str


def read_corpus(path: str, context: int) -> Corpus:
    """The text at `path`: a file, the text files of a folder, or the standard library's sources if it is empty.

    Raises InputError if there is nothing readable, or too little to hold a sample out.
    """
    source = path or sysconfig.get_path("stdlib")
    documents = _ordered(path)
    row = _row(documents)
    cut = len(row) - int(len(row) * HELD_OUT)
    if len(row) - cut <= context:
        raise InputError(
            f"{source} holds {len(row) - len(documents):,} bytes of text in {len(documents):,} documents, which leaves "
            f"{len(row) - cut} held-out bytes; a sample needs {context + 1}: give more text, or a smaller context"
        )
    return Corpus(row[:cut], row[cut:], len(documents), hashlib.sha256(row).hexdigest()[:16], source)


def read_whole(path: str) -> bytes:
    """All documents of the text at `path`, none held out. Raises InputError if there is nothing readable."""
    documents = _ordered(path)
    if not documents:
        raise InputError(f"{path} holds no text; give a text file, or a folder of them")
    return _row(documents)


def _ordered(path: str) -> list[bytes]:
    """The documents at `path`, or the standard library's sources."""
    source = Path(path or sysconfig.get_path("stdlib"))
    return sorted(_documents(source, sources_only=not path), key=lambda document: hashlib.sha256(document).digest())


def _row(documents: list[bytes]) -> bytes:
    return b"".join(SEPARATOR + document for document in documents)


def _documents(path: Path, sources_only: bool) -> Iterator[bytes]:
    """Every text under `path`: not hidden, not empty, without a NUL."""
    try:
        if path.is_file():
            text = path.read_bytes()
            if SEPARATOR in text:
                raise InputError(f"{path} holds NUL bytes, so it is no text; give a text file or a folder")
            if text:
                yield text
            return
        if path.exists() and not path.is_dir():
            raise InputError(f"{path} is neither a file nor a folder; give a text file or a folder of them")
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


def corpus_of(config: Config, resumed: Checkpoint | None) -> Corpus:
    """Returns the text of a run. Raises InputError where it cannot be used, or is not that of the run resumed."""
    corpus = read_corpus(config.data, config.context)
    if resumed:
        resumed.check_text(corpus.digest, corpus.source)
    return corpus
