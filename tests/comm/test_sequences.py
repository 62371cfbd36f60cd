"""Any sequence of collectives, waited for in any order, gives what arithmetic gives, on each transport of CPU ranks."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from sherd.comm.host import gloo, shared_memory
from sherd.comm.host.gloo import Gloo
from sherd.comm.host.shared_memory import SharedMemory
from tests.comm.numbers import EXACT, SUMMED, added_up, numbers, rounding

KIB = 1 << 10


class Drawn:
    """A random collective: the same on all ranks, with what this one must get."""

    def __init__(self, draw: random.Random, rank: int, num_ranks: int, most: int, has_memory: bool) -> None:
        self.dtype = draw.choice(SUMMED)
        self.sizes = [draw.randint(0, most)] * num_ranks
        if draw.random() < 0.6:
            self.sizes = [draw.choice((0, draw.randint(0, most), draw.randint(0, 9))) for _ in range(num_ranks)]
        self.kind = draw.choice(("gather", *["onto"] * has_memory, "scatter", "reduce"))
        self.is_async = draw.random() < 0.7
        self.in_place = draw.random() < 0.3 and (has_memory or self.kind == "gather")
        # torch's own all-reduce sums in an order of its own.
        self.is_exact = has_memory or self.kind != "reduce"
        self.unchanged: list[torch.Tensor] = []
        self.seed = draw.randint(0, 1 << 30)
        self.rank, self.total = rank, sum(self.sizes)
        self.start = sum(self.sizes[:rank])

    @functools.cached_property
    def of_ranks(self) -> list[torch.Tensor]:
        return [numbers(self.seed + each, size, self.dtype) for each, size in enumerate(self.sizes)]

    @functools.cached_property
    def rows_of_ranks(self) -> list[torch.Tensor]:
        return [numbers(self.seed + each, self.total, self.dtype) for each in range(len(self.sizes))]

    @property
    def own(self) -> slice:
        return slice(self.start, self.start + self.sizes[self.rank])

    def begin(self, transport: Any) -> Callable[[], None]:
        """Call it; what remains is to wait and compare."""
        work, result, expected = getattr(self, self.kind)(transport)
        assert (work is not None) <= self.is_async

        def end() -> None:
            if work is not None:
                work.wait()
                work.wait()  # as often as one likes
            torch.testing.assert_close(result, expected, **(EXACT if self.is_exact else rounding(self.dtype)))
            for given in self.unchanged:
                assert torch.equal(given, self.rows_of_ranks[self.rank])

        return end

    def gather(self, transport):
        rest = self.of_ranks[self.rank].clone()
        rows = torch.zeros(self.total, dtype=self.dtype)
        if self.in_place:
            rows[self.own] = rest
            rest = rows[self.own]
        return transport.all_gather(rows, rest, self.sizes, self.is_async), rows, torch.cat(self.of_ranks)

    def onto(self, transport):
        rest = self.of_ranks[self.rank].clone()
        rows = torch.zeros(self.total, dtype=self.dtype)
        into = rows.split(self.sizes)
        work = transport.all_gather_onto(lambda rank, part: into[rank].copy_(part), rest, self.sizes, self.is_async)
        rest.zero_()  # it may be written again at once
        return work, rows, torch.cat(self.of_ranks)

    def scatter(self, transport):
        rows = self.rows_of_ranks[self.rank].clone()
        expected = added_up(self.rows_of_ranks)[self.own]
        rest = torch.zeros_like(expected)
        if self.in_place and expected.dtype == self.dtype:
            rest = rows[self.own]
        else:
            self.unchanged.append(rows)
        return transport.reduce_scatter(rest, rows, self.sizes, self.is_async), rest, expected

    def reduce(self, transport):
        tensor = self.rows_of_ranks[self.rank].clone()
        return transport.all_reduce(tensor, self.is_async), tensor, added_up(self.rows_of_ranks).to(self.dtype)


MEETINGS: dict[str, Callable[[], Any]] = {
    "64 KiB of shared memory": lambda: SharedMemory.meet(dist.group.WORLD, limit=64 * KIB),
    "1 MiB of shared memory": lambda: SharedMemory.meet(dist.group.WORLD, limit=1024 * KIB),
    "gloo": lambda: Gloo(dist.group.WORLD),
    "gloo, with as little memory as it can": lambda: Gloo(dist.group.WORLD, ahead=1),
}


# Collectives of a few thousand elements take many rounds.
@mock.patch.object(shared_memory, "_CHUNK", 4 * KIB)
@mock.patch.object(gloo, "_SMALLEST_PIECE", 4 * KIB)
def random_sequences(name: str, seeds: Sequence[int], most: int) -> None:
    """Many collectives in flight, waited for in an order of this rank's own."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for seed in seeds:
        transport = MEETINGS[name]()
        has_memory = isinstance(transport, SharedMemory)
        draw, own_draw = random.Random(seed), random.Random(f"{seed} {rank}")
        under_way: list[Callable[[], None]] = []
        for _ in range(30):
            under_way.append(Drawn(draw, rank, num_ranks, most, has_memory).begin(transport))
            while under_way and own_draw.random() < 0.4:
                under_way.pop(own_draw.randrange(len(under_way)))()
        for end in reversed(under_way):
            end()
        if has_memory:
            transport.close()


@pytest.mark.pairs
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("most", [50, 5000])
@pytest.mark.parametrize("name", MEETINGS)
def test_ranks_may_wait_in_different_orders(world, num_ranks, most, name):
    world(num_ranks).run(random_sequences, name, range(4), most)
