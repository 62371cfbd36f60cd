"""Where tensors are: in a file by its header, and in the files of a checkpoint by the manifest.

    8 bytes             the length of the header, a little-endian integer
    the header          JSON: {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
    the data            the tensors' bytes, row by row, little-endian; offsets count from here

The format is that of the `safetensors` package (https://github.com/huggingface/safetensors). A file is not trusted:
no header makes a reader look outside of the file.

`docs/look_up/checkpoint_format.md` describes the format for other readers. A manifest is not trusted: its numbers are
checked against each other before anything is read or allocated for them.
"""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeVar

from sherd.errors import CheckpointError
from sherd.layout.boxes import Box, Grid, GridCut, Piece, overlapping, whole
from sherd.layout.placement import Shape
from sherd.storage.places import Readable

T = TypeVar("T")

# The header of a file

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


def header_of(tensors: Mapping[str, tuple[str, Shape]], metadata: Mapping[str, str] | None = None) -> bytes:
    """Returns the begin of a file with `tensors`, (dtype, shape) by name, one after the other.

    Raises:
        CheckpointError: a tensor has the name that the format reserves, or the header would be too long.
    """
    if METADATA in tensors:
        raise CheckpointError(f"a tensor cannot be called {METADATA} in a safetensors file; rename it")
    fields: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    start = 0
    for name, (dtype, shape) in tensors.items():
        stop = start + nbytes_of(dtype, shape)
        fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNED)
    if len(text) > LONGEST_HEADER:
        raise CheckpointError(f"the header of a file would have {len(text)} bytes; {LONGEST_HEADER} are possible")
    return len(text).to_bytes(8, "little") + text


def header_length(begin: bytes, nbytes: int, file: str) -> int:
    """Returns the length of the header of `file`, which has `nbytes` and begins with the 8 bytes `begin`.

    Raises:
        CheckpointError: the header would be longer than the file, or than `LONGEST_HEADER`.
    """
    length = int.from_bytes(begin, "little")
    if len(begin) < 8 or length > min(nbytes - 8, LONGEST_HEADER):
        raise CheckpointError(f"{file} is no safetensors file: it has {nbytes} bytes, its header {length}")
    return length


def parsed_header(header: bytes, nbytes: int, file: str) -> tuple[dict[str, Stored], dict[str, str]]:
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


def header_in(file: Readable) -> tuple[dict[str, Stored], dict[str, str]]:
    """Returns the tensors and the metadata of `file`. Raises as `parsed_header`, and what reading raises."""
    begin = bytearray(min(8, file.nbytes))
    file.read_into(0, memoryview(begin))
    header = bytearray(header_length(bytes(begin), file.nbytes, file.name))
    file.read_into(8, memoryview(header))
    return parsed_header(bytes(header), file.nbytes, file.name)


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


# The manifest

MANIFEST = "manifest.json"
FORMAT = "sherd/1"
BLOCK_BYTES = 4 << 20
"""The bytes of a file that one checksum covers. A slice of a tensor is verified without reading all of its file."""
MOST_BYTES = 1 << 30
"""The longest manifest: some million parts."""
_MOST_BLOCK_BYTES = 256 << 20
_MOST_SIDE_BY_SIDE = 200
"""The most parts side by side along any dim. With more, a hostile list would take long to be checked for overlaps."""
_CRC32 = re.compile("[0-9a-f]{8}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}")
_SIGNATURE = re.compile(rb',\n"sha256": "([0-9a-f]{64})"\n}\n\Z')
_SIGNATURE_BYTES = 81


