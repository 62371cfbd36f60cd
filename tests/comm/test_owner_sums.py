"""Sums that owners make, in the order of ranks or in another dtype; and sums that no order changes."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from sherd.codecs import codec
from sherd.comm.collectives import UsersCollectives
from sherd.comm.owner_sums import OwnerSums, SumsInOrder
from sherd.comm.transport import Sizes, cut, parts
from sherd.comm.transports import MAKERS
from sherd.errors import PolicyError
from sherd.policy import ReduceScatter, Reduction
from sherd.tensor.exact_sums import ExactSum, sum_over_ranks
from tests.support.ranks.bodies import on_processes

TRANSPORTS = ("torch", "gloo", "shared_memory")
SIZES = ((5, 5, 5, 5), (7, 0, 3, 1), (0, 0, 0, 0), (300_000, 5, 700_000, 1))


def rows_of(rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(sum(sizes), generator=torch.Generator().manual_seed(rank)).to(dtype)


def in_turn(start: torch.Tensor, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What rank by rank is added to `start`, the part of this rank."""
    total = start.clone()
    for rank in range(len(sizes)):
        total.add_(parts(rows_of(rank, sizes, dtype), sizes)[dist.get_rank()])
    return total


@pytest.mark.values
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", TRANSPORTS)
@on_processes(2, 3, 4, is_async=(False, True))
def test_each_rank_is_added_in_its_turn_onto_what_is_there(name, sizes, dtype, is_async):
    rank, sizes = dist.get_rank(), Sizes(sizes[: dist.get_world_size()])
    transport = MAKERS[name](dist.group.WORLD, True)
    wide = torch.promote_types(dtype, torch.float32)
    start = torch.randn(sizes[rank], generator=torch.Generator().manual_seed(9)).to(wide)
    totals = [start.clone() for _ in range(3)]
    pending = [transport.add_onto(each, rows_of(rank, sizes, dtype), sizes, is_async) for each in totals]
    for each in pending:
        if each is not None:
            each.wait()
    for each in totals:
        assert torch.equal(each, in_turn(start, sizes, dtype))


