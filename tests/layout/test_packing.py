"""Slots lie apart and aligned, and a packing that is wrong cannot be made."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sherd.layout.extent import Extent
from sherd.layout.packing import SHARD_ALIGNMENT, SHORT, UNSHARDED_ALIGNMENT, Packing, Slot, even_share, pack
from sherd.layout.placement import Shard
from sherd.layout.plan import plan
from sherd.layout.runs import Runs
from tests.layout.strategies import groups, run_groups
from tests.support.refusals import refusal


def disjoint(extents: list[Extent], size: int) -> bool:
    """Whether no element of a buffer of `size` is in two extents, and all are inside."""
    taken = [element for extent in extents for element in range(extent.start, extent.stop)]
    return len(set(taken)) == len(taken) and all(0 <= element < size for element in taken)


@given(groups())
def test_slots_keep_their_tensors_order_never_overlap_and_start_aligned_unless_they_are_short(group):
    ranks, cuts = group
    packing = pack(cuts, ranks)
    assert [slot.cut for slot in packing.slots] == cuts
    assert disjoint([slot.shard for slot in packing.slots], packing.shard_numels[0])
    assert disjoint([slot.unsharded for slot in packing.slots], packing.unsharded_numel)
    assert all(slot.unsharded.start % UNSHARDED_ALIGNMENT == 0 for slot in packing.slots)
    assert all(slot.shard.start % SHARD_ALIGNMENT == 0 for slot in packing.slots if slot.cut.slot >= SHORT)


@given(groups())
def test_the_whole_buffer_divides_by_the_ranks_and_slots_hold_every_tensor_whole_and_what_a_rank_has_of_it(group):
    ranks, cuts = group
    packing = pack(cuts, ranks)
    assert packing.unsharded_numel % ranks == 0
    for slot in packing.slots:
        assert slot.unsharded.numel >= slot.cut.numel
        for rank in range(ranks):
            held = slot.held(rank)
            assert held.numel == slot.cut.local_numel(rank)
            assert held.start == slot.shard.start
            assert held.stop <= slot.shard.stop


def gathered(packing: Packing) -> list[tuple[int, int] | None]:
    """The rows buffer as a list: at each place (tensor, flat index) or None for padding."""
    rows: list[tuple[int, int] | None] = [None] * packing.gathered_numel
    for number, slot in enumerate(packing.slots):
        cut = slot.cut
        for rank in range(packing.num_ranks):
            indices = range(cut.numel)
            if cut.dim is not None:
                mine = range(cut.rows[rank].start, cut.rows[rank].stop)
                indices = [index for index in indices if index // cut.view[2] % cut.shape[cut.dim] in mine]
            start = packing.starts[rank] + slot.shard.start
            rows[start : start + len(indices)] = [(number, index) for index in indices]
    return rows


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
    assert len(whole) == packing.gathered_numel <= packing.unsharded_numel
    for number, slot in enumerate(packing.slots):
        found = whole[slot.unsharded.start : slot.unsharded.start + slot.cut.numel]
        assert found == [(number, index) for index in range(slot.cut.numel)]


def test_one_large_even_tensor_is_gathered_direct_and_two_interleave_on_two_ranks_so_they_are_not():
    assert pack([Shard(0).cut((64, 16), 4, "w")], 4).direct
    assert not pack([Shard(0).cut((16, 4), 2, "w")] * 2, 2).direct


def test_even_shards_of_a_real_models_block_cost_under_three_percent_and_short_ones_nothing():
    shapes = [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)] + [(4096,)] * 2
    for ranks in (2, 8, 64, 256, 1024):
        cuts = [Shard(0).cut(shape, ranks, "w") for shape in shapes]
        assert pack(cuts, ranks).padding < 0.03, ranks
    short = [Shard(0).cut((4096,), 4096, "norm")] * 10
    assert pack(short, 4096).shard_numels == (10,) * 4096


# Wrong on purpose


CUT = Shard(0).cut((4, 4), 2, "w")
RIGHT = Packing(
    2,
    (Slot(CUT, Extent(0, 8), Extent(0, 16)), Slot(CUT, Extent(8, 8), Extent(16, 16))),
    shard_numels=(16, 16),
    unsharded_numel=32,
)


def with_slot(packing: Packing, number: int, **changes: object) -> dict[str, tuple[Slot, ...]]:
    """The change of `packing` that changes its slot of that number."""
    slots = list(packing.slots)
    slots[number] = replace(slots[number], **changes)
    return {"slots": tuple(slots)}


WRONG = {
    "shards overlap": (with_slot(RIGHT, 1, shard=Extent(7, 8)), "overlap in the shard buffer"),
    "unsharded overlap": (with_slot(RIGHT, 1, unsharded=Extent(15, 16)), "overlap in the unsharded buffer"),
    "shard too far": (with_slot(RIGHT, 1, shard=Extent(9, 8)), "ends after the shard buffer"),
    "unsharded too far": (with_slot(RIGHT, 1, unsharded=Extent(17, 16)), "ends after the unsharded buffer"),
    "shard buffer too short": ({"shard_numels": (15, 15)}, "ends after the shard buffer"),
    "shard buffer longer on one rank": ({"shard_numels": (16, 17)}, "same room on every rank"),
    "a rank without shard buffer": ({"shard_numels": (16,)}, "every rank has a shard buffer"),
    "unsharded does not divide": ({"unsharded_numel": 33}, "must divide by the ranks"),
    "shard extent shorter than a piece": (
        with_slot(RIGHT, 1, shard=Extent(8, 4)),
        "the shard of a tensor",
    ),
    "unsharded extent shorter than the tensor": (
        with_slot(RIGHT, 1, unsharded=Extent(16, 8)),
        "the unsharded extent of",
    ),
}


def require_refused(packing: Packing, wrong: dict[str, tuple[dict[str, object], str]]) -> None:
    """Each change of `packing` is refused with its words."""
    for name, (changes, words) in wrong.items():
        assert words in refusal(AssertionError, replace, packing, **changes), name


# Cut into runs


def run_extents(slot: Slot, packing: Packing) -> list[Extent]:
    """What each rank holds of the slot's tensor, as places in the unsharded buffer."""
    return [slot.held(rank).shifted(packing.starts[rank]) for rank in range(packing.num_ranks) if slot.held(rank).numel]


