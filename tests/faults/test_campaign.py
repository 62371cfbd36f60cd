"""Every drawn fault ends right, or with a named error on every surviving rank, in time, and leaves nothing behind.

200 cases with `--suite thorough`, else some of them that have every value of everything that is drawn, and some pairs
of values. `SHERD_FAULTS=2000 pytest tests/faults/test_campaign.py --suite all` tries as many as that says.
`python -m tests.faults` shows them by hand.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Hashable
from dataclasses import fields

import pytest
import torch

from bench.pages import read_csv, written
from tests.faults.builder import Fault, Injected, Kind, Phase, Probe, phases_of
from tests.faults.campaign import ERRORS, Outcome, drawn, judged, run, run_all
from tests.faults.crews import Case, Crew, End, Ends
from tests.faults.page import DATA, PAGE, rows, sections
from tests.faults.program import DIVERGENCES, TRANSPORTS, Setting
from tests.support.sharding import FRONTS
from tests.support.suites import fewest, share

USUAL_CASES = 200
AT_A_TIME = 50


def met_in(case: Case) -> set[Hashable]:
    """What an ordinary run has to meet in one case or another: values, and pairs of them."""
    setting, fault = case.setting, case.fault
    values = {(each.name, getattr(of, each.name)) for of in (setting, fault) for each in fields(of)}
    pairs = {(fault.kind, setting.divergence), (setting.front, setting.transport)}
    return values | pairs | {("keeps_store", case.keeps_store)}


FEW = fewest([met_in(drawn(seed)) for seed in range(USUAL_CASES)])
CASES = os.environ.get("SHERD_FAULTS")
SEEDS = list(range(int(CASES))) if CASES else share(FEW, list(range(USUAL_CASES)))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(SEEDS), AT_A_TIME))
def test_every_fault_ends_right_or_by_name(tmp_path, first):
    seeds = SEEDS[first : first + AT_A_TIME]
    verdicts = dict(run_all(seeds, tmp_path))
    assert list(verdicts) == seeds
    bad = [
        f"seed {seed}: {each.case}: {each.outcome.value}\n{each.words}"
        for seed, each in verdicts.items()
        if not (each.is_good or each.is_known)
    ]
    assert not bad, "\n\n".join(bad)


@pytest.mark.slow
def test_a_rank_that_is_cut_off_from_the_store_and_compares_raises(tmp_path):
    setting = Setting(num_ranks=3, transport="torch", front="flat")
    verdict = run(Case(setting, Fault(0, 1, Phase.BEFORE_FORWARD, Kind.CUT), keeps_store=True), tmp_path / "case")
    if verdict.outcome is Outcome.IMPOSSIBLE:
        pytest.skip(verdict.words)
    assert verdict.outcome in ERRORS, verdict.words


@pytest.mark.slow
def test_a_rank_that_wakes_after_the_other_has_given_up_the_first_comparison_raises(tmp_path):
    setting = Setting(num_ranks=2, front="flat wrapper", divergence="error")
    verdict = run(Case(setting, Fault(1, 0, Phase.BEFORE_FORWARD, Kind.STOP)), tmp_path / "case")
    assert verdict.outcome in ERRORS, verdict.words


KILLED = Case(Setting(num_ranks=3), Fault(1, 2, Phase.BACKWARD, Kind.KILL))


def test_a_rank_that_is_killed_is_named_by_the_others(tmp_path):
    verdict = run(KILLED, tmp_path / "case")
    assert verdict.outcome in ERRORS, verdict.words


def test_the_page_shows_a_campaign_without_a_bad_case_that_is_not_known():
    page = PAGE.read_text()
    (bad,) = re.findall(r"<!-- bad -->\n(.*?)\n<!-- /bad -->", page, re.DOTALL)
    known = re.compile(r"\| .*its machine's link is cut \| hung \|")
    assert bad == "None." or all(known.fullmatch(line) for line in bad.splitlines()[2:]), bad
    lines = read_csv(DATA)
    head, *_ = rows([])
    assert lines[0] == head
    assert [line[0] for line in lines[1 : len(Kind) + 1]] == [kind.value for kind in Kind], (
        "python -m tests.faults --write"
    )
    assert written(page, sections(lines)) == page, "python -m tests.faults --write"


# The campaign would notice


def test_seeds_draw_every_kind_in_every_phase_under_every_setting():
    cases = [drawn(seed) for seed in range(2000)]
    possible = {(kind, phase) for kind in Kind for phase in phases_of(kind)}
    assert {(case.fault.kind, case.fault.phase) for case in cases} == possible
    for kind, phase in set(itertools.product(Kind, Phase)) - possible:
        with pytest.raises(ValueError, match=f"{kind.name} cannot happen in phase {phase.name}"):
            Fault(1, 2, phase, kind)
    settings = [case.setting for case in cases]
    assert {(each.num_ranks, each.transport, each.divergence, each.front) for each in settings} == set(
        itertools.product((2, 3, 4), TRANSPORTS, DIVERGENCES, FRONTS)
    )
    assert {each.is_hybrid for each in settings} == {True, False}
    assert {each.fault.kind for each in cases[: len(Kind)]} == set(Kind)
    assert drawn(17) == drawn(17)


def test_a_fault_happens_once_on_its_rank_in_its_step_and_phase():
    for phase in set(Phase) - {Phase.BACKWARD}:
        fault = Fault(1, 2, phase, Kind.RAISE, unit=0)
        for rank, step, other, unit in itertools.product((0, 1), (1, 2), Phase, (0, 1)):
            told: list[str] = []
            probe = Probe(fault, rank, lambda told=told: told.append("told"), step=step)
            if (rank, step, other) == (1, 2, phase) and (unit == 0 or not fault.has_unit):
                with pytest.raises(Injected, match="rank 1, step 2"):
                    probe.at(other, unit=unit)
                assert told == ["told"]
                assert probe.at(other, "x", unit=unit) == "x"
            else:
                assert probe.at(other, torch.ones(1), unit=unit) is not None
                assert told == []


def ended(*texts: str, kinds: tuple[str, ...] = ("CommError", "CommError"), code: int = -9) -> Ends:
    """Ranks 0 and 2 of `KILLED` with these errors, two seconds after the fault."""
    ends = [End(error=kind, text=text, when=12.0, exit_code=1) for kind, text in zip(kinds, texts, strict=True)]
    return Ends([ends[0], End(exit_code=code), ends[1]], fault_at=10.0)


def test_a_verdict_says_how_well_the_errors_name_the_rank_and_what_else_was_bad():
    died = "[rank 0] rank 1 has died", "[rank 2] Rank 1 has died"
    for ends, outcome in (
        (ended(*died), Outcome.NAMED),
        (ended(died[0], "[rank 2] one of the ranks [0, 1]"), Outcome.AMONG),
        (ended("[rank 0] rank 2 has left", died[1]), Outcome.OTHER),
        (ended(died[0], "[rank 2] something has died"), Outcome.UNNAMED),
        (ended(died[0], "rank 1", kinds=("CommError", "RuntimeError")), Outcome.UNNAMED),
        (ended(*died, code=-6), Outcome.CRASHED),
    ):
        verdict = judged(KILLED, ends)
        assert (verdict.outcome, verdict.seconds) == (outcome, 2.0), verdict.words
        assert verdict.is_good == (outcome in ERRORS), outcome
    ends = ended(*died)
    ends.left.append("/dev/shm/sherd")
    assert judged(KILLED, ends).outcome is Outcome.LEFT
    ends.of_rank[2].is_stuck = True
    assert judged(KILLED, ends).outcome is Outcome.HUNG
    assert not judged(KILLED, ends).is_good


@pytest.mark.slow
@pytest.mark.parametrize("front", ["shard", "wrapper", "flat wrapper"])
def test_a_training_without_a_fault_ends_as_the_plain_one(tmp_path, front):
    case = Case(Setting(front=front), None)
    verdict = judged(case, Crew(case, tmp_path / "case").run())
    assert verdict.outcome is Outcome.RIGHT, verdict.words


def test_wrong_values_are_noticed(tmp_path):
    """The plain model has the NaN, and the sharded one has not: the verdict must see it."""
    case = Case(Setting(), Fault(1, 1, Phase.FORWARD, Kind.NAN))
    ends = Crew(Case(Setting(), Fault(1, 1, Phase.FORWARD, Kind.SLOW)), tmp_path / "case").run()
    assert judged(case, ends).outcome is Outcome.WRONG
