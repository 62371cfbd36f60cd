"""Hugging Face's safetensors: one file, or several with an index. They hold a model and nothing else."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from sherd.checkpoint.encoding import DTYPES, in_buckets
from sherd.checkpoint.full_tensors import file_names
from sherd.errors import CheckpointError
from sherd.layout.boxes import Box, overlapping
from sherd.storage.files import Content, write_file
from sherd.storage.manifest import Stored, header_in, nbytes_of, read_json
from sherd.storage.places import DiskPlace, Readable, mode_of, read_file
from sherd.tools.convert.contents import MODEL, Contents, Lazy, Read, Source, Spec, in_pieces, open_file, path_inside
from sherd.tools.convert.of_torch import Storage, strided
from sherd.tools.convert.state_trees import Collected

FORMAT = "hf"
ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDED = "DCP_SHARDING_INFO"
"""The metadata of safetensors from `torch.distributed.checkpoint` that says which parts of tensors a file has."""
SHARD_BYTES = 5 << 30
"""The most bytes of a file with several tensors, by default."""

_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|h5|msgpack|gguf|onnx)(\.index\.json)?")
_MOST_BESIDE = 256 << 20


def _stored(file: Readable, at: Stored) -> Lazy:
    """Returns a tensor of a safetensors file, which has its elements row by row."""
    strides = tuple(prod(at.shape[dim + 1 :]) for dim in range(len(at.shape)))
    storage = Storage(file, at.start, nbytes_of(at.dtype, at.shape), DTYPES[at.dtype])
    return strided(storage, Spec(at.dtype, at.shape), 0, strides)


def _header(file: Readable) -> tuple[dict[str, Stored], dict[str, str]]:
    """Returns the tensors and the metadata of a safetensors file. Raises CheckpointError if it is another file."""
    try:
        return header_in(file)
    except (OSError, EOFError) as error:
        raise CheckpointError(f"{file.name} cannot be read: {error or 'it ends'}") from error


def read(path: Path) -> Source:
    """Returns the file, or the folder of files, at `path`, open for reading. Raises CheckpointError."""
    contents, num_files = Collected(), 0
    pieces: dict[str, list[tuple[Box, Lazy]]] = {}
    contents.values[MODEL] = {"kind": "module"}
    with ExitStack() as files:
        for file_path, names in _files(path).items():
            file, num_files = open_file(file_path), num_files + 1
            files.callback(file.close)
            tensors, metadata = _header(file)
            if names is not None and not names <= set(tensors):
                raise CheckpointError(f"{file_path} lacks {min(names - set(tensors))}, which the index says it has")
            if SHARDED in metadata:
                for name, offsets in _offsets(metadata[SHARDED], tensors, str(file_path)).items():
                    box = Box(offsets, tensors[name].shape)
                    pieces.setdefault(name, []).append((box, _stored(file, tensors[name])))
                continue
            if num_files > 1 and names is None:
                raise CheckpointError(f"{path} has several files, and neither {INDEX} nor places of parts in them")
            for name in tensors if names is None else [name for name in tensors if name in names]:
                contents.tensors[f"{MODEL}/{name}"] = _stored(file, tensors[name])
            for alias, name in metadata.items():
                if name in tensors and alias not in tensors:
                    contents.aliases[f"{MODEL}/{alias}"] = f"{MODEL}/{name}"
        contents.tensors |= {f"{MODEL}/{name}": _joined(name, boxes, path) for name, boxes in pieces.items()}
        return contents.source(FORMAT, files.pop_all().close)


def _offsets(text: str, tensors: Mapping[str, Stored], file: str) -> dict[str, tuple[int, ...]]:
    """Returns by name the index of a part's first element in the full tensor. Raises CheckpointError."""
    entries = read_json(text.encode(), file)
    first: dict[str, tuple[int, ...]] = {}
    for name, stored in tensors.items():
        entry = entries.get(name)
        offsets = entry.get("saved_offsets") if isinstance(entry, dict) else None
        listed: list[Any] = offsets if isinstance(offsets, list) else [None]
        if len(listed) != len(stored.shape) or not all(type(offset) is int and offset >= 0 for offset in listed):
            raise CheckpointError(f"{file} does not say which part of {name} it has")
        first[name] = tuple(listed)
    return first


