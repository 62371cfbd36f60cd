"""The errors of encoding: what a codec makes of values on their way, against the values, by sums of squares."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sherd.policy import Codec

LIMIT = "limit"
"""The listener whose sums ranks compare with the limit of their policy."""


def squares(found: Tensor, exact: Tensor) -> Tensor:
    """Returns the sums of squares of `found - exact`, and of `exact`, over the elements that are finite in `exact`."""
    if exact.is_complex():
        found, exact = torch.view_as_real(found), torch.view_as_real(exact)
    finite = exact.isfinite()
    parts = torch.where(finite, found - exact, 0), torch.where(finite, exact, 0)
    return torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64).square() for part in parts])


def relative_error(error: float, exact: float) -> float:
    """Returns the relative error of two sums of squares: 0 of zeros that are zeros still, NaN of numbers made NaN."""
    return math.sqrt(error / exact) if exact else math.inf if error else 0.0


class WireErrors:
    """The errors of what one unit encodes on one of its ways: its gathers, or its reductions over one axis.

    Attributes:
        listeners: by listener, the sums of squares of errors and of values that it has not taken, float64 [2]; None for
            none. Without listeners nothing is measured.
        is_unencoded: an error was above the limit of the policy, so nothing is encoded any more.
        last: the relative error when ranks compared it last, for a limit; None before.
    """

    def __init__(self, has_limit: bool = False) -> None:
        self.listeners: dict[object, Tensor | None] = {LIMIT: None} if has_limit else {}
        self.is_unencoded = False
        self.last: float | None = None

    def note(self, codec: Codec, values: Tensor, encoded: Tensor, sizes: Sequence[int]) -> None:
        """Measure the parts of `values`, of `sizes` elements, that were `encoded`, a part at a time.

        Of a part there are temporaries of 13 bytes an element, and what its decoding takes.
        """
        sums = torch.zeros(2, dtype=torch.float64, device=values.device)
        given = zip(values.split(list(sizes)), encoded.split([*map(codec.num_bytes, sizes)]), strict=True)
        for part, of_part in given:
            decoded = torch.empty_like(part, dtype=torch.promote_types(part.dtype, torch.float32))
            codec.decode(of_part, decoded)
            sums += squares(decoded, part)
        self.add(sums)

    def add(self, sums: Tensor) -> None:
        """Give `sums` of squares to the listeners."""
        for listener, total in self.listeners.items():
            self.listeners[listener] = sums if total is None else total + sums

    def take(self, listener: object) -> Tensor | None:
        """Returns the sums that came since the last call for `listener`; None if nothing was encoded."""
        total, self.listeners[listener] = self.listeners.get(listener), None
        return total

    def compared(self, error: float) -> None:
        """Note the relative error on all ranks."""
        self.last = error

    def fall_back(self) -> None:
        """Encode nothing from now on. All ranks must call this at the same moment."""
        self.is_unencoded = True