@dataclass(frozen=True, slots=True)
class File:
    """One safetensors file: its `name` in the checkpoint's folder, its length, and the CRC-32 of each block."""

    name: str
    nbytes: int
    crc32: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: `dtype` as safetensors names it, `shape`, and the `layout` of its parts over the files."""

    dtype: str
    shape: Shape
    layout: Grid | tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.dtype, self.shape)

    def pieces(self, part: Box | None = None) -> Iterator[Piece]:
        """Yields the parts that share elements with `part`; None: all parts."""
        if isinstance(self.layout, Grid):
            yield from self.layout.pieces(self.shape, part)
        elif part is None:
            yield from self.layout
        else:
            yield from (piece for piece in self.layout if piece[1].intersect(part) is not None)


def name_in_file(name: str, shape: Shape, piece: Box) -> str:
    """Returns the name of a part in its file.

    A part that is the full tensor is called `name`. Any other has the index of its first element behind the name:
    "model/out.weight@512,0".
    """
    return name if piece == whole(shape) else f"{name}@{','.join(map(str, piece.offsets))}"


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint.

    Args:
        step: the step of the save.
        save_id: hex digits, unique among the saves into one folder; the names of the files begin with them.
        saved: the time of the save, in UTC, as ISO 8601.
        world_size: the number of ranks that saved.
        files: the files; parts refer to them by number.
        tensors: all tensors, by name.
        aliases: other names of tensors (tied weights), and the names that they stand for.
        values: all other values, by item.
        user: the user's own JSON.
        block_bytes: the bytes of a file that one checksum covers.
    """

    step: int
    save_id: str
    saved: str
    world_size: int
    files: tuple[File, ...]
    tensors: Mapping[str, Entry]
    aliases: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    user: Any = None
    block_bytes: int = BLOCK_BYTES

    def entry(self, name: str) -> Entry | None:
        return self.tensors.get(self.aliases.get(name, name))

    def to_bytes(self) -> bytes:
        """Returns the text of the manifest: one entry a line, and at the end a SHA-256 of the text before it."""
        fields = {
            "format": _json(FORMAT),
            "step": _json(self.step),
            "save_id": _json(self.save_id),
            "saved": _json(self.saved),
            "world_size": _json(self.world_size),
            "block_bytes": _json(self.block_bytes),
            "files": _lines(
                [
                    _json({"name": file.name, "bytes": file.nbytes, "crc32": [f"{crc:08x}" for crc in file.crc32]})
                    for file in self.files
                ],
                "[]",
            ),
            "tensors": _lines([f"{_json(k)}: {_json(_entry_fields(v))}" for k, v in self.tensors.items()]),
            "aliases": _lines([f"{_json(k)}: {_json(v)}" for k, v in self.aliases.items()]),
            "values": _lines([f"{_json(k)}: {_json(v)}" for k, v in self.values.items()]),
            # As ASCII, unlike the rest: a user's text may have surrogates, which UTF-8 cannot encode.
            "user": json.dumps(self.user, separators=(",", ":"), allow_nan=False),
        }
        return signed(("{\n" + ",\n".join(f'"{key}": {text}' for key, text in fields.items())).encode())


def signed(body: bytes) -> bytes:
    """Returns the manifest whose text, up to the checksum, is `body`."""
    return body + b',\n"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _lines(entries: Sequence[str], brackets: str = "{}") -> str:
    return (
        brackets[0] + "".join(f"\n  {entry}," for entry in entries)[:-1] + f"\n{brackets[1]}" if entries else brackets
    )


def _entry_fields(entry: Entry) -> dict[str, object]:
    fields: dict[str, object] = {"dtype": entry.dtype, "shape": entry.shape}
    if isinstance(entry.layout, Grid):
        cuts = [[cut.dim, cut.parts, cut.stride] for cut in entry.layout.cuts]
        return fields | {"file": entry.layout.file} | ({"cuts": cuts} if cuts else {})
    return fields | {"pieces": [[file, box.offsets, box.sizes] for file, box in entry.layout]}


# Reading


def parsed(raw: bytes, where: str) -> Manifest:
    """Returns the manifest whose text is `raw`; `where` names it in errors.

    Raises:
        CheckpointError: the text was damaged, is of another format, or has entries that contradict each other.
    """
    signature = _SIGNATURE.search(raw[-_SIGNATURE_BYTES:])
    if signature is None:
        raise CheckpointError(f"{where} is torn: it does not end with its checksum")
    body = raw[: len(raw) - len(signature.group())]
    if hashlib.sha256(body).hexdigest().encode() != signature.group(1):
        raise CheckpointError(f"{where} is not what was written: its checksum is another one")
    fields = read_json(raw, where)
    if fields.get("format") != FORMAT:
        raise OtherFormat(f"{where} has format {in_brief(fields.get('format'))}; this version reads {FORMAT!r}")
    read = _Reading(fields, where)
    block_bytes = read.number("block_bytes", 1, _MOST_BLOCK_BYTES)
    files = tuple(read.each("files", list, lambda _, entry: _file(entry, block_bytes)))
    names = [file.name for file in files]
    if len(set(names)) != len(names):
        raise CheckpointError(f"{where}: two files have one name, {Counter(names).most_common(1)[0][0]}")
    tensors = dict(read.each("tensors", dict, lambda name, entry: (name, _entry(entry, len(files)))))
    needed, available = sum(entry.nbytes for entry in tensors.values()), sum(file.nbytes for file in files)
    if needed > available:
        raise CheckpointError(f"{where}: its tensors would take {in_brief(needed)} bytes, its files have {available}")
    aliases = dict(read.each("aliases", dict, lambda name, other: (name, _alias(name, other, tensors))))
    return Manifest(
        step=read.number("step", 0, 1 << 62),
        save_id=read.text("save_id", r"[0-9a-f]{1,32}"),
        saved=read.text("saved", r"[0-9TZ:.+-]{1,40}"),
        world_size=read.number("world_size", 1, 1 << 31),
        files=files,
        tensors=tensors,
        aliases=aliases,
        values=dict(read.each("values", dict, lambda name, value: (name, value))),
        user=fields.get("user"),
        block_bytes=block_bytes,
    )


class OtherFormat(CheckpointError):
    """A manifest of another format, undamaged: a later version wrote it.

    A search for the newest checkpoint stops here. Otherwise it would take an older one for the newest.
    """


