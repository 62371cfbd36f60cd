"""Losses of one group's gradients on the wire, which are kept and sent with the next ones; rounding at random."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from sherd.codecs import encode_parts, round_to_bf16
from sherd.policy import Codec, Reduction

CHUNK = 1 << 20
"""The elements that are rounded at random at once: temporaries of 24 MiB."""


class Narrowing:
    """The state that one group keeps between its reductions. The lane that reduces writes it.

    Attributes:
        lost: what this rank's values have lost (exact - decoded) and have not sent yet: of "shards", rows for the shard
            axis; "replicas", sums of a shard for its replicas; "back", this rank's part of the replicas' sum on its way
            back. float32 or wider, since what is kept in a narrower dtype would be rounded, too. Zero where a value, or
            what is decoded of it, is not finite.
        name: of the group's first parameter in the model.
    """

    def __init__(self) -> None:
        self.lost: dict[str, Tensor] = {}
        self._number, self._turn, self.name = -1, 0, ""

    def begin(self, number: int, name: str) -> None:
        """Note a reduction after `number` backwards, of the group whose first parameter has the `name`."""
        self._turn = self._turn + 1 if number == self._number else 0
        self._number, self.name = number, name

    def key(self, reduction: Reduction, name: str, rank: int, num_ranks: int) -> tuple[int, int, int, int]:
        """Returns a key of random numbers for what has the `name`.

        It has the number of a batch among those of all ranks, so that it does not depend on the number of ranks.
        """
        return reduction.seed, self._number * num_ranks + rank, self._turn, number_of(name)

    def owed(self, reduction: Reduction, what: str, values: Tensor) -> Tensor:
        """Returns `values` with what was lost before, in its memory; without feedback they stay as they are."""
        if not reduction.feedback:
            return values
        if what not in self.lost or self.lost[what].shape != values.shape:
            wide = torch.promote_types(values.dtype, torch.float32)
            self.lost[what] = torch.zeros_like(values, dtype=wide)
        return self.lost[what].add_(values)

    def narrowed(
        self, codec: Codec | None, reduction: Reduction, what: str, values: Tensor, sizes: Sequence[int], rank: int
    ) -> tuple[Tensor, Sequence[int]]:
        """Returns what `rank` sends for `values`, which have parts of `sizes`, and the lengths of its parts."""
        if codec is not None:
            return encode_parts(codec, values, sizes)
        if not reduction.is_stochastic:
            return values.to(reduction.wire_dtype(values.dtype), copy=True), sizes
        key = self.key(reduction, f"{self.name}, {what}", rank, dist.get_world_size())
        sent = torch.empty_like(values, dtype=torch.bfloat16)
        for number, (part, exact) in enumerate(zip(sent.split(CHUNK), values.split(CHUNK), strict=True)):
            part.copy_(round_to_bf16(exact, (*key, number)))
        return sent, sizes

    def keep(
        self, codec: Codec | None, values: Tensor, sizes: Sequence[int], sent: Tensor, lengths: Sequence[int]
    ) -> None:
        """Leave in `values`, which `owed` returned, what they lose by what is `sent` for them."""
        for lost, encoded in zip(values.split(list(sizes)), sent.split(list(lengths)), strict=True):
            decoded = encoded if codec is None else torch.empty_like(lost)
            if codec is not None:
                codec.decode(encoded, decoded)
            lost.sub_(decoded).nan_to_num_(0.0, 0.0, 0.0)

    def go_on(self, lost: Mapping[str, Tensor]) -> None:
        """Take over what was `lost` before, in place: a step that was captured as a graph has the memory."""
        for each in self.lost.values():
            each.zero_()
        for what, each in lost.items():
            self.lost.setdefault(what, each).copy_(each)

    def kept(self) -> Callable[[], None]:
        """Returns what restores the present state."""
        number, turn, lost = self._number, self._turn, {what: each.clone() for what, each in self.lost.items()}

        def undo() -> None:
            self._number, self._turn = number, turn
            self.go_on(lost)

        return undo


@cache
def number_of(name: str) -> int:
    """Returns a number of 64 bits that stands for `name`."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
