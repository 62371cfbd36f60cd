"""Do the transports move and sum the right elements, whatever their groups are made of?"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from sherd.comm.host.gloo import Gloo
from sherd.comm.transport import CoalescedCalls, OneRank, SingleCalls, Transport, are_even, parts

CPU = torch.device("cpu")


def numbers_of(rank: int, count: int) -> torch.Tensor:
    """Numbers that tell rank and place, and whose sums are exact."""
    return torch.arange(count).float() + 100 * rank


def moved_by(
    transport: Transport, size: int, rank: int, async_op: bool
) -> tuple[list[float], list[float], list[float]]:
    """What a rank gets of the three collectives, three elements a rank."""
    sizes = [3] * size
    rows, rest, total = torch.full((3 * size,), -1.0), torch.full((3,), -1.0), numbers_of(rank, 2)
    pending = [
        transport.all_gather(rows, numbers_of(rank, 3), sizes, async_op),
        transport.reduce_scatter(rest, numbers_of(rank, 3 * size), sizes, async_op),
        transport.all_reduce(total, async_op),
    ]
    for each in pending:
        if each is not None:
            each.wait()
    return rows.tolist(), rest.tolist(), total.tolist()


def expected(size: int, rank: int) -> tuple[list[float], list[float], list[float]]:
    """The same, by plain sums."""
    ranks = range(size)
    gathered = torch.cat([numbers_of(each, 3) for each in ranks])
    scattered = sum(numbers_of(each, 3 * size) for each in ranks)[3 * rank : 3 * rank + 3]
    return gathered.tolist(), scattered.tolist(), sum(numbers_of(each, 2) for each in ranks).tolist()


def by_single_calls(async_op: bool) -> tuple[list[float], list[float], list[float]]:
    return moved_by(SingleCalls(dist.group.WORLD), dist.get_world_size(), dist.get_rank(), async_op)


def by_gloo(async_op: bool) -> tuple[list[float], list[float], list[float]]:
    return moved_by(Gloo(dist.group.WORLD), dist.get_world_size(), dist.get_rank(), async_op)


@pytest.mark.pairs
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("moved", [by_single_calls, by_gloo])
def test_processes_get_the_plain_gather_and_the_plain_sums(world, size, async_op, moved):
    assert world(size).run(moved, async_op) == [expected(size, rank) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 5, 8])
@pytest.mark.parametrize("async_op", [False, True])
def test_threads_get_the_plain_gather_and_the_plain_sums(threads, size, async_op):
    assert threads(size).run(by_single_calls, async_op) == [expected(size, rank) for rank in range(size)]


@pytest.mark.parametrize("async_op", [False, True])
def test_one_rank_alone_copies_at_once(async_op):
    alone = OneRank()
    assert moved_by(alone, 1, 0, async_op) == expected(1, 0)
    assert alone.all_gather(torch.empty(2), torch.ones(2), [2], async_op) is None
    assert alone.reduce_scatter(torch.empty(2), torch.ones(2), [2], async_op) is None
    assert alone.all_reduce(torch.ones(2), async_op) is None


def test_one_rank_alone_may_gather_a_buffer_onto_itself():
    rows = torch.arange(3.0)
    OneRank().all_gather(rows, rows, [3], False)
    assert rows.tolist() == [0, 1, 2]


def uneven_through_another_one() -> tuple[list[float], list[float]]:
    group, rank = dist.group.WORLD, dist.get_rank()
    transport, sizes = SingleCalls(group, for_uneven=Gloo(group)), [3, 0]
    rows, rest = torch.empty(3), torch.empty(sizes[rank])
    transport.all_gather(rows, numbers_of(rank, sizes[rank]), sizes, False)
    transport.reduce_scatter(rest, numbers_of(rank, 3), sizes, False)
    return rows.tolist(), rest.tolist()


def test_uneven_parts_go_through_the_transport_that_can_where_torchs_list_forms_cannot(world):
    assert world(2).run(uneven_through_another_one) == [([0, 1, 2], [100, 102, 104]), ([0, 1, 2], [])]


def each_gathered(async_op: bool) -> list[list[float]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    targets = [torch.full((size * count,), -1.0) for count in (3, 1)]
    rests = [numbers_of(rank, count) for count in (3, 1)]
    pending = CoalescedCalls(dist.group.WORLD).all_gather_each(targets, rests, async_op)
    if pending is not None:
        pending.wait()
    return [target.tolist() for target in targets]


@pytest.mark.parametrize("async_op", [False, True])
def test_several_tensors_are_gathered_as_one_each_to_its_place(world, async_op):
    assert world(2).run(each_gathered, async_op) == [[[0, 1, 2, 100, 101, 102], [0, 100]]] * 2


def test_parts_are_views_side_by_side_and_may_be_empty():
    rows = torch.arange(5)
    assert [part.tolist() for part in parts(rows, [2, 0, 3])] == [[0, 1], [], [2, 3, 4]]
    parts(rows, [2, 0, 3])[2].zero_()
    assert rows.tolist() == [0, 1, 0, 0, 0]


def test_even_is_when_all_parts_are_equally_long():
    assert are_even([2, 2, 2])
    assert are_even([0])
    assert not are_even([2, 2, 1])


def test_a_transport_without_shared_memory_says_so_and_sums_in_the_dtype_it_is_given():
    alone = OneRank()
    assert not alone.shares_memory
    assert not alone.brings_memory
    assert not alone.coalesces
    assert alone.sum_dtype(torch.bfloat16) == torch.bfloat16
    with pytest.raises(NotImplementedError, match="OneRank has no memory that ranks share"):
        alone.all_gather_onto(lambda rank, part: None, torch.ones(1), [1], False)
    with pytest.raises(NotImplementedError, match="OneRank gathers one buffer at a time"):
        alone.all_gather_each([torch.ones(1)], [torch.ones(1)], False)
    assert (alone.empty(3, torch.float16, CPU).shape, alone.empty(3, torch.float16, CPU).dtype) == ((3,), torch.float16)
