"""Does every model train as in one process under every placement and every transport, on 1 to 4 ranks?"""

import pytest
from torch.distributed.tensor import Shard

from sherd import Blocks, CommPolicy, Flat, Owned
from tests.support.models import MODELS
from tests.support.suites import part
from tests.support.training import Recipe, assert_all_same, assert_each_same, tolerance, train_each, train_sharded

PLACEMENTS = {"flat": Flat(), "rows": Blocks(1), "blocks": Blocks(3), "whole": Owned()}
TRANSPORTS = ("torch", "gloo", "shared_memory")


def recipe_of(model):
    # SGD's update in bfloat16 rounds differently in a vector's tail, and where tails are depends on the pieces.
    return Recipe(model, optimizer="adamw" if model == "mixed_bfloat" else "momentum", steps=2)


def train_under(placement, recipe, **options):
    """`placement` by its name, which may be "default"."""
    if placement != "default":
        options |= {"placement": PLACEMENTS[placement], "shard_placement_fn": None}
    return train_sharded(recipe, **options)


def train_in_turn(recipes, **options):
    """Recipes by the name of a placement."""
    return {placement: train_under(placement, recipe, **options) for placement, recipe in recipes.items()}


def under_its_placement(model, num_ranks):
    """A model's recipe by placement: another one for the next number of ranks of four, and for the next model."""
    return dict.fromkeys(part(PLACEMENTS, list(MODELS).index(model) + num_ranks, len(PLACEMENTS)), recipe_of(model))


def assert_all_same_in_turn(runs, recipes):
    for placement, recipe in recipes.items():
        assert_all_same([run[placement] for run in runs], recipe, **tolerance(recipe.model, len(runs)))


@pytest.mark.parametrize(("num_ranks", "transport"), [(2, "shared_memory"), (3, "gloo")])
@pytest.mark.parametrize("model", MODELS)
def test_a_model_trains_on_processes_as_in_one_process(world, model, num_ranks, transport):
    recipes = under_its_placement(model, num_ranks)
    assert_all_same_in_turn(world(num_ranks).run(train_in_turn, recipes, comm_policy=CommPolicy(transport)), recipes)


@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize("model", MODELS)
def test_a_model_trains_on_threads_as_in_one_process(threads, model, num_ranks):
    recipes = under_its_placement(model, num_ranks)
    assert_all_same_in_turn(threads(num_ranks).run(train_in_turn, recipes, comm_policy=CommPolicy("auto")), recipes)


DIFFICULT = ("uneven", "tied_across", "mixed_bfloat")


# Every number of ranks meets every transport under every other placement, and under the others with the next one; the
# model is another one from each placement to the next.
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_number_of_ranks_trains_on_every_transport(world, num_ranks, transport):
    first = num_ranks + TRANSPORTS.index(transport)
    models = {
        placement: DIFFICULT[(first + turn) % len(DIFFICULT)] for turn, placement in enumerate(("default", *PLACEMENTS))
    }
    recipes = {placement: recipe_of(models[placement]) for placement in part(models, first, 2)}
    assert_all_same_in_turn(world(num_ranks).run(train_in_turn, recipes, comm_policy=CommPolicy(transport)), recipes)


def train_coalesced(recipe):
    return train_sharded(recipe, comm_policy=CommPolicy("coalesced"))


# Runs travel as on "torch", so only the default differs. `uneven_columns`, cut on other dims, cannot be coalesced.
@pytest.mark.values
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("model", ["uneven", "tied_across", "mixed_bfloat", "uneven_columns"])
def test_coalesced_gathers_train_as_in_one_process(world, model, num_ranks):
    runs = world(num_ranks).run(train_coalesced, recipe_of(model))
    assert_all_same(runs, recipe_of(model), **tolerance(model, num_ranks))


MIXED = {"by_dim": {1: Flat(), 2: Owned()}, "blocks_and_columns": {1: Blocks(2), 2: Shard(1)}}


def train_mixed(recipe, kind):
    by_dim = MIXED[kind]
    return train_sharded(recipe, shard_placement_fn=lambda parameter: by_dim.get(parameter.dim()))


@pytest.mark.parametrize("kind", MIXED)
@pytest.mark.parametrize("model", ["mlp", "nested", "transformer", "frozen", "tied_across"])
def test_placements_may_be_chosen_per_parameter(world, model, kind):
    recipe = Recipe(model)
    assert_all_same(world(3).run(train_mixed, recipe, kind), recipe)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_replicas_train_under_every_placement(world, placement):
    runs = world(4).run(
        train_each,
        [recipe_of(model) for model in ("mlp", "nested", "transformer")],
        mesh_shape=(2, 2),
        placement=PLACEMENTS[placement],
        shard_placement_fn=None,
        reshard_after_forward=True,
    )
    assert_each_same(runs)


KEPT = (True, False, 2)


# Each pair of a model, a placement and what is kept: the third of each two is another from pair to pair.
@pytest.mark.parametrize("reshard", KEPT, ids="reshard_{}".format)
def test_whole_parameters_may_be_kept_or_shrunk_under_every_placement(threads, reshard):
    first = KEPT.index(reshard)
    models = ("mlp", "uneven", "reentrant_outside")
    recipes = {placement: recipe_of(models[(first + turn) % len(models)]) for turn, placement in enumerate(PLACEMENTS)}
    assert_all_same_in_turn(threads(4).run(train_in_turn, recipes, reshard_after_forward=reshard), recipes)
