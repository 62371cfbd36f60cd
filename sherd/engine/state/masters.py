"""The float32 masters of bfloat16 shards, exactly, in 2.125 bytes for each element.

A master is rounded to the weight. The weight has the upper 16 bits of the master, plus 1 if it was rounded up:

    master   | sign, exponent, 7 bits | 16 bits |        weight = upper + carry        low = the 16 bits

So the 16 low bits and one carry bit bring the master back. The carry is needed only where the low bits are a tie, 0x8000,
which rounds up from an odd number and down from an even one. Known from areal-project/AReno, issue 498.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from sherd.layout.extent import Extent

BITS = (1, 2, 4, 8, 16, 32, 64, 128)


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the weights, bfloat16, of float32 masters `[n]`, their low bits, int16, and `ceil(n / 8)` bytes of carries."""
    halves = master.view(torch.int16).view(-1, 2)  # the low half first, on every machine that torch runs on
    weight = master.to(torch.bfloat16)
    carry = weight.view(torch.int16) != halves[:, 1]
    padded = torch.nn.functional.pad(carry, (0, -len(carry) % 8)).view(-1, 8)
    bits = torch.tensor(BITS, dtype=torch.uint8, device=master.device)
    return weight, halves[:, 0], (padded * bits).sum(1, dtype=torch.uint8)


def join(weight: torch.Tensor, low: torch.Tensor, carries: torch.Tensor, out: torch.Tensor) -> None:
    """Write the masters of bfloat16 weights `[n]` to `out`, float32 `[n]`, which `split` gives the same three of."""
    bits = torch.tensor(BITS, dtype=torch.uint8, device=weight.device)
    carry = (carries.unsqueeze(1) & bits).ne(0).view(-1)[: len(weight)]
    halves = out.view(torch.int16).view(-1, 2)
    halves[:, 0] = low
    halves[:, 1] = weight.view(torch.int16) - carry.to(torch.int16)


class Masters:
    """The masters of one group's shards: float32 in `values` while an optimizer steps, else low bits and carries.

    Attributes:
        values: `[numel]`, without memory between steps.
        low: int16 `[numel]`, at rest; `carries`: uint8 `[ceil(numel / 8)]`. The masters of weights that were never
            stepped are the weights, so both are zero.
    """

    def __init__(
        self, shard_buffer: torch.Tensor, parameters: Sequence[tuple[torch.Tensor, Extent]], low: torch.Tensor
    ) -> None:
        self._weights, self._parameters = shard_buffer, parameters
        self.values = torch.empty(shard_buffer.numel(), dtype=torch.float32, device=shard_buffer.device)
        self.values.untyped_storage().resize_(0)
        self.low = low
        self.carries = low.new_zeros(-(-low.numel() // 8), dtype=torch.uint8, pin_memory=low.is_pinned())
        self._is_stepped = False
        self._note()

    def _note(self) -> None:
        self._versions = [parameter._version for parameter, _ in self._parameters]

    def note_step(self) -> None:
        """Note that shards have the versions that a step gave them."""
        if self._is_stepped:
            self._is_stepped = False
            self._note()

    @torch.no_grad()
    def full(self) -> torch.Tensor:
        """Returns the masters, float32 `[numel]`, on the device of the shards. What a user has written is as it is."""
        device = self._weights.device
        return self._joined(self.low.to(device), self.carries.to(device), self._weights.to(torch.float32))

    def _joined(self, low: torch.Tensor, carries: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        join(self._weights, low, carries, values)
        for (parameter, extent), version in zip(self._parameters, self._versions, strict=True):
            if parameter._version != version:
                written = slice(extent.start, extent.stop)
                values[written] = self._weights[written]
        return values

    @torch.no_grad()
    def put(self, values: torch.Tensor) -> None:
        """Make `values`, float32 `[numel]`, the masters, and the shards these rounded."""
        for target, value in zip((self._weights, self.low, self.carries), split(values), strict=True):
            target.copy_(value)
        self._note()

    @contextmanager
    def allocated(self) -> Iterator[None]:
        """Within this context `values` has memory, so that views of it can be made."""
        self.values.untyped_storage().resize_(self.values.numel() * self.values.itemsize)
        try:
            yield
        finally:
            self.values.untyped_storage().resize_(0)

    @contextmanager
    def lent(self, low: torch.Tensor, carries: torch.Tensor) -> Iterator[None]:
        """Within this context `values` has the masters; behind it weights, `low` and `carries` are those of `values`.

        `low` and `carries` are where the shards are: this object's own, or copies of these.
        """
        with self.allocated():
            with torch.no_grad():
                self._joined(low, carries, self.values)
            yield
            with torch.no_grad():
                for target, value in zip((self._weights, low, carries), split(self.values), strict=True):
                    target.copy_(value)
            self._is_stepped = True
