"""Do slots lie apart and aligned, and does a packing that is wrong refuse to exist?"""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given

from sherd.layout.extent import Extent
from sherd.layout.packing import REST_ALIGNMENT, SHORT, WHOLE_ALIGNMENT, Packing, Slot, pack
from sherd.layout.placement import Shard
from tests.layout.strategies import PROPERTY, groups


def disjoint(extents: list[Extent], size: int) -> bool:
    """Whether no element of a buffer of `size` is in two extents, and all are inside."""
    taken = [element for extent in extents for element in range(extent.start, extent.stop)]
    return len(set(taken)) == len(taken) and all(0 <= element < size for element in taken)


@PROPERTY
@given(groups())
def test_slots_keep_their_tensors_order_and_never_overlap(group):
    ranks, cuts = group
    packing = pack(cuts, ranks)
    assert [slot.cut for slot in packing.slots] == cuts
    assert disjoint([slot.rest for slot in packing.slots], packing.rest_numel)
    assert disjoint([slot.whole for slot in packing.slots], packing.whole_numel)


@PROPERTY
@given(groups())
def test_whole_tensors_start_aligned_and_so_do_shards_that_are_not_short(group):
    ranks, cuts = group
    packing = pack(cuts, ranks)
    assert all(slot.whole.start % WHOLE_ALIGNMENT == 0 for slot in packing.slots)
    assert all(slot.rest.start % REST_ALIGNMENT == 0 for slot in packing.slots if slot.cut.slot >= SHORT)


@PROPERTY
@given(groups())
def test_the_whole_buffer_divides_by_the_ranks_and_holds_every_tensor_whole(group):
    ranks, cuts = group
    packing = pack(cuts, ranks)
    assert packing.whole_numel % ranks == 0
    assert all(slot.whole.numel >= slot.cut.numel for slot in packing.slots)


@PROPERTY
@given(groups())
def test_what_a_rank_holds_lies_inside_its_slot(group):
    ranks, cuts = group
    for slot in pack(cuts, ranks).slots:
        for rank in range(ranks):
            held = slot.held(rank)
            assert held.numel == slot.cut.local_numel(rank)
            assert held.start == slot.rest.start
            assert held.stop <= slot.rest.stop


def gathered(packing: Packing) -> list[tuple[int, int] | None]:
    """The rows buffer as a list: at each place (tensor, flat index) or None for padding."""
    rows: list[tuple[int, int] | None] = [None] * (packing.num_ranks * packing.rest_numel)
    for number, slot in enumerate(packing.slots):
        cut = slot.cut
        for rank in range(packing.num_ranks):
            indices = range(cut.numel)
            if cut.dim is not None:
                mine = range(cut.rows[rank].start, cut.rows[rank].stop)
                indices = [index for index in indices if index // cut.inner % cut.shape[cut.dim] in mine]
            start = rank * packing.rest_numel + slot.rest.start
            rows[start : start + len(indices)] = [(number, index) for index in indices]
    return rows


@PROPERTY
@given(groups())
@example((1, [Shard(0).cut((20,), 1, "a"), Shard(0).cut((20,), 1, "b")]))
@example((2, [Shard(0).cut((3, 1), 2, "a")]))
@example((2, [Shard(0).cut((5, 8), 2, "a")]))
def test_rows_gathered_straight_into_the_whole_buffer_are_right_wherever_the_packing_calls_it_direct(group):
    ranks, cuts = group
    packing = pack(cuts, ranks)
    if not packing.direct:
        return
    whole = gathered(packing)
    assert len(whole) == packing.rows_numel <= packing.whole_numel
    for number, slot in enumerate(packing.slots):
        found = whole[slot.whole.start : slot.whole.start + slot.cut.numel]
        assert found == [(number, index) for index in range(slot.cut.numel)]


def test_one_large_even_tensor_is_gathered_direct_for_that_saves_a_copy():
    assert pack([Shard(0).cut((64, 16), 4, "w")], 4).direct


def test_two_tensors_on_two_ranks_interleave_so_they_are_not_direct():
    cut = Shard(0).cut((16, 4), 2, "w")
    assert not pack([cut, cut], 2).direct


def test_padding_counts_the_share_of_places_that_hold_nothing():
    assert pack([Shard(0).cut((64, 16), 4, "w")], 4).padding == 0.0
    # 2 ranks, 3 rows of 16: slots of 2 rows, so one row of four is padding.
    assert pack([Shard(0).cut((3, 16), 2, "w")], 2).padding == 0.25
    assert pack([Shard(0).cut((0, 4), 2, "w")], 2).padding == 0.0


def test_even_shards_of_a_real_models_block_cost_under_three_percent_on_up_to_1024_ranks():
    shapes = [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)] + [(4096,)] * 2
    for ranks in (2, 8, 64, 256, 1024):
        cuts = [Shard(0).cut(shape, ranks, "w") for shape in shapes]
        assert pack(cuts, ranks).padding < 0.03, ranks


def test_thousands_of_ranks_with_short_shards_are_not_padded_to_the_alignment():
    cuts = [Shard(0).cut((4096,), 4096, "norm")] * 10
    assert pack(cuts, 4096).rest_numel == 10


# Wrong on purpose


CUT = Shard(0).cut((4, 4), 2, "w")
RIGHT = Packing(
    2,
    (Slot(CUT, Extent(0, 8), Extent(0, 16)), Slot(CUT, Extent(8, 8), Extent(16, 16))),
    rest_numel=16,
    whole_numel=32,
)


def with_second(**changes: object) -> tuple[Slot, Slot]:
    return RIGHT.slots[0], replace(RIGHT.slots[1], **changes)


def test_the_hand_made_packing_is_right_and_so_are_its_numbers():
    assert all(one.whole.stop <= other.whole.start for one, other in pairwise(RIGHT.slots))
    assert RIGHT.padding == 0.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"slots": with_second(rest=Extent(7, 8))}, "overlap in the rest buffer"),
        ({"slots": with_second(whole=Extent(15, 16))}, "overlap in the whole buffer"),
        ({"slots": with_second(rest=Extent(9, 8))}, "ends after the rest buffer"),
        ({"slots": with_second(whole=Extent(17, 16))}, "ends after the whole buffer"),
        ({"rest_numel": 15}, "ends after the rest buffer"),
        ({"whole_numel": 33}, "must divide by the ranks"),
        ({"slots": with_second(cut=replace(CUT, rows=(Extent(0, 2), Extent(2, 1))))}, "no owner, or two"),
        ({"slots": with_second(cut=replace(CUT, rows=(Extent(0, 3), Extent(2, 2))))}, "no owner, or two"),
        ({"slots": with_second(rest=Extent(8, 4))}, None),
        ({"slots": with_second(whole=Extent(16, 8))}, None),
        ({"slots": with_second(cut=replace(CUT, rows=(Extent(0, 2), Extent(1, 2))))}, None),
    ],
    ids=[
        "rest overlap",
        "whole overlap",
        "rest slot too far",
        "whole slot too far",
        "rest too short",
        "whole does not divide",
        "a row without owner",
        "a row with two owners",
        "rest slot shorter than a piece",
        "whole slot shorter than the tensor",
        "one row twice and one never",
    ],
)
def test_a_packing_that_is_wrong_cannot_be_made(changes, said):
    with pytest.raises(AssertionError, match=said):
        replace(RIGHT, **changes)
