"""A 1-D buffer whose memory is freed and allocated again in place, under its views; and the pages of such memory.

Views are made once and stay the same objects. Reading one while the buffer is freed kills the process, so the engine
hides them from the user meanwhile (`engine/moves/weights.py`).
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable

import torch


class Buffer:
    """`numel` elements of `dtype` on `device`, allocated or not.

    An accelerator's allocator keeps memory per stream, so allocate on the stream that writes first.

    Attributes:
        tensor: the buffer, 1-D unless another tensor's memory was taken over.
        nbytes: its bytes when allocated.
        address: the address of its storage, for `storage_uses`, which counts tensors that share the memory.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._hold(torch.empty(numel, dtype=dtype, device=device), is_ours=True)

    @classmethod
    def around(cls, tensor: torch.Tensor) -> Buffer:
        """Returns a buffer around the caller's 1-D `tensor`, whose memory is never freed in place."""
        buffer = cls.__new__(cls)
        buffer._hold(tensor, is_ours=False)
        return buffer

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Buffer:
        """Returns a buffer that takes over the memory of `tensor`, of any shape, to free and refill it in place."""
        buffer = cls.__new__(cls)
        buffer._hold(tensor, is_ours=True)
        return buffer

    def _hold(self, tensor: torch.Tensor, is_ours: bool) -> None:
        self.tensor = tensor
        self.is_ours = is_ours
        self._storage = tensor.untyped_storage()
        self.nbytes = self._storage.nbytes()
        self.address: int = self._storage._cdata

    def allocate(self) -> None:
        """Allocate the memory, uninitialised, unless it is allocated."""
        if self._storage.nbytes() == self.nbytes:
            return
        is_large = self.nbytes >= LARGE and self._storage.device.type == "cpu"
        if is_large:
            prepare_pages(self.nbytes)
        self._storage.resize_(self.nbytes)  # from 0 bytes: it would copy old contents
        if is_large:
            advise_pages(self._storage)

    def free(self) -> None:
        """Free the memory. The views stay, and must not be read until the next `allocate`."""
        assert self.is_ours, "borrowed memory is dropped, not freed"
        self._storage.resize_(0)


# Pages of host memory
#
# glibc gives freed memory back to the system: a block above a threshold at once, and the end of the heap when twice the
# threshold is free at it. Allocating it again costs a page fault for every 4 KiB, which takes longer than filling it.
# The threshold adapts: it is the largest block that was freed, up to 32 MiB (docs/decisions/027-page-faults.md).

MOST_KEPT = 32 << 20  # glibc maps each larger block again, whatever was freed before
LARGE = 1 << 20  # below this, page faults are few


def prepare_pages(nbytes: int) -> None:
    """Prepare for a block of `nbytes` of host memory that will be freed and allocated again."""
    if nbytes >= LARGE:
        _raise_threshold()


def advise_pages(storage: torch.UntypedStorage) -> None:
    """Have the system use large pages for `storage`, host memory that is newly mapped and is about to be filled."""
    advice = _advice()
    nbytes = storage.nbytes()
    if advice is None or nbytes <= MOST_KEPT:
        return
    first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    advice(first, end - first)  # without a look at the result: if large pages are refused, small pages do


@functools.cache
def _raise_threshold() -> None:
    """Raise glibc's threshold to its most, unless the user has set thresholds (`MALLOC_TRIM_THRESHOLD_`, `mallopt`)."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(("malloc", libc))
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(("free", libc))
    # A block of the largest size that the threshold adapts to. It is never written, so it takes no memory; and it is no
    # tensor, which tools that count the bytes of tensors would see.
    free(allocate(MOST_KEPT - 16 * mmap.PAGESIZE))


@functools.cache
def _advice() -> Callable[[int, int], int] | None:
    """Returns the system's `madvise(first, nbytes)` for large pages; None if it has none."""
    if not sys.platform.startswith("linux") or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    madvise = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    call = madvise(("madvise", ctypes.CDLL(None)))
    return lambda first, nbytes: int(call(first, nbytes, mmap.MADV_HUGEPAGE))
