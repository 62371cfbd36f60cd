"""Buffers in host memory are used again, and there are never more bytes than were in use at once."""

from hypothesis import given
from hypothesis import strategies as st

from sherd.engine.moves.offload import HostBuffers

steps = st.lists(st.lists(st.integers(1, 6), max_size=8), min_size=1, max_size=6)


@given(steps)
def test_there_are_no_more_bytes_than_were_in_use_at_once(sizes_of_steps):
    buffers, most = HostBuffers(), 0
    for sizes in sizes_of_steps:
        taken = [buffers.take(size, False) for size in sizes]
        assert len({id(each) for each in taken}) == len(taken)
        most = max(most, sum(sizes))
        idle = [each for kept in buffers._idle.values() for each in kept]
        assert sum(each.nbytes for each in [*idle, *taken]) <= most
        for each in taken:
            buffers.give_back(each, False)


def test_a_step_like_the_last_one_makes_none():
    buffers = HostBuffers()
    first = [buffers.take(size, False) for size in (8, 4, 8)]
    for each in first:
        buffers.give_back(each, False)
    again = [buffers.take(size, False) for size in (4, 8, 8)]
    assert {id(each) for each in again} == {id(each) for each in first}
