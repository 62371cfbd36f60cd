"""The owners of matrices, chosen so that the most loaded rank computes as little as possible. Numbers only.

A matrix whose elements are on several ranks has to be assembled on one of them. That rank is its owner for the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf


@dataclass(frozen=True, slots=True)
class MatrixWork:
    """Something that only one rank computes.

    Attributes:
        flops: the work of the function, in any unit.
        nbytes: what is exchanged with the owner; decides between ranks that are loaded alike.
        candidates: the numbers of the ranks that may compute it.
    """

    flops: float
    nbytes: int
    candidates: Sequence[int]


def owners_of(works: Sequence[MatrixWork], num_ranks: int, loads: Sequence[float] = ()) -> list[int]:
    """Returns the number of the rank that computes each of `works`, given `loads`, what each rank computes already.

    The longest first, each to the candidate that is loaded least (Graham 1969, "Bounds on multiprocessing timing
    anomalies"): the most loaded rank has at most 4/3 of the least possible. Works that few ranks may compute are given
    first. If others go to any rank, they do too where their own would have more than the mean.
    """
    flops, nbytes = list(loads) or [0.0] * num_ranks, [0] * num_ranks
    owners, ranks = [0] * len(works), range(num_ranks)
    is_free = [len(work.candidates) == num_ranks for work in works]
    most = sum([*flops, *(work.flops for work in works)]) / num_ranks if any(is_free) else inf
    for index in sorted(range(len(works)), key=lambda i: (is_free[i], -works[i].flops, -works[i].nbytes)):
        work = works[index]
        owner = min(work.candidates, key=lambda rank: (flops[rank], nbytes[rank], rank))
        if flops[owner] + work.flops > most:
            owner = min(ranks, key=lambda rank: (flops[rank], nbytes[rank], rank))
        flops[owner] += work.flops
        nbytes[owner] += work.nbytes
        owners[index] = owner
    return owners


def in_order(owners: Sequence[int], works: Sequence[MatrixWork], num_ranks: int) -> list[int]:
    """Returns the owners of neighbouring works, changed so that none is before its predecessor.

    Works that any rank may compute exchange their owners, or take a neighbour's. All others keep theirs, which are in
    order already.
    """
    is_free = [len(work.candidates) == num_ranks for work in works]
    free = iter(sorted(owner for owner, is_one in zip(owners, is_free, strict=True) if is_one))
    chosen = [next(free) if is_one else owner for owner, is_one in zip(owners, is_free, strict=True)]
    most = [num_ranks if is_one else owner for owner, is_one in zip(owners, is_free, strict=True)]
    return list(accumulate(map(min, chosen, list(accumulate(reversed(most), min))[::-1]), max))
