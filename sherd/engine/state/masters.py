"""The float32 masters of bfloat16 shards, exactly, in 2.125 bytes for each element.

A master is rounded to the weight. The weight has the upper 16 bits of the master, plus 1 if it was rounded up:

    master   | sign, exponent, 7 bits | 16 bits |        weight = upper + carry        low = the 16 bits

So the 16 low bits and one carry bit bring the master back. The carry is needed only where the low bits are a tie,
0x8000, which rounds up from an odd number and down from an even one. Known from inclusionAI/AReno, issue 498.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from sherd.comm.streams import Handoff
from sherd.layout.extent import Extent


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns float32 masters `[n]` as bfloat16 weights, int16 low bits, and uint8 carries `[ceil(n / 8)]`."""
    halves = master.view(torch.int16).view(-1, 2)  # the low half first, on every machine that torch runs on
    weight = master.to(torch.bfloat16)
    carry = weight.view(torch.int16) != halves[:, 1]
    padded = torch.nn.functional.pad(carry, (0, -len(carry) % 8)).view(-1, 8)
    places = torch.arange(8, dtype=torch.uint8, device=master.device)
    return weight, halves[:, 0], (padded.to(torch.uint8) << places).sum(1, dtype=torch.uint8)


@torch.no_grad()
def join(weight: torch.Tensor, low: torch.Tensor, carries: torch.Tensor) -> torch.Tensor:
    """Returns the masters of bfloat16 weights `[n]`, float32 `[n]`, which `split` gives the same three of."""
    out = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    places = torch.arange(8, dtype=torch.uint8, device=weight.device)
    carry = (carries.unsqueeze(1) >> places & 1).view(-1)[: len(weight)]
    halves = out.view(torch.int16).view(-1, 2)
    halves[:, 0] = low
    halves[:, 1] = weight.view(torch.int16) - carry.to(torch.int16)
    return out


