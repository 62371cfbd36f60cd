r"""Tensors as the bytes of files, and other values as JSON: those of optimizers, schedulers and data loaders.

JSON has fewer types than Python. A value of any other type is an object with one key that begins with "$":

    ("a", 1)                {"$tuple": ["a", 1]}           float("inf")   {"$float": "inf"}
    {0: "x"}                {"$dict": [[0, "x"]]}          1 + 2j         {"$complex": [1.0, 2.0]}
    torch.tensor(3.0)       {"$scalar": ["F32", 3.0]}      b"\x00"        {"$bytes": "AA=="}
    torch.zeros(5)          {"$tensor": "loader/queue"}    torch.float16  {"$dtype": "F16"}

A tensor with dimensions is among the checkpoint's tensors, under the name given here. Nothing is pickled.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor

from sherd._torch import local_tensor
from sherd.engine import ShardedParameter
from sherd.errors import CheckpointError
from sherd.layout.boxes import Box, spans, start_of_run, whole
from sherd.storage.files import Opened
from sherd.tensor.ragged import local_part, memory_of

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "C128": torch.complex128,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

T = TypeVar("T")

CHUNK_BYTES = 4 << 20
"""A tensor that is on a device, or not contiguous, is copied to the host in chunks of this size."""


def dtype_name(dtype: torch.dtype, name: str) -> str:
    """Returns the name of a dtype in files. Raises CheckpointError, about the tensor `name`, if there is none."""
    if dtype not in _NAMES:
        raise CheckpointError(f"{name} is of {dtype}, which safetensors files do not have; save it in another dtype")
    return _NAMES[dtype]


def require_bytes(tensor: torch.Tensor, name: str) -> None:
    """Raises CheckpointError unless the elements of the tensor `name` are the bytes of its memory."""
    local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    if local.layout != torch.strided or local.is_quantized or local.is_nested:
        raise CheckpointError(f"{name} is sparse, nested or quantized, which checkpoints do not hold; make it dense")
    if local.is_meta:
        raise CheckpointError(f"{name} is on the meta device; give it memory and values first")
    subclass = type(local)
    if subclass.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise CheckpointError(
            f"{name} is a {subclass.__module__}.{subclass.__qualname__}, a tensor subclass without memory of its own, "
            "which checkpoints do not hold; save or load the plain tensors in it, or what it stands for as a plain "
            "tensor (torchao's tensors have dequantize())"
        )


def chunks_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yields the bytes of a tensor, row by row. A contiguous tensor on the host is not copied.

    Use each chunk before asking for the next one.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if not tensor.numel():
        return
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        yield memory_of(tensor)
        return
    box = whole(tuple(tensor.shape))
    for span in spans(box, box, max(CHUNK_BYTES // tensor.itemsize, 1)):
        copied = tensor[span.box.within(box)].to("cpu").contiguous()
        yield memory_of(copied)


def read_into(opened: Opened, name: str, part: Box, target: torch.Tensor, most_bytes: int = CHUNK_BYTES) -> None:
    """Fill `target`, which has the shape of `part`, with that part of the tensor `name`, in `target`'s dtype.

    This takes at most `most_bytes` of memory in addition to `target`, and one block of each file.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    dtype, target = DTYPES[opened.entry(name).dtype], target.detach()
    for file, stored, piece in opened.pieces(name, part):
        shared = piece.intersect(part)
        if shared is None:
            continue  # a stored part without elements
        if target.dtype == dtype and target.device.type == "cpu":
            first, place = start_of_run(piece, shared), target[shared.within(part)]
            if first is not None and place.is_contiguous() and not (place.is_conj() or place.is_neg()):
                # Contiguous in the file and in memory: the bytes go straight to where they belong.
                file.bytes.read_into(stored.start + first * dtype.itemsize, memory_of(place))
                continue
        for span in spans(piece, shared, max(most_bytes // dtype.itemsize, 1)):
            read = torch.empty(span.box.sizes, dtype=dtype)
            file.bytes.read_into(stored.start + span.start * dtype.itemsize, memory_of(read))
            target[span.wanted.within(part)].copy_(read[span.wanted.within(span.box)])


def read_tensor(opened: Opened, name: str) -> torch.Tensor:
    """Returns the tensor `name` in host memory."""
    entry = opened.entry(name)
    target = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    read_into(opened, name, whole(entry.shape), target)
    return target


def in_buckets(elements: Iterable[T], nbytes_of: Callable[[T], int], most_bytes: int) -> list[list[T]]:
    """Returns `elements`, in order, in lists of at most `most_bytes`, or of one element."""
    buckets: list[list[T]] = []
    room = 0
    for element in elements:
        nbytes = nbytes_of(element)
        if not buckets or nbytes > room:
            buckets.append([])
            room = most_bytes
        buckets[-1].append(element)
        room -= nbytes
    return buckets


# Values as JSON

Json = Any
"""Any value that `json` reads and writes."""

NOT_WRITTEN = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)
"""The errors of code that meets a value which sherd has not written."""


@dataclass(frozen=True)
class SavedPart:
    """A part of a tensor, as its rank writes it; `read` returns it, or makes it."""

    dtype: torch.dtype
    shape: torch.Size
    read: Callable[[], torch.Tensor]


class Tensors(dict[str, torch.Tensor]):
    """Tensors by name. `masters` has the parameters whose float32 masters stand for them: these tensors are on meta."""

    def __init__(self) -> None:
        super().__init__()
        self.masters: dict[str, ShardedParameter] = {}

    def keep(self, name: str, tensor: torch.Tensor, record: ShardedParameter | None = None) -> None:
        """Add a tensor, or the masters of `record`, if it has any, in the tensor's layout.

        Raises:
            CheckpointError: the name is taken, or the elements are not in the tensor's memory.
        """
        require_bytes(tensor, name)
        if name in self:
            raise CheckpointError(
                f"two tensors would be called {name} in the checkpoint; rename an item, module or key"
            )
        if record is not None and record.masters is not None:
            self.masters[name] = record
            tensor = record.around(torch.empty(record.local.shape, device="meta"))
        self[name] = tensor

    def part(self, name: str, part: torch.Tensor) -> SavedPart:
        """Returns a part of the tensor `name`."""
        record = self.masters.get(name)
        return SavedPart(part.dtype, part.shape, (lambda: part) if record is None else partial(record.masters_of, part))

    def present(self, name: str) -> torch.Tensor:
        """Returns the tensor `name`, or its masters as a DTensor in memory."""
        tensor, record = self[name], self.masters.get(name)
        return tensor if record is None else record.around(record.masters_of(local_part(tensor)))


def encoded(value: object, path: str, keep: Callable[[str, torch.Tensor], None]) -> Json:
    """Returns `value` as JSON. Each tensor with dimensions goes to `keep`, with a name that begins with `path`.

    Raises:
        CheckpointError: an object is of another type, or contains itself. The message has its path.
    """
    try:
        return _encoded(value, path, keep)
    except RecursionError:
        raise CheckpointError(f"{path} contains itself, or too many lists and dicts in one another") from None


def _encoded(value: object, path: str, keep: Callable[[str, torch.Tensor], None]) -> Json:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _encoded(item, f"{path}/{key}", keep) for key, item in value.items()}
        pairs = [[_encoded(key, path, keep), _encoded(item, f"{path}/{key}", keep)] for key, item in value.items()]
        return {"$dict": pairs}
    if isinstance(value, list | tuple):
        items = [_encoded(item, f"{path}/{at}", keep) for at, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, torch.Tensor):
        if value.dim() or value.is_complex() or isinstance(value, DTensor):
            keep(path, value)
            return {"$tensor": path}
        require_bytes(value, path)
        number = value.item()
        return {"$scalar": [dtype_name(value.dtype, path), _encoded(number, path, keep)]}
    if isinstance(value, bytes | bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {"$complex": [_encoded(value.real, path, keep), _encoded(value.imag, path, keep)]}
    if isinstance(value, torch.dtype):
        return {"$dtype": dtype_name(value, path)}
    raise CheckpointError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, and a checkpoint holds tensors, numbers, "
        "texts, lists and dicts alone, so that reading it never runs code; turn it into these, or leave it out"
    )


