"""Whatever is killed, full or damaged: no checkpoint that was reported done is lost, or loads wrong.

40 cases, and 100 with `--thorough`. `SHERD_KILLS=1000 pytest tests/checkpoint/kills` tries as many as that says;
`python -m tests.checkpoint.kills` shows them by hand.
"""

import os

import pytest

from tests.checkpoint.kills.campaign import run_all
from tests.thorough import share

NUM_CASES = int(os.environ.get("SHERD_KILLS", share(40, 100)))
AT_A_TIME = 50


@pytest.mark.parametrize("first", range(0, NUM_CASES, AT_A_TIME))
def test_no_checkpoint_is_lost_or_loads_wrong(first):
    seeds = range(first, min(first + AT_A_TIME, NUM_CASES))
    verdicts = dict(run_all(seeds))
    assert list(verdicts) == list(seeds)
    lines = {seed: "\n  ".join((str(each.case), *each.wrong)) for seed, each in verdicts.items() if each.wrong}
    assert not lines, "\n\n".join(f"seed {seed}: {words}" for seed, words in lines.items())
    assert sum(each.num_reached for each in verdicts.values()) > len(verdicts) // 2, "moments that do not come"
