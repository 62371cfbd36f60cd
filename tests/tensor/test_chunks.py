"""Do the rectangles of a run hold its elements, in order, and nothing else?"""

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from sherd.layout.extent import Extent
from sherd.tensor.checkpoint import Rectangle, rectangles

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def runs(draw):
    shape = draw(shapes)
    start = draw(st.integers(0, prod(shape)))
    return shape, Extent(start, draw(st.integers(0, prod(shape) - start)))


def elements(shape, rectangle):
    """The places of a rectangle's elements in the flattened tensor, in order."""
    places = [0]
    for size, offset, wide in zip(shape, rectangle.offsets, rectangle.sizes, strict=True):
        places = [place * size + index for place in places for index in range(offset, offset + wide)]
    return places


@given(runs())
def test_the_rectangles_are_the_run_in_order(case):
    shape, run = case
    found = rectangles(shape, run)
    assert [place for each in found for place in elements(shape, each)] == list(range(run.start, run.stop))


@given(runs())
def test_each_rectangle_is_one_run_and_there_are_few(case):
    shape, run = case
    found = rectangles(shape, run)
    for each in found:
        assert elements(shape, each) == list(range(each.start, each.start + each.numel))
        assert each.numel > 0
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_the_drawing_in_the_docstring():
    assert rectangles((4, 5), Extent(3, 15)) == (
        Rectangle(3, (0, 3), (1, 2)),
        Rectangle(5, (1, 0), (2, 5)),
        Rectangle(15, (3, 0), (1, 3)),
    )


def test_a_scalar_is_one_rectangle_without_dims():
    assert rectangles((), Extent(0, 1)) == (Rectangle(0, (), ()),)
    assert rectangles((), Extent(0, 0)) == ()
