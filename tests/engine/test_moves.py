"""Which moves a group's parameters may make, and by how much a sum of gradients is scaled, where."""

from itertools import product

import pytest
import torch

from sherd.engine.moves.buffer_plan import Scale
from sherd.engine.moves.weights import MOVES, Position
from sherd.errors import StateError
from sherd.schedule.state import Live
from tests.support.comparing import assert_refused

ALLOWED = {
    (Live.SHARDED, Live.GATHERING),
    (Live.GATHERING, Live.UNSHARDED),
    (Live.GATHERING, Live.SHARDED),
    (Live.UNSHARDED, Live.SHARDED),
    (Live.UNSHARDED, Live.SHRUNK),
    (Live.SHRUNK, Live.GATHERING),
    (Live.SHRUNK, Live.SHARDED),
}


def test_parameters_start_sharded_and_the_table_of_moves_is_the_drawn_one():
    assert Position("w").live is Live.SHARDED
    assert {(start, end) for start, ends in MOVES.items() for end in ends} == ALLOWED


def test_a_move_of_the_table_is_made_and_any_other_raises_with_both_names_and_goes_nowhere():
    for start, end in product(Live, Live):
        position = Position("blocks.0.weight (and 3 more)")
        position.live = start
        if (start, end) in ALLOWED:
            position.move(end)
        else:
            said = ("blocks.0.weight", f"from {start.name} to {end.name}")
            assert_refused(lambda at=position, to=end: at.move(to), StateError, RuntimeError, *said)
        assert position.live is (end if (start, end) in ALLOWED else start), (start, end)


def test_gradients_are_scaled_on_the_way_in_where_it_costs_nothing_and_after_the_sum_where_the_range_allows():
    for dtype in (torch.float32, torch.float64):
        assert Scale.for_(dtype, 8) == Scale(before=1 / 8, after=1.0), dtype
    assert Scale.for_(torch.bfloat16, 8) == Scale(before=1.0, after=1 / 8)


def test_float16_is_divided_by_a_power_of_two_before_and_by_what_is_left_after():
    rows = [(1, 1, 1), (2, 1, 1 / 2), (4, 1 / 2, 1 / 2), (6, 1 / 2, 1 / 3), (64, 1 / 8, 1 / 8)]
    for ranks, before, after in rows:
        scale = Scale.for_(torch.float16, ranks)
        assert scale.before == before, ranks
        assert scale.after == pytest.approx(after), ranks


def test_both_factors_together_always_divide_by_what_was_asked():
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    for dtype, divide_by in product(dtypes, (0.5, 1, 2, 3, 7, 64, 1000, 4096.0)):
        scale = Scale.for_(dtype, divide_by)
        assert scale.before * scale.after == pytest.approx(1 / divide_by), (dtype, divide_by)
