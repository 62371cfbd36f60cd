"""The samples of a run: which bytes of a text each step trains on, and each evaluation scores."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import torch
from torch import Tensor


def seeded(*key: object) -> torch.Generator:
    """A generator on the CPU that depends on `key` alone: not on ranks, devices or what was drawn before."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))


def tokens(text: bytes) -> Tensor:
    """Returns `text` as tokens: 1-D, uint8, on the CPU."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batch(text: Tensor, context: int, seed: int, first: int, num: int) -> tuple[Tensor, Tensor]:
    """Returns samples `first` to `first + num` of an endless row that `seed` alone decides.

    They are inputs and targets, int64 [num, context]; a target is the byte after its input. `text` is uint8, 1-D.

    Step s of a run with batches of b takes samples s*b to (s+1)*b, in micro-batches that ranks take in turn, so neither
    resuming nor another number of ranks changes what a step trains on. An epoch visits each window of `context` bytes
    once.
    """
    num_windows = (len(text) - 1) // context
    starts = []
    for sample in range(first, first + num):
        epoch, place = divmod(sample, num_windows)
        starts.append(int(_order(num_windows, seed, epoch)[place]) * context)
    samples = torch.stack([text[start : start + context + 1] for start in starts]).long()
    return samples[:, :-1], samples[:, 1:]


@lru_cache(maxsize=2)  # a batch may straddle two epochs
def _order(num_windows: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(num_windows, generator=seeded("order", seed, epoch))


class Windows:
    """Overlapping windows over a text, each byte scored exactly once, the later half of a window at a time.

        window 0   | NULs......|scored 0|
        window 1         | seen |scored 1|          seen: context // 2 bytes or a little more
        window 2                 | seen  |scored 2|

    So a byte is predicted from at least half a context, and no window starts blind.
    """

    def __init__(self, text: Tensor, context: int) -> None:
        self.context, self.num_bytes = context, len(text)
        self.stride = max(1, context // 2)
        self.num = -(-len(text) // self.stride)
        tail = self.num * self.stride - len(text)
        self._row = torch.cat([text.new_zeros(context), text, text.new_zeros(tail)])

    def batch(self, windows: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs and targets (int64), and weights (float32, 1 where scored): each [len(windows), context].

        A window from `num` on is empty, its weights zero, for ranks that have fewer windows than others.
        """
        starts = [min(window, self.num - 1) * self.stride for window in windows]
        # A window's last target is the last byte of its stride; the row numbers it `context` higher.
        rows = torch.stack([self._row[s + self.stride - 1 :][: self.context + 1] for s in starts]).long()
        place = torch.tensor(windows)[:, None] * self.stride + torch.arange(self.context) - (self.context - self.stride)
        old = torch.arange(self.context) < self.context - self.stride
        weights = (~old & (place < self.num_bytes)).float()
        return rows[:, :-1], rows[:, 1:], weights
