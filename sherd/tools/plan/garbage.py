"""No garbage collection while a search makes many records that live on."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["garbage_left"]


@contextmanager
def garbage_left() -> Iterator[None]:
    """A context without garbage collection, which would take a quarter of a search's time.

    Garbage from inside is freed by the next full collection.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # objects that others froze stay frozen
            gc.freeze()
            gc.unfreeze()  # now all objects belong to the oldest generation
        if is_enabled:
            gc.enable()
