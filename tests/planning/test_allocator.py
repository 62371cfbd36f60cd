"""The caching allocator: what it takes from the driver, by torch's rules, beside the same rules done the slow way."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sherd.schedule.moments import GroupSizes, MemoryKind
from sherd.tools.simulate.reserved import MIB, CachingAllocator, Reserved, lane_of
from sherd.tools.simulate.sharded import SimulatedUnit
from sherd.tools.simulate.timeline import Lane
from tests.support.suites import examples

KIB = 1 << 10


def reserved_for(*sizes):
    allocator = CachingAllocator()
    for size in sizes:
        allocator.allocate(size, Lane.COMPUTE)
    return allocator.reserved


def test_segments_have_torchs_sizes():
    for nbytes, segment in (
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
        (30 * MIB + 1, 32 * MIB),
    ):
        assert reserved_for(nbytes) == segment, nbytes


def test_requests_share_segments_of_2_mib_or_of_20_and_each_size_has_pools_of_its_own():
    assert reserved_for(*[512 * KIB] * 4) == 2 * MIB
    assert reserved_for(*[512 * KIB] * 4, 1) == 4 * MIB
    assert reserved_for(*[5 * MIB] * 4) == 20 * MIB
    assert reserved_for(*[5 * MIB] * 5) == 40 * MIB
    assert reserved_for(5 * MIB, 512 * KIB) == 22 * MIB


@pytest.fixture
def allocator():
    return CachingAllocator()


def test_a_rest_of_a_mib_is_not_cut_off_in_the_large_pool(allocator):
    allocator.free(allocator.allocate(16 * MIB, Lane.COMPUTE))
    block = allocator.allocate(15 * MIB, Lane.COMPUTE)
    assert block.size == 16 * MIB
    allocator.free(block)
    assert allocator.allocate(15 * MIB - 512, Lane.COMPUTE).size == 15 * MIB - 512


def test_the_smallest_free_block_that_is_large_enough_is_taken(allocator):
    blocks = [allocator.allocate(size * MIB, Lane.COMPUTE) for size in (40, 20, 30)]
    for block in blocks:
        allocator.free(block)
    assert allocator.allocate(18 * MIB, Lane.COMPUTE).address == blocks[1].address
    assert allocator.allocate(30 * MIB, Lane.COMPUTE).address == blocks[2].address


def test_neighbours_that_are_free_are_joined(allocator):
    whole = allocator.allocate(60 * MIB, Lane.COMPUTE)
    allocator.free(whole)
    parts = [allocator.allocate(20 * MIB, Lane.COMPUTE) for _ in range(3)]
    for part in (parts[0], parts[2], parts[1]):
        allocator.free(part)
    assert allocator.allocate(60 * MIB, Lane.COMPUTE).address == whole.address
    assert allocator.reserved == 60 * MIB


def test_free_memory_in_two_segments_or_of_another_lane_does_not_serve_a_request(allocator):
    for _ in range(2):
        held = allocator.allocate(12 * MIB, Lane.COMPUTE), allocator.allocate(12 * MIB, Lane.COMPUTE)
        allocator.free(held[0])
    allocator.allocate(24 * MIB, Lane.COMPUTE)
    assert allocator.reserved == (12 + 12 + 12 + 24) * MIB  # the second turn has taken one block again
    allocator.allocate(12 * MIB, Lane.GATHER)
    assert allocator.reserved == (12 + 12 + 12 + 24 + 12) * MIB


def test_where_the_driver_has_no_more_whole_segments_are_given_back_but_none_in_use():
    allocator = CachingAllocator(limit=50 * MIB)
    allocator.free(allocator.allocate(20 * MIB, Lane.GATHER))
    allocator.free(allocator.allocate(16 * MIB, Lane.COMPUTE))
    allocator.allocate(30 * MIB, Lane.COMPUTE)
    assert (allocator.reserved, allocator.num_retries, allocator.has_failed) == (30 * MIB, 1, False)
    allocator = CachingAllocator(limit=50 * MIB)
    allocator.free(allocator.allocate(20 * MIB, Lane.COMPUTE))
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
    return SimulatedUnit("0", "Linear", 200, (0,), (GroupSizes(**usual | sizes),), (), ())


def test_each_buffer_is_of_the_lane_that_makes_it():
    for kind, its, lane in (
        (MemoryKind.UNSHARDED, unit(), Lane.GATHER),
        (MemoryKind.UNSHARDED, unit(rows=800), Lane.COMPUTE),
        (MemoryKind.ROWS, unit(rows=800), Lane.GATHER),
        (MemoryKind.GRADIENT_ROWS, unit(), Lane.COMPUTE),
        (MemoryKind.GRADIENT_ROWS, unit(lane_owns_rows=True), Lane.REDUCE),
        (MemoryKind.GRADIENTS, unit(), Lane.REDUCE),
        (MemoryKind.GRADIENTS, unit(reduced=200), Lane.COMPUTE),
        (MemoryKind.SHARDS, unit(), Lane.COMPUTE),
    ):
        assert lane_of(kind.value, its) is lane, kind


def test_a_buffer_is_given_back_whole_and_several_at_once():
    for kind, sizes, reserves in (
        (MemoryKind.UNSHARDED.value, (30, 12, -12, -30, 30), 42),
        ("gradients arrived", (20, 20, 20, -40, 20), 60),
    ):
        reserved = Reserved((unit(),))
        for size in sizes:
            reserved.change(kind, 0, size * MIB)
        assert reserved.allocator.reserved == reserves * MIB, kind


def test_of_tensors_of_several_micro_batches_the_oldest_goes_first():
    reserved = Reserved(())
    reserved.follow([(7, 20 * MIB), (7, 30 * MIB), (7, 0)])
    reserved.follow([(8, 20 * MIB)])
    assert reserved.allocator.reserved == 50 * MIB
    reserved.follow([(7, 0)])
    reserved.follow([(9, 30 * MIB)])
    assert reserved.allocator.reserved == 50 * MIB
