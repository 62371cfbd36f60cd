"""A tensor cut into runs gives each rank its elements, and a placement says where it may be cut."""

import pytest
import torch
from hypothesis import given

from sherd.errors import PlacementError, SherdError
from sherd.layout.extent import Extent
from sherd.layout.plan import plan
from sherd.layout.runs import Blocks, Flat, Owned, Runs
from tests.layout.strategies import PROPERTY, run_groups

DRAWN = Runs((3, 5), 4, 1, (5, 15), by_rows=True)


def test_the_drawing_of_runs_shows_what_each_rank_holds():
    for rank in range(4):
        piece = DRAWN.piece(rank)
        rows = [" ".join(map(str, range(row, row + 5))) for row in range(piece.start, piece.stop, 5)]
        assert "".join([f"        rank {rank} |", *(f" {row} |" for row in rows), "\n"]) in Runs.__doc__


def test_ranks_before_the_first_and_behind_the_last_hold_nothing():
    assert [DRAWN.piece(rank) for rank in range(4)] == [Extent(0, 0), Extent(0, 5), Extent(5, 10), Extent(15, 0)]
    assert [DRAWN.local_shape(rank) for rank in range(4)] == [(0, 5), (1, 5), (2, 5), (0, 5)]
    assert list(DRAWN.holders) == [1, 2]


@PROPERTY
@given(run_groups())
def test_pieces_put_one_behind_the_other_are_the_tensor(group):
    ranks, wanted = group
    for runs in plan(wanted, ranks):
        pieces = [runs.piece(rank) for rank in range(ranks)]
        assert [place for piece in pieces for place in range(piece.start, piece.stop)] == list(range(runs.numel))


@PROPERTY
@given(run_groups())
def test_local_shapes_put_together_on_their_first_dim_are_the_tensors_shape(group):
    ranks, wanted = group
    for runs in plan(wanted, ranks):
        local = [torch.empty(runs.local_shape(rank)) for rank in range(ranks)]
        assert [tensor.numel() for tensor in local] == [runs.local_numel(rank) for rank in range(ranks)]
        assert tuple(torch.cat(local).shape) == (runs.shape if runs.by_rows else (runs.numel,))


@pytest.mark.parametrize("shape", [(3, 0), (0, 3), (0,), (2, 0, 3)])
@pytest.mark.parametrize("rule", [Blocks(2), Owned()])
def test_a_tensor_without_elements_keeps_its_rows_on_its_first_rank(rule, shape):
    runs = Runs(shape, 3, 1, (0,), rule.by_rows(shape))
    assert [runs.local_shape(rank) for rank in range(3)] == [(0, *shape[1:]), shape, (0, *shape[1:])]


def test_what_is_cut_anywhere_is_a_vector_on_every_rank_and_so_is_a_scalar():
    assert Runs((3, 5), 2, 0, (7, 15)).local_shape(1) == (8,)
    assert [Runs((), 2, 1, (1,)).local_shape(rank) for rank in range(2)] == [(0,), (1,)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (((4,), 2, 0, ()), "no owner"),
        (((4,), 2, 1, (2, 4)), "ranks that are not there"),
        (((4,), 2, 0, (2, 3)), "not at its last element"),
        (((4,), 3, 0, (3, 2, 4)), "go backwards"),
        (((2, 2), 2, 0, (1, 4), True), "a row is cut in two"),
    ],
)
def test_runs_that_are_wrong_cannot_be_made(arguments, said):
    with pytest.raises(AssertionError, match=said):
        Runs(*arguments)


# Placements


def test_a_block_is_so_many_rows_and_of_a_vector_so_many_elements():
    assert Blocks(4).grain((10, 3, 5), "w") == 60
    assert Blocks(4).grain((10,), "b") == 4
    assert Blocks().grain((10, 3), "w") == 3
    assert Flat().grain((10, 3), "w") == 1
    assert Owned().grain((10, 3), "w") == 30


@pytest.mark.parametrize("rule", [Flat(), Blocks(3), Owned()])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 3)])
def test_even_of_nothing_a_block_has_an_element(rule, shape):
    assert rule.grain(shape, "w") >= 1


def test_only_flat_and_scalars_lose_the_rows():
    assert [rule.by_rows((4, 2)) for rule in (Flat(), Blocks(), Owned())] == [False, True, True]
    assert [rule.by_rows(()) for rule in (Flat(), Blocks(), Owned())] == [False, False, False]


def test_only_whole_tensors_have_an_owner():
    assert [rule.owned for rule in (Flat(), Blocks(), Owned())] == [False, False, True]


@pytest.mark.parametrize("rows", [0, -1, 2.0, "3", None, True])
def test_blocks_of_no_rows_or_of_something_else_are_refused_with_what_was_found(rows):
    with pytest.raises(PlacementError) as raised:
        Blocks(rows)
    assert f"Blocks(rows={rows!r})" in str(raised.value)
    assert "a positive int" in str(raised.value)
    assert isinstance(raised.value, SherdError)
