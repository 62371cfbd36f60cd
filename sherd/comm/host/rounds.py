"""Rounds: the bytes that each rank shows the others in one exchange, and how it takes theirs. No order, no messages."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache

import torch

from sherd.comm.host.sums import add_up
from sherd.comm.transport import CopyIntoPlace

ALL_GATHER, ALL_GATHER_ONTO, REDUCE_SCATTER, ALL_REDUCE = range(4)
_NAMES = ("all-gather", "all-gather", "reduce-scatter", "all-reduce")
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_NUMBER_OF = {dtype: number for number, dtype in enumerate(_DTYPES)}


class Question:
    """The collective that a rank asks for, which must be the same on all ranks."""

    def __init__(self, op: int, dtype: torch.dtype, sizes: tuple[int, ...], is_async: bool) -> None:
        self.dtype = dtype
        self.sizes = sizes
        self.is_async = is_async
        digest, total = _digest(sizes)
        self.numbers = (op, _NUMBER_OF[dtype], int(is_async), digest, total * dtype.itemsize)
        """The first fields of a post."""

    def __str__(self) -> str:
        return _described(*self.numbers)

    def beside(self, theirs: tuple[int, ...]) -> str:
        """Returns another rank's question in words if it differs from this one; else an empty text."""
        if theirs == self.numbers:
            return ""
        described = _described(*theirs)
        return described if described != str(self) else f"{described} in parts of other sizes, or not at once"


@lru_cache(maxsize=1024)
def _digest(sizes: tuple[int, ...]) -> tuple[int, int]:
    return zlib.crc32(repr(sizes).encode()), sum(sizes)


def _described(op: int, dtype: int, is_async: int, digest: int, total: int) -> str:
    return f"{_NAMES[op]} of {total:,} bytes of {str(_DTYPES[dtype]).removeprefix('torch.')}"


class Round(ABC):
    """One exchange: what this rank shows, and what it does with the parts that the others show."""

    number: int
    start: int

    def __init__(self, question: Question, shown: Sequence[int]) -> None:
        self.question = question
        self._itemsize = question.dtype.itemsize
        self.show(shown)

    def show(self, shown: Sequence[int]) -> None:
        """Set how many elements each rank stages."""
        self.shown = shown
        self.widest = max(shown) * self._itemsize
        """Bytes that the rank with the largest stage stages: the same number on all ranks."""

    def nbytes_of(self, rank: int) -> int:
        """Returns how many bytes `rank` stages."""
        return self.shown[rank] * self._itemsize

    @abstractmethod
    def fill(self, stage: torch.Tensor) -> None:
        """Copy this rank's elements for the others, `shown[own rank]` of them, to `stage`."""

    @abstractmethod
    def meant_for_us(self, rank: int) -> tuple[int, int]:
        """Returns the first element of `rank`'s stage that is for this rank, and how many there are."""

    @abstractmethod
    def take(self, rank: int, part: torch.Tensor) -> None:
        """Take `rank`'s part, which stays readable until `finish` has returned."""

    @abstractmethod
    def finish(self) -> None:
        """End the round: all parts were taken."""

    @abstractmethod
    def forget(self) -> None:
        """Drop the result, which nobody wants any more, and leave the caller's memory alone. Called on any thread."""


class Gather(Round):
    """Every rank shows the same part to all. This rank's lies in `pieces`."""

    def __init__(
        self, question: Question, shown: Sequence[int], pieces: Sequence[torch.Tensor], copy_into_place: CopyIntoPlace
    ) -> None:
        super().__init__(question, shown)
        self._pieces = pieces
        self._copy_into_place: CopyIntoPlace | None = copy_into_place

    def fill(self, stage: torch.Tensor) -> None:
        assert self._pieces, "filled once"
        if len(self._pieces) == 1:
            stage.copy_(self._pieces[0])
        else:
            torch.cat(list(self._pieces), out=stage)
        self._pieces = ()

    def meant_for_us(self, rank: int) -> tuple[int, int]:
        return 0, self.shown[rank]

    def take(self, rank: int, part: torch.Tensor) -> None:
        copy_into_place = self._copy_into_place
        if copy_into_place is not None:
            copy_into_place(rank, part)

    def finish(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._copy_into_place = None


class Sum(Round):
    """Every rank shows each other rank its contribution to that rank's part, in the order of ranks.

    rank 1's stage, of three ranks   | for rank 0 | for rank 2 |
    """

    def __init__(
        self, question: Question, counts: Sequence[int], own: int, pieces: Sequence[torch.Tensor], out: torch.Tensor
    ) -> None:
        super().__init__(question, [sum(counts) - count for count in counts])
        self._counts = counts
        self._own = own
        self._pieces: list[torch.Tensor] = list(pieces)
        self._out: torch.Tensor | None = out

    def fill(self, stage: torch.Tensor) -> None:
        start = 0
        for rank, piece in enumerate(self._pieces):
            if rank != self._own:
                stage[start : start + piece.numel()].copy_(piece)
                start += piece.numel()
        # The others' pieces are staged. From now on the list holds the summands of our own part.
        self._pieces = [self._pieces[self._own]] * len(self._pieces)

    def meant_for_us(self, rank: int) -> tuple[int, int]:
        before = sum(self._counts[: self._own])
        return before - (self._counts[rank] if rank < self._own else 0), self._counts[self._own]

    def take(self, rank: int, part: torch.Tensor) -> None:
        self._pieces[rank] = part

    def finish(self) -> None:
        out = self._out
        if out is not None:
            add_up(self._pieces, out)
        self._pieces, self._out = [], None

    def forget(self) -> None:
        self._out = None


class SumOfWholes(Sum):
    """Every rank shows its whole tensor to all, and each rank adds up all of them."""

    def __init__(self, question: Question, own: int, tensor: torch.Tensor) -> None:
        num_ranks = len(question.sizes)
        super().__init__(question, [tensor.numel()] * num_ranks, own, [tensor] * num_ranks, tensor)
        self.show([tensor.numel()] * num_ranks)

    def fill(self, stage: torch.Tensor) -> None:
        stage.copy_(self._pieces[self._own])

    def meant_for_us(self, rank: int) -> tuple[int, int]:
        return 0, self.shown[rank]


def copier_into(parts: Sequence[torch.Tensor], cut: Sequence[slice]) -> CopyIntoPlace:
    """Returns the function that copies a rank's elements to its slice of `cut` in its tensor of `parts`."""

    def copy_into_place(rank: int, part: torch.Tensor) -> None:
        parts[rank][cut[rank]].copy_(part)

    return copy_into_place
