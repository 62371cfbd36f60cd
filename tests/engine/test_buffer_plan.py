"""A buffer plan says what a transport and a gradient may do without a buffer."""

from dataclasses import replace

import torch

from sherd.comm.transport import NoTransport, Sizes
from sherd.engine.moves.buffer_plan import BufferPlan, Fill, Scale

PLAN = BufferPlan(
    gathers_itself=False,
    may_be_rows=False,
    may_gather_each=False,
    row_bytes=100,
    is_never_gathered=False,
    frees_unsharded=True,
    sends_shards_as_they_are=True,
    may_borrow=True,
    is_unpadded=True,
    collects_late=False,
    batch_bytes=1,
    lane_owns_rows=False,
    scales_sums=False,
    reduce_dtype=torch.float32,
    reduced_by_piece=Sizes((4, 4)),
    reduced_by_rank=Sizes((4, 4)),
    codec=None,
    padding=(),
    owned=None,
)


def transport(**abilities):
    made = NoTransport()
    vars(made).update(abilities)
    return made


def test_the_unsharded_buffer_is_filled_with_as_few_copies_as_plan_and_transport_allow():
    for choices, abilities, fill in (
        ({}, {}, Fill.FROM_ROWS),
        ({}, {"each_from_bytes": 0}, Fill.FROM_ROWS),
        ({"may_gather_each": True}, {"each_from_bytes": 0}, Fill.TENSOR_BY_TENSOR),
        ({"may_gather_each": True, "row_bytes": 99}, {"each_from_bytes": 100}, Fill.FROM_ROWS),
        ({"may_gather_each": True, "row_bytes": 100}, {"each_from_bytes": 100}, Fill.TENSOR_BY_TENSOR),
        ({"may_gather_each": True}, {}, Fill.FROM_ROWS),
        ({"may_be_rows": True}, {}, Fill.IN_PLACE),
        ({"may_be_rows": True}, {"brings_memory": True}, Fill.FROM_ROWS),
        ({"may_be_rows": True}, {"shares_memory": True}, Fill.FROM_RANKS),
        ({"gathers_itself": True}, {"shares_memory": True}, Fill.BY_SUBCLASS),
    ):
        found = replace(PLAN, **choices).fill_by(transport(**abilities))
        assert found is fill, (choices, abilities)


def test_a_gradient_is_sent_from_where_it_is_only_if_it_is_what_is_sent():
    assert PLAN.borrows(torch.float32)
    for hindrance in ({"may_borrow": False}, {"is_unpadded": False}, {"reduce_dtype": torch.bfloat16}):
        assert not replace(PLAN, **hindrance).borrows(torch.float32), hindrance


def test_a_gradient_that_may_be_borrowed_is_scaled_once_it_was_summed():
    assert PLAN.scale_for(8, may_borrow=False) == Scale(before=1 / 8, after=1.0)
    assert PLAN.scale_for(8, may_borrow=True) == Scale(before=1.0, after=1 / 8)
    assert replace(PLAN, scales_sums=True).scale_for(8, may_borrow=False) == Scale(before=1.0, after=1 / 8)


def test_a_batch_ends_once_it_has_enough_bytes_and_with_the_last_gradient():
    for order, batch_bytes, ends in (
        ((), 8, {}),
        ((0,), 8, {0: {0}}),
        ((2, 0, 1, 3), 100, {3: {0, 1, 2, 3}}),
        ((2, 0, 1, 3), 8, {0: {0, 2}, 3: {0, 1, 2, 3}}),
        ((3, 2, 0, 1), 8, {3: {3}, 0: {0, 2, 3}, 1: {0, 1, 2, 3}}),
    ):
        assert replace(PLAN, batch_bytes=batch_bytes).ends_of(order, {0: 4, 1: 4, 2: 4, 3: 8}) == ends, order
