"""Every drawn fault ends right, or with a named error on every surviving rank, in time, and leaves nothing behind.

200 cases with `--thorough`, else some of them that have every value of everything that is drawn, and some pairs of
values. `SHERD_FAULTS=2000 pytest tests/faults/test_campaign.py` tries as many as that says. `python -m tests.faults`
shows them by hand.
"""

from __future__ import annotations

import os
import re
from collections.abc import Hashable
from dataclasses import fields

import pytest

from tests.faults.builder import Fault, Kind, Phase
from tests.faults.campaign import ERRORS, Outcome, drawn, run, run_all
from tests.faults.crews import Case
from tests.faults.page import PAGE
from tests.faults.program import Setting
from tests.support.suites import fewest, share

USUAL_CASES = 200
AT_A_TIME = 50


def met_in(case: Case) -> set[Hashable]:
    """What an ordinary run has to meet in one case or another: values, and pairs of them."""
    setting, fault = case.setting, case.fault
    values = {(each.name, getattr(of, each.name)) for of in (setting, fault) for each in fields(of)}
    pairs = {
        (fault.kind, setting.divergence),
        (setting.placement, setting.transport),
        (setting.placement, setting.front_end),
    }
    return values | pairs | {("keeps_store", case.keeps_store)}


FEW = fewest([met_in(drawn(seed)) for seed in range(USUAL_CASES)])
CASES = os.environ.get("SHERD_FAULTS")
SEEDS = list(range(int(CASES))) if CASES else share(FEW, list(range(USUAL_CASES)))


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


def test_a_rank_that_is_cut_off_from_the_store_and_compares_raises(tmp_path):
    setting = Setting(num_ranks=3, transport="torch", placement="Flat")
    verdict = run(Case(setting, Fault(0, 1, Phase.BEFORE_FORWARD, Kind.CUT), keeps_store=True), tmp_path / "case")
    if verdict.outcome is Outcome.IMPOSSIBLE:
        pytest.skip(verdict.words)
    assert verdict.outcome in ERRORS, verdict.words


def test_the_page_shows_a_campaign_without_a_bad_case_that_is_not_known():
    page = PAGE.read_text()
    (bad,) = re.findall(r"<!-- bad -->\n(.*?)\n<!-- /bad -->", page, re.DOTALL)
    known = re.compile(r"\| .*its machine's link is cut \| hung \|")
    assert bad == "None." or all(known.fullmatch(line) for line in bad.splitlines()[2:]), bad
    (outcomes,) = re.findall(r"<!-- outcomes -->\n(.*?)\n<!-- /outcomes -->", page, re.DOTALL)
    for kind in Kind:
        assert f"| {kind.value} |" in outcomes, "python -m tests.faults --write"
