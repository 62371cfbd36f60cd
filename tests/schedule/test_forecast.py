"""A step's peak is what one finds by hand, and every byte that comes also goes."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from sherd.schedule.actions import (
    AfterBackward,
    AfterForward,
    BeforeBackward,
    BeforeForward,
    EndBackward,
    EndForward,
    GradientsReady,
    GroupPassed,
)
from sherd.schedule.forecast import SchedulePlayer, forecast
from sherd.schedule.moments import Arrival, GroupSizes, MemoryKind, step_of
from sherd.schedule.state import Keep, Limits, UnitSpec

# Two ranks: 100 whole bytes, 50 in a shard. Rows of gradients are as long, their sum as a shard.
GROUP = GroupSizes(
    shards=50, unsharded=100, arriving=(60, 40), gradient_rows=100, reduced=50, gradients=50, is_all_trainable=True
)
AT_ONCE = Limits(forward_depth=0, backward_depth=0, reduce_buffers=0)
ROOT = UnitSpec(100, Keep.FOR_BACKWARD)
BLOCK = UnitSpec(100)


def call(unit, *inner):
    """A forward: what it uses, and other calls, in this order."""
    flat = [moment for each in inner for moment in (each if isinstance(each, tuple) else (each,))]
    return (BeforeForward(unit), *flat, AfterForward(unit))


def leaf(unit, num_gradients=2):
    return call(unit, *(Arrival(unit, 0, index) for index in range(num_gradients)))


BLOCKS = call(0, *(call(unit) for unit in range(1, 5)))


def chain(num_blocks):
    """A root that uses its first parameter before its blocks, and its second one after them."""
    return call(0, Arrival(0, 0, 0), *(leaf(unit) for unit in range(1, num_blocks + 1)), Arrival(0, 0, 1))


def peak_of(specs, groups, forward, limits=AT_ONCE, **options):
    """The forecast of a step of units that have one group each, or the groups of a tuple."""
    sizes = [group if isinstance(group, tuple) else (group,) for group in groups]
    return forecast(tuple(specs), limits, sizes, step_of(forward, sizes), **{"batch_bytes": 1, **options})


def peak_of_chain(limits=AT_ONCE, *, group=GROUP, **options):
    """The forecast of a root and two blocks."""
    return peak_of([ROOT, BLOCK, BLOCK], [group] * 3, chain(2), limits, **options)


def moments_of(forward, groups, kind):
    """The moments of that kind in the backward of a step of units that have one group each."""
    return [each for each in step_of(forward, [(group,) for group in groups]) if isinstance(each, kind)]


def of_kind(found, kind):
    return {unit: nbytes for (unit, each), nbytes in found.parts.items() if each is kind}


# Moments


def test_backward_goes_back_through_calls_and_gradients_come_when_their_last_use_was_gone_through():
    sizes = [(GROUP,), (GROUP,)]
    assert step_of(chain(1), sizes) == (
        BeforeForward(0),
        BeforeForward(1),
        AfterForward(1),
        AfterForward(0),
        EndForward(),
        BeforeBackward(0),
        Arrival(0, 0, 1),
        BeforeBackward(1),
        Arrival(1, 0, 1),
        Arrival(1, 0, 0),
        AfterBackward(1, unreduced=True),
        AfterBackward(1),
        Arrival(0, 0, 0),
        AfterBackward(0, unreduced=True),
        AfterBackward(0),
        EndBackward(),
    )


def test_with_a_frozen_parameter_in_the_unit_its_gradients_are_ready_before_it_may_be_freed():
    group = replace(GROUP, arriving=(60,), is_all_trainable=False)
    moments = step_of(leaf(0, 1), [(group,)])
    assert moments[-4:] == (Arrival(0, 0, 0), GradientsReady(0), AfterBackward(0), EndBackward())


def test_a_group_of_one_tensor_is_passed_when_its_gradient_comes_before_others_of_the_unit():
    lone = replace(GROUP, arriving=(100,), borrows=True)
    uses = (Arrival(0, 0, 0), Arrival(0, 1, 0), Arrival(0, 0, 1), Arrival(0, 2, 0))
    moments = step_of(call(0, *uses), [(GROUP, lone, replace(lone, is_all_trainable=False))])
    assert [each for each in moments if isinstance(each, (Arrival, GroupPassed))] == [
        Arrival(0, 2, 0),
        Arrival(0, 0, 1),
        Arrival(0, 1, 0),
        GroupPassed(0, 1),
        Arrival(0, 0, 0),
    ]


def test_backward_does_not_reach_what_comes_before_the_first_trainable_parameter():
    entered = moments_of(call(0, call(1), leaf(2), call(3)), [GROUP] * 4, BeforeBackward)
    assert [each.unit for each in entered] == [0, 3, 2]


def test_what_is_used_or_called_twice_has_its_gradients_once_after_the_first_use_was_gone_through():
    used_twice = call(0, Arrival(0, 0, 0), Arrival(0, 0, 1), Arrival(0, 0, 0))
    assert moments_of(used_twice, [GROUP], Arrival) == [Arrival(0, 0, 1), Arrival(0, 0, 0)]
    called_twice = call(0, leaf(1), leaf(1))
    assert moments_of(called_twice, [GROUP] * 2, BeforeBackward) == [BeforeBackward(unit) for unit in (0, 1, 1)]
    assert moments_of(called_twice, [GROUP] * 2, Arrival) == [Arrival(1, 0, 1), Arrival(1, 0, 0)]


# Peaks by hand


def test_one_unit_peaks_when_its_last_gradient_waits_beside_the_rows():
    # shards 50, whole 100, rows 100 (made for the 40 bytes that came first), the 60 bytes that come last
    found = peak_of([ROOT], [GROUP], leaf(0))
    assert (found.peak, found.moment) == (310, Arrival(0, 0, 0))
    assert found.parts == {
        (0, MemoryKind.SHARDS): 50,
        (0, MemoryKind.UNSHARDED): 100,
        (0, MemoryKind.GRADIENT_ROWS): 100,
        (0, MemoryKind.ARRIVED): 60,
    }
    # 40 and 60 bytes have both arrived when the rows are made for a batch of them.
    assert peak_of([ROOT], [GROUP], leaf(0), batch_bytes=1000).peak == 50 + 100 + 100 + 100


def test_rows_that_come_late_do_not_meet_the_whole_nor_the_rows_of_the_unit_before():
    late = replace(GROUP, collects_late=True)
    # The gradients are there, beside the whole, when the last one comes; then beside the rows.
    found = peak_of([ROOT], [late], leaf(0))
    assert (found.peak, found.moment) == (50 + 100 + 100, Arrival(0, 0, 0))
    # In unit 1's backward: 3 shards, the root's and its own whole, its own gradients and the 40 bytes of the root's,
    # the rows and the sum of unit 2, which is in reduction.
    waits = replace(AT_ONCE, reduce_buffers=1)
    found = peak_of_chain(waits, group=late)
    assert (found.peak, found.moment) == (150 + 200 + 100 + 40 + 150, Arrival(1, 0, 0))
    assert peak_of_chain(waits).peak == found.peak + (100 + 60 - 100) + (100 - 40)
    assert peak_of_chain(unsynced=2) == peak_of_chain(unsynced=2, group=late), "of a backward that is not reduced"


def test_a_large_gradient_that_is_borrowed_takes_no_rows():
    group = replace(GROUP, arriving=(100,), borrows=True)
    found = peak_of([ROOT], [group], leaf(0, 1))
    assert (found.peak, found.moment) == (50 + 100 + 100, Arrival(0, 0, 0))
    assert of_kind(found, MemoryKind.GRADIENT_ROWS) == {0: 100}
    # In an earlier backward it is what the next ones are added to.
    found = peak_of([ROOT], [group], leaf(0, 1), unsynced=2)
    assert found.peak == 50 + 100 + 100 + 100
    assert of_kind(found, MemoryKind.ARRIVED) == {0: 100}


def test_what_backward_has_passed_is_gone_when_the_next_gradient_comes():
    # Of three tensors, each with a group to itself: shards 150, gradients 300, their sums 150; wholes 300 if they stay.
    lone = replace(GROUP, arriving=(100,), borrows=True)
    forward = call(0, *(Arrival(0, number, 0) for number in range(3)))
    stays = replace(ROOT, reshard_after_backward=False)
    assert peak_of([ROOT], [(lone,) * 3], forward).peak == 150 + 300 + 150
    assert peak_of([stays], [(lone,) * 3], forward).peak == 150 + 300 + 150 + 300
    # Before the reduction, each gradient takes the place of the whole before it.
    found = peak_of([ROOT], [(replace(lone, reduced=1, gradients=1),) * 3], forward)
    assert (found.peak, found.moment) == (150 + 300 + 100, Arrival(0, 2, 0))


def test_a_reduction_peaks_with_the_rows_the_sum_also_before_it_was_cast_and_what_the_transport_takes():
    group = replace(GROUP, scratch=200)
    found = peak_of([ROOT], [group], leaf(0))
    assert (found.peak, found.moment) == (50 + 100 + 50 + 200, AfterBackward(0, unreduced=True))
    assert of_kind(found, MemoryKind.TRANSPORT) == {0: 200}
    group = replace(GROUP, arriving=(10,), gradient_rows=10, unsharded=10, reduced=500, gradients=1000)
    found = peak_of([ROOT], [group], leaf(0, 1))
    assert found.peak == 50 + 500 + 1000
    assert of_kind(found, MemoryKind.GRADIENTS) == {0: 1000}


def test_gathered_rows_and_what_they_are_copied_to_are_there_at_once_group_by_group():
    frozen = GroupSizes(shards=50, unsharded=100, rows=110, sent=25, is_all_trainable=False)
    found = peak_of([ROOT], [frozen], call(0))
    assert (found.peak, found.moment) == (50 + 25 + 110 + 100, BeforeForward(0))
    assert peak_of([ROOT], [replace(frozen, rows=0)], call(0)).peak == 50 + 25 + 100
    assert peak_of([ROOT], [(replace(frozen, shards=0, sent=0),) * 2], call(0)).peak == 110 + 110 + 100


def frozen_blocks(**sizes):
    """A root without parameters, and four blocks without trainable ones."""
    root = GroupSizes(shards=0, unsharded=0, is_all_trainable=False)
    return [root] + [replace(root, **{"unsharded": 100, **sizes})] * 4


def test_prefetching_deeper_holds_so_many_more_units_at_once_within_the_bytes_that_may_be_in_flight():
    for depth, whole in ((0, 100), (1, 200), (2, 300), (9, 400)):
        assert peak_of([ROOT, *[BLOCK] * 4], frozen_blocks(), BLOCKS, Limits(depth, depth)).peak == whole, depth
    limits = Limits(9, 9, bytes_in_flight=100)
    assert peak_of([ROOT, *[BLOCK] * 4], frozen_blocks(), BLOCKS, limits).peak == 200


def test_units_that_are_kept_are_all_there_when_forward_ends_and_over_a_step_not_twice():
    assert peak_of([ROOT, *[UnitSpec(100, Keep.ALWAYS)] * 4], frozen_blocks(), BLOCKS).peak == 400
    kept = UnitSpec(100, Keep.ALWAYS, reshard_after_backward=False)
    frozen = GroupSizes(shards=50, unsharded=100, is_all_trainable=False)
    assert peak_of([kept], [frozen], call(0)).peak == 150


def test_a_kept_part_is_made_while_the_whole_is_there_and_sent_while_it_comes_back():
    specs, groups = [ROOT, *[UnitSpec(100, Keep.PART)] * 4], frozen_blocks(part=30)
    found = peak_of(specs, groups, BLOCKS)
    assert (found.peak, found.moment) == (4 * 30 + 100, AfterForward(4))
    # With something to learn they come back, from the part that was kept.
    learning = [replace(group, arriving=(1,), is_all_trainable=False) for group in groups]
    found = peak_of(specs, learning, call(0, *(leaf(unit, 1) for unit in range(1, 5))))
    assert found.peak >= 4 * 30 + 100
    assert sum(of_kind(found, MemoryKind.PART).values()) + sum(of_kind(found, MemoryKind.SENT).values()) in (90, 120)


def test_gradients_of_units_that_are_done_add_up_and_reductions_in_flight_keep_their_rows():
    # In unit 1's backward: 3 shards, the root's and its own whole, 2 times rows (the root's were made first), the 60
    # bytes that came last, and the shards' gradients of unit 2.
    found = peak_of_chain()
    assert (found.peak, found.moment) == (150 + 200 + 200 + 60 + 50, Arrival(1, 0, 0))
    assert of_kind(found, MemoryKind.GRADIENTS) == {2: 50}
    assert peak_of_chain(replace(AT_ONCE, reduce_buffers=1)).peak == found.peak + 100
    # Without a reduction: the rows of three units and unsharded parameters of two, beside what arrives.
    once, twice = (peak_of_chain(unsynced=num) for num in (1, 2))
    assert once.peak == 150 + 300 + 200 + 60 > found.peak - 50
    assert twice.peak == once.peak


# Any sizes


sizes_of_a_group = st.builds(
    GroupSizes,
    shards=st.integers(0, 100),
    unsharded=st.integers(0, 100),
    rows=st.sampled_from([0, 7]),
    sent=st.sampled_from([0, 5]),
    part=st.integers(0, 50),
    arriving=st.lists(st.integers(1, 30), max_size=3).map(tuple),
    gradient_rows=st.integers(1, 100),
    reduced=st.integers(1, 50),
    gradients=st.integers(1, 50),
    scratch=st.sampled_from([0, 11]),
    collects_late=st.booleans(),
)
specs_of_a_unit = st.builds(
    UnitSpec, unsharded_bytes=st.just(10), after_forward=st.sampled_from(Keep), reshard_after_backward=st.just(True)
)


@given(
    st.lists(st.tuples(specs_of_a_unit, st.lists(sizes_of_a_group, min_size=1, max_size=2)), min_size=1, max_size=4),
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(1, 60),
)
def test_after_a_step_only_shards_and_their_gradients_are_left(units, depth, reduce_buffers, batch_bytes):
    specs, sizes = tuple(spec for spec, _ in units), [groups for _, groups in units]
    groups = [group for of_unit in sizes for group in of_unit]

    def uses(unit):
        return tuple(Arrival(unit, n, i) for n, group in enumerate(sizes[unit]) for i in range(len(group.arriving)))

    forward = call(0, *uses(0)[:1], *(call(unit, *uses(unit)) for unit in range(1, len(units))), *uses(0)[1:])
    player = SchedulePlayer(specs, Limits(depth, depth, reduce_buffers=reduce_buffers), sizes, batch_bytes)
    for _ in range(2):
        player.begin_step()
        assert player.ledger.now == sum(group.shards for group in groups)
        for moment in step_of(forward, sizes):
            player.live_through(moment)
    assert player.ledger.now == sum(g.shards for g in groups) + sum(g.gradients for g in groups if g.arriving)
    found = player.ledger.peak
    assert sum(found.parts.values()) == found.peak >= player.ledger.now
