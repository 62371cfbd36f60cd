"""Extents are cut, moved and intersected as lines of numbers are."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from sherd.layout.extent import Extent, aligned, chunks
from tests.support.refusals import refusal

extents = st.builds(Extent, st.integers(0, 20), st.integers(0, 20))


def elements(extent: Extent) -> set[int]:
    return set(range(extent.start, extent.stop))


@given(st.integers(0, 60), st.integers(1, 12))
def test_chunks_follow_one_another_where_torch_cuts_and_the_ranks_that_torch_leaves_out_hold_nothing(size, parts):
    pieces = chunks(size, parts)
    expected = [tuple(piece.tolist()) for piece in torch.arange(size).chunk(parts)]
    assert [tuple(range(piece.start, piece.stop)) for piece in pieces] == expected + [()] * (parts - len(expected))
    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
    assert pieces[-1].stop == size


@given(extents, extents, st.integers(0, 9))
def test_an_intersection_holds_what_both_hold_inside_the_first_and_a_shifted_extent_starts_later(one, other, by):
    common = one.intersect(other)
    assert elements(common) == elements(one) & elements(other)
    assert one.start <= common.start <= common.stop <= one.stop
    assert elements(one.shifted(by)) == {element + by for element in elements(one)}


@given(st.integers(0, 1000), st.integers(1, 64))
def test_alignment_goes_up_to_the_next_multiple_and_no_further(numel, to):
    result = aligned(numel, to)
    assert result % to == 0
    assert numel <= result < numel + to


def test_an_extent_that_begins_or_counts_below_zero_is_refused():
    for start, numel in ((-1, 2), (0, -1)):
        assert "cannot be negative" in refusal(AssertionError, Extent, start, numel), (start, numel)
