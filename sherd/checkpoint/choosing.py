"""Which rank writes which piece: each piece once, and each rank about as many bytes."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sherd.checkpoint.pieces import Described
from sherd.storage.safetensors import nbytes_of

SMALL_BYTES = 1 << 20
"""Plain tensors below this size are all written by the first rank that has them: ranks may have different ones, as of a
batch norm, and the mean of one rank does not go with the variance of another."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Which copy of a tensor is written: the `variant` of it that some ranks have, and the number of the `copy` of
    that. Of a plain tensor the copy is the one of this rank."""

    variant: tuple[object, ...]
    copy: int


@dataclass(frozen=True, slots=True)
class Party:
    """Ranks that have the same tensors, as they describe them."""

    ranks: tuple[int, ...]
    tensors: Mapping[str, Described]


def choose(parties: Sequence[Party]) -> dict[str, Choice]:
    """Returns the choice for each tensor, in the order of its first party.

    A tensor that several parties describe in different ways (a norm that each of two tensor-parallel ranks shards over
    its own data-parallel ranks) is written as the first one has it. Copies go to those who have the fewest bytes so
    far. All ranks that know the same parties make the same choices.
    """
    found: dict[str, Choice] = {}
    of_copies: dict[tuple[int, ...], list[int]] = {}
    of_ranks = {party.ranks: [(0, rank) for rank in party.ranks] for party in parties}
    for party in parties:
        for name, tensor in party.tensors.items():
            if name in found:
                continue
            nbytes = nbytes_of(tensor.dtype, tensor.shape)
            if tensor.copies is None and nbytes < SMALL_BYTES:
                found[name] = Choice(tensor.variant, party.ranks[0])
            elif tensor.copies is None:
                held, rank = of_ranks[party.ranks][0]
                heapq.heapreplace(of_ranks[party.ranks], (held + nbytes, rank))
                found[name] = Choice(tensor.variant, rank)
            else:
                firsts = tensor.copies.firsts
                loads = of_copies.setdefault(firsts, [0] * len(firsts))
                copy = loads.index(min(loads))
                loads[copy] += nbytes * len(firsts) // len(tensor.copies.files)
                found[name] = Choice(tensor.variant, copy)
    return found


def is_written_here(tensor: Described, choice: Choice, rank: int) -> bool:
    """Returns whether this rank writes its pieces of `tensor`."""
    if tensor.variant != choice.variant:
        return False
    return choice.copy == (rank if tensor.copies is None else tensor.copies.own)
