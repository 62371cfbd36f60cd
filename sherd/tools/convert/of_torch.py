"""Files of `torch.save` with state dicts in them: read and written, by parts."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from sherd._torch import rebuild_tensor, rebuild_tensor_of_bytes
from sherd.checkpoint.tensor_bytes import DTYPES, chunks_of
from sherd.tools.convert.contents import Contents, LazySource, Read
from sherd.tools.convert.state_trees import Pending, collected, left_out_of_tree, tree_of
from sherd.tools.convert.torch_files import STORAGE_OF, opened

FORMAT = "torch"
_ALIGNED = 64
_HEADER_BYTES, _ZIP64_BYTES = 30, 20


def read(path: Path) -> LazySource:
    """Returns the file at `path`, open for reading. Raises CheckpointError."""
    file = opened(path)
    try:
        return collected(file.tree, str(path)).source(FORMAT, file.close)
    except BaseException:
        file.close()
        raise


def write(path: Path, contents: Contents, read: Read) -> Sequence[str]:
    """Write a file that `torch.load` reads, with `weights_only`, too."""
    with open(path, "xb") as file:
        save(file, tree_of(contents, numbered=True), read)
        file.flush()
        os.fsync(file.fileno())
    return left_out_of_tree(contents)


@dataclass(frozen=True)
class _Storage:
    """A storage as a pickle refers to it."""

    pending: Pending
    key: str

    def reference(self) -> tuple[object, ...]:
        """Returns what `torch.load` looks for."""
        spec = self.pending.spec
        dtype = DTYPES[spec.dtype]
        if dtype not in STORAGE_OF:
            return "storage", torch.UntypedStorage, self.key, "cpu", spec.nbytes
        return "storage", getattr(torch, STORAGE_OF[dtype]), self.key, "cpu", spec.nbytes // dtype.itemsize


class _Pickler(pickle.Pickler):
    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, protocol=2)
        self.storages: dict[int, _Storage] = {}

    def persistent_id(self, of: Any) -> object:
        """Returns how the pickle refers to a storage."""
        return of.reference() if isinstance(of, _Storage) else None

    def reducer_override(self, of: Any) -> Any:
        """Returns how the pickle makes a tensor."""
        if not isinstance(of, Pending):
            return NotImplemented
        storage = self.storages.setdefault(id(of), _Storage(of, str(len(self.storages))))
        shape, dtype = of.spec.shape, DTYPES[of.spec.dtype]
        strides = torch.empty(shape, device="meta").stride()
        hooks: OrderedDict[str, Any] = OrderedDict()
        args = (storage, 0, shape, strides, False, hooks)
        return (rebuild_tensor(), args) if dtype in STORAGE_OF else (rebuild_tensor_of_bytes(), (*args, dtype))


class _Shifted(io.RawIOBase):
    """A file from where it stands, as a file."""

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
    """Write what `torch.save` would, from where `file` stands on; the bytes of tensors that are not in memory come from
    `read`."""
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
    """Write a record. Its bytes begin at a multiple of 64, so that they can be mapped into memory."""
    info = zipfile.ZipInfo(f"archive/{name}")
    begin = tell() + _HEADER_BYTES + len(info.filename) + _ZIP64_BYTES
    padding = -(begin + 4) % _ALIGNED
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    with archive.open(info, "w", force_zip64=True) as record:
        for chunk in chunks:
            record.write(chunk)
