"""Boxes of a run, and grids, hold each element once, in order, and what is asked of them is found."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sherd.layout.boxes import Box, Grid, GridCut, boxes_of_run, cell, overlapping, spans, start_of_run, whole
from sherd.layout.extent import Extent
from tests.layout.strategies import elements

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def runs(draw):
    shape = draw(shapes)
    start = draw(st.integers(0, prod(shape)))
    return shape, Extent(start, draw(st.integers(0, prod(shape) - start)))


@st.composite
def grids(draw):
    shape = draw(st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple))
    dims = draw(st.lists(st.integers(0, len(shape) - 1), max_size=3))
    return shape, Grid(
        draw(st.integers(0, 3)), tuple(GridCut(dim, draw(st.integers(1, 4)), 4**n) for n, dim in enumerate(dims))
    )


@st.composite
def parts(draw, shape):
    offsets = tuple(draw(st.integers(0, max(size - 1, 0))) for size in shape)
    return Box(
        offsets, tuple(draw(st.integers(1, max(size - start, 1))) for size, start in zip(shape, offsets, strict=True))
    )


@given(runs())
def test_the_boxes_are_the_run_in_order_each_is_one_run_and_there_are_few(case):
    shape, run = case
    found = boxes_of_run(shape, run)
    start = run.start
    for each in found:
        assert elements(shape, each) == list(range(start, start + each.numel))
        assert each.numel > 0
        start += each.numel
    assert start == run.stop
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_the_drawing_in_the_docstring_and_a_scalar_which_is_one_box_without_dims():
    assert boxes_of_run((4, 5), Extent(3, 15)) == (Box((0, 3), (1, 2)), Box((1, 0), (2, 5)), Box((3, 0), (1, 3)))
    assert boxes_of_run((), Extent(0, 1)) == (Box((), ()),)
    assert boxes_of_run((), Extent(0, 0)) == ()


@given(grids())
def test_the_pieces_of_a_grid_are_the_tensor_and_each_is_its_ranks_cell(case):
    shape, grid = case
    pieces = list(grid.pieces(shape))
    found = sorted(place for _, box in pieces for place in elements(shape, box))
    assert found == list(range(prod(shape)))
    assert overlapping(box for _, box in pieces) is None
    for file, box in pieces:
        numbers = [(file - grid.file) // 4**n % 4 for n in range(len(grid.cuts))]
        cuts = [(cut.dim, cut.parts, number) for cut, number in zip(grid.cuts, numbers, strict=True)]
        assert cell(whole(shape), cuts) == box or not prod(shape)


@given(st.data())
def test_a_grid_finds_the_pieces_that_share_elements_with_a_part(data):
    shape, grid = data.draw(grids())
    part = data.draw(parts(shape))
    if prod(shape):
        sharing = [(file, box) for file, box in grid.pieces(shape) if box.intersect(part) is not None]
        assert list(grid.pieces(shape, part)) == sharing


@given(st.data())
def test_boxes_that_share_elements_are_found(data):
    shape = data.draw(st.lists(st.integers(1, 5), max_size=3).map(tuple))
    boxes = data.draw(st.lists(parts(shape), max_size=5))
    places = [place for box in boxes for place in elements(shape, box)]
    assert (overlapping(boxes) is None) == (len(places) == len(set(places)))


@given(st.data())
def test_spans_hold_the_part_in_order_in_one_run_each_and_are_not_too_long(data):
    shape = data.draw(st.lists(st.integers(1, 6), max_size=4).map(tuple))
    piece = data.draw(parts(shape))
    piece = Box(piece.offsets, tuple(min(m, n - o) for m, n, o in zip(piece.sizes, shape, piece.offsets, strict=True)))
    inner = data.draw(parts(piece.sizes))
    part = Box(
        tuple(a + b for a, b in zip(piece.offsets, inner.offsets, strict=True)),
        tuple(min(m, n - o) for m, n, o in zip(inner.sizes, piece.sizes, inner.offsets, strict=True)),
    )
    most, start = data.draw(st.integers(1, 30)), data.draw(st.integers(0, 9))
    places = {place: start + at for at, place in enumerate(elements(shape, piece))}
    wanted, end = [], start
    for span in spans(piece, part, most, start):
        run = [places[place] for place in elements(shape, span.box)]
        assert run == list(range(span.start, span.start + span.box.numel))
        assert 0 < span.box.numel <= most
        assert span.start >= end
        end = span.start + span.box.numel
        assert span.wanted.intersect(span.box) == span.wanted
        wanted += elements(shape, span.wanted)
    assert wanted == elements(shape, part)


def test_a_part_within_another_is_its_index_and_rows_of_a_span_are_not_split_if_they_fit():
    assert Box((3, 5), (2, 4)).within(Box((2, 5), (4, 6))) == (slice(1, 3), slice(0, 4))
    piece = Box((2, 0), (4, 5))
    assert [(each.start, each.box) for each in spans(piece, piece, 20, 7)] == [(7, piece)]
    assert [each.start for each in spans(piece, piece, 19)] == [0, 15]
    assert [each.start for each in spans(piece, piece.narrowed(1, Extent(1, 2)), 4)] == [1, 6, 11, 16]


def test_the_search_for_boxes_that_share_elements_ends():
    slabs = [Box((n, n), (1 << 20, 1)) for n in range(200)]
    assert overlapping(slabs, 1) is None  # behind each other along dim 1
    grid = [Box((n, m), (1, 1)) for n in range(20) for m in range(20)]
    assert overlapping(grid, 20) is None
    with pytest.raises(OverflowError):
        overlapping(grid, 9)


@given(st.data())
def test_a_part_that_is_one_run_of_its_piece_begins_where_it_is_said(data):
    shape = data.draw(st.lists(st.integers(1, 4), max_size=3).map(tuple))
    part = data.draw(parts(shape))
    places = elements(shape, part)
    is_run = places == list(range(places[0], places[0] + len(places)))
    assert start_of_run(whole(shape), part) == (places[0] if is_run else None)
