"""A tensor cut into runs gives each rank its elements, and a placement says where it may be cut."""

import inspect

import torch
from hypothesis import given

from sherd.errors import PlacementError
from sherd.layout.extent import Extent
from sherd.layout.plan import plan
from sherd.layout.runs import Blocks, Flat, Owned, Runs
from tests.layout.strategies import run_groups
from tests.support.comparing import assert_refused
from tests.support.refusals import refusal

DRAWN = Runs((3, 5), 4, 1, (5, 15), by_rows=True)


def test_the_drawing_shows_what_each_rank_holds_and_those_before_the_first_and_behind_the_last_hold_nothing():
    for rank in range(4):
        piece = DRAWN.piece(rank)
        rows = [" ".join(map(str, range(row, row + 5))) for row in range(piece.start, piece.stop, 5)]
        assert "".join([f"    rank {rank} |", *(f" {row} |" for row in rows), "\n"]) in inspect.getdoc(Runs)
    assert [DRAWN.piece(rank) for rank in range(4)] == [Extent(0, 0), Extent(0, 5), Extent(5, 10), Extent(15, 0)]
    assert [DRAWN.local_shape(rank) for rank in range(4)] == [(0, 5), (1, 5), (2, 5), (0, 5)]
    assert list(DRAWN.holders) == [1, 2]


@given(run_groups())
def test_pieces_put_one_behind_the_other_are_the_tensor_and_so_are_their_shapes(group):
    ranks, wanted = group
    for runs in plan(wanted, ranks):
        pieces = [runs.piece(rank) for rank in range(ranks)]
        assert [place for piece in pieces for place in range(piece.start, piece.stop)] == list(range(runs.numel))
        local = [torch.empty(runs.local_shape(rank)) for rank in range(ranks)]
        assert [tensor.numel() for tensor in local] == [runs.local_numel(rank) for rank in range(ranks)]
        assert tuple(torch.cat(local).shape) == (runs.shape if runs.by_rows else (runs.numel,))


def test_a_tensor_without_elements_keeps_its_rows_on_its_first_rank():
    for rule in (Blocks(2), Owned()):
        for shape in ((3, 0), (0, 3), (0,), (2, 0, 3)):
            runs = Runs(shape, 3, 1, (0,), rule.by_rows(shape))
            assert [runs.local_shape(rank) for rank in range(3)] == [(0, *shape[1:]), shape, (0, *shape[1:])], rule


def test_what_is_cut_anywhere_is_a_vector_on_every_rank_and_so_is_a_scalar():
    assert Runs((3, 5), 2, 0, (7, 15)).local_shape(1) == (8,)
    assert [Runs((), 2, 1, (1,)).local_shape(rank) for rank in range(2)] == [(0,), (1,)]


def test_runs_that_are_wrong_cannot_be_made():
    for arguments, said in (
        (((4,), 2, 0, ()), "no owner"),
        (((4,), 2, 1, (2, 4)), "ranks that do not exist"),
        (((4,), 2, 0, (2, 3)), "not at its last element"),
        (((4,), 3, 0, (3, 2, 4)), "go backwards"),
        (((2, 2), 2, 0, (1, 4), True), "a row is cut in two"),
    ):
        assert said in refusal(AssertionError, Runs, *arguments), arguments


# Placements


RULES = (Flat(), Blocks(), Owned())


def test_a_block_is_so_many_rows_of_a_vector_so_many_elements_and_has_one_even_of_nothing():
    assert Blocks(4).grain((10, 3, 5), "w") == 60
    assert Blocks(4).grain((10,), "b") == 4
    assert [rule.grain((10, 3), "w") for rule in RULES] == [1, 3, 30]
    for rule in (*RULES, Blocks(3)):
        for shape in ((), (0,), (3, 0), (0, 3)):
            assert rule.grain(shape, "w") >= 1, (rule, shape)


def test_only_flat_and_scalars_lose_the_rows_and_only_whole_tensors_have_an_owner():
    assert [rule.by_rows((4, 2)) for rule in RULES] == [False, True, True]
    assert [rule.by_rows(()) for rule in RULES] == [False, False, False]
    assert [rule.owned for rule in RULES] == [False, False, True]


def test_blocks_of_no_rows_or_of_something_else_are_refused_with_what_was_found():
    for rows in (0, -1, 2.0, "3", None, True):
        words = (f"Blocks(rows={rows!r})", "a positive int")
        assert_refused(lambda rows=rows: Blocks(rows), PlacementError, ValueError, *words)
