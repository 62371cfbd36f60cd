"""Does every model train as in one process, on any number of ranks, under every `reshard_after_forward`?"""

import pytest

from tests.models import MODELS
from tests.parity.training import Recipe, assert_all_same, tolerance, train_sharded


@pytest.mark.parametrize(("num_ranks", "reshard"), [(2, None), (2, False), (3, True)], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_a_model_trains_on_processes_as_in_one_process(world, model, num_ranks, reshard):
    recipe = Recipe(model, optimizer="adamw", steps=3)
    runs = world(num_ranks).run(train_sharded, recipe, reshard_after_forward=reshard)
    assert_all_same(runs, recipe, **tolerance(model, num_ranks))


# All models in one form and then in the next: threads that make no groups live on, and know the operations by then.
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("num_ranks", "reshard"), [(1, None), (4, True), (4, 2)], ids=str)
def test_a_model_trains_on_threads_as_in_one_process(threads, model, num_ranks, reshard):
    recipe = Recipe(model, optimizer="momentum")
    runs = threads(num_ranks).run(train_sharded, recipe, reshard_after_forward=reshard)
    assert_all_same(runs, recipe, **tolerance(model, num_ranks))


@pytest.mark.parametrize("model", ["mlp", "uneven", "nested", "reentrant_outside", "tied_across"])
def test_four_processes_may_reshard_to_pairs(world, model):
    recipe = Recipe(model)
    assert_all_same(world(4).run(train_sharded, recipe, reshard_after_forward=2), recipe)


@pytest.mark.parametrize("model", ["mlp", "uneven", "tied_across", "shared_and_reentrant"])
def test_eight_ranks_may_reshard_to_fours(threads, model):
    recipe = Recipe(model, optimizer="momentum")
    assert_all_same(threads(8).run(train_sharded, recipe, reshard_after_forward=4), recipe)
