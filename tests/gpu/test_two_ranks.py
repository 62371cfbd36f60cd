"""Do two ranks train as the plain model? Two processes: on CUDA they share the first GPU, over gloo where gloo takes
its tensors; on the simulated device they have collectives of its own."""

from __future__ import annotations

import pytest

import sherd
from tests.gpu.devices import here
from tests.gpu.training import RECIPES, Run, assert_same, train_here, train_plain

SINGLE_CALLS = ("single_gather", "single_scatter", "all_reduce")
LIST_CALLS = ("list_gather", "all_reduce")


def train_on_rank(recipe, how, options) -> tuple[Run, dict[str, int]]:
    """On a rank: what came out, and which accesses nothing orders."""
    accelerator = here()
    accelerator.races()
    return train_here(recipe, how, accelerator.device, options), accelerator.races()


def assert_ranks_train_plainly(ranks, recipe, how, **options):
    expected = train_plain(recipe, here().device, num_ranks=2)
    expected.params = {name: each.cpu() for name, each in expected.params.items()}
    for found, races in ranks.run(train_on_rank, recipe, how, options, timeout=120):
        assert_same(found, expected, recipe, own_losses=False)
        assert not races


@pytest.mark.values
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("placement", [None, sherd.Flat()], ids=["Shard(0)", "Flat"])
def test_torchs_calls_carry_it(placement, recipe, ranks_with):
    assert_ranks_train_plainly(ranks_with(2, *SINGLE_CALLS), RECIPES[recipe], "torch's calls", placement=placement)


@pytest.mark.values
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("placement", [None, sherd.Flat()], ids=["Shard(0)", "Flat"])
def test_a_users_own_calls_carry_it(placement, recipe, ranks_with):
    assert_ranks_train_plainly(ranks_with(2, *LIST_CALLS), RECIPES[recipe], "own collectives", placement=placement)


@pytest.mark.parametrize("recipe", ["float32", "unsynced", "clipped"])
@pytest.mark.parametrize("placement", [None, sherd.Flat()], ids=["Shard(0)", "Flat"])
def test_offloaded_shards_are_carried_too(placement, recipe, ranks_with):
    assert_ranks_train_plainly(
        ranks_with(2, *LIST_CALLS), RECIPES[recipe], "own collectives", placement=placement, offload=True
    )


@pytest.mark.values
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("use_orig_params", [True, False], ids=["original", "flat"])
def test_the_wrapper_carries_it(use_orig_params, recipe, ranks_with):
    assert_ranks_train_plainly(
        ranks_with(2, *SINGLE_CALLS), RECIPES[recipe], "wrapper", use_orig_params=use_orig_params
    )
