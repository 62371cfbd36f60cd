"""Files of `torch.save`: their tree of values, with tensors that are read by parts, straight from the file.

Such a file is a zip archive, without compression: `data.pkl` is the pickled tree, and `data/0`, `data/1` and so on are
the bytes of its storages. The pickle is read with a list of the names that torch writes for tensors; anything else in
it is an error.

https://pytorch.org/docs/stable/notes/serialization.html describes the form, which torch writes since 1.6.
"""

from __future__ import annotations

import io
import struct
import zipfile
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

import torch

from sherd.checkpoint.tensor_bytes import DTYPES, dtype_name, memory_of
from sherd.errors import CheckpointError
from sherd.layout.boxes import Box
from sherd.layout.extent import Extent
from sherd.storage.places import Disk, Readable, read_exactly
from sherd.tools.convert.contents import Spec
from sherd.tools.convert.pickles import Dict, Unpickler

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
STORAGE_OF = {dtype: name for name, dtype in _STORAGES.items()}
"""The name of the storage class that a file has for a dtype; dtypes that are not here have untyped ones."""

_LONGEST_PICKLE = 1 << 30
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")


@dataclass(frozen=True, slots=True)
class _Storage:
    file: Readable
    start: int
    nbytes: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Strided:
    """A tensor of a file: its elements are those of a storage, `strides` apart, from element `offset` on."""

    storage: _Storage
    spec: Spec
    offset: int
    strides: tuple[int, ...]

    def same_memory(self) -> object:
        """Returns what two tensors have in common that are one."""
        return self.storage.file.name, self.storage.start, self.spec, self.offset, self.strides

    def vector(self) -> Strided:
        """Returns this tensor, which must be contiguous, flattened."""
        numel = prod(self.spec.shape)
        return Strided(self.storage, Spec(self.spec.dtype, (numel,)), self.offset, (1,))

    def read_into(self, part: Box, target: torch.Tensor, most_bytes: int) -> None:
        """Fill `target` with `part`. The stretch of the file that holds it is read at once, or by halves of it."""
        if not part.numel:
            return
        dtype = DTYPES[self.spec.dtype]
        reach = [(size - 1) * stride for size, stride in zip(part.sizes, self.strides, strict=True)]
        start = self.offset + sum(at * stride for at, stride in zip(part.offsets, self.strides, strict=True))
        numel = sum(reach) + 1
        if numel == part.numel and target.is_contiguous() and target.dtype == dtype and self._is_row_major(part):
            self._read(start * dtype.itemsize, memory_of(target))
        elif numel * dtype.itemsize <= most_bytes or part.numel == 1:
            read = torch.empty(numel, dtype=dtype)
            self._read(start * dtype.itemsize, memory_of(read))
            target.copy_(read.as_strided(part.sizes, self.strides))
        else:
            dim = max(range(len(reach)), key=lambda each: reach[each])
            half = part.sizes[dim] // 2
            for extent in (Extent(0, half), Extent(half, part.sizes[dim] - half)):
                below = part.narrowed(dim, extent)
                self.read_into(below, target[below.within(part)], most_bytes)

    def _is_row_major(self, part: Box) -> bool:
        inner = 1
        for size, stride in zip(reversed(part.sizes), reversed(self.strides), strict=True):
            if size > 1 and stride != inner:
                return False
            inner *= size
        return True

    def _read(self, start: int, into: memoryview) -> None:
        storage = self.storage
        if start + len(into) > storage.nbytes:
            raise CheckpointError(f"{storage.file.name}: a tensor lies outside of its storage")
        read_exactly(storage.file, storage.start + start, into)

    def value(self) -> torch.Tensor:
        """Returns the tensor, in memory."""
        target = torch.empty(self.spec.shape, dtype=DTYPES[self.spec.dtype])
        self.read_into(Box((0,) * target.dim(), self.spec.shape), target, max(target.nbytes, 1))
        return target


