"""Does every model train as in one process, on any number of ranks, under every `reshard_after_forward`?"""

import pytest

from tests.support.models import MODELS
from tests.support.training import Recipe, assert_all_same, assert_each_same, tolerance, train_each, train_sharded


@pytest.mark.values
@pytest.mark.parametrize(("num_ranks", "reshard"), [(2, False), (3, True)], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_a_model_trains_on_processes_as_in_one_process(world, model, num_ranks, reshard):
    # In its third step `branching` takes the branch of the first again.
    recipe = Recipe(model, optimizer="adamw", steps=3 if model == "branching" else 2)
    runs = world(num_ranks).run(train_sharded, recipe, reshard_after_forward=reshard)
    assert_all_same(runs, recipe, **tolerance(model, num_ranks))


# All models in one form and then in the next: threads that make no groups live on, and know the operations by then.
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_model_trains_on_threads_as_in_one_process(threads, model, num_ranks):
    recipe = Recipe(model)
    runs = threads(num_ranks).run(train_sharded, recipe)
    assert_all_same(runs, recipe, **tolerance(model, num_ranks))


# Threads that make groups do not live on, so many models train on the same.
@pytest.mark.parametrize("family", sorted({model.__module__ for model in MODELS.values()}))
def test_four_ranks_may_reshard_to_pairs(threads, family):
    recipes = [Recipe(name) for name, model in MODELS.items() if model.__module__ == family]
    assert_each_same(threads(4).run(train_each, recipes, reshard_after_forward=2))


def test_four_processes_may_reshard_to_pairs(world):
    recipes = [Recipe(model) for model in ("mlp", "uneven", "nested", "reentrant_outside", "tied_across")]
    assert_each_same(world(4).run(train_each, recipes, reshard_after_forward=2))


def test_eight_ranks_may_reshard_to_fours(threads):
    recipes = [Recipe(model) for model in ("mlp", "uneven", "tied_across", "shared_and_reentrant")]
    assert_each_same(threads(8).run(train_each, recipes, reshard_after_forward=4))