class Masters:
    """The masters of one group's shards, as low bits and carries: float32 only while an optimizer steps.

    What is written to a shard between two steps is its own master: its low bits go before the next step, or when
    masters are read. A write raises torch's version of the parameter or of its local tensor; of other writes (a
    collective into `parameter.to_local()`) a user tells by `torch.autograd.graph.increment_version(parameter)`.

    Args:
        shard_buffer: the weights, bfloat16 `[numel]`.
        parameters: the parameters that have the weights, and their places.
        low: zeros, int16 `[numel]`, where low bits rest.

    Attributes:
        low: the low bits, and `carries`, uint8 `[ceil(numel / 8)]`, at rest. The masters of weights that were never
            stepped are the weights, so both are zero.
        form: float32 `[numel]` without memory: what the spans that an optimizer steps are parts of.
    """

    def __init__(
        self, shard_buffer: torch.Tensor, parameters: Sequence[tuple[Written, Extent]], low: torch.Tensor
    ) -> None:
        self._weights = shard_buffer
        self._parameters = [(weakref.ref(record), extent) for record, extent in parameters]
        self.form = torch.empty(shard_buffer.numel(), dtype=torch.float32, device=shard_buffer.device)
        self.form.untyped_storage().resize_(0)
        self.low = low
        self.carries = low.new_zeros(-(-low.numel() // 8), dtype=torch.uint8, pin_memory=low.is_pinned())
        self._is_stepped = False
        self._arriving: Handoff | None = None
        self.note()

    # What was written

    def note(self) -> None:
        """Take what the shards hold now for what the masters were rounded to."""
        self._seen = [_versions_of(ref()) for ref, _ in self._parameters]
        self._is_stepped = False

    def note_step(self) -> None:
        """Note that shards have the versions that a step gave them."""
        if self._is_stepped:
            self.note()

    def settle(self) -> None:
        """Make what was written to shards its own master."""
        pairs = zip(self._parameters, self._seen, strict=True)
        written = [extent for (_, extent), seen in pairs if any(_version_of(each) != at for each, at in seen)]
        if written and not self._weights.is_meta:
            for extent in written:
                self._write(extent, self._weights[extent.start : extent.stop].float())
        self.note()

    def arrive_by(self, copies: Handoff) -> None:
        """Note the copies of low bits to where they rest, which others wait for before they use them."""
        self._arriving = copies

    def _wait(self) -> None:
        if self._arriving is not None and self.low.device != self._weights.device:
            self._arriving.wait_on_host()
        self._arriving = None

    # A step

    @contextmanager
    def with_form(self) -> Iterator[torch.Tensor]:
        """Within this context `form` has memory, so that views of it can be made."""
        self.form.untyped_storage().resize_(self.form.numel() * self.form.itemsize)
        try:
            yield self.form
        finally:
            self.form.untyped_storage().resize_(0)

    def rest_in(self, low: torch.Tensor, carries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep low bits and carries in these vectors from now on. Returns them."""
        self.low, self.carries = low.copy_(self.low), carries.copy_(self.carries)
        return self.low, self.carries

    def at(self, extent: Extent) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the low bits and the carries of the elements `extent`, which begins at a multiple of 8."""
        return self.low[extent.start : extent.stop], self.carries[extent.start // 8 : -(-extent.stop // 8)]

    joined = staticmethod(join)

    @torch.no_grad()
    def split_into(self, values: torch.Tensor, weights: torch.Tensor, low: torch.Tensor, carries: torch.Tensor) -> None:
        """Split stepped masters into their weights, `low` and `carries`."""
        for target, value in zip((weights, low, carries), split(values), strict=True):
            target.copy_(value)
        self._is_stepped = True

    # Reading and writing

    def bits(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the low bits and the carries of all masters, at rest."""
        self.settle()
        self._wait()
        return self.low, self.carries

    def part(self, extent: Extent) -> torch.Tensor:
        """Returns the masters of `extent`, float32 `[numel]`, where the weights are."""
        self.settle()
        around, values = self._around(extent)
        return values[extent.start - around.start : extent.stop - around.start]

    @torch.no_grad()
    def put(self, extent: Extent, values: torch.Tensor) -> None:
        """Make `values`, float32, the masters of `extent`, and the weights these rounded."""
        self.settle()
        self._write(extent, values)

    @torch.no_grad()
    def of_weights(self, extent: Extent, weights: torch.Tensor) -> torch.Tensor:
        """Returns `weights` `[numel]` as float32: their masters where they are the weights of `extent`."""
        if self._weights.is_meta or extent.numel != weights.numel():
            return weights.float()
        own = self._weights[extent.start : extent.stop].to(weights.device)
        kept = self.part(extent).to(weights.device)
        return torch.where(own.view(torch.int16) == weights.view(torch.int16), kept, weights.float())

    @torch.no_grad()
    def kept(self) -> Callable[[], None]:
        """Returns a call that brings the low bits back to what they are now, when the weights are back."""
        self.settle()
        self._wait()
        copies = self.low.clone(), self.carries.clone()

        def bring_back() -> None:
            self._wait()
            for target, value in zip((self.low, self.carries), copies, strict=True):
                target.copy_(value)
            self.note()

        return bring_back

    def _around(self, extent: Extent) -> tuple[Extent, torch.Tensor]:
        """Returns an extent around `extent` that begins and ends at multiples of 8, and its masters."""
        self._wait()
        start, device = extent.start // 8 * 8, self._weights.device
        around = Extent(start, min(-(-extent.stop // 8) * 8, len(self.low)) - start)
        low, carries = self.at(around)
        return around, join(self._weights[around.start : around.stop], low.to(device), carries.to(device))

    def _write(self, extent: Extent, values: torch.Tensor) -> None:
        around, joined = self._around(extent)
        joined[extent.start - around.start : extent.stop - around.start] = values
        parts = self._weights[around.start : around.stop], *self.at(around)
        for target, value in zip(parts, split(joined), strict=True):
            target.copy_(value)


class Written(Protocol):
    """A sharded parameter: `forms` are the tensors by which its shard may be written, a flat parameter among them."""

    @property
    def forms(self) -> Sequence[torch.Tensor]:
        """Returns the tensors, some of them maybe more than once."""


Version = tuple[torch.Tensor, int]


def _versions_of(record: Written | None) -> list[Version]:
    if record is None:
        return []
    return [(each, _version_of(each)) for each in {id(each): each for each in record.forms}.values()]


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
