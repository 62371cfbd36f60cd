"""Tensors as the bytes of files: dtypes by their names in safetensors files, and memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch.distributed.tensor import DTensor

from sherd._torch import local_tensor
from sherd.errors import CheckpointError
from sherd.layout.boxes import Box, spans, start_of_run, whole
from sherd.storage.files import Opened

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


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor on the host; it lives as long as the view."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous(), "its memory is contiguous and on the host"
    # Not by numpy, which torch works without, and which has no bfloat16 or float8.
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.of = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


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

    It takes at most `most_bytes` of memory besides `target`, and one block of each file.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    dtype, target = DTYPES[opened.entry(name).dtype], target.detach()
    for file, stored, piece in opened.pieces(name, part):
        shared = piece.intersect(part)
        if shared is None:
            continue  # a piece without elements
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