@given(run_groups())
def test_runs_lie_in_the_order_of_the_ranks_which_hold_their_pieces_inside_their_own_matrices_before_vectors(group):
    ranks, wanted = group
    packing = pack(plan(wanted, ranks), ranks)
    assert packing.starts == tuple(sum(packing.shard_numels[:rank]) for rank in range(ranks))
    for rank in range(ranks):
        vectors, matrices = [], []
        for slot in packing.slots:
            held = slot.held(rank)
            assert held.numel == slot.cut.local_numel(rank)
            assert held.stop <= packing.shard_numels[rank]
            if held.numel:
                (vectors if len(slot.cut.shape) < 2 else matrices).append(held)
        if vectors and matrices:
            assert max(extent.stop for extent in matrices) <= min(extent.start for extent in vectors)


@given(run_groups())
def test_the_ranks_pieces_of_a_tensor_follow_each_other_as_its_slot_and_with_the_gaps_slots_are_the_rows(group):
    ranks, wanted = group
    packing = pack(plan(wanted, ranks), ranks)
    for slot in packing.slots:
        places = [place for piece in run_extents(slot, packing) for place in range(piece.start, piece.stop)]
        assert places == list(range(slot.unsharded.start, slot.unsharded.stop))
    parts = [*packing.gaps, *(slot.unsharded for slot in packing.slots)]
    assert disjoint(parts, packing.gathered_numel)
    assert sum(part.numel for part in parts) == packing.gathered_numel


@given(run_groups())
def test_whole_tensors_cut_into_runs_start_aligned_in_a_buffer_that_divides_by_the_ranks(group):
    ranks, wanted = group
    packing = pack(plan(wanted, ranks), ranks)
    assert all(slot.unsharded.start % UNSHARDED_ALIGNMENT == 0 for slot in packing.slots)
    assert packing.unsharded_numel % ranks == 0
    assert packing.gathered_numel <= packing.unsharded_numel < packing.gathered_numel + ranks
    if not packing.is_even:
        assert all(gap.numel < UNSHARDED_ALIGNMENT for gap in packing.gaps), "padding that aligns no tensor"


