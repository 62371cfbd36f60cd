"""What one group's gradients lose on the wire: it is kept and sent with the next ones, or rounded at random."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from sherd.codecs import encode_parts, round_to_bf16
from sherd.policy import Codec, Reduction

CHUNK = 1 << 20
"""The elements that are rounded at random at once: temporaries of 24 MiB."""


class Narrowing:
    """What one group keeps of its reductions. All of it is written on the lane that reduces.

    Attributes:
        lost: what this rank's values have lost (exact - decoded) and have not sent yet: of "shards", rows for the shard
            axis; "replicas", sums of a shard for its replicas; "back", this rank's part of the replicas' sum on its way
            back. float32 or wider, since what is kept in a narrower dtype would be rounded, too. Zero where a value, or
            what is decoded of it, is not finite.
        number: how many backwards came before the present reduction.
        name: of the group's first parameter in the model.
    """

    def __init__(self) -> None:
        self.lost: dict[str, Tensor] = {}
        self.number, self._turn, self.name = -1, 0, ""

    def begin(self, number: int, name: str) -> None:
        """Note a reduction after `number` backwards, of the group whose first parameter has the `name`."""
        self._turn = self._turn + 1 if number == self.number else 0
        self.number, self.name = number, name

    def key(self, reduction: Reduction, name: str, rank: int, num_ranks: int) -> tuple[int, int, int, int]:
        """Returns a key of random numbers for what has the `name`.

        It has the number of a batch among those of all ranks, so that it does not depend on the number of ranks.
        """
        return reduction.seed, self.number * num_ranks + rank, self._turn, number_of(name)

    def narrowed(
        self,
        codec: Codec | None,
        reduction: Reduction,
        what: str,
        values: Tensor,
        sizes: Sequence[int],
        key: Sequence[int],
    ) -> tuple[Tensor, Sequence[int]]:
        """Returns what is sent in the place of `values`, which have parts of `sizes`, and the lengths of its parts."""
        if reduction.feedback:
            values = self._with_lost(what, values)
        lengths = sizes
        if codec is not None:
            sent, lengths = encode_parts(codec, values, sizes)
        elif reduction.is_stochastic:
            sent = torch.empty_like(values, dtype=torch.bfloat16)
            for number, (part, exact) in enumerate(zip(sent.split(CHUNK), values.split(CHUNK), strict=True)):
                part.copy_(round_to_bf16(exact, (*key, number)))
        else:
            sent = values.to(reduction.wire_dtype(values.dtype))
        if reduction.feedback:
            for lost, decoded in zip(values.split(list(sizes)), sent.split(list(lengths)), strict=True):
                if codec is not None:
                    codec.decode(decoded, decoded := torch.empty_like(lost))
                torch.nan_to_num_(lost.sub_(decoded), 0.0, 0.0, 0.0)
        return sent, lengths

    def _with_lost(self, what: str, values: Tensor) -> Tensor:
        """Returns `values` with what was lost before added: the buffer of that, which what is lost now replaces."""
        lost = self.lost.get(what)
        if lost is None or lost.shape != values.shape:
            lost = torch.zeros_like(values, dtype=dtype_of_lost(values.dtype))
        self.lost[what] = lost = lost.to(values.device)
        return lost.add_(values)

    def go_on(self, lost: dict[str, Tensor]) -> None:
        """Take over what was `lost` before, as by this rank of a training that is resumed."""
        self.lost = lost

    def kept(self) -> Callable[[], None]:
        """Returns what restores the present state."""
        number, turn, lost = self.number, self._turn, {what: each.clone() for what, each in self.lost.items()}

        def undo() -> None:
            self.number, self._turn, self.lost = number, turn, lost

        return undo


def dtype_of_lost(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@cache
def number_of(name: str) -> int:
    """Returns a number of 64 bits that stands for `name`."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
