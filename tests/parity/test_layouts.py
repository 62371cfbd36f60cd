"""Every model trains and shows its state as in one process, under every placement and transport, on 1 to 8 ranks."""

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from sherd import Blocks, CommPolicy, Flat, FSDPModule, Owned
from tests.parity.cases import assert_each_trains, each
from tests.support.comparing import assert_named_close, assert_same, plain_name, whole_values
from tests.support.models import MODELS, build
from tests.support.sharding import sharded
from tests.support.suites import part
from tests.support.training import Recipe, assert_all_same, assert_each_same, steps_sharded, tolerance, train_each

PLACEMENTS = {"default": None, "flat": Flat(), "rows": Blocks(1), "blocks": Blocks(3), "whole": Owned()}
TRANSPORTS = ("torch", "gloo", "shared_memory")


def recipe_of(model):
    # SGD's update in bfloat16 rounds differently in a vector's tail, and where tails are depends on the pieces.
    optimizer = "adamw" if model == "mixed_bfloat" else "momentum"
    # In its third step `branching` takes the branch of the first again.
    return Recipe(model, optimizer, steps=3 if model == "branching" else 2)


def case(model, placement, **options):
    if placement != "default":
        options |= {"placement": PLACEMENTS[placement], "shard_placement_fn": None}
    return recipe_of(model), options


def train_and_look(recipe, **options):
    """On a rank: the run, and the whole state before and after it."""
    model = build(recipe.model)
    classes = [type(module) for module in model.modules()]
    sharded(model, **options)
    units = {id(m) for unit in model.units() for m in (unit if isinstance(unit, list) else [unit])}
    for module, cls in zip(model.modules(), classes, strict=True):
        assert isinstance(module, cls)
        assert isinstance(module, FSDPModule) == (id(module) in units)
    assert all(isinstance(param, DTensor) and isinstance(param, nn.Parameter) for param in model.parameters())
    before = whole_values(model.state_dict())
    run = steps_sharded(model, recipe, dist.get_rank())
    after = model.state_dict()
    kinds = {key: isinstance(value, DTensor) for key, value in after.items()}
    return run, before, whole_values(after), kinds


def assert_every_model_trains(ranks, turn, always=(), **options):
    """Each model under one placement, the next model under the next one, and those of `always`; in a thorough run under
    all of them."""
    cases = {
        (model, placement): case(model, placement, **options)
        for at, model in enumerate(MODELS)
        for placement in dict.fromkeys([*part(PLACEMENTS, at + turn, len(PLACEMENTS)), *always])
    }
    found = ranks.run(each, train_and_look, cases)
    for name, (recipe, _) in cases.items():
        plain = build(recipe.model)
        expected, buffers = plain.state_dict(), dict(plain.named_buffers())
        of_ranks = [of_rank[name] for of_rank in found]
        assert_all_same([run for run, *_ in of_ranks], recipe, **tolerance(recipe.model, len(found)))
        for run, before, after, kinds in of_ranks:
            assert_named_close(before, expected, f"{name}: state", 0, 0)
            assert kinds == {key: key not in buffers for key in expected}, name
            for param, value in run.params.items():
                assert_same(after[plain_name(param)], value, f"{name}: state of {param}")


@pytest.mark.front("More models run unchanged")
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_model_trains_and_shows_its_state_as_in_one_process(threads, num_ranks):
    assert_every_model_trains(threads(num_ranks), num_ranks, comm_policy=CommPolicy("auto"))


# In a quick run threads train every model, and processes the difficult ones.
@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "transport", "reshard"), [(2, "shared_memory", False), (3, "gloo", True)])
def test_every_model_trains_on_processes_as_in_one_process(world, num_ranks, transport, reshard):
    ranks, policy = world(num_ranks), CommPolicy(transport)
    options = {"comm_policy": policy, "reshard_after_forward": reshard}
    assert_every_model_trains(ranks, num_ranks + 3, always=["default"], **options)


# Threads that make groups do not live on, so many models train on the same.
@pytest.mark.parametrize("family", sorted({model.__module__ for model in MODELS.values()}))
def test_four_ranks_may_reshard_to_pairs(threads, family):
    recipes = [Recipe(name) for name, model in MODELS.items() if model.__module__ == family]
    assert_each_same(threads(4).run(train_each, recipes, reshard_after_forward=2))


@pytest.mark.slow
def test_four_processes_may_reshard_to_pairs(world):
    recipes = [Recipe(model) for model in ("mlp", "uneven", "nested", "reentrant_outside", "tied_across")]
    assert_each_same(world(4).run(train_each, recipes, reshard_after_forward=2))


@pytest.mark.parametrize("models", [("mlp", "uneven"), ("tied_across", "shared_and_reentrant")])
def test_eight_ranks_may_reshard_to_fours(threads, models):
    recipes = [Recipe(model) for model in models]
    assert_each_same(threads(8).run(train_each, recipes, reshard_after_forward=4))


DIFFICULT = ("uneven", "tied_across", "mixed_bfloat")


# Every number of ranks meets every transport under every other placement, and under the others with the next one; the
# model is another one from each placement to the next.
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_number_of_ranks_trains_on_every_transport(world, num_ranks, transport):
    first = num_ranks + TRANSPORTS.index(transport)
    models = {placement: DIFFICULT[(first + turn) % len(DIFFICULT)] for turn, placement in enumerate(PLACEMENTS)}
    policy = CommPolicy(transport)
    cases = {placement: case(models[placement], placement, comm_policy=policy) for placement in part(models, first, 2)}
    assert_each_trains(world(num_ranks), cases)


# Runs travel as on "torch", so only the default differs. `uneven_columns`, cut on other dims, cannot be coalesced.
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_coalesced_gathers_train_as_in_one_process(world, num_ranks):
    models, policy = (*DIFFICULT, "uneven_columns"), CommPolicy("coalesced")
    cases = {model: case(model, "default", comm_policy=policy) for model in part(models, num_ranks, 2)}
    assert_each_trains(world(num_ranks), cases)


MIXED = {"by_dim": {1: Flat(), 2: Owned()}, "blocks_and_columns": {1: Blocks(2), 2: Shard(1)}}


@pytest.mark.parametrize("kind", MIXED)
def test_placements_may_be_chosen_per_parameter(threads, kind):
    models = ("mlp", "nested", "transformer", "frozen", "tied_across")
    options = {"shard_placement_fn": lambda parameter: MIXED[kind].get(parameter.dim())}
    assert_each_trains(threads(3), {model: (Recipe(model), options) for model in models})


REPLICATED = ("mlp", "nested", "transformer")


@pytest.mark.parametrize("placement", [placement for placement in PLACEMENTS if placement != "default"])
def test_replicas_train_under_every_placement(world, placement):
    options = {"mesh_shape": (2, 2), "reshard_after_forward": True}
    assert_each_trains(world(4), {model: case(model, placement, **options) for model in REPLICATED})


KEPT = (True, False, 2)


# Each pair of a model, a placement and what is kept: the third of each two is another from pair to pair.
@pytest.mark.front("Fewer copies")
@pytest.mark.parametrize("reshard", KEPT, ids="reshard_{}".format)
def test_whole_parameters_may_be_kept_or_shrunk_under_every_placement(threads, reshard):
    models = ("mlp", "uneven", "reentrant_outside")
    cases = {
        placement: case(models[(KEPT.index(reshard) + turn) % len(models)], placement, reshard_after_forward=reshard)
        for turn, placement in enumerate(PLACEMENTS)
    }
    assert_each_trains(threads(4), cases)
