"""The float32 masters of bfloat16 shards, exactly, in 2.125 bytes for each element.

A master is rounded to the weight. The weight has the upper 16 bits of the master, plus 1 if it was rounded up:

    master   | sign, exponent, 7 bits | 16 bits |        weight = upper + carry        low = the 16 bits

So the 16 low bits and one carry bit bring the master back. The carry is needed only where the low bits are a tie,
0x8000, which rounds up from an odd number and down from an even one. Known from inclusionAI/AReno, issue 498.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from sherd.layout.extent import Extent


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns float32 masters `[n]` as bfloat16 weights, int16 low bits, and uint8 carries `[ceil(n / 8)]`."""
    halves = master.view(torch.int16).view(-1, 2)  # the low half first, on every machine that torch runs on
    weight = master.to(torch.bfloat16)
    carry = weight.view(torch.int16) != halves[:, 1]
    padded = torch.nn.functional.pad(carry, (0, -len(carry) % 8)).view(-1, 8)
    places = torch.arange(8, dtype=torch.uint8, device=master.device)
    return weight, halves[:, 0], (padded.to(torch.uint8) << places).sum(1, dtype=torch.uint8)


def join(weight: torch.Tensor, low: torch.Tensor, carries: torch.Tensor, out: torch.Tensor) -> None:
    """Write the masters of bfloat16 weights `[n]` to `out`, float32 `[n]`, which `split` gives the same three of."""
    places = torch.arange(8, dtype=torch.uint8, device=weight.device)
    carry = (carries.unsqueeze(1) >> places & 1).view(-1)[: len(weight)]
    halves = out.view(torch.int16).view(-1, 2)
    halves[:, 0] = low
    halves[:, 1] = weight.view(torch.int16) - carry.to(torch.int16)


class Masters:
    """The masters of one group's shards, as low bits and carries: float32 only while an optimizer steps.

    Attributes:
        low: int16 `[numel]`, at rest; `carries`: uint8 `[ceil(numel / 8)]`. The masters of weights that were never
            stepped are the weights, so both are zero.
        form: float32 `[numel]` without memory: what the spans that an optimizer steps are parts of.
    """

    def __init__(
        self, shard_buffer: torch.Tensor, parameters: Sequence[tuple[torch.Tensor, Extent]], low: torch.Tensor
    ) -> None:
        self._weights, self._parameters = shard_buffer, parameters
        self.form = torch.empty(shard_buffer.numel(), dtype=torch.float32, device=shard_buffer.device)
        self.form.untyped_storage().resize_(0)
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

    @contextmanager
    def with_form(self) -> Iterator[torch.Tensor]:
        """Within this context `form` has memory, so that views of it can be made."""
        self.form.untyped_storage().resize_(self.form.numel() * self.form.itemsize)
        try:
            yield self.form
        finally:
            self.form.untyped_storage().resize_(0)

    def rest_in(self, low: torch.Tensor, carries: torch.Tensor) -> None:
        """Keep low bits and carries in these vectors from now on."""
        self.low, self.carries = low.copy_(self.low), carries.copy_(self.carries)

    def at(self, extent: Extent) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the low bits and the carries of the elements `extent`, which begins at a multiple of 8."""
        return self.low[extent.start : extent.stop], self.carries[extent.start // 8 : -(-extent.stop // 8)]

    @torch.no_grad()
    def joined(self, extent: Extent, low: torch.Tensor, carries: torch.Tensor) -> torch.Tensor:
        """Returns the masters of `extent`, float32, of its weights and of these, which are where the weights are.

        What a user has written since the last step is its own master.
        """
        weights = self._weights[extent.start : extent.stop]
        values = torch.empty(extent.numel, dtype=torch.float32, device=weights.device)
        join(weights, low, carries, values)
        for (parameter, own), version in zip(self._parameters, self._versions, strict=True):
            if parameter._version != version:
                written = own.intersect(extent).shifted(-extent.start) if own.stop > extent.start else Extent(0, 0)
                values[written.start : written.stop] = weights[written.start : written.stop]
        return values

    @torch.no_grad()
    def split_into(self, extent: Extent, values: torch.Tensor, low: torch.Tensor, carries: torch.Tensor) -> None:
        """Split stepped masters of `extent` into its weights, `low` and `carries`."""
        weights = self._weights[extent.start : extent.stop]
        for target, value in zip((weights, low, carries), split(values), strict=True):
            target.copy_(value)
        self._is_stepped = True

    def full(self) -> torch.Tensor:
        """Returns all masters, float32 `[numel]`, where the weights are."""
        device = self._weights.device
        return self.joined(Extent(0, len(self.low)), self.low.to(device), self.carries.to(device))

    @torch.no_grad()
    def put(self, values: torch.Tensor) -> None:
        """Make `values`, float32 `[numel]`, the masters, and the weights these rounded."""
        for target, value in zip((self._weights, self.low, self.carries), split(values), strict=True):
            target.copy_(value)
        self._note()