class Range(Readable):
    """A part of a file, as a file. Closing it leaves the file open."""

    def __init__(self, file: Readable, start: int, nbytes: int) -> None:
        if not 0 <= start <= start + nbytes <= file.nbytes:
            raise CheckpointError(f"{file.name} has {file.nbytes} bytes, not those from {start} to {start + nbytes}")
        self.name, self.nbytes, self.file, self.start = file.name, nbytes, file, start

    def read_into(self, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `start` on."""
        if start + len(into) > self.nbytes:
            raise EOFError
        self.file.read_into(self.start + start, into)

    def close(self) -> None:
        """Nothing to let go of."""


class _Stream(io.RawIOBase):
    """A `Readable` as zipfile wants it."""

    def __init__(self, file: Readable) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.nbytes}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer).cast("B")[: max(self._file.nbytes - self._at, 0)]
        if len(into):
            read_exactly(self._file, self._at, into)
        self._at += len(into)
        return len(into)


class TorchFile:
    """A file of `torch.save`. `tree` is what it holds, with `Strided` in the place of tensors.

    Args:
        file: the file.
        stubs: the first parts of names of modules whose classes become inert objects.

    Raises:
        CheckpointError: it is no such file, or names what is not known.
    """

    def __init__(self, file: Readable, stubs: tuple[str, ...] = ()) -> None:
        self._file = file
        try:
            self._zip = zipfile.ZipFile(cast("io.BufferedReader", io.BufferedReader(_Stream(file))))
        except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError, struct.error) as error:
            raise CheckpointError(
                f"{file.name} is no file of torch.save since torch 1.6 ({error}); load it with the torch that has "
                "saved it, and save it again"
            ) from None
        names = [info.filename for info in self._zip.infolist()]
        pickled = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickled) != 1 or len(set(names)) != len(names):
            raise CheckpointError(f"{file.name} is a zip archive without a data.pkl in it, or with two of a name")
        self._folder = pickled[0].removesuffix("data.pkl")
        if f"{self._folder}byteorder" in names and self._bytes("byteorder") != b"little":
            raise CheckpointError(f"{file.name} was saved on a machine with another order of bytes; save it again")
        self._storages: dict[str, _Storage] = {}
        unpickler = _Unpickler(self, io.BytesIO(self._bytes("data.pkl")), f"{file.name}", stubs)
        self.tree: Any = unpickler.read()

    def _bytes(self, name: str) -> bytes:
        start, nbytes = self._record(name)
        if nbytes > _LONGEST_PICKLE:
            raise CheckpointError(f"{self._file.name}: {name} has {nbytes} bytes")
        found = bytearray(nbytes)
        read_exactly(self._file, start, memoryview(found))
        return bytes(found)

    def _record(self, name: str) -> tuple[int, int]:
        """Returns where the record `name` begins, and its bytes."""
        try:
            info = self._zip.getinfo(self._folder + name)
        except KeyError:
            raise CheckpointError(f"{self._file.name} lacks the record {name[:100]}") from None
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise CheckpointError(
                f"{self._file.name}: the record {name[:100]} is compressed, which torch does not write"
            )
        header = bytearray(_LOCAL_HEADER.size)
        read_exactly(self._file, info.header_offset, memoryview(header))
        magic, *_, len_name, len_extra = _LOCAL_HEADER.unpack(header)
        start = info.header_offset + len(header) + len_name + len_extra
        if magic != b"PK\3\4" or start + info.file_size > self._file.nbytes:
            raise CheckpointError(f"{self._file.name}: the record {name[:100]} is not where the archive says")
        return start, info.file_size

    def storage(self, dtype: torch.dtype, key: str) -> _Storage:
        """Returns the storage `key`."""
        if key not in self._storages:
            self._storages[key] = _Storage(self._file, *self._record(f"data/{key}"), dtype)
        return self._storages[key]

    def damaged(self) -> str | None:
        """Returns the name of a record whose checksum differs, or None."""
        try:
            return self._zip.testzip()
        except (zipfile.BadZipFile, OSError) as error:
            return str(error)

    def close(self) -> None:
        """Close the file."""
        self._zip.close()
        self._file.close()


class _Unpickler(Unpickler):
    def __init__(self, of: TorchFile, file: io.BytesIO, where: str, stubs: tuple[str, ...]) -> None:
        names: dict[tuple[str, str], object] = {
            ("collections", "OrderedDict"): Dict,
            ("torch", "Size"): tuple,
            ("torch", "device"): str,
            ("torch.storage", "UntypedStorage"): torch.uint8,
            ("torch", "UntypedStorage"): torch.uint8,
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor,
            ("torch._utils", "_rebuild_tensor_v3"): self._tensor_of_bytes,
            ("torch._utils", "_rebuild_parameter"): self._parameter,
            ("torch._utils", "_rebuild_parameter_with_state"): self._parameter,
            ("torch._tensor", "_rebuild_from_type_v2"): self._subclass,
            ("torch.nn.parameter", "Parameter"): "Parameter",
            ("torch.nn.parameter", "Buffer"): "Buffer",
            ("torch", "Tensor"): "Tensor",
            ("_codecs", "encode"): self._encode,
            ("builtins", "set"): set,
            ("builtins", "complex"): complex,
            ("__builtin__", "set"): set,
            ("__builtin__", "complex"): complex,
        }
        names |= {("torch", name): dtype for name, dtype in _STORAGES.items()}
        names |= {("torch", str(dtype).removeprefix("torch.")): dtype for dtype in DTYPES.values()}
        super().__init__(file, names, where, stubs)
        self._of = of

    def persistent_load(self, pid: Any) -> _Storage:
        """Returns the storage that the pickle refers to as `pid`."""
        kind, dtype, key, _, _ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or not isinstance(key, str):
            raise CheckpointError(f"{self._where} refers to {str(pid)[:100]}, which is no storage")
        return self._of.storage(dtype, key)

    def _tensor(self, storage: _Storage, offset: int, size: Any, stride: Any, *_: object) -> Strided:
        return self._strided(storage, storage.dtype, offset, size, stride)

    def _tensor_of_bytes(self, storage: _Storage, offset: int, size: Any, stride: Any, *others: Any) -> Strided:
        return self._strided(storage, others[2], offset, size, stride)

    def _strided(self, storage: _Storage, dtype: torch.dtype, offset: int, size: Any, stride: Any) -> Strided:
        shape, strides = tuple(size), tuple(stride)
        if not all(type(each) is int and each >= 0 for each in (offset, *shape, *strides)) or len(shape) != len(
            strides
        ):
            raise CheckpointError(
                f"{self._where} has a tensor of shape {str(shape)[:100]}, strides {str(strides)[:100]}"
            )
        last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + 1 if prod(shape) else 0
        if last * dtype.itemsize > storage.nbytes:
            raise CheckpointError(
                f"{self._where} has a tensor of {last} elements in a storage of {storage.nbytes} bytes"
            )
        return Strided(storage, Spec(dtype_name(dtype, self._where), shape), offset, strides)

    def _parameter(self, data: Strided, *_: object) -> Strided:
        return data

    def _subclass(self, rebuild: Any, kind: object, args: tuple[Any, ...], _: object) -> Strided:
        if kind not in ("Parameter", "Buffer", "Tensor") or rebuild not in (self._tensor, self._tensor_of_bytes):
            raise CheckpointError(f"{self._where} has a tensor of a class of its own; save it as a plain tensor")
        found: Strided = rebuild(*args)
        return found

    def _encode(self, text: str, encoding: str) -> bytes:
        if encoding != "latin1":
            raise CheckpointError(f"{self._where} encodes a text as {str(encoding)[:100]}")
        return text.encode("latin1")


def opened(path: Path, stubs: tuple[str, ...] = ()) -> TorchFile:
    """Returns the file at `path`, open. Raises CheckpointError."""
    try:
        file = Disk(path.parent).open(path.name)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        return TorchFile(file, stubs)
    except BaseException:
        file.close()
        raise
