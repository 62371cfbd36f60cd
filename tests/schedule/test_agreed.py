"""Ranks that want different collectives issue the same ones, in one order, until each has had what it wants."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hypothesis import given
from hypothesis import strategies as st

from sherd.uneven import agreed
from sherd.uneven.agreed import AgreedOrder, AgreedStep, Proposal, StepKind

TRAIN, EVAL = 0, 1
LEAVE = AgreedStep(StepKind.LEAVE)

units = st.integers(0, 4)
ways = st.lists(units, max_size=6)
steps = st.lists(st.tuples(st.sampled_from([TRAIN, EVAL]), ways), max_size=3)
programs = st.lists(steps, max_size=5)


def a_pass(way: Sequence[int], mode: int = TRAIN, syncs: bool = True) -> Iterator[Proposal]:
    """What a rank wants in a forward through the units of `way`, and in the backward."""
    yield Proposal(AgreedStep(StepKind.BEGIN, 0, mode))
    for unit in way:
        yield Proposal(AgreedStep(StepKind.GATHER, unit))
    if mode == EVAL:
        return
    for unit in reversed(way):
        yield Proposal(AgreedStep(StepKind.GATHER, unit), True)
        if syncs:
            yield Proposal(AgreedStep(StepKind.REDUCE, unit), True)
    if syncs:
        yield Proposal(AgreedStep(StepKind.END), True)


def a_step(passes: Sequence[tuple[int, Sequence[int]]]) -> Iterator[Proposal]:
    for number, (mode, way) in enumerate(passes):
        yield from a_pass(way, mode, syncs=number == len(passes) - 1)
    yield Proposal(AgreedStep(StepKind.STEP))


def to_the_end(wishes: Iterator[Proposal]) -> Iterator[Proposal]:
    yield from wishes
    yield Proposal(LEAVE)


class Ranks:
    """Ranks in lockstep: what they issue, and how often they vote."""

    def __init__(self, number: int) -> None:
        self.orders = [AgreedOrder() for _ in range(number)]
        self.issued: list[AgreedStep] = []
        self.num_votes = 0

    def issue(self, wishes: Sequence[Proposal]) -> AgreedStep:
        """Have all ranks take the same next step, by a vote if the order does not say it."""
        (step,) = {order.expected() for order in self.orders}
        if step is None:
            self.num_votes += 1
            step = agreed.choose(wishes)
        for order in self.orders:
            order.take(step)
        self.issued.append(step)
        return step

    def run(self, wanted: Sequence[Iterator[Proposal]]) -> list[list[AgreedStep]]:
        """Let each rank have what it wants, then leave. Returns what each got, in its order."""
        wishing = [to_the_end(wishes) for wishes in wanted]
        wishes, got = [next(each) for each in wishing], [list[AgreedStep]() for _ in wanted]
        while True:
            step = self.issue(wishes)
            for rank, wish in enumerate(wishes):
                if wish.step == step:
                    got[rank].append(step)
                    wishes[rank] = next(wishing[rank], wish)
            if step == LEAVE:
                return got

    def train(self, *of_ranks: Sequence[int]) -> None:
        """A step of each rank, through the units of its way."""
        self.run([a_step([(TRAIN, way)]) for way in of_ranks])

    def since(self, action: Callable[[], object]) -> tuple[list[str], int]:
        """Returns the collectives that `action` issues, and how many votes it takes."""
        begin, before = len(self.issued), self.num_votes
        action()
        return collectives(self.issued[begin:]), self.num_votes - before


def collectives(issued: Sequence[AgreedStep]) -> list[str]:
    return ["gr"[step.kind] + str(step.which) for step in issued if not step.is_vote]


@given(st.lists(programs, min_size=2, max_size=8))
def test_each_rank_has_what_it_wants_in_its_order_and_all_issue_the_same(of_ranks):
    ranks = Ranks(len(of_ranks))
    wanted = [[wish for step in program for wish in a_step(step)] for program in of_ranks]
    got = ranks.run([iter(each) for each in wanted])
    assert got == [[*(wish.step for wish in each), LEAVE] for each in wanted]


@given(st.lists(ways, min_size=2, max_size=4), st.integers(3, 5))
def test_what_repeats_itself_is_settled_in_its_third_step(of_ranks, num_steps):
    ranks = Ranks(len(of_ranks))
    for number in range(num_steps):
        _, num_votes = ranks.since(lambda: ranks.train(*of_ranks))
        if number >= 2:
            assert num_votes == 4  # it begins, its backward ends, the optimizer steps, all leave


OF_THREE_UNITS = ["g0", "g1", "g2", "g2", "r2", "g1", "r1", "g0", "r0"]


def test_a_skipped_unit_costs_nothing_but_its_own_collectives_and_is_known_the_next_time():
    ranks = Ranks(2)
    assert ranks.since(lambda: ranks.run([a_pass([0, 1, 2]), a_pass([0, 2])]))[0] == OF_THREE_UNITS
    ranks = Ranks(2)
    for _ in range(2):
        ranks.train([0, 2], [0, 2])
    for way in ([0, 1, 2], [0, 1, 2], [0, 2]):
        ranks.train([0, 2], way)
    assert ranks.since(lambda: ranks.train([0, 2], [0, 1, 2])) == (OF_THREE_UNITS, 4)


def test_an_evaluation_is_not_taken_for_a_step():
    ranks = Ranks(2)
    for _ in range(3):
        ranks.train([0, 1], [0, 1])
    assert ranks.since(lambda: ranks.run([a_pass([0, 1], EVAL), a_pass([0, 1], EVAL)]))[0] == ["g0", "g1"]


def test_a_rank_with_fewer_batches_steps_when_the_others_do():
    ranks = Ranks(2)
    many = [(TRAIN, [0, 1])] * 3
    got = ranks.run([a_step(many), a_step(many[:1])])
    assert [each.count(AgreedStep(StepKind.STEP)) for each in got] == [1, 1]
    assert [step.kind for step in ranks.issued if step.is_vote][-3:] == [StepKind.END, StepKind.STEP, StepKind.LEAVE]


@given(st.lists(st.permutations(range(5)), min_size=4, max_size=12))
def test_orders_that_never_repeat_do_not_make_steps_ever_longer(of_steps):
    ranks = Ranks(2)
    for way in of_steps:
        issued, _ = ranks.since(lambda way=way: ranks.train(range(5), way))
        assert len(issued) <= 100


def test_what_is_known_has_a_bound(monkeypatch):
    monkeypatch.setattr(agreed, "MOST_STRETCHES", 4)
    ranks = Ranks(2)
    for mode in range(50):
        ranks.run([a_pass([0, 1], mode + 2), a_pass([1], mode + 2)])
    assert len(ranks.orders[0]._known) <= 4


FAIL, DONE = AgreedStep(StepKind.FAIL), AgreedStep(StepKind.DONE)


def guarded(ranks: Ranks, steps_of: Sequence[Sequence[Sequence[Proposal]]]) -> list[list[bool]]:
    """Let each rank take its steps, each of which all make or give up. Returns which ones each rank has made."""
    at, got = [(0, 0)] * len(steps_of), [list[bool]() for _ in steps_of]
    for _ in range(10_000):
        going = [
            (rank, steps_of[rank][number][place])
            for rank, (number, place) in enumerate(at)
            if number < len(steps_of[rank])
        ]
        if not going:
            return got
        wishes = dict(going)
        step = ranks.issue([wishes.get(rank, Proposal(LEAVE)) for rank in range(len(at))])
        for rank, wish in going:
            number, place = at[rank]
            if step == FAIL or step == wish.step == DONE:
                got[rank].append(step == DONE)
                at[rank] = (number + 1, 0)
            elif step == wish.step:
                at[rank] = (number, place + 1)
    raise AssertionError("ranks go on for ever")


steps_that_may_fail = st.lists(steps, min_size=3, max_size=3)
failures = st.dictionaries(st.tuples(st.integers(0, 7), st.integers(0, 2)), st.integers(0, 40), max_size=4)


@given(
    st.lists(steps_that_may_fail, min_size=2, max_size=8),
    failures,
    st.sets(st.tuples(st.integers(0, 7), st.integers(0, 2))),
)
def test_all_give_up_the_same_steps_which_are_those_that_one_fails_in(of_ranks, fails, evaluate_before):
    wanted = [[[*a_step(step), Proposal(DONE)] for step in program] for program in of_ranks]
    for (rank, number), place in fails.items():
        if rank < len(wanted):
            way = wanted[rank][number]
            way[place % len(way) :] = [Proposal(FAIL)]
    expected = [all(way[number][-1].step == DONE for way in wanted) for number in range(3)]
    for rank, program in enumerate(wanted):
        for number, way in enumerate(program):
            before = a_pass([0, 1], EVAL) if (rank, number) in evaluate_before else ()
            way[:] = [*before, *(wish._replace(in_attempt=True) for wish in way)]
    assert guarded(Ranks(len(wanted)), wanted) == [expected] * len(wanted)


def test_a_step_that_was_given_up_teaches_nothing_and_the_next_one_is_as_settled_as_ever():
    ranks, made = Ranks(2), []
    way = [wish._replace(in_attempt=True) for wish in (*a_step([(TRAIN, [0, 1, 2])]), Proposal(DONE))]
    for _ in range(3):
        guarded(ranks, [[way], [way]])
    assert guarded(ranks, [[way], [[*way[:2], Proposal(FAIL, in_attempt=True)]]]) == [[False], [False]]
    # It votes four times: it begins, its backward ends, the optimizer steps, it is done.
    assert ranks.since(lambda: made.extend(guarded(ranks, [[way], [way]]))) == (OF_THREE_UNITS, 4)
    assert made == [[True], [True]]
