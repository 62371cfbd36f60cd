"""What many things came to on live ranks, where one of them may bring the ranks down."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from tests.support.ranks import RanksFailed

T = TypeVar("T")


def each_on(
    ranks: Any, things: Sequence[T], fn: Callable[..., Any], timeout: float
) -> Iterator[tuple[T, tuple[Any, ...] | RanksFailed]]:
    """Yields each thing with what `fn(things)` has in its place on each rank, or with how the ranks failed at it.

    All are handed over together first, for speed, and each half by itself where that fails. `fn` may stop early: what
    it has left out is handed over again.
    """
    if not things:
        return
    try:
        found = list(zip(*ranks.run(fn, tuple(things), timeout=timeout), strict=False))
    except RanksFailed as error:
        if len(things) == 1:
            yield things[0], error
            return
        half = len(things) // 2
        yield from each_on(ranks, things[:half], fn, timeout)
        yield from each_on(ranks, things[half:], fn, timeout)
        return
    yield from zip(things, found, strict=False)
    yield from each_on(ranks, things[len(found) :], fn, timeout)