def _joined(name: str, boxes: Sequence[tuple[Box, Lazy]], path: Path) -> Lazy:
    dims = len(boxes[0][0].sizes)
    if any(len(box.sizes) != dims or piece.spec.dtype != boxes[0][1].spec.dtype for box, piece in boxes):
        raise CheckpointError(f"{path}: the parts of {name} have several dtypes or numbers of dims")
    shape = tuple(max(box.offsets[dim] + box.sizes[dim] for box, _ in boxes) for dim in range(dims))
    numel = sum(box.numel for box, _ in boxes)
    if numel != prod(shape) or overlapping(box for box, _ in boxes) is not None:
        raise CheckpointError(f"{path}: the parts of {name} have {numel} elements of {prod(shape)}, or share some")
    return in_pieces(Spec(boxes[0][1].spec.dtype, shape), boxes)


def _files(path: Path) -> dict[Path, set[str] | None]:
    """Returns the files, each with the names of its tensors by the index, or None without an index."""
    if path.is_file() and not path.name.endswith(".json"):
        return {path: None}
    index = path if path.is_file() else path / INDEX
    if not mode_of(index):
        found = [path / ONE] if mode_of(path / ONE) else sorted(path.glob("*.safetensors"))
        if not found:
            raise CheckpointError(f"{path} has neither {INDEX} nor {ONE}")
        return dict.fromkeys(found)
    try:
        fields = read_json(read_file(index, _MOST_BESIDE), str(index))
    except OSError as error:
        raise CheckpointError(f"{index} cannot be read: {error.strerror or error}") from None
    listed = fields.get("weight_map")
    if not isinstance(listed, dict):
        raise CheckpointError(f"{index} has no weight_map")
    files: dict[Path, set[str] | None] = {}
    for name, file in listed.items():
        names = files.setdefault(path_inside(index.parent, file, str(index)), set())
        assert names is not None, "this loop puts sets there"
        names.add(name)
    return files


def write(path: Path, contents: Contents, read: Read, shard_bytes: int = SHARD_BYTES) -> Sequence[str]:
    """Write a model as a file, if `path` ends in ".safetensors", or as a folder of files of at most `shard_bytes`.

    Raises:
        CheckpointError: the checkpoint has no model, or several.
    """
    modules = contents.of_kind("module")
    if len(modules) != 1:
        raise CheckpointError(f"the format hf holds one model, and this checkpoint has {len(modules)}: {modules}")
    (item,) = modules
    tensors, begin = contents.of_item(item), f"{item}/"
    aliases = {alias[len(begin) :]: name[len(begin) :] for alias, name in contents.aliases.items()}
    one = path.suffix == ".safetensors"
    files = [list(tensors)] if one else in_buckets(tensors, lambda name: tensors[name].nbytes, shard_bytes) or [[]]
    folder = path.parent if one else path
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for name, names in zip([path.name] if one else file_names(len(files)), files, strict=True):
        metadata = {"format": "pt"} | {alias: of for alias, of in aliases.items() if of in names}
        names = sorted(names, key=lambda tensor: (-nbytes_of(tensors[tensor].dtype, ()), tensor))
        content_of = {
            tensor: Content(tensors[tensor].dtype, tensors[tensor].shape, partial(read, begin + tensor))
            for tensor in names
        }
        write_file(DiskPlace(folder), name, content_of, metadata)
        weight_map |= dict.fromkeys(names, name)
    if len(files) > 1:
        total = sum(spec.nbytes for spec in tensors.values())
        index = json.dumps(
            {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, indent=2
        )
        (folder / INDEX).write_text(index + "\n")
    return [f"{name} is left out: the format hf holds a model alone" for name in contents.values if name != item]


def copy_beside(source: Path, target: Path) -> list[str]:
    """Copy other files than weights from the folder `source` to `target`, such as config.json. Returns their names.

    Links to files of other folders are not followed, except for links into the blobs of Hugging Face's cache.
    """
    copied, own = [], source.resolve()
    for file in sorted(source.iterdir()):
        if file.resolve().parent not in (own, own.parent.parent / "blobs"):
            continue
        if _WEIGHTS.fullmatch(file.name) or not file.is_file() or file.stat().st_size > _MOST_BESIDE:
            continue
        if not (target / file.name).exists():
            shutil.copyfile(file, target / file.name)
            copied.append(file.name)
    return copied
