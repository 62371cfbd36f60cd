"""The text of a run: which bytes it trains on, and which are kept to judge the model.

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
from pathlib import Path

from sherd.train.config import Config, DataConfig, InputError
from sherd.train.saved import Checkpoint

__all__ = ["SEPARATOR", "VOCABULARY", "Corpus", "corpus_of", "read_corpus", "read_whole"]

VOCABULARY = 256
SEPARATOR = b"\0"
NOT_SOURCES = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Text, cut in two. `digest` names the content of both."""

    train: bytes
    held_out: bytes
    num_documents: int
    digest: str
    source: str


def read_corpus(data: DataConfig) -> Corpus:
    """The text at `data.path`: a file, the text files of a folder, or the standard library's sources.

    Raises:
        InputError: nothing readable there, or too little for one sample on either side of the cut.
    """
    source = data.path or sysconfig.get_path("stdlib")
    documents, row = _row(data)
    cut = len(row) - int(len(row) * data.held_out)
    for share, size in (("training", cut), ("held-out", len(row) - cut)):
        if size <= data.context:
            raise InputError(
                f"{source} holds {_count(len(row) - documents, 'byte')} of text in "
                f"{_count(documents, 'document')}, which leaves {_count(size, f'{share} byte')}; a sample needs "
                f"{data.context + 1}: give more text, or a smaller data.context"
            )
    digest = hashlib.sha256(row).hexdigest()[:16]
    return Corpus(row[:cut], row[cut:], documents, digest, source)


def read_whole(path: str) -> bytes:
    """All documents of the text at `path`, none held out.

    Raises:
        InputError: there is nothing readable.
    """
    documents, row = _row(DataConfig(path=path))
    if not documents:
        raise InputError(f"{path} holds no text; give a text file, or a folder of them")
    return row


def _row(data: DataConfig) -> tuple[int, bytes]:
    """The number of documents at `data.path`, and all of them in a row."""
    source = Path(data.path or sysconfig.get_path("stdlib"))
    documents = sorted(_documents(source, sources_only=not data.path), key=lambda d: hashlib.sha256(d).digest())
    return len(documents), b"".join(SEPARATOR + document for document in documents)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


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
    corpus = read_corpus(config.data)
    if resumed:
        resumed.check_text(corpus.digest, corpus.source)
    return corpus
