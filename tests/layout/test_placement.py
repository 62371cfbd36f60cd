"""A placement gives each rank its elements, for any shape, dim and number of ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sherd.errors import PlacementError, SherdError
from sherd.layout.placement import Cut, Replicate, Shard
from tests.layout.strategies import PROPERTY, groups, num_ranks, shapes


def piece(cut: Cut, rank: int) -> torch.Tensor:
    """The flat indices of the whole tensor that `rank` holds, in the shape it holds them."""
    indices = torch.arange(cut.numel).view(cut.shape)
    rows = cut.rows[rank]
    return indices if cut.dim is None else indices.narrow(cut.dim, rows.start, rows.numel)


@PROPERTY
@given(groups())
def test_every_element_of_a_sharded_tensor_is_on_exactly_one_rank(group):
    ranks, cuts = group
    for cut in cuts:
        held = [element for rank in range(ranks) for element in piece(cut, rank).flatten().tolist()]
        copies = ranks if cut.dim is None else 1
        assert sorted(held) == sorted(list(range(cut.numel)) * copies)


@PROPERTY
@given(groups())
def test_the_local_shape_is_that_of_the_piece_torch_would_give(group):
    ranks, cuts = group
    for cut in cuts:
        for rank in range(ranks):
            assert cut.local_shape(rank) == tuple(piece(cut, rank).shape)
            assert cut.local_numel(rank) == piece(cut, rank).numel()


@PROPERTY
@given(groups())
def test_a_slot_holds_the_largest_piece_and_not_one_element_more(group):
    ranks, cuts = group
    for cut in cuts:
        assert cut.slot == max(cut.local_numel(rank) for rank in range(ranks))
        outer, _, inner = cut.view
        assert outer * cut.rows[0].numel * inner == cut.slot


@PROPERTY
@given(groups())
def test_padded_pieces_side_by_side_begin_with_the_tensor_exactly_where_the_cut_says_so(group):
    ranks, cuts = group
    for cut in cuts:
        side_by_side: list[int] = []
        for rank in range(ranks if cut.dim is not None else 1):
            held = piece(cut, rank).flatten().tolist()
            side_by_side += held + [-1] * (cut.slot - len(held))
        if cut.in_order:
            assert side_by_side[: cut.numel] == list(range(cut.numel))
        assert cut.unsharded_numel == (ranks * cut.slot if cut.in_order else cut.numel)


@PROPERTY
@given(shapes.filter(bool), num_ranks, st.data())
def test_a_dim_counted_from_the_end_is_the_same_dim(shape, ranks, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    assert Shard(dim - len(shape)).cut(shape, ranks, "w") == Shard(dim).cut(shape, ranks, "w")


def test_uneven_rows_make_a_shorter_last_piece_and_then_empty_ones():
    cut = Shard(0).cut((5, 3), 4, "w")
    assert [cut.local_shape(rank) for rank in range(4)] == [(2, 3), (2, 3), (1, 3), (0, 3)]
    assert (cut.slot, cut.unsharded_numel) == (6, 24)


def test_columns_are_cut_unevenly_too_and_keep_every_row():
    cut = Shard(1).cut((2, 5), 2, "w")
    assert [cut.local_shape(rank) for rank in range(2)] == [(2, 3), (2, 2)]
    assert not cut.in_order
    assert (cut.slot, cut.unsharded_numel) == (6, 10)


def test_a_replicated_scalar_is_one_element_on_every_rank():
    cut = Replicate().cut((), 3, "scale")
    assert [cut.local_shape(rank) for rank in range(3)] == [(), (), ()]
    assert (cut.numel, cut.slot, cut.unsharded_numel) == (1, 1, 3)


@pytest.mark.parametrize(
    ("ends", "said"),
    [((2, 3), "not at its last element"), ((3, 2, 4), "go backwards"), ((), "no owner")],
    ids=["a row without owner", "a row with two owners", "nobody"],
)
def test_a_cut_in_which_a_row_has_no_owner_or_two_cannot_be_made(ends, said):
    with pytest.raises(AssertionError, match=said):
        Cut((4, 4), 3, 0, ends, dim=0)


@pytest.mark.parametrize("dim", [2, -3, 7])
def test_a_dimension_the_tensor_lacks_is_named_with_the_range_that_it_has(dim):
    with pytest.raises(PlacementError) as raised:
        Shard(dim).cut((4, 6), 2, "blocks.0.weight")
    said = str(raised.value)
    assert said.startswith("blocks.0.weight: ")
    assert f"Shard({dim})" in said
    assert "(4, 6)" in said
    assert "from -2 to 1" in said


@pytest.mark.parametrize("dim", [0, -1])
def test_a_scalar_cannot_be_sharded_and_the_error_says_what_to_return(dim):
    with pytest.raises(PlacementError, match=r"^scale: a scalar has no dimension to shard; return None"):
        Shard(dim).cut((), 2, "scale")


def test_a_placement_error_is_a_sherd_error_and_a_value_error():
    assert issubclass(PlacementError, SherdError)
    assert issubclass(PlacementError, ValueError)
