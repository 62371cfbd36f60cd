"""Which moves may a group's parameters make, and by how much is a sum of gradients scaled, where?"""

from itertools import product

import pytest
import torch

from sherd.engine.moves.scale import Scale
from sherd.engine.moves.weights import MOVES, Position
from sherd.errors import SherdError, StateError
from sherd.schedule.state import Live

ALLOWED = {
    (Live.SHARDED, Live.GATHERING),
    (Live.GATHERING, Live.UNSHARDED),
    (Live.GATHERING, Live.SHARDED),
    (Live.UNSHARDED, Live.SHARDED),
    (Live.UNSHARDED, Live.SHRUNK),
    (Live.SHRUNK, Live.GATHERING),
    (Live.SHRUNK, Live.SHARDED),
}


def at(live: Live) -> Position:
    position = Position("blocks.0.weight (and 3 more)")
    position.live = live
    return position


def test_parameters_start_sharded_and_the_table_of_moves_is_the_drawn_one():
    assert Position("w").live is Live.SHARDED
    assert {(start, end) for start, ends in MOVES.items() for end in ends} == ALLOWED


@pytest.mark.parametrize(("start", "end"), sorted(ALLOWED, key=str))
def test_a_move_of_the_table_is_made(start, end):
    position = at(start)
    position.move(end)
    assert position.live is end


@pytest.mark.parametrize(("start", "end"), sorted(set(product(Live, Live)) - ALLOWED, key=str))
def test_any_other_move_raises_with_both_names_and_goes_nowhere(start, end):
    position = at(start)
    with pytest.raises(StateError, match=rf"blocks\.0\.weight.*from {start.name} to {end.name}"):
        position.move(end)
    assert position.live is start


def test_a_state_error_is_a_sherd_error_and_a_runtime_error():
    assert issubclass(StateError, SherdError)
    assert issubclass(StateError, RuntimeError)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_gradients_are_scaled_on_the_way_in_where_it_costs_nothing(dtype):
    assert Scale.for_(dtype, 8) == Scale(before=1 / 8, after=1.0)


def test_bfloat16_sums_first_for_it_has_the_range_and_divides_after_it_was_widened():
    assert Scale.for_(torch.bfloat16, 8) == Scale(before=1.0, after=1 / 8)


@pytest.mark.parametrize(
    ("ranks", "before", "after"), [(1, 1, 1), (2, 1, 1 / 2), (4, 1 / 2, 1 / 2), (6, 1 / 2, 1 / 3), (64, 1 / 8, 1 / 8)]
)
def test_float16_is_divided_by_a_power_of_two_before_and_by_what_is_left_after(ranks, before, after):
    scale = Scale.for_(torch.float16, ranks)
    assert scale.before == before
    assert scale.after == pytest.approx(after)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("divide_by", [0.5, 1, 2, 3, 7, 64, 1000, 4096.0])
def test_both_factors_together_always_divide_by_what_was_asked(dtype, divide_by):
    scale = Scale.for_(dtype, divide_by)
    assert scale.before * scale.after == pytest.approx(1 / divide_by)
