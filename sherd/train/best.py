"""The best checkpoint of a run: OUT/checkpoints/best.json names it, and is replaced as a whole.

    {"step": 500, "bits": 2.071, "judged": "3f9a..."}

The file is written when the checkpoint is whole, so what it names is there; a crash in between leaves the one before.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from sherd.train.config import InputError
from sherd.train.manifest import folder_of, whole

__all__ = ["Best", "read_best", "write_best"]

NAME = "best.json"


@dataclass(frozen=True)
class Best:
    """The step whose evaluation was the best so far, its held-out bits per byte, and a digest of what was judged: bits
    of other bytes, or of another context, are not comparable."""

    step: int
    bits: float
    judged: str

    def path(self, out: Path) -> Path:
        """Returns where the checkpoint of that step is, in the run's folder `out`."""
        return folder_of(out, self.step)

    def beats(self, other: Best | None, out: Path) -> bool:
        """Returns whether this is better than `other`, the best of the run in `out` until now; than one that is gone,
        or not comparable, anything is."""
        if other is None or other.judged != self.judged or not _is_whole(other.path(out)):
            return math.isfinite(self.bits)
        return self.bits < other.bits


def _is_whole(path: Path) -> bool:
    try:
        whole(path)
    except InputError:
        return False
    return True


def read_best(out: Path) -> Best | None:
    """Returns the best checkpoint that the run in `out` has named; None if there is none, or the file is damaged."""
    try:
        values = json.loads((out / "checkpoints" / NAME).read_text())
        return Best(**{f.name: values[f.name] for f in fields(Best)})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_best(out: Path, best: Best) -> str | None:
    """Name another best. Whoever reads meanwhile, and whatever crashes, finds the old one or the new one.

    Returns:
        Why it could not be written, which ends no run; None when it is.
    """
    path = out / "checkpoints" / NAME
    part = path.with_suffix(".part")
    try:
        with open(part, "w") as file:
            json.dump(asdict(best), file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        return error.strerror
    return None
