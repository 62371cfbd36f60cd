"""Garbage that is left for later, while many records are made that are no garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["garbage_left"]


@contextmanager
def garbage_left() -> Iterator[None]:
    """A context in which nobody looks for garbage: among the records of a search that takes a quarter of its time. What
    there is, is left to the next full collection."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # what others have frozen stays so
            gc.freeze()
            gc.unfreeze()  # now all that there is belongs to the oldest generation
        if is_enabled:
            gc.enable()
