"""Random settings train as the plain model, with every access ordered and no wait of the host.

40 of them by default; the environment variable SHERD_RANDOM_SETTINGS says how many. What fails is named with its
setting, to be pasted into a test.
"""

from __future__ import annotations

import functools
import os
import random

import pytest

from tests.gpu.setting_runs import report, wrong
from tests.gpu.settings import ALL_STRATEGIES, FRONTS, MESHES, PLACEMENTS, Setting, legal, shown

NUM_SETTINGS = int(os.environ.get("SHERD_RANDOM_SETTINGS", "40"))
TOGETHER = 20

CHOICES: dict[str, tuple[object, ...]] = {
    "width": (8, 13, 16),
    "num_blocks": (1, 2, 3),
    "tied": (False, True),
    "frozen": ("", "", "block", "norms"),
    "ignored": (False, True),
    "scalar": (False, True),
    "recompute": ("", "", "kept graph", "reentrant"),
    "front": (FRONTS[0], *FRONTS),
    "built": ("device", "device", "cpu", "meta"),
    "placement": PLACEMENTS,
    "mesh": (*[MESHES[0]] * 4, MESHES[1], *[MESHES[2]] * 2),
    "strategy": ALL_STRATEGIES,
    "reshard": (None, True, False, 2),
    "param_dtype": ("", "", "bfloat16", "float16"),
    "reduce_dtype": ("", "", "float32", "bfloat16"),
    "offload": ("", "", "", "pinned", "pageable"),
    "forward_depth": (0, 1, 2),
    "backward_depth": (0, 1, 2),
    "after_backward": (False, True),
    "transport": ("auto", "coalesced"),
    "part_bytes": (None, 1),
    "reduction": ("", "", "", "ranks", "any bfloat16", "ranks bfloat16", "any int8"),
    "encoded": (False, False, True),
    "own_collectives": (False, True),
    "optimizer": ("sgd", "adamw", "flattened"),
    "micro_batches": (1, 1, 2, 3),
    "accumulation": ("", "no_sync", "accumulate"),
    "max_norm": (None, 0.1),
    "scaled": (False, False, True),
    "between": ("", "", "unsharded", "written", "eval", "state dict"),
    "pauses": tuple(range(1, 1001)),
}


@functools.cache
def drawn(count: int) -> tuple[Setting, ...]:
    """Returns `count` settings, the same ones each time."""
    dice = random.Random(4)
    return tuple(legal(Setting(**{name: dice.choice(of) for name, of in CHOICES.items()})) for _ in range(count))


# By number, so that nothing is drawn where the tests are only collected.
@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, NUM_SETTINGS, TOGETHER))
def test_random_settings_train_as_the_plain_model(first, ranks_with, accelerator):
    settings, failing = drawn(NUM_SETTINGS)[first : first + TOGETHER], {}
    for num_ranks in sorted({each.num_ranks for each in settings}):
        ranks = ranks_with(num_ranks, "single_gather", "single_scatter", "list_gather", "all_reduce")
        alike = [each for each in settings if each.num_ranks == num_ranks]
        failing |= wrong(ranks, alike, accelerator.counts_waits_of_ranks)
    assert not failing, report(failing)


def test_settings_are_legal_and_shown_as_they_are_and_every_choice_is_drawn():
    settings = drawn(max(NUM_SETTINGS, 40))
    for each in settings:
        assert legal(each) == each
        assert eval(shown(each), {"Setting": Setting}) == each
    for name in CHOICES:
        assert len({getattr(each, name) for each in settings}) > 1, name
