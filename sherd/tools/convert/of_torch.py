"""Files of `torch.save`: tensors are read and written by parts, straight from and to the file.

Such a file is a zip archive, without compression: `data.pkl` is the pickled tree of values, and `data/0`, `data/1` and
so on are the bytes of storages. The pickle is read with a list of the names that torch writes for tensors; any other
name in it is an error.

https://pytorch.org/docs/stable/notes/serialization.html describes the form, which torch writes since 1.6.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from sherd._torch import rebuild_tensor, rebuild_tensor_of_bytes
from sherd.checkpoint.encoding import DTYPES, chunks_of, dtype_name
from sherd.errors import CheckpointError
from sherd.layout.boxes import Box
from sherd.layout.extent import Extent
from sherd.layout.placement import Shape
from sherd.storage.places import Readable, read_exactly
from sherd.tensor.ragged import memory_of
from sherd.tools.convert.contents import Contents, Lazy, Read, Source, Spec, open_file
from sherd.tools.convert.pickles import Dict, Unpickler
from sherd.tools.convert.state_trees import PendingTensor, collected, left_out_of_tree, tree_of

FORMAT = "torch"
_ALIGNED = 64
_HEADER_BYTES, _ZIP64_BYTES = 30, 20
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
_STORAGE_OF = {dtype: name for name, dtype in _STORAGES.items()}
"""The storage class of a dtype in a file. Dtypes that are not here have untyped storages."""

_LONGEST_PICKLE = 1 << 30
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")


# Reading


@dataclass(frozen=True, slots=True)
class Storage:
    """`nbytes` bytes of a file from byte `start` on, with elements of `dtype`."""

    file: Readable
    start: int
    nbytes: int
    dtype: torch.dtype


def strided(storage: Storage, spec: Spec, offset: int, strides: Shape) -> Lazy:
    """Returns a tensor with elements of a storage from element `offset` on, `strides` apart."""
    memory = storage.file.name, storage.start, spec, offset, strides
    return Lazy(spec, partial(_read_strided, storage, DTYPES[spec.dtype], offset, strides), memory)


def _read_strided(
    storage: Storage,
    dtype: torch.dtype,
    offset: int,
    strides: Shape,
    part: Box,
    target: torch.Tensor,
    most_bytes: int,
) -> None:
    """Fill `target` with `part`: by one read of all bytes between its first and last element, else by halves."""
    if not part.numel:
        return
    reach = [(size - 1) * stride for size, stride in zip(part.sizes, strides, strict=True)]
    start = offset + sum(at * stride for at, stride in zip(part.offsets, strides, strict=True))
    numel = sum(reach) + 1
    if numel == part.numel and target.is_contiguous() and target.dtype == dtype and _is_row_major(part, strides):
        _read(storage, start * dtype.itemsize, memory_of(target))
    elif numel * dtype.itemsize <= most_bytes or part.numel == 1:
        read = torch.empty(numel, dtype=dtype)
        _read(storage, start * dtype.itemsize, memory_of(read))
        target.copy_(read.as_strided(part.sizes, strides))
    else:
        dim = max(range(len(reach)), key=reach.__getitem__)
        half = part.sizes[dim] // 2
        for extent in (Extent(0, half), Extent(half, part.sizes[dim] - half)):
            below = part.narrowed(dim, extent)
            _read_strided(storage, dtype, offset, strides, below, target[below.within(part)], most_bytes)


def _is_row_major(part: Box, strides: Shape) -> bool:
    inner = 1
    for size, stride in zip(reversed(part.sizes), reversed(strides), strict=True):
        if size > 1 and stride != inner:
            return False
        inner *= size
    return True


def _read(storage: Storage, start: int, into: memoryview) -> None:
    if start + len(into) > storage.nbytes:
        raise CheckpointError(f"{storage.file.name}: a tensor is outside of its storage")
    read_exactly(storage.file, storage.start + start, into)


class Range(Readable):
    """A part of a file, as a file. Closing it leaves the file open."""

    def __init__(self, file: Readable, start: int, nbytes: int) -> None:
        if not 0 <= start <= start + nbytes <= file.nbytes:
            raise CheckpointError(f"{file.name} has {file.nbytes} bytes, not those from {start} to {start + nbytes}")
        self.name, self.nbytes, self.file, self.start = file.name, nbytes, file, start

    def read_into(self, start: int, into: memoryview) -> None:
        if start + len(into) > self.nbytes:
            raise EOFError
        self.file.read_into(self.start + start, into)

    def close(self) -> None:
        """Leave the file open."""


class _Stream(io.RawIOBase):
    """A `Readable` as a file for zipfile."""

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
    """A file of `torch.save`. Its `tree` holds the values, with `Lazy` tensors in the place of tensors.

    The classes of the top-level packages `stubs` become inert objects.

    Raises:
        CheckpointError: it is no such file, or names an unknown class or function.
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
        self._storages: dict[str, Storage] = {}
        unpickler = _Unpickler(self, io.BytesIO(self._bytes("data.pkl")), file.name, stubs)
        self.tree: Any = unpickler.read()

    def _bytes(self, name: str) -> bytes:
        start, nbytes = self._record(name)
        if nbytes > _LONGEST_PICKLE:
            raise CheckpointError(f"{self._file.name}: {name} has {nbytes} bytes")
        content = bytearray(nbytes)
        read_exactly(self._file, start, memoryview(content))
        return bytes(content)

    def _record(self, name: str) -> tuple[int, int]:
        """Returns where the record `name` begins, and the number of its bytes."""
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

    def storage(self, dtype: torch.dtype, key: str) -> Storage:
        if key not in self._storages:
            self._storages[key] = Storage(self._file, *self._record(f"data/{key}"), dtype)
        return self._storages[key]

    def close(self) -> None:
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
            ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
            ("torch._utils", "_rebuild_parameter_with_state"): lambda data, *_: data,
            ("torch._tensor", "_rebuild_from_type_v2"): self._subclass,
            ("torch.nn.parameter", "Parameter"): "Parameter",
            ("torch.nn.parameter", "Buffer"): "Buffer",
            ("torch", "Tensor"): "Tensor",
            ("_codecs", "encode"): self._encode,
        }
        names |= {(module, each.__name__): each for module in ("builtins", "__builtin__") for each in (set, complex)}
        names |= {("torch", name): dtype for name, dtype in _STORAGES.items()}
        names |= {("torch", str(dtype).removeprefix("torch.")): dtype for dtype in DTYPES.values()}
        super().__init__(file, names, where, stubs)
        self._of = of

    def persistent_load(self, pid: Any) -> Storage:
        """Returns the storage that the pickle refers to as `pid`."""
        kind, dtype, key, _, _ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or not isinstance(key, str):
            raise CheckpointError(f"{self._where} refers to {str(pid)[:100]}, which is no storage")
        return self._of.storage(dtype, key)

    def _tensor(self, storage: Storage, offset: int, size: Any, stride: Any, *_: object) -> Lazy:
        return self._strided(storage, storage.dtype, offset, size, stride)

    def _tensor_of_bytes(self, storage: Storage, offset: int, size: Any, stride: Any, *others: Any) -> Lazy:
        return self._strided(storage, others[2], offset, size, stride)

    def _strided(self, storage: Storage, dtype: torch.dtype, offset: int, size: Any, stride: Any) -> Lazy:
        shape, strides = tuple(size), tuple(stride)
        are_numbers = all(type(number) is int and number >= 0 for number in (offset, *shape, *strides))
        if not are_numbers or len(shape) != len(strides):
            raise CheckpointError(
                f"{self._where} has a tensor of shape {str(shape)[:100]}, strides {str(strides)[:100]}"
            )
        last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + 1 if prod(shape) else 0
        if last * dtype.itemsize > storage.nbytes:
            raise CheckpointError(
                f"{self._where} has a tensor of {last} elements in a storage of {storage.nbytes} bytes"
            )
        return strided(storage, Spec(dtype_name(dtype, self._where), shape), offset, strides)

    def _subclass(self, rebuild: Any, kind: object, args: tuple[Any, ...], _: object) -> Lazy:
        if kind not in ("Parameter", "Buffer", "Tensor") or rebuild not in (self._tensor, self._tensor_of_bytes):
            raise CheckpointError(f"{self._where} has a tensor of a class of its own; save it as a plain tensor")
        tensor: Lazy = rebuild(*args)
        return tensor

    def _encode(self, text: str, encoding: str) -> bytes:
        if encoding != "latin1":
            raise CheckpointError(f"{self._where} encodes a text as {str(encoding)[:100]}")
        return text.encode("latin1")