def decoded(value: Json, tensor: Callable[[str], object]) -> Any:
    """Returns the value that was encoded as `value`. Tensors with dimensions come from `tensor`, by name.

    Raises:
        CheckpointError: there is no such encoding, or a tensor is in two places, and would take memory twice.
    """
    seen: set[str] = set()

    def once(name: str) -> object:
        if name in seen:
            raise CheckpointError(f"a value has the tensor {name} in two places")
        seen.add(name)
        return tensor(name)

    try:
        return _decoded(value, once)
    except RecursionError:
        raise CheckpointError("a value has too many lists and dicts in one another") from None


def _decoded(value: Json, tensor: Callable[[str], object]) -> Any:
    if isinstance(value, list):
        return [_decoded(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if not any(key.startswith("$") for key in value):
        return {key: _decoded(item, tensor) for key, item in value.items()}
    try:
        ((type_name, content),) = value.items()
        return _DECODERS[type_name](content, tensor)
    except (CheckpointError, RecursionError):
        raise
    except NOT_WRITTEN as error:
        raise CheckpointError(f"{str(value)[:100]} is no encoding of a value ({error!r})") from None


def _number(value: object) -> object:
    if not isinstance(value, bool | int | float | complex):
        raise TypeError("a scalar holds one number")
    return value


_DECODERS: dict[str, Callable[[Json, Callable[[str], object]], object]] = {
    "$float": lambda content, _: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[content],
    "$tuple": lambda content, tensor: tuple(_decoded(content, tensor)),
    "$dict": lambda content, tensor: {_decoded(key, tensor): _decoded(item, tensor) for key, item in content},
    "$scalar": lambda content, tensor: torch.tensor(_number(_decoded(content[1], tensor)), dtype=DTYPES[content[0]]),
    "$tensor": lambda content, tensor: tensor(content),
    "$bytes": lambda content, _: base64.b64decode(content, validate=True),
    "$complex": lambda content, tensor: complex(_decoded(content[0], tensor), _decoded(content[1], tensor)),
    "$dtype": lambda content, _: DTYPES[content],
}
