"""The best checkpoint of a run: checkpoints/best.json names it, and is replaced as a whole.

    {"step": 500, "bits": 2.071, "judged": "3f9a..."}

The file is written when the checkpoint is whole, so what it names is there; a crash in between leaves the one before.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields

from sherd.storage.folder import Folder
from sherd.storage.places import Place

__all__ = ["Best", "read_best", "write_best"]

NAME = "best.json"


@dataclass(frozen=True)
class Best:
    """The step whose evaluation was the best so far, its held-out bits per byte, and a digest of what was judged: bits
    of other bytes, or of another context, are not comparable."""

    step: int
    bits: float
    judged: str

    def beats(self, other: Best | None, place: Place) -> bool:
        """Returns whether this is better than `other`, the best in `place` until now; than one that is gone, or not
        comparable, anything is."""
        if other is None or other.judged != self.judged or Folder(place).found(other.step).manifest is None:
            return math.isfinite(self.bits)
        return self.bits < other.bits


def read_best(place: Place) -> Best | None:
    """Returns the best of the checkpoints in `place`; None if none was named, or the file is damaged."""
    try:
        values = json.loads(place.read(NAME))
        return Best(**{f.name: values[f.name] for f in fields(Best)})
    except (OSError, EOFError, ValueError, KeyError, TypeError):
        return None


def write_best(place: Place, best: Best) -> str | None:
    """Name another best. Whoever reads meanwhile, and whatever crashes, finds the old one or the new one.

    Returns:
        Why it could not be written, which ends no run; None when it is.
    """
    raw = json.dumps(asdict(best)).encode()
    try:
        place.write(NAME, lambda: [memoryview(raw)])
    except OSError as error:
        return error.strerror or str(error)
    return None