class _Reading:
    """The fields of a manifest, read and checked one by one."""

    def __init__(self, fields: Mapping[str, object], where: str) -> None:
        self._fields, self._where = fields, where

    def number(self, key: str, least: int, most: int) -> int:
        value = self._fields.get(key)
        if type(value) is not int or not least <= value <= most:
            raise CheckpointError(f"{self._where}: {key} is {in_brief(value)}, not a number from {least} to {most}")
        return value

    def text(self, key: str, pattern: str) -> str:
        value = self._fields.get(key)
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise CheckpointError(f"{self._where}: {key} is {in_brief(value)}")
        return value

    def each(self, key: str, container: type, read: Callable[[str, Any], T]) -> Iterator[T]:
        """Yields `read(name, entry)` of each entry under `key`, a list or an object. Errors name the entry."""
        entries = self._fields.get(key)
        if not isinstance(entries, container):
            raise CheckpointError(f"{self._where}: {key} is {in_brief(entries)}, not a {container.__name__}")
        named = entries.items() if isinstance(entries, dict) else ((str(at), one) for at, one in enumerate(entries))  # type: ignore[arg-type, var-annotated]
        for name, entry in named:
            try:
                yield read(name, entry)
            except (_Wrong, KeyError, TypeError, ValueError) as error:
                why = f": {error}" if isinstance(error, _Wrong) else ""
                text = f"{in_brief(name)}, which is {in_brief(entry)}{why}"
                raise CheckpointError(f"{self._where}: {key} has {text}") from None


class _Wrong(Exception):
    """An entry of a manifest that contradicts itself or others."""


def _require(is_right: object, otherwise: str) -> None:
    if not is_right:
        raise _Wrong(otherwise)


def _numbers(values: Any) -> tuple[int, ...]:
    numbers = tuple(values)
    _require(all(type(number) is int and 0 <= number <= MOST for number in numbers), "a size is no number")
    return numbers


def _file(entry: Any, block_bytes: int) -> File:
    name, (nbytes,) = entry["name"], _numbers([entry["bytes"]])
    _require(
        isinstance(name, str) and _FILE_NAME.fullmatch(name), "the name of a file has letters, digits, - _ . alone"
    )
    listed = entry["crc32"]
    _require(all(_CRC32.fullmatch(crc) for crc in listed), "a checksum has 8 hex digits")
    sums = tuple(int(crc, 16) for crc in listed)
    _require(len(sums) == -(-nbytes // block_bytes), f"{nbytes} bytes have {-(-nbytes // block_bytes)} checksums")
    return File(name, nbytes, sums)


def _entry(entry: Any, num_files: int) -> Entry:
    dtype, shape = entry["dtype"], _numbers(entry["shape"])
    _require(dtype in BITS, f"{in_brief(dtype)} is no dtype")
    _require(len(shape) <= MOST_DIMS, "there are too many dims")
    if "pieces" in entry:
        return Entry(dtype, shape, _pieces(entry["pieces"], shape, num_files))
    (file,) = _numbers([entry["file"]])
    cuts = tuple(GridCut(*_numbers(cut)) for cut in entry.get("cuts", ()))
    _require(len(cuts) <= MOST_DIMS, "there are too many cuts")
    _require(all(cut.dim < len(shape) and cut.parts for cut in cuts), "a cut is of a dim that does not exist")
    # Without this limit, a grid of a few numbers could have more parts than a reader can ever go through.
    _require(prod(cut.parts for cut in cuts) <= num_files, "a grid has one part in a file at most")
    last = file + sum((cut.parts - 1) * cut.stride for cut in cuts)
    _require(last < num_files, f"there is no file {last}")
    return Entry(dtype, shape, Grid(file, cuts))


def _pieces(listed: Any, shape: Shape, num_files: int) -> tuple[Piece, ...]:
    pieces = []
    _require(isinstance(listed, list), "its parts are no list")
    for file, offsets, sizes in listed:
        box = Box(_numbers(offsets), _numbers(sizes))
        _require(type(file) is int and 0 <= file < num_files, f"there is no file {in_brief(file)}")
        _require(len(box.offsets) == len(box.sizes) == len(shape), "a part has other dims")
        ends = map(sum, zip(box.offsets, box.sizes, strict=True))
        _require(all(end <= size for end, size in zip(ends, shape, strict=True)), "a part is not inside the tensor")
        pieces.append((file, box))
    numel = sum(box.numel for _, box in pieces)
    _require(numel == prod(shape) and pieces, f"its parts have {in_brief(numel)} elements of {in_brief(prod(shape))}")
    try:
        overlap = overlapping((box for _, box in pieces), _MOST_SIDE_BY_SIDE)
    except OverflowError:
        raise _Wrong("its parts are too many, and too entangled, to be told apart") from None
    _require(overlap is None, "two of its parts share elements")
    return tuple(pieces)


def _alias(name: str, other: object, tensors: Mapping[str, Entry]) -> str:
    _require(name not in tensors, "there is a tensor of that name")
    if not isinstance(other, str) or other not in tensors:
        raise _Wrong("an alias is of a tensor")
    return other
