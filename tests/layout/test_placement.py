"""A placement gives each rank its elements, for any shape, dim and number of ranks."""

import functools

import torch
from hypothesis import given
from hypothesis import strategies as st

from sherd.errors import PlacementError
from sherd.layout.placement import Cut, Replicate, Shard
from tests.layout.strategies import groups, num_ranks, shapes
from tests.support.comparing import assert_refused
from tests.support.refusals import refusal


def piece(cut: Cut, rank: int) -> torch.Tensor:
    """The flat indices of the whole tensor that `rank` holds, in the shape it holds them."""
    indices = torch.arange(cut.numel).view(cut.shape)
    rows = cut.rows[rank]
    return indices if cut.dim is None else indices.narrow(cut.dim, rows.start, rows.numel)


@given(groups())
def test_every_element_of_a_sharded_tensor_is_on_exactly_one_rank_in_the_piece_torch_would_give(group):
    ranks, cuts = group
    for cut in cuts:
        held = []
        for rank in range(ranks):
            found = piece(cut, rank)
            held += found.flatten().tolist()
            assert cut.local_shape(rank) == tuple(found.shape)
            assert cut.local_numel(rank) == found.numel()
        copies = ranks if cut.dim is None else 1
        assert sorted(held) == sorted(list(range(cut.numel)) * copies)


@given(groups())
def test_a_slot_holds_the_largest_piece_and_padded_ones_side_by_side_begin_with_the_tensor_where_the_cut_says_so(group):
    ranks, cuts = group
    for cut in cuts:
        assert cut.slot == max(cut.local_numel(rank) for rank in range(ranks))
        outer, _, inner = cut.view
        assert outer * cut.rows[0].numel * inner == cut.slot
    for cut in cuts:
        side_by_side: list[int] = []
        for rank in range(ranks if cut.dim is not None else 1):
            held = piece(cut, rank).flatten().tolist()
            side_by_side += held + [-1] * (cut.slot - len(held))
        if cut.in_order:
            assert side_by_side[: cut.numel] == list(range(cut.numel))
        assert cut.unsharded_numel == (ranks * cut.slot if cut.in_order else cut.numel)


@given(shapes.filter(bool), num_ranks, st.data())
def test_a_dim_counted_from_the_end_is_the_same_dim(shape, ranks, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    assert Shard(dim - len(shape)).cut(shape, ranks, "w") == Shard(dim).cut(shape, ranks, "w")


def local_shapes(cut: Cut) -> list[tuple[int, ...]]:
    return [cut.local_shape(rank) for rank in range(cut.num_ranks)]


def test_uneven_rows_or_columns_make_a_shorter_last_piece_and_then_empty_ones():
    cut = Shard(0).cut((5, 3), 4, "w")
    assert local_shapes(cut) == [(2, 3), (2, 3), (1, 3), (0, 3)]
    assert (cut.slot, cut.unsharded_numel) == (6, 24)
    cut = Shard(1).cut((2, 5), 2, "w")
    assert local_shapes(cut) == [(2, 3), (2, 2)]
    assert not cut.in_order
    assert (cut.slot, cut.unsharded_numel) == (6, 10)


def test_a_replicated_scalar_is_one_element_on_every_rank():
    cut = Replicate().cut((), 3, "scale")
    assert local_shapes(cut) == [(), (), ()]
    assert (cut.numel, cut.slot, cut.unsharded_numel) == (1, 1, 3)


def test_a_cut_in_which_a_row_has_no_owner_or_two_cannot_be_made():
    for ends, said in (((2, 3), "not at its last element"), ((3, 2, 4), "go backwards"), ((), "no owner")):
        assert said in refusal(AssertionError, Cut, (4, 4), 3, 0, ends, dim=0), ends


def test_a_dimension_the_tensor_lacks_is_named_with_the_range_that_it_has_and_of_a_scalar_what_to_return():
    for dim in (2, -3, 7):
        cut = functools.partial(Shard(dim).cut, (4, 6), 2, "blocks.0.weight")
        assert_refused(cut, PlacementError, ValueError, f"Shard({dim})", "(4, 6)", "from -2 to 1")
        assert refusal(PlacementError, cut).startswith("blocks.0.weight: ")
    for dim in (0, -1):
        said = refusal(PlacementError, Shard(dim).cut, (), 2, "scale")
        assert said.startswith("scale: a scalar has no dimension to shard; return None"), dim
