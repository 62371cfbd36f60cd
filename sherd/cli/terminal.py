"""The terminal: what it is not to obey, and a rank's stdout and stderr, without which it goes on."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any, TextIO

_GONE = (errno.EIO, errno.EPIPE)  # a closed terminal; a pipe without a reader


class _Unlosable(io.FileIO):
    """A descriptor that becomes /dev/null once what it led to is gone."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in _GONE:
                raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())  # what else writes there, such as torch's warnings from C++, goes on too
        os.close(nowhere)
        return len(memoryview(data).cast("B"))


def outlive_the_terminal() -> None:
    """Let prints to a terminal that was closed, or to a pipe without a reader, be lost without an error."""
    sys.stdout, sys.stderr = (_unlosable(stream.fileno(), stream.encoding) for stream in (sys.stdout, sys.stderr))


def _unlosable(descriptor: int, encoding: str) -> io.TextIOWrapper:
    # Without a buffer, as `python -u` has them: a line is there when a rank is killed.
    raw: Any = _Unlosable(descriptor, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding, errors="backslashreplace", write_through=True)


def say(text: str, file: TextIO | None = None) -> None:
    """Print `text`, in which there may be names from files of others, on stdout or `file`."""
    print(escaped(text), file=file)


def escaped(text: str) -> str:
    """Returns `text` with escapes for characters that a terminal obeys, or does not show as they are.

    These are controls, changes of direction and surrogates. Ends of lines stay.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each == "\n" or each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )
