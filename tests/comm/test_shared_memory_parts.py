"""The pieces that shared memory is made of hold by themselves: segments, regions of them, and sums in rank order."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sherd.comm.host.segments import Regions, Segment
from sherd.comm.host.sums import add_up, can_add, sum_dtype
from tests.comm.numbers import added_up, numbers

MIB = 1 << 20


@pytest.fixture
def segment():
    made = Segment.new(4 * MIB)
    yield made
    made.close()
    made.close()


def test_a_segment_takes_memory_only_where_it_was_written(segment):
    assert segment.nbytes == 0
    segment.view(MIB, MIB, torch.float32).fill_(1.0)
    assert segment.nbytes == MIB
    segment.give_back(MIB + MIB // 2)
    assert segment.nbytes == MIB // 2
    assert segment.view(MIB, MIB, torch.float32).sum().item() == MIB // 4 // 2


def test_a_segment_grows_and_its_older_views_see_the_same_memory(segment):
    theirs = Segment(os.dup(segment.fd))
    before = segment.view(0, 16, torch.int64)
    segment.reach(16 * MIB)
    segment.view(0, 16, torch.int64).copy_(torch.tensor([5, 6]))
    segment.view(15 * MIB, 4, torch.uint8).fill_(7)
    assert before.tolist() == [5, 6]
    assert theirs.view(15 * MIB, 4, torch.uint8).tolist() == [7] * 4
    theirs.close()


def test_what_was_viewed_stays_readable_when_the_segment_is_closed():
    segment = Segment.new(MIB)
    view = segment.view(64, 8, torch.float64)
    view.fill_(2.5)
    segment.close()
    del segment
    assert view.tolist() == [2.5]


@given(st.lists(st.one_of(st.integers(0, 1000), st.just(None)), max_size=60), st.randoms())
def test_regions_never_overlap_and_lie_as_low_as_they_fit(wishes, draw):
    regions, taken = Regions(), []
    for nbytes in wishes:
        if nbytes is None and taken:
            regions.free(*taken.pop(draw.randrange(len(taken))))
        elif nbytes:
            start = regions.take(nbytes)
            assert start % 128 == 0
            assert all(start + nbytes <= other or other + size <= start for other, size in taken)
            candidates = [0, *(-(-(other + size) // 128) * 128 for other, size in taken)]
            width = -(-nbytes // 128) * 128
            ends = [(other, -(-(other + size) // 128) * 128) for other, size in taken]
            fits = [at for at in candidates if all(at + width <= low or high <= at for low, high in ends)]
            assert start == min(fits)
            taken.append((start, nbytes))
        assert regions.end >= max((start + size for start, size in taken), default=0)


@pytest.mark.pairs
@pytest.mark.parametrize("numel", [0, 1, 1000, 200_001])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.complex64], ids=str)
def test_parts_are_added_up_in_rank_order_and_rounded_once(numel, num_parts, dtype):
    parts = [numbers(seed, numel, dtype) for seed in range(num_parts)]
    wide, out = added_up(parts), torch.empty(numel, dtype=sum_dtype(dtype))
    add_up(parts, out)
    assert torch.equal(out, wide)
    for own in range(num_parts):  # into one of the parts
        copies = [part.clone() for part in parts]
        add_up(copies, copies[own])
        assert torch.equal(copies[own], wide.to(dtype))


def test_torch_adds_up_all_but_float8_and_the_like():
    known = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex128)
    assert all(map(can_add, known))
    assert not any(map(can_add, (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16)))
