"""Folders of `torch.distributed.checkpoint`, in which FSDP1, FSDP2, DDP, torchtitan and Megatron-FSDP save.

`.metadata` is a pickle of the items and their places; it is read with the list of names below. Each item in a `.distcp`
file is a file of `torch.save` of its own: a tensor, or a value.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from sherd._torch import storage_info
from sherd.checkpoint.encoding import DTYPES, dtype_name
from sherd.errors import CheckpointError
from sherd.layout.boxes import Box, overlapping
from sherd.storage.places import DiskPlace, Readable, read_file
from sherd.tools.convert.contents import Contents, Lazy, Read, Source, Spec, in_pieces, open_file, path_inside
from sherd.tools.convert.of_torch import Range, TorchFile, save
from sherd.tools.convert.pickles import Dict, Inert, UnknownName, Unpickler, inert
from sherd.tools.convert.state_trees import PendingTensor, collected, left_out_of_tree, tree_of

FORMAT = "dcp"
METADATA = ".metadata"
FILE_BYTES = 4 << 30

_CHECKPOINT = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_Index, _Info = inert("MetadataIndex"), inert("_StorageInfo")
_Tensor, _Metadata = inert("TensorStorageMetadata"), inert("Metadata")

_OTHERS = "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"

NAMES: dict[tuple[str, str], object] = {
    (_CHECKPOINT, "Metadata"): _Metadata,
    (_CHECKPOINT, "MetadataIndex"): _Index,
    (_CHECKPOINT, "TensorStorageMetadata"): _Tensor,
    **{(_CHECKPOINT, name): inert(name) for name in _OTHERS},
    (_FILESYSTEM, "_StorageInfo"): _Info,
    (_FILESYSTEM, "_StoragePrefix"): inert("_StoragePrefix"),
    ("torch.serialization", "_get_layout"): inert("layout"),
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): Dict,
    **{("pathlib", name): inert("path") for name in ("PosixPath", "WindowsPath", "PurePosixPath")},
    ("pathlib._local", "PosixPath"): inert("path"),
    **{("torch", str(dtype).removeprefix("torch.")): dtype for dtype in DTYPES.values()},
}
"""The classes and functions that a `.metadata` may name."""

_LONGEST_METADATA = 4 << 30


class _Files:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[Path, Readable] = {}

    def open(self, name: object) -> Readable:
        path = path_inside(self.folder, name, str(self.folder / METADATA))
        if path not in self._open:
            self._open[path] = open_file(path)
        return self._open[path]

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()


@dataclass(frozen=True)
class _Item:
    """The bytes in a file that `torch.save` wrote for one object."""

    files: _Files
    name: str
    file: Any
    start: Any
    nbytes: Any

    def tree(self) -> Any:
        if type(self.start) is not int or type(self.nbytes) is not int:
            raise CheckpointError(f"{self.files.folder / METADATA}: the place of {self.name} is no number")
        return TorchFile(Range(self.files.open(self.file), self.start, self.nbytes)).tree


def _chunk(item: _Item, spec: Spec) -> Lazy:
    """Returns a chunk of a tensor, which is an item."""

    def read_into(part: Box, target: torch.Tensor, most_bytes: int) -> None:
        tensor = item.tree()
        if not isinstance(tensor, Lazy) or tensor.spec != spec:
            is_ = tensor.spec if isinstance(tensor, Lazy) else type(tensor).__name__
            where = f"{item.files.folder}/{item.file}"
            raise CheckpointError(f"{where} has {is_} as {item.name}, {spec} by {METADATA}")
        tensor.read_into(part, target, most_bytes)

    return Lazy(spec, read_into, (item.file, item.start))


def metadata_of(path: Path) -> Inert:
    """Returns the object in `path/.metadata`. Raises CheckpointError."""
    file = path / METADATA
    try:
        metadata = Unpickler(io.BytesIO(read_file(file, _LONGEST_METADATA)), NAMES, str(file)).read()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from None
    if not isinstance(metadata, _Metadata):
        raise CheckpointError(f"{file} holds a {type(metadata).__name__}, not the metadata of a checkpoint")
    return metadata


def _leaves_of(path: Path, files: _Files) -> tuple[dict[tuple[Any, ...], Any], list[str]]:
    """Returns the tensors and values of the folder at `path`, by their paths in the saved state dict, and notes.

    The notes say which values are left out: those of unknown classes. Raises CheckpointError.
    """
    metadata, where = metadata_of(path), str(path / METADATA)
    items: dict[tuple[str, tuple[int, ...] | None], _Item] = {}
    places, kinds = metadata.get("storage_data"), metadata.get("state_dict_metadata")
    if not isinstance(places, Mapping) or not isinstance(kinds, Mapping):
        raise CheckpointError(f"{where} does not say what is saved, or where")
    for index, info in places.items():
        if not isinstance(index, _Index) or not isinstance(info, _Info):
            raise CheckpointError(f"{where}: an item is no index with a place")
        if info.get("transform_descriptors", 3):
            raise CheckpointError(
                f"{where}: items are compressed ({info.get('transform_descriptors', 3)}); save without"
            )
        name, offset = index.get("fqn", 0), index.get("offset", 1)
        first = None if offset is None else tuple(offset)
        file, start, nbytes = info.get("relative_path", 0), info.get("offset", 1), info.get("length", 2)
        items[name, first] = _Item(files, name, file, start, nbytes)
    paths = metadata.get("planner_data", 1)
    paths = paths if isinstance(paths, Mapping) else {}
    leaves: dict[tuple[Any, ...], Any] = {}
    notes: list[str] = []
    # `paths` are in the state dict's order. `kinds` are not: they begin with the items that rank 0 saved.
    order = {name: at for at, name in enumerate(paths)}
    for name, kind in sorted(kinds.items(), key=lambda named: order.get(named[0], len(order))):
        if isinstance(kind, _Tensor):
            leaf: Any = _chunked(name, kind, items, where)
        else:
            if (name, None) not in items:
                raise CheckpointError(f"{where} does not say where {name} is")
            try:
                leaf = items[name, None].tree()
            except UnknownName as error:
                notes.append(f"{name} is left out: {error}")
                continue
        at_path = paths.get(name, (name,))
        leaves[tuple(at_path) if isinstance(at_path, tuple | list) else (name,)] = leaf
    return leaves, notes


def _chunked(name: str, kind: Inert, items: Mapping[Any, _Item], where: str) -> Lazy:
    try:
        shape = tuple(kind.get("size", 1))
        dtype = kind.get("properties", 0)
        dtype = dtype.state[0] if isinstance(dtype.state, tuple) else dtype.get("dtype", 0)
        boxes = {Box(tuple(chunk.get("offsets", 0)), tuple(chunk.get("sizes", 1))) for chunk in kind.get("chunks", 2)}
        sizes = [size for box in boxes for size in (*box.offsets, *box.sizes)]
        fits = all(type(size) is int and size >= 0 for size in (*shape, *sizes)) and all(
            at + size <= most for box in boxes for at, size, most in zip(box.offsets, box.sizes, shape, strict=True)
        )
        spec = Spec(dtype_name(dtype, name), shape)
    except (TypeError, ValueError, AttributeError, IndexError):
        raise CheckpointError(f"{where}: {name} has no shape, dtype and chunks") from None
    listed = sorted(box for box in boxes if box.numel or not shape)
    numel = sum(box.numel for box in listed)
    if not fits or numel != prod(shape) or overlapping(listed) is not None:
        raise CheckpointError(f"{where}: the chunks of {name} have {numel} elements of {prod(shape)}, or share some")
    parts: list[tuple[Box, Lazy]] = []
    for box in listed:
        item = items.get((name, box.offsets)) or (items.get((name, None)) if len(listed) == 1 else None)
        if item is None:
            raise CheckpointError(f"{where} does not say where {name} is from {box.offsets} on")
        parts.append((box, _chunk(item, Spec(spec.dtype, box.sizes))))
    return in_pieces(spec, parts, (spec, *((box, part.memory) for box, part in parts)))


def _nested(leaves: Mapping[tuple[Any, ...], Any]) -> Any:
    """Returns the tree whose leaves have these paths. A dict with the keys 0, 1, 2 and so on becomes a list."""
    tree: dict[Any, Any] = {}
    for path, leaf in leaves.items():
        at = tree
        for key in path[:-1]:
            at = at.setdefault(key, {})
            if not isinstance(at, dict):
                raise CheckpointError(f"{path} is below a value")
        at[path[-1]] = leaf
    return _listed(tree)


def _listed(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    values = {key: _listed(value) for key, value in tree.items()}
    numbers = [key for key in values if type(key) is int]
    is_list = numbers and sorted(numbers) == list(range(len(values)))
    return [values[number] for number in range(len(values))] if is_list else values


def read(path: Path) -> Source:
    """Returns the folder at `path`, open for reading. Raises CheckpointError."""
    files = _Files(path)
    try:
        leaves, notes = _leaves_of(path, files)
        contents = collected(_nested(leaves), str(path))
        contents.notes += notes
        return contents.source(FORMAT, files.close)
    except BaseException:
        files.close()
        raise


# Writing


def write(path: Path, contents: Contents, read: Read) -> Sequence[str]:
    """Write a folder that `torch.distributed.checkpoint.load` reads on any number of ranks; `.metadata` comes last."""
    from torch.distributed.checkpoint import metadata as meta

    path.mkdir(parents=True, exist_ok=True)
    kinds: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    written: dict[str, Any] = {}  # all names of a tensor have one place
    files = 0
    file, name = None, ""
    with ExitStack() as stack:
        for at, leaf in _leaves(tree_of(contents)):
            if file is None or file.tell() >= FILE_BYTES:
                stack.close()
                name, files = f"__0_{files}.distcp", files + 1
                file = stack.enter_context(open(path / name, "xb"))
            flat, start = ".".join(map(str, at)), file.tell()
            if flat in kinds:
                raise CheckpointError(f"two tensors or values would be called {flat} in a folder of {FORMAT}")
            index, kinds[flat] = meta.MetadataIndex(flat), meta.BytesStorageMetadata()
            if isinstance(leaf, PendingTensor):
                index = meta.MetadataIndex(flat, (0,) * len(leaf.spec.shape))
                shape, properties = torch.Size(leaf.spec.shape), meta.TensorProperties(DTYPES[leaf.spec.dtype])
                chunk = meta.ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
                kinds[flat] = meta.TensorStorageMetadata(properties, shape, [chunk])
            key = leaf.name if isinstance(leaf, PendingTensor) and leaf.name else f"value {flat}"
            if key not in written:
                save(file, leaf, read)
                written[key] = storage_info(name, start, file.tell() - start)
            paths[flat], places[index] = at, written[key]
    metadata = meta.Metadata(kinds, paths, places, meta.StorageMeta(), version="1.0.0")
    DiskPlace(path).write(METADATA, lambda: [memoryview(pickle.dumps(metadata))])
    return left_out_of_tree(contents)


def _leaves(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields the leaves with their paths, as torch flattens state dicts: a list without dicts and tensors is a leaf."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, (*at, key))
    elif isinstance(tree, list) and any(map(_goes_on, tree)):
        for number, value in enumerate(tree):
            yield from _leaves(value, (*at, number))
    else:
        yield at, tree


def _goes_on(value: Any) -> bool:
    return isinstance(value, Mapping | PendingTensor) or (isinstance(value, list) and any(map(_goes_on, value)))
