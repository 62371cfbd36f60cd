"""Does every model train as in one process under every placement and every transport, on 1 to 4 ranks?"""

import pytest
from torch.distributed.tensor import Shard

from sherd import Blocks, CommPolicy, Flat, Whole
from tests.models import MODELS
from tests.parity.training import Recipe, assert_all_same, tolerance, train_sharded

PLACEMENTS = {"flat": Flat(), "rows": Blocks(1), "blocks": Blocks(3), "whole": Whole()}
TRANSPORTS = ("torch", "gloo", "shared_memory")


def recipe_of(model):
    # SGD's update in bfloat16 rounds differently in a vector's tail, and where tails are depends on the pieces.
    return Recipe(model, optimizer="adamw" if model == "mixed_bfloat" else "momentum", steps=2)


def train_under_every_placement(recipe, transport):
    return {
        name: train_sharded(recipe, placement=placement, shard_placement_fn=None, comm_policy=CommPolicy(transport))
        for name, placement in PLACEMENTS.items()
    }


@pytest.mark.parametrize(("num_ranks", "transport"), [(2, "shared_memory"), (3, "gloo")])
@pytest.mark.parametrize("model", MODELS)
def test_a_model_trains_on_processes_as_in_one_process(world, model, num_ranks, transport):
    runs = world(num_ranks).run(train_under_every_placement, recipe_of(model), transport)
    for placement in PLACEMENTS:
        assert_all_same([run[placement] for run in runs], recipe_of(model), **tolerance(model, num_ranks))


@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize("model", MODELS)
def test_a_model_trains_on_threads_as_in_one_process(threads, model, num_ranks):
    runs = threads(num_ranks).run(train_under_every_placement, recipe_of(model), "auto")
    for placement in PLACEMENTS:
        assert_all_same([run[placement] for run in runs], recipe_of(model), **tolerance(model, num_ranks))


def train_under_default_and_every_placement(recipe, transport):
    by_default = train_sharded(recipe, comm_policy=CommPolicy(transport))
    return {"default": by_default, **train_under_every_placement(recipe, transport)}


# With those above, every number of ranks meets every transport.
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("model", ["uneven", "tied_across", "mixed_bfloat"])
def test_every_number_of_ranks_trains_on_every_transport(world, model, num_ranks, transport):
    runs = world(num_ranks).run(train_under_default_and_every_placement, recipe_of(model), transport)
    for placement in ("default", *PLACEMENTS):
        assert_all_same([run[placement] for run in runs], recipe_of(model), **tolerance(model, num_ranks))


def train_coalesced(recipe):
    return train_sharded(recipe, comm_policy=CommPolicy("coalesced"))


# Runs travel as on "torch", so only the default differs. `uneven_columns`, cut on other dims, cannot be coalesced.
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("model", ["uneven", "tied_across", "mixed_bfloat", "uneven_columns"])
def test_coalesced_gathers_train_as_in_one_process(world, model, num_ranks):
    runs = world(num_ranks).run(train_coalesced, recipe_of(model))
    assert_all_same(runs, recipe_of(model), **tolerance(model, num_ranks))


MIXED = {"by_dim": {1: Flat(), 2: Whole()}, "blocks_and_columns": {1: Blocks(2), 2: Shard(1)}}


def train_mixed(recipe, kind):
    by_dim = MIXED[kind]
    return train_sharded(recipe, shard_placement_fn=lambda parameter: by_dim.get(parameter.dim()))


@pytest.mark.parametrize("kind", MIXED)
@pytest.mark.parametrize("model", ["mlp", "nested", "transformer", "frozen", "tied_across"])
def test_placements_may_be_chosen_per_parameter(world, model, kind):
    recipe = Recipe(model, steps=3)
    assert_all_same(world(3).run(train_mixed, recipe, kind), recipe)


def train_replicated(recipe, placement, reshard):
    return train_sharded(
        recipe,
        mesh_shape=(2, 2),
        placement=PLACEMENTS[placement],
        shard_placement_fn=None,
        reshard_after_forward=reshard,
    )


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("model", ["mlp", "nested", "transformer"])
def test_replicas_train_under_every_placement(world, model, placement):
    recipe = recipe_of(model)
    assert_all_same(world(4).run(train_replicated, recipe, placement, True), recipe)


KEPT = (True, False, 2)


# Each pair of a model, a placement and what is kept: the third of each two is another from pair to pair.
@pytest.mark.parametrize("turn", range(len(KEPT)))
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_whole_parameters_may_be_kept_or_shrunk_under_every_placement(threads, placement, turn):
    model = ("mlp", "uneven", "reentrant_outside")[turn]
    reshard = KEPT[(turn + list(PLACEMENTS).index(placement)) % len(KEPT)]
    recipe = recipe_of(model)
    runs = threads(4).run(
        train_sharded,
        recipe,
        placement=PLACEMENTS[placement],
        shard_placement_fn=None,
        reshard_after_forward=reshard,
    )
    assert_all_same(runs, recipe)
