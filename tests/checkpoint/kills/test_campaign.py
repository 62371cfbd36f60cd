"""Whatever is killed, full or damaged: no checkpoint that was reported done is lost, or loads wrong.

100 cases with `--suite thorough`, else some of them. `SHERD_KILLS=1000 pytest tests/checkpoint/kills` tries as many as
that says; `python -m tests.checkpoint.kills` shows them by hand.
"""

import os

import pytest

from tests.checkpoint.kills.campaign import run_all
from tests.support.suites import share

AT_A_TIME = 50


# Of the first hundred, these have every value of everything that is drawn, and some pairs of values.
FEW = [23, 25, 30, 31, 33, 38, 39, 51, 62, 67, 69, 74, 77, 79, 81, 82, 97, 99]
CASES = os.environ.get("SHERD_KILLS")
SEEDS = list(range(int(CASES))) if CASES else share(FEW, list(range(100)))


@pytest.mark.slow
# Ranks take over this process's filters, and a judge loads folders that were damaged on purpose.
@pytest.mark.filterwarnings("ignore:.* is loaded instead:UserWarning")
@pytest.mark.parametrize("first", range(0, len(SEEDS), AT_A_TIME))
def test_no_checkpoint_is_lost_or_loads_wrong(first):
    seeds = SEEDS[first : first + AT_A_TIME]
    verdicts = dict(run_all(seeds))
    assert list(verdicts) == seeds
    lines = {seed: "\n  ".join((str(each.case), *each.wrong)) for seed, each in verdicts.items() if each.wrong}
    assert not lines, "\n\n".join(f"seed {seed}: {words}" for seed, words in lines.items())
    assert sum(each.num_reached for each in verdicts.values()) > len(verdicts) // 2, "moments that do not come"
