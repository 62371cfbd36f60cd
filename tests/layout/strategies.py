"""The shapes, cuts and packings that the property tests draw, and the elements of a box."""

from hypothesis import strategies as st

from sherd.layout.boxes import Box
from sherd.layout.placement import Cut, Replicate, Shape, Shard
from sherd.layout.plan import Wanted
from sherd.layout.runs import Blocks, Flat, Owned

num_ranks = st.integers(1, 9)
shapes = st.lists(st.sampled_from([0, 1, 1, 2, 3, 4, 5, 7, 8, 16]), min_size=0, max_size=3).map(tuple)


@st.composite
def cuts(draw: st.DrawFn, ranks: int) -> Cut:
    """One tensor cut over `ranks` ranks, on any of its dims, counted from either end; a scalar is replicated."""
    shape: Shape = draw(shapes)
    if not shape:
        return Replicate().cut(shape, ranks, "scalar")
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    return Shard(dim).cut(shape, ranks, "weight")


@st.composite
def groups(draw: st.DrawFn) -> tuple[int, list[Cut]]:
    """A number of ranks, and up to six tensors cut over them."""
    ranks = draw(num_ranks)
    return ranks, draw(st.lists(cuts(ranks), min_size=1, max_size=6))


matrices_and_vectors = st.one_of(
    shapes, st.tuples(st.integers(0, 70), st.sampled_from([1, 5, 16, 24, 48])), st.tuples(st.integers(0, 900))
)
consecutive = st.one_of(st.just(Flat()), st.builds(Blocks, st.sampled_from([1, 2, 3, 8, 32])))


@st.composite
def run_groups(
    draw: st.DrawFn, rules: tuple[st.SearchStrategy, ...] = (consecutive, st.just(Owned()))
) -> tuple[int, list[Wanted]]:
    """A number of ranks, at times more than there are elements, and up to eight tensors to be cut into runs."""
    ranks = draw(st.one_of(num_ranks, st.sampled_from([16, 64, 500])))
    rule = draw(st.sampled_from(rules))
    wanted = st.builds(Wanted, matrices_and_vectors, rule, st.just("weight"))
    return ranks, draw(st.lists(wanted, min_size=1, max_size=8))


def elements(shape: Shape, box: Box) -> list[int]:
    """The places of a box's elements in the flattened tensor, in order."""
    places = [0]
    for size, offset, wide in zip(shape, box.offsets, box.sizes, strict=True):
        places = [place * size + index for place in places for index in range(offset, offset + wide)]
    return places