def opened(path: Path, stubs: tuple[str, ...] = ()) -> TorchFile:
    """Returns the file at `path`, open. Raises CheckpointError."""
    file = open_file(path)
    try:
        return TorchFile(file, stubs)
    except BaseException:
        file.close()
        raise


def read(path: Path) -> Source:
    """Returns the file at `path`, open for reading. Raises CheckpointError."""
    file = opened(path)
    try:
        return collected(file.tree, str(path)).source(FORMAT, file.close)
    except BaseException:
        file.close()
        raise


# Writing


def write(path: Path, contents: Contents, read: Read) -> Sequence[str]:
    """Write a file that `torch.load` reads, with `weights_only`, too."""
    save_file(path, tree_of(contents, numbered=True), read)
    return left_out_of_tree(contents)


def save_file(path: Path, tree: object, read: Read) -> None:
    """Write `tree` to a new file, as `save` does, and flush it to the disk."""
    with open(path, "xb") as file:
        save(file, tree, read)
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True)
class _Reference:
    """A storage as a pickle refers to it."""

    pending: PendingTensor
    key: str


class _Pickler(pickle.Pickler):
    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, protocol=2)
        self.storages: dict[int, _Reference] = {}

    def persistent_id(self, of: Any) -> object:
        if not isinstance(of, _Reference):
            return None
        nbytes, dtype = of.pending.spec.nbytes, DTYPES[of.pending.spec.dtype]
        if dtype not in _STORAGE_OF:
            return "storage", torch.UntypedStorage, of.key, "cpu", nbytes
        return "storage", getattr(torch, _STORAGE_OF[dtype]), of.key, "cpu", nbytes // dtype.itemsize

    def reducer_override(self, of: Any) -> Any:
        """Returns the call that makes a tensor of a storage."""
        if not isinstance(of, PendingTensor):
            return NotImplemented
        storage = self.storages.setdefault(id(of), _Reference(of, str(len(self.storages))))
        shape, dtype = of.spec.shape, DTYPES[of.spec.dtype]
        strides = torch.empty(shape, device="meta").stride()
        hooks: OrderedDict[str, Any] = OrderedDict()
        args = (storage, 0, shape, strides, False, hooks)
        return (rebuild_tensor(), args) if dtype in _STORAGE_OF else (rebuild_tensor_of_bytes(), (*args, dtype))


