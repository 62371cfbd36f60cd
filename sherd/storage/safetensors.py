"""The header of a safetensors file, which says where its tensors are.

    8 bytes             the length of the header, a little-endian integer
    the header          JSON: {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
    the data            the tensors' bytes, row by row, little-endian; offsets count from here

The format is that of the `safetensors` package (https://github.com/huggingface/safetensors). A file is not trusted:
no header makes a reader look outside of the file.
"""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from sherd.errors import CheckpointError
from sherd.layout.placement import Shape

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "BF16": 16, "F16": 16, "F32": 32, "F64": 64, "C64": 64, "C128": 128,
}  # fmt: skip
"""The bits of an element, by the name of its dtype."""

LONGEST_HEADER = 100_000_000
"""The longest header in bytes, as in the `safetensors` package."""
METADATA = "__metadata__"
MOST_DIMS = 64
MOST = 1 << 62
"""The largest size or offset. Products of hostile ones stay short, too."""
_ALIGNED = 8
"""The data begins at a multiple of this many bytes, so that a reader can map it into memory as numbers."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file: its `dtype` by name, its `shape`, and the bytes `start` to `stop` of the file."""

    dtype: str
    shape: Shape
    start: int
    stop: int


def nbytes_of(dtype: str, shape: Iterable[int]) -> int:
    return BITS[dtype] // 8 * prod(shape)


def header_of(
    tensors: Mapping[str, tuple[str, Shape]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, Stored]]:
    """Returns the begin of a file with `tensors`, (dtype, shape) by name, and the place of each tensor in the file.

    Raises:
        CheckpointError: a tensor has the name that the format reserves, or the header would be too long.
    """
    if METADATA in tensors:
        raise CheckpointError(f"a tensor cannot be called {METADATA} in a safetensors file; rename it")
    fields: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    stored: dict[str, Stored] = {}
    start = 0
    for name, (dtype, shape) in tensors.items():
        stop = start + nbytes_of(dtype, shape)
        fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
        stored[name] = Stored(dtype, shape, start, stop)
        start = stop
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNED)
    if len(text) > LONGEST_HEADER:
        raise CheckpointError(f"the header of a file would have {len(text)} bytes; {LONGEST_HEADER} are possible")
    first = 8 + len(text)
    in_file = {name: Stored(at.dtype, at.shape, first + at.start, first + at.stop) for name, at in stored.items()}
    return len(text).to_bytes(8, "little") + text, in_file


def header_length(begin: bytes, nbytes: int, file: str) -> int:
    """Returns the length of the header of `file`, which has `nbytes` and begins with the 8 bytes `begin`.

    Raises:
        CheckpointError: the header would be longer than the file, or than `LONGEST_HEADER`.
    """
    length = int.from_bytes(begin, "little")
    if len(begin) < 8 or length > min(nbytes - 8, LONGEST_HEADER):
        raise CheckpointError(f"{file} is no safetensors file: it has {nbytes} bytes, its header {length}")
    return length


def parsed(header: bytes, nbytes: int, file: str) -> tuple[dict[str, Stored], dict[str, str]]:
    """Returns the tensors and the metadata of `file`, which has `nbytes` and this `header`.

    Raises:
        CheckpointError: the header is malformed, has a name twice, or a tensor outside of the file, overlaps
            another tensor, or is not as long as its shape says.
    """
    fields = read_json(header, file)
    first = 8 + len(header)
    metadata = fields.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{file}: {METADATA} should hold texts by name")
    tensors = {name: _stored(name, entry, first, nbytes, file) for name, entry in fields.items()}
    end = first
    for name, at in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if at.start < end and at.stop > at.start:
            raise CheckpointError(f"{file}: {in_brief(name)} begins at byte {at.start}, inside another tensor")
        end = max(end, at.stop)
    return tensors, metadata


def _stored(name: str, entry: object, first: int, nbytes: int, file: str) -> Stored:
    try:
        fields: Any = entry
        dtype, shape, (start, stop) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
        bits = BITS[dtype]
        are_sizes = all(type(size) is int and 0 <= size <= MOST for size in (*shape, start, stop))
    except (KeyError, TypeError, ValueError):
        are_sizes = False
    name = in_brief(name)
    if not are_sizes or len(shape) > MOST_DIMS:
        raise CheckpointError(f"{file}: the entry of {name} is {in_brief(entry)}, not a dtype, shape and place")
    if not start <= stop <= nbytes - first:
        raise CheckpointError(f"{file}: {name} is at bytes {start} to {stop} of {nbytes - first}")
    if bits // 8 * prod(shape) != stop - start:
        raise CheckpointError(
            f"{file}: {name} is {dtype} of shape {in_brief(shape)}, which are not {stop - start} bytes"
        )
    return Stored(dtype, shape, first + start, first + stop)


def read_json(text: bytes, file: str) -> dict[str, object]:
    """Returns the JSON object `text`. Raises CheckpointError if it is anything else, or has a name twice."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        members = dict(pairs)
        if len(members) != len(pairs):
            ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
            raise CheckpointError(f"{file}: {in_brief(twice)} is in it twice")
        return members

    def refused(constant: str) -> None:
        raise CheckpointError(f"{file} is no JSON: it has {constant}")

    try:
        parsed_text = json.loads(text.decode(), object_pairs_hook=unique, parse_constant=refused)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is no JSON: {error}") from None
    if not isinstance(parsed_text, dict):
        raise CheckpointError(f"{file} holds {in_brief(parsed_text)} where an object is expected")
    return parsed_text


_BRIEF = reprlib.Repr()
_BRIEF.maxlevel, _BRIEF.maxstring, _BRIEF.maxlong = 3, 100, 40


def in_brief(value: object) -> str:
    """Returns `value` for the text of an error, shortened if it is long or deep."""
    text = _BRIEF.repr(value)
    return text if len(text) <= 160 else f"{text[:157]}..."