@given(run_groups(), st.data())
def test_any_part_of_a_plans_cuts_can_be_packed_on_its_own(group, data):
    ranks, wanted = group
    cuts = plan(wanted, ranks)
    chosen = data.draw(st.lists(st.sampled_from(range(len(cuts))), min_size=1, unique=True))
    packing = pack([cuts[index] for index in chosen], ranks)
    assert [slot.cut for slot in packing.slots] == [cuts[index] for index in chosen]
    for slot in packing.slots:
        assert sum(extent.numel for extent in run_extents(slot, packing)) == slot.cut.numel


def numels_packed(*runs: Runs) -> tuple[int, ...]:
    """How many elements each rank holds of these runs, packed."""
    return pack(runs, runs[0].num_ranks).shard_numels


def test_runs_are_made_equal_where_that_takes_less_than_three_percent_or_no_more_than_the_least_equal_ones():
    for second, numels in ((1568, (1600, 1600)), (1488, (1600, 1488))):
        assert numels_packed(Runs((1600,), 2, 0, (1600,)), Runs((second,), 2, 1, (second,))) == numels
    assert numels_packed(Runs((3,), 64, 0, (3,))) == (16,) * 64
    assert [even_share(numel, 4) for numel in (0, 1, 64, 65)] == [0, 16, 16, 32]


def test_a_tensor_is_moved_behind_a_gap_for_equal_runs_but_never_to_where_it_starts_unaligned():
    cuts = [Runs((6, 1600), 2, 0, (4800, 9600), by_rows=True), Runs((80,), 2, 0, (80,)), Runs((96,), 2, 1, (96,))]
    packing = pack(cuts, 2)
    assert packing.shard_numels == (4896, 4896)
    assert [slot.unsharded.start for slot in packing.slots] == [96, 0, 9696]
    assert packing.gaps == (Extent(80, 16),)
    packing = pack([Runs((16,), 2, 0, (5, 16))], 2)
    assert packing.shard_numels == (5, 11)
    assert packing.slots[0].unsharded == Extent(0, 16)


def test_padding_is_the_share_of_places_that_hold_nothing_and_imbalance_is_over_the_mean():
    assert pack([Shard(0).cut((64, 16), 4, "w")], 4).padding == 0.0
    # 2 ranks, 3 rows of 16: slots of 2 rows, so one row of four is padding.
    assert pack([Shard(0).cut((3, 16), 2, "w")], 2).padding == 0.25
    assert pack([Shard(0).cut((0, 4), 2, "w")], 2).padding == 0.0
    packing = pack([Runs((48,), 2, 0, (48,)), Runs((8,), 2, 1, (8,))], 2)
    assert packing.shard_numels == (48, 16)
    assert (packing.padding, packing.imbalance) == (8 / 64, 48 / 32 - 1)
    empty = pack([Runs((0,), 2, 0, (0,))], 2)
    assert (empty.padding, empty.imbalance) == (0.0, 0.0)


def test_a_packing_of_runs_is_direct_and_tensors_cut_otherwise_do_not_mix_with_it():
    runs = Runs((48,), 2, 0, (48,))
    assert pack([runs], 2).direct
    with pytest.raises(AssertionError, match="a group of their own"):
        pack([runs, Shard(0).cut((4,), 2, "w")], 2)


RUNS = pack([Runs((96,), 2, 0, (64, 96)), Runs((32,), 2, 1, (32,))], 2)


WRONG_RUNS = {
    "overlap": (with_slot(RUNS, 0, unsharded=Extent(16, 96)), "overlap in the unsharded buffer"),
    "too short": (with_slot(RUNS, 0, unsharded=Extent(0, 80)), "is in the buffer as it is"),
    "said to lie elsewhere": (with_slot(RUNS, 0, shard=Extent(16, 64)), "outside its run"),
    "outside its rank's run": (with_slot(RUNS, 0, cut=Runs((96,), 2, 0, (80, 96))), "outside its run"),
    "rows longer than whole": ({"shard_numels": (64, 80)}, "the unsharded buffer"),
}


def test_a_packing_that_is_wrong_cannot_be_made_and_the_hand_made_ones_are_right():
    assert all(one.unsharded.stop <= other.unsharded.start for one, other in pairwise(RIGHT.slots))
    assert RIGHT.padding == 0.0
    require_refused(RIGHT, WRONG)
    require_refused(RUNS, WRONG_RUNS)