class _Shifted(io.RawIOBase):
    """The rest of a file from its current position on, as a file of its own."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._first = file, file.tell()

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell() - self._first

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset + (self._first if whence == io.SEEK_SET else 0), whence) - self._first

    def write(self, data: Any) -> int:
        return self._file.write(data)


def save(file: BinaryIO, tree: object, read: Read) -> None:
    """Write `tree` as `torch.save` does, from the position of `file` on. `read` has tensors that are not in memory."""
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    pickler.dump(tree)
    shifted = _Shifted(file)
    with zipfile.ZipFile(shifted, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        texts = {"data.pkl": pickled.getvalue(), "byteorder": b"little", "version": b"3\n"}
        for name, text in texts.items():
            _record(archive, shifted.tell, name, [memoryview(text)])
        for storage in pickler.storages.values():
            of = storage.pending
            chunks = read(of.name) if of.value is None else chunks_of(of.value)
            _record(archive, shifted.tell, f"data/{storage.key}", chunks)


def _record(archive: zipfile.ZipFile, tell: Callable[[], int], name: str, chunks: Iterable[memoryview]) -> None:
    """Write a record. It begins at a multiple of 64 bytes, so that it can be mapped into memory."""
    info = zipfile.ZipInfo(f"archive/{name}")
    begin = tell() + _HEADER_BYTES + len(info.filename) + _ZIP64_BYTES
    padding = -(begin + 4) % _ALIGNED
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    with archive.open(info, "w", force_zip64=True) as record:
        for chunk in chunks:
            record.write(chunk)
