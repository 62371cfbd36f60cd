"""Whatever is killed, full or damaged: no checkpoint that was reported done is lost, or loads wrong.

100 cases with `--thorough`, else some of them that have every value of everything that is drawn, and some pairs of
values. `SHERD_KILLS=1000 pytest tests/checkpoint/kills` tries as many as that says; `python -m tests.checkpoint.kills`
shows them by hand.
"""

import os
from collections.abc import Hashable
from dataclasses import fields

import pytest

from tests.checkpoint.kills.campaign import run_all
from tests.checkpoint.kills.cases import Case, drawn
from tests.support.suites import fewest, share

USUAL_CASES = 100
AT_A_TIME = 50


def met_in(case: Case) -> set[Hashable]:
    """What an ordinary run has to meet in one case or another: values, and pairs of them."""
    first = case.jobs[0]
    of_all = {(name, getattr(case, name)) for name in ("num_weights", "has_loader", "has_short_timeout", "is_cold")}
    of_jobs = {
        (whose, each.name, getattr(job, each.name))
        for whose, job in (("first", first), ("judge", case.judge))
        for each in fields(job)
        if each.name != "steps"
    }
    damages = {(each.target, each.harm) for each in case.damages}
    counts = {("jobs", len(case.jobs)), ("starts", len(case.moments)), ("damages", len(case.damages))}
    calls = {("call", each.call) for each in case.moments}
    return of_all | of_jobs | damages | counts | calls | {(case.act, first.is_async), (case.act, case.has_loader)}


FEW = fewest([met_in(drawn(seed)) for seed in range(USUAL_CASES)])
CASES = os.environ.get("SHERD_KILLS")
SEEDS = list(range(int(CASES))) if CASES else share(FEW, list(range(USUAL_CASES)))


@pytest.mark.parametrize("first", range(0, len(SEEDS), AT_A_TIME))
def test_no_checkpoint_is_lost_or_loads_wrong(first):
    seeds = SEEDS[first : first + AT_A_TIME]
    verdicts = dict(run_all(seeds))
    assert list(verdicts) == seeds
    lines = {seed: "\n  ".join((str(each.case), *each.wrong)) for seed, each in verdicts.items() if each.wrong}
    assert not lines, "\n\n".join(f"seed {seed}: {words}" for seed, words in lines.items())
    assert sum(each.num_reached for each in verdicts.values()) > len(verdicts) // 2, "moments that do not come"
