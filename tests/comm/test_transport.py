"""The transports move and sum the right elements, whatever their groups are made of."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sherd.comm.host.gloo import Gloo
from sherd.comm.host.shared_memory import SharedMemory
from sherd.comm.transport import CoalescedCalls, OneRank, PartByPart, SingleCalls, Transport, are_even, parts
from sherd.comm.transports import transport_of
from sherd.policy import TRANSPORTS, CommPolicy
from tests.comm.numbers import EXACT, GATHERED, SUMMED, added_up, bits, numbers, rounding, splits
from tests.support.ranks.bodies import on_processes, on_threads

CPU = torch.device("cpu")


def numbers_of(rank: int, count: int) -> torch.Tensor:
    """Numbers that tell rank and place, and whose sums are exact."""
    return torch.arange(count).float() + 100 * rank


def assert_moves(transport: Transport, size: int, rank: int, async_op: bool) -> None:
    """A rank gets the plain gather and the plain sums of three elements a rank."""
    sizes, ranks = [3] * size, range(size)
    rows, rest, total = torch.full((3 * size,), -1.0), torch.full((3,), -1.0), numbers_of(rank, 2)
    pending = [
        transport.all_gather(rows, numbers_of(rank, 3), sizes, async_op),
        transport.reduce_scatter(rest, numbers_of(rank, 3 * size), sizes, async_op),
        transport.all_reduce(total, async_op),
    ]
    for each in pending:
        finish(each)
    assert torch.equal(rows, torch.cat([numbers_of(each, 3) for each in ranks]))
    assert torch.equal(rest, sum(numbers_of(each, 3 * size) for each in ranks)[3 * rank : 3 * rank + 3])
    assert torch.equal(total, sum(numbers_of(each, 2) for each in ranks))


TRANSPORTS_OF: dict[str, Callable[[Any], Transport]] = {
    "single calls": SingleCalls,
    "part by part": PartByPart,
    "gloo": Gloo,
    **{wanted: partial(transport_of, device=CPU, policy=CommPolicy(wanted)) for wanted in TRANSPORTS},
}


def assert_all_move(names: Iterable[str]) -> None:
    """On a rank: all of these transports, whether the calls return at once or not."""
    for name, async_op in itertools.product(names, (False, True)):
        assert_moves(TRANSPORTS_OF[name](dist.group.WORLD), dist.get_world_size(), dist.get_rank(), async_op)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@on_processes()
def test_processes_get_the_plain_gather_and_the_plain_sums():
    assert_all_move(TRANSPORTS_OF)


@pytest.mark.parametrize("num_ranks", [1, 2, 5, 8])
@on_threads()
def test_threads_get_the_plain_gather_and_the_plain_sums():
    assert_all_move(["single calls", "auto"])


@pytest.mark.parametrize("async_op", [False, True])
def test_one_rank_alone_copies_at_once(async_op):
    alone = transport_of(None, CPU, CommPolicy())
    assert isinstance(alone, OneRank)
    assert_moves(alone, 1, 0, async_op)
    assert alone.all_gather(torch.empty(2), torch.ones(2), [2], async_op) is None
    assert alone.reduce_scatter(torch.empty(2), torch.ones(2), [2], async_op) is None
    assert alone.all_reduce(torch.ones(2), async_op) is None


HOSTS = [Gloo, SharedMemory.meet]
"""The transports of CPU ranks."""


def finish(pending: Any) -> None:
    """As often as one likes."""
    if pending is not None:
        pending.wait()
        pending.wait()


@pytest.mark.pairs
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("of", HOSTS)
@on_processes()
def test_every_rank_gets_every_part_and_the_plain_sum_of_its_own_bit_by_bit(of, async_op):
    """What was given stays as it was."""
    transport, rank, size = of(dist.group.WORLD), dist.get_rank(), dist.get_world_size()
    compared = 0
    for sizes, dtype in itertools.product(splits(size), GATHERED):
        parts_of = [numbers(each, numel, dtype) for each, numel in enumerate(sizes)]
        rows = torch.zeros(sum(sizes), dtype=dtype)
        finish(transport.all_gather(rows, parts_of[rank], sizes, async_op))
        assert torch.equal(bits(rows), bits(torch.cat(parts_of))), (dtype, sizes)
        compared += 1
        if dtype in SUMMED:
            given = [numbers(each, sum(sizes), dtype) for each in range(size)]
            rest = torch.empty(sizes[rank], dtype=transport.sum_dtype(dtype))
            finish(transport.reduce_scatter(rest, given[rank], sizes, async_op))
            assert torch.equal(rest, added_up(given).split(sizes)[rank]), (dtype, sizes)
            assert torch.equal(given[rank], numbers(rank, sum(sizes), dtype)), (dtype, sizes)
            compared += 1
    assert compared == 11 * (len(GATHERED) + len(SUMMED))


@pytest.mark.parametrize(
    ("num_ranks", "numel", "dtype"),
    [
        (2, 1, torch.float32),
        (3, 100, torch.bfloat16),
        (4, 1000, torch.int64),
        (4, 100, torch.complex64),
        (3, 1000, torch.float64),
        (2, 2_200_000, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("of", HOSTS)
@on_processes()
def test_torchs_own_collectives_give_the_same(of, numel, dtype):
    transport, rank, size = of(dist.group.WORLD), dist.get_rank(), dist.get_world_size()
    given, rest, sizes = numbers(rank, numel * size, dtype), numbers(rank, numel, dtype), [numel] * size
    theirs = torch.empty(numel * size, dtype=dtype), torch.empty(numel, dtype=dtype), given.clone()
    ours = torch.empty_like(theirs[0]), torch.empty(numel, dtype=transport.sum_dtype(dtype)), given.clone()
    dist.all_gather(list(theirs[0].split(numel)), rest)
    transport.all_gather(ours[0], rest, sizes, False)
    dist.reduce_scatter(theirs[1], list(given.clone().split(numel)))
    transport.reduce_scatter(ours[1], given, sizes, False)
    dist.all_reduce(theirs[2])
    transport.all_reduce(ours[2], False)
    assert torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[1].to(dtype), theirs[1], **rounding(dtype))
    # Gloo's sum is torch's own.
    torch.testing.assert_close(ours[2], theirs[2], **(EXACT if of is Gloo else rounding(dtype)))


@pytest.mark.pairs
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("numel", [1, 1001, 300_001])
@pytest.mark.parametrize("of", HOSTS)
@on_processes()
def test_an_all_reduce_gives_every_rank_the_same_bits(of, dtype, numel):
    given = [numbers(rank, numel, dtype) for rank in range(dist.get_world_size())]
    total = given[dist.get_rank()].clone()
    finish(of(dist.group.WORLD).all_reduce(total, numel == 1001))
    of_ranks = [torch.empty_like(total) for _ in given]
    dist.all_gather(of_ranks, total)
    assert all(torch.equal(total, each) for each in of_ranks)
    torch.testing.assert_close(total, added_up(given).to(dtype), **(rounding(dtype) if of is Gloo else EXACT))


def test_one_rank_alone_may_gather_a_buffer_onto_itself():
    rows = torch.arange(3.0)
    OneRank().all_gather(rows, rows, [3], False)
    assert rows.tolist() == [0, 1, 2]


@on_processes(2)
def test_uneven_parts_go_through_the_transport_that_can_where_torchs_list_forms_cannot():
    group, rank = dist.group.WORLD, dist.get_rank()
    for transport in (SingleCalls(group, for_uneven=Gloo(group)), PartByPart(group)):
        sizes = [3, 0]
        rows, rest, given = torch.empty(3), torch.empty(sizes[rank]), numbers_of(rank, 3)
        transport.all_gather(rows, numbers_of(rank, sizes[rank]), sizes, False)
        transport.reduce_scatter(rest, given, sizes, False)
        assert rows.tolist() == [0, 1, 2]
        assert rest.tolist() == [[100, 102, 104], []][rank]
        assert given.tolist() == numbers_of(rank, 3).tolist()


@on_processes(2, async_op=[False, True])
def test_several_tensors_are_gathered_as_one_each_to_its_place(async_op):
    targets = [torch.full((2 * count,), -1.0) for count in (3, 1)]
    rests = [numbers_of(dist.get_rank(), count) for count in (3, 1)]
    finish(CoalescedCalls(dist.group.WORLD).all_gather_each(targets, rests, async_op))
    assert [target.tolist() for target in targets] == [[0, 1, 2, 100, 101, 102], [0, 100]]


def test_parts_are_views_side_by_side_which_may_be_empty_and_are_even_if_equally_long():
    rows = torch.arange(5)
    assert [part.tolist() for part in parts(rows, [2, 0, 3])] == [[0, 1], [], [2, 3, 4]]
    parts(rows, [2, 0, 3])[2].zero_()
    assert rows.tolist() == [0, 1, 0, 0, 0]
    assert are_even([2, 2, 2])
    assert are_even([0])
    assert not are_even([2, 2, 1])


def test_a_transport_without_shared_memory_says_so_and_sums_in_the_dtype_it_is_given():
    alone = OneRank()
    assert not alone.shares_memory
    assert not alone.brings_memory
    assert alone.each_from_bytes == math.inf
    assert alone.sum_dtype(torch.bfloat16) == torch.bfloat16
    with pytest.raises(NotImplementedError, match="OneRank has no memory that ranks share"):
        alone.all_gather_onto(lambda rank, part: None, torch.ones(1), [1], False)
    with pytest.raises(NotImplementedError, match="OneRank gathers one buffer at a time"):
        alone.all_gather_each([torch.ones(1)], [torch.ones(1)], False)
    assert (alone.empty(3, torch.float16, CPU).shape, alone.empty(3, torch.float16, CPU).dtype) == ((3,), torch.float16)