@pytest.mark.values
@pytest.mark.parametrize("wire", [None, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", TRANSPORTS)
@on_processes(2, 3)
def test_sums_have_the_dtype_that_is_asked_for(name, wire):
    rank, size = dist.get_rank(), dist.get_world_size()
    sums = OwnerSums(MAKERS[name](dist.group.WORLD, True), dist.group.WORLD, Reduction(wire))
    for dtype in (torch.float32, torch.bfloat16):
        travels = wire or dtype
        sent = [rows_of(each, (40,), dtype).to(travels) for each in range(size)]
        wide = torch.promote_types(travels, torch.float32)
        assert sums.sum_dtype(dtype) is wide
        expected = torch.zeros(40, dtype=wide)
        for each in sent:
            expected += each
        sizes = cut(40, size)
        own = torch.empty(sizes[rank], dtype=wide)
        pending = sums.reduce_scatter(own, rows_of(rank, (40,), dtype), sizes, True)
        if pending is not None:
            pending.wait()
        torch.testing.assert_close(own, parts(expected, sizes)[rank])
        everywhere = rows_of(rank, (40,), dtype)
        pending = sums.all_reduce(everywhere, True)
        if pending is not None:
            pending.wait()
        torch.testing.assert_close(everywhere, expected.to(travels).to(dtype))


@pytest.mark.values
@pytest.mark.parametrize("wire", ["int8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("name", TRANSPORTS)
@on_processes(2, 3)
def test_encoded_sums_are_within_the_codecs_bound(name, wire):
    rank, size = dist.get_rank(), dist.get_world_size()
    sums = OwnerSums(MAKERS[name](dist.group.WORLD, True), dist.group.WORLD, Reduction(wire))
    for sizes in (cut(900, size), Sizes((0, *cut(900, size - 1)))):
        sent = [rows_of(each, sizes, torch.float32) for each in range(size)]
        bound = sum(torch.cat([codec(wire).bound(part) for part in parts(each, sizes)]) for each in sent)
        own = torch.empty(sizes[rank])
        pending = sums.reduce_scatter(own, sent[rank], sizes, True)
        if pending is not None:
            pending.wait()
        assert ((own - parts(sum(sent), sizes)[rank]).abs() <= parts(bound, sizes)[rank] + 1e-5).all()
    everywhere = rows_of(rank, (900,), torch.float32)
    sums.all_reduce(everywhere, True)
    expected = sum(rows_of(each, (900,), torch.float32) for each in range(size))
    torch.testing.assert_close(everywhere, expected, rtol=0.3, atol=0.6)  # rounded twice, by up to an eighth
    alike = [torch.empty_like(everywhere) for _ in range(size)]
    dist.all_gather(alike, everywhere)
    assert all(torch.equal(each, everywhere) for each in alike)


@on_processes(4)
def test_parts_may_be_in_another_order_than_ranks():
    rank, order = dist.get_rank(), [0, 2, 1, 3]
    for name in TRANSPORTS:
        sums = SumsInOrder(MAKERS[name](dist.group.WORLD, True), Reduction(order="ranks"), order, order[rank], 2)
        sizes = sums.sizes(Sizes((7, 4)))
        assert sizes == (3, 4, 2, 2)
        total = torch.zeros(sizes[order[rank]])
        pending = sums.add(total, rows_of(rank, sizes, torch.float32), sizes, True)
        if pending is not None:
            pending.wait()
        expected = torch.zeros_like(total)
        for each in range(4):
            expected += parts(rows_of(each, sizes, torch.float32), sizes)[order[rank]]
        assert torch.equal(total, expected)


def test_collectives_of_the_user_have_no_order():
    class Own(ReduceScatter):
        def allocate(self, size, *, dtype, device):
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, *_):
            raise NotImplementedError

    with pytest.raises(PolicyError, match="UsersCollectives has no sum in the order of ranks"):
        UsersCollectives(Own(), None).add_onto(torch.zeros(2), torch.zeros(2), (2,), False)


# Sums that no order changes

NUMBERS = st.floats(allow_nan=False, allow_infinity=False, width=32)


@given(st.lists(NUMBERS, min_size=1, max_size=60), st.integers(0, 60), st.randoms(), st.sampled_from([1, 2]))
def test_an_exact_sum_has_the_same_bits_in_any_order_and_cut_anywhere(numbers, at, dice, power):
    values = torch.tensor(numbers, dtype=torch.float32)
    exact = ExactSum(values.double().abs().amax() ** power)
    found = exact.total(exact.parts([values], power))
    dice.shuffle(numbers)
    shuffled = torch.tensor(numbers, dtype=torch.float32)
    halves = exact.parts([shuffled[:at]], power) + exact.parts([shuffled[at:]], power)
    assert torch.equal(exact.total(halves), found)
    expected = math.fsum(abs(each) ** power for each in values.double().tolist())
    assert abs(found.item() - expected) <= len(numbers) * 2.0**-56 * float(values.double().abs().amax()) ** power


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_so(odd):
    exact = ExactSum(torch.tensor(abs(odd), dtype=torch.float64))
    total = exact.total(exact.parts([torch.tensor([1.0, odd])], 2)).item()
    assert math.isnan(total) if math.isnan(odd) else total == math.inf


def test_complex_and_empty_values_count_too():
    values = torch.tensor([3 + 4j, 0, -5j])
    exact = ExactSum(torch.tensor(25.0, dtype=torch.float64))
    assert exact.total(exact.parts([values, values[:0]], 2)).item() == 50
    assert exact.total(exact.parts([values], 1)).item() == pytest.approx(10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex128])
def test_what_is_summed_stays_as_it_is(dtype):
    values = torch.tensor([3.0, -4.0], dtype=dtype)
    exact = ExactSum(torch.tensor(16.0, dtype=torch.float64))
    assert [exact.total(exact.parts([values], power)).item() for power in (1, 2)] == [7, 25]
    assert values.tolist() == [3, -4]


@on_processes(3)
def test_ranks_sum_to_the_same_bits():
    rank = dist.get_rank()
    values = torch.rand(4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    every = [torch.rand(4, generator=torch.Generator().manual_seed(each), dtype=torch.float64) for each in range(3)]
    assert sum_over_ranks(values) == pytest.approx(math.fsum(torch.cat(every).tolist()), rel=1e-15)
