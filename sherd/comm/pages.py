"""Memory pages on a CPU: keeps buffers that are freed and allocated in every step from being mapped anew each time.

glibc gives freed memory back to the system: a block above a threshold at once, and the end of the heap when twice the
threshold is free there. Allocating it again costs a page fault for every 4 KiB, which takes longer than filling it. The
threshold adapts: it is the largest block that was freed, up to 32 MiB. `docs/decisions/027-page-faults.md`.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable

import torch

MOST_KEPT = 32 << 20
"""glibc maps each larger block anew, whatever was freed before."""

LARGE = 1 << 20
"""Below this, page faults are few."""


def prepare(nbytes: int) -> None:
    """Prepare for a block of `nbytes` of host memory that will be freed and allocated again."""
    if nbytes >= LARGE:
        _raise_threshold()


def advise(storage: torch.UntypedStorage) -> None:
    """Have the system use large pages for `storage`, host memory that is about to be filled, if it was mapped anew."""
    advice = _advice()
    nbytes = storage.nbytes()
    if advice is None or nbytes <= MOST_KEPT:
        return
    first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    advice(first, end - first)  # its result does not matter: without large pages, small ones do


@functools.cache
def _raise_threshold() -> None:
    """Free one block of the largest size that the threshold adapts to. It is never written, so it takes no memory.

    A user who has set thresholds (`MALLOC_TRIM_THRESHOLD_`, `mallopt`) has switched off the adapting, and keeps them.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(("malloc", libc))
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(("free", libc))
    # Not a tensor: tools that count the bytes of tensors would see it.
    free(allocate(MOST_KEPT - 16 * mmap.PAGESIZE))


@functools.cache
def _advice() -> Callable[[int, int], int] | None:
    """Returns the system's `madvise(first, nbytes)` for large pages, or None where there is none."""
    if not sys.platform.startswith("linux") or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    madvise = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    call = madvise(("madvise", ctypes.CDLL(None)))
    return lambda first, nbytes: int(call(first, nbytes, mmap.MADV_HUGEPAGE))
