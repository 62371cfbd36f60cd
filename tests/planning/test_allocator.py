"""The caching allocator: what it takes from the driver, by torch's rules, beside the same rules done the slow way."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sherd.schedule.moments import GroupSizes, MemoryKind
from sherd.simulate.allocator import MIB, CachingAllocator
from sherd.simulate.reserved import Reserved, lane_of
from sherd.simulate.sharded import Unit
from sherd.simulate.timeline import Lane
from tests.support.suites import examples

KIB = 1 << 10


def reserved_for(*sizes):
    allocator = CachingAllocator()
    for size in sizes:
        allocator.allocate(size, Lane.COMPUTE)
    return allocator.reserved


@pytest.mark.parametrize(
    ("nbytes", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
        (30 * MIB + 1, 32 * MIB),
    ],
)
def test_segments_have_torchs_sizes(nbytes, segment):
    assert reserved_for(nbytes) == segment


def test_small_requests_share_a_segment_of_2_mib():
    assert reserved_for(*[512 * KIB] * 4) == 2 * MIB
    assert reserved_for(*[512 * KIB] * 4, 1) == 4 * MIB


def test_requests_of_some_mib_share_a_segment_of_20():
    assert reserved_for(*[5 * MIB] * 4) == 20 * MIB
    assert reserved_for(*[5 * MIB] * 5) == 40 * MIB


def test_small_and_large_requests_have_pools_of_their_own():
    assert reserved_for(5 * MIB, 512 * KIB) == 22 * MIB


def test_a_rest_of_a_mib_is_not_cut_off_in_the_large_pool():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(16 * MIB, Lane.COMPUTE))
    block = allocator.allocate(15 * MIB, Lane.COMPUTE)
    assert block.size == 16 * MIB
    allocator.free(block)
    assert allocator.allocate(15 * MIB - 512, Lane.COMPUTE).size == 15 * MIB - 512


def test_the_smallest_free_block_that_is_large_enough_is_taken():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB, Lane.COMPUTE) for size in (40, 20, 30)]
    for block in blocks:
        allocator.free(block)
    assert allocator.allocate(18 * MIB, Lane.COMPUTE).address == blocks[1].address
    assert allocator.allocate(30 * MIB, Lane.COMPUTE).address == blocks[2].address


def test_neighbours_that_are_free_are_joined():
    allocator = CachingAllocator()
    whole = allocator.allocate(60 * MIB, Lane.COMPUTE)
    allocator.free(whole)
    parts = [allocator.allocate(20 * MIB, Lane.COMPUTE) for _ in range(3)]
    for part in (parts[0], parts[2], parts[1]):
        allocator.free(part)
    assert allocator.allocate(60 * MIB, Lane.COMPUTE).address == whole.address
    assert allocator.reserved == 60 * MIB


def test_free_memory_in_two_segments_does_not_serve_one_request():
    allocator = CachingAllocator()
    for _ in range(2):
        held = allocator.allocate(12 * MIB, Lane.COMPUTE), allocator.allocate(12 * MIB, Lane.COMPUTE)
        allocator.free(held[0])
    allocator.allocate(24 * MIB, Lane.COMPUTE)
    assert allocator.reserved == (12 + 12 + 12 + 24) * MIB  # the second turn has taken one block again


def test_blocks_of_one_lane_do_not_serve_another():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(20 * MIB, Lane.GATHER))
    allocator.allocate(20 * MIB, Lane.COMPUTE)
    assert allocator.reserved == 40 * MIB


def test_where_the_driver_has_no_more_whole_segments_are_given_back():
    allocator = CachingAllocator(limit=50 * MIB)
    allocator.free(allocator.allocate(20 * MIB, Lane.GATHER))
    allocator.free(allocator.allocate(16 * MIB, Lane.COMPUTE))
    allocator.allocate(30 * MIB, Lane.COMPUTE)
    assert (allocator.reserved, allocator.num_retries, allocator.has_failed) == (30 * MIB, 1, False)


def test_a_segment_in_use_is_not_given_back():
    allocator = CachingAllocator(limit=50 * MIB)
    first = allocator.allocate(20 * MIB, Lane.COMPUTE)
    allocator.free(first)
    allocator.allocate(12 * MIB, Lane.COMPUTE)  # in the same segment
    allocator.allocate(32 * MIB, Lane.COMPUTE)
    assert (allocator.reserved, allocator.num_retries, allocator.has_failed) == (52 * MIB, 1, True)


class Slow:
    """The same rules without lists of free blocks: each segment is a list of sizes, below 0 for what is free."""

    def __init__(self):
        self.segments = []

    def allocate(self, nbytes, lane):
        size = -(-nbytes // 512) * 512
        is_small = size <= MIB
        fitting = [
            (-each, number, at)
            for number, (its_lane, its_small, sizes) in enumerate(self.segments)
            if (its_lane, its_small) == (lane, is_small)
            for at, each in enumerate(sizes)
            if -each >= size
        ]
        if fitting:
            found, number, at = min(fitting)
        else:
            found = 2 * MIB if is_small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            number, at = len(self.segments), 0
            self.segments.append((lane, is_small, [-found]))
        sizes = self.segments[number][-1]
        rest = found - size
        sizes[at : at + 1] = [size, -rest] if (rest >= 512 if is_small else rest > MIB) else [found]
        return number, sum(map(abs, sizes[:at]))

    def free(self, block):
        number, start = block
        lane, is_small, sizes = self.segments[number]
        at = next(at for at in range(len(sizes)) if sum(map(abs, sizes[:at])) == start)
        sizes[at] = -sizes[at]
        joined = []
        for size in sizes:
            if joined and joined[-1] < 0 and size < 0:
                joined[-1] += size
            else:
                joined.append(size)
        self.segments[number] = lane, is_small, joined

    @property
    def reserved(self):
        return sum(sum(map(abs, sizes)) for *_, sizes in self.segments)


SIZES = st.one_of(st.integers(1, 2 * MIB), st.integers(MIB, 40 * MIB), st.sampled_from([512, MIB, 10 * MIB, 12 * MIB]))


@settings(max_examples=examples(60))
@given(
    st.lists(st.tuples(SIZES, st.sampled_from([Lane.COMPUTE, Lane.GATHER]), st.booleans()), max_size=60), st.randoms()
)
def test_it_takes_what_the_slow_way_takes(requests, dice: random.Random):
    fast, slow, held = CachingAllocator(), Slow(), []
    for nbytes, lane, frees in requests:
        held.append((fast.allocate(nbytes, lane), slow.allocate(nbytes, lane)))
        if frees:
            one, other = held.pop(dice.randrange(len(held)))
            fast.free(one)
            slow.free(other)
        assert fast.reserved == slow.reserved
        parts = sorted((one.address, one.address + one.size) for one, _ in held)
        assert all(end <= start for (_, end), (start, _) in pairwise(parts)), "no two blocks overlap"


# The buffers of the engine


def unit(**sizes):
    usual = {"shards": 100, "unsharded": 800, "reduced": 100, "gradients": 100}
    return Unit("0", "Linear", 200, (0,), (GroupSizes(**usual | sizes),), (), ())


@pytest.mark.parametrize(
    ("kind", "its", "lane"),
    [
        (MemoryKind.UNSHARDED, unit(), Lane.GATHER),
        (MemoryKind.UNSHARDED, unit(rows=800), Lane.COMPUTE),
        (MemoryKind.ROWS, unit(rows=800), Lane.GATHER),
        (MemoryKind.GRADIENT_ROWS, unit(), Lane.COMPUTE),
        (MemoryKind.GRADIENT_ROWS, unit(lane_owns_rows=True), Lane.REDUCE),
        (MemoryKind.GRADIENTS, unit(), Lane.REDUCE),
        (MemoryKind.GRADIENTS, unit(reduced=200), Lane.COMPUTE),
        (MemoryKind.SHARDS, unit(), Lane.COMPUTE),
    ],
)
def test_each_buffer_is_of_the_lane_that_makes_it(kind, its, lane):
    assert lane_of(kind.value, its) is lane


def test_a_buffer_is_taken_and_given_back_whole():
    reserved = Reserved((unit(),))
    for nbytes in (30 * MIB, 12 * MIB, -12 * MIB, -30 * MIB):
        reserved.change(MemoryKind.UNSHARDED.value, 0, nbytes)
    reserved.change(MemoryKind.UNSHARDED.value, 0, 30 * MIB)
    assert reserved.allocator.reserved == 42 * MIB


def test_several_buffers_are_given_back_at_once():
    reserved = Reserved((unit(),))
    for nbytes in (20 * MIB, 20 * MIB, 20 * MIB, -40 * MIB):
        reserved.change("gradients arrived", 0, nbytes)
    reserved.change("gradients arrived", 0, 20 * MIB)
    assert reserved.allocator.reserved == 60 * MIB


def test_of_tensors_of_several_micro_batches_the_oldest_goes_first():
    reserved = Reserved(())
    reserved.follow([(7, 20 * MIB), (7, 30 * MIB), (7, 0)])
    reserved.follow([(8, 20 * MIB)])
    assert reserved.allocator.reserved == 50 * MIB
    reserved.follow([(7, 0)])
    reserved.follow([(9, 30 * MIB)])
    assert reserved.allocator.reserved == 50 * MIB
