"""Do random settings train as the plain model, with every access ordered and no wait of the host?

40 of them by default; the environment variable SHERD_RANDOM_SETTINGS says how many. A failure is named with its
setting, the first one also with a smaller setting that fails.
"""

from __future__ import annotations

import functools
import time

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.gpu.setting_runs import option, report, wrong
from tests.gpu.settings import ALL_STRATEGIES, FRONTS, MESHES, PLACEMENTS, Setting, legal, shown, simpler

NUM_SETTINGS = option("SHERD_RANDOM_SETTINGS", 40)
TOGETHER = 20
SHRINK_SECONDS = 30

CHOICES: dict[str, st.SearchStrategy[object]] = {
    "width": st.sampled_from([8, 13, 16]),
    "num_blocks": st.sampled_from([1, 2, 3]),
    "tied": st.booleans(),
    "frozen": st.sampled_from(["", "", "block", "norms"]),
    "ignored": st.booleans(),
    "scalar": st.booleans(),
    "recompute": st.sampled_from(["", "", "kept graph", "reentrant"]),
    "front": st.sampled_from([FRONTS[0], *FRONTS]),
    "built": st.sampled_from(["device", "device", "cpu", "meta"]),
    "placement": st.sampled_from(PLACEMENTS),
    "mesh": st.sampled_from([MESHES[0]] * 4 + [MESHES[1]] + [MESHES[2]] * 2),
    "strategy": st.sampled_from(ALL_STRATEGIES),
    "reshard": st.sampled_from([None, True, False, 2]),
    "param_dtype": st.sampled_from(["", "", "bfloat16", "float16"]),
    "reduce_dtype": st.sampled_from(["", "", "float32", "bfloat16"]),
    "offload": st.sampled_from(["", "", "", "pinned", "pageable"]),
    "forward_depth": st.integers(0, 2),
    "backward_depth": st.integers(0, 2),
    "after_backward": st.booleans(),
    "transport": st.sampled_from(["auto", "coalesced"]),
    "parts": st.booleans(),
    "own_collectives": st.booleans(),
    "optimizer": st.sampled_from(["sgd", "adamw", "flattened"]),
    "micro_batches": st.sampled_from([1, 1, 2, 3]),
    "accumulation": st.sampled_from(["", "no_sync", "accumulate"]),
    "max_norm": st.sampled_from([None, 0.1]),
    "scaled": st.sampled_from([False, False, True]),
    "between": st.sampled_from(["", "", "unsharded", "written", "eval", "state dict"]),
    "pauses": st.integers(1, 1000),
}


@functools.cache
def drawn(count: int) -> tuple[Setting, ...]:
    """Returns `count` settings, the same ones each time."""
    found: list[Setting] = []
    for seed in range(-(-count // TOGETHER)):
        found += _drawn(seed)
    return tuple(dict.fromkeys(found))[:count]


def _drawn(seed: int) -> list[Setting]:
    """Returns the settings of `seed`: of one example of hypothesis, as many examples would be variants of a few."""
    found: list[list[Setting]] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=2,  # the first is always the simplest one
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(st.lists(st.builds(Setting, **CHOICES).map(legal), min_size=TOGETHER, max_size=TOGETHER))
    def collect(settings: list[Setting]) -> None:
        found.append(settings)

    collect()
    return found[-1]


NUM_PARTS = -(-NUM_SETTINGS // TOGETHER)


def part(number: int) -> dict[int, list[Setting]]:
    """Returns the settings of one part, by their number of ranks."""
    by_ranks: dict[int, list[Setting]] = {}
    for setting in drawn(NUM_SETTINGS)[number * TOGETHER : (number + 1) * TOGETHER]:
        by_ranks.setdefault(setting.num_ranks, []).append(setting)
    return by_ranks


def smallest(ranks, setting: Setting, counts_waits: bool) -> dict[Setting, str]:
    """Returns a failing setting with as few choices as can be reached one at a time, and what is wrong with it."""
    failing = wrong(ranks(setting.num_ranks), [setting], counts_waits)
    until = time.monotonic() + SHRINK_SECONDS
    while failing:
        (setting,) = failing
        for candidate in simpler(setting):
            if time.monotonic() > until:
                return failing
            found = wrong(ranks(candidate.num_ranks), [candidate], counts_waits)
            if found:
                failing = found
                break
        else:
            return failing
    return failing


# By number, so that nothing is drawn where the tests are only collected.
@pytest.mark.parametrize("number", range(NUM_PARTS))
def test_random_settings_train_as_the_plain_model(number, ranks_with, accelerator):
    counts_waits, failing = accelerator.counts_waits_of_ranks, {}
    for num_ranks, settings in part(number).items():
        ranks = ranks_with(num_ranks, "single_gather", "single_scatter", "list_gather", "all_reduce")
        failing |= wrong(ranks, settings, counts_waits)
    if failing:
        reduced = smallest(ranks_with, next(iter(failing)), counts_waits)
        pytest.fail(f"{report(failing)}\n\nThe first of them, made smaller:\n{report(reduced)}", pytrace=False)


# The settings themselves


def test_a_setting_that_is_legal_stays_as_it_is():
    for setting in drawn(NUM_SETTINGS):
        assert legal(setting) == setting


def test_what_is_shown_is_the_setting():
    for setting in drawn(NUM_SETTINGS):
        assert eval(shown(setting), {"Setting": Setting}) == setting


def test_every_choice_is_drawn():
    settings = drawn(max(NUM_SETTINGS, 40))
    for name in CHOICES:
        assert len({getattr(each, name) for each in settings}) > 1, name
