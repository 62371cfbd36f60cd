"""Stock optimizers, clipping and schedules act on shards as on unsharded parameters."""

import pytest
import torch
import torch.distributed as dist

from tests.parity.cases import assert_both_sides_agree, assert_each_trains
from tests.support.comparing import whole_params
from tests.support.models import build
from tests.support.sharding import sharded
from tests.support.training import (
    EPS,
    OPTIMIZERS,
    Recipe,
    Run,
    finish_step,
    make_optimizer,
    steps_sharded,
    train_sharded,
)

SHAPES = ["mlp", "uneven", "tiny_parameter", "scalar_parameter"]


@pytest.mark.parametrize("turn", range(len(SHAPES)))
def test_an_optimizer_updates_shards_as_it_updates_whole_parameters(threads, turn):
    recipes = [Recipe(SHAPES[(at + turn) % len(SHAPES)], optimizer) for at, optimizer in enumerate(OPTIMIZERS)]
    assert_each_trains(threads(2), {recipe.optimizer: (recipe, {}) for recipe in recipes})


NORMS = [2.0, 1.0, float("inf")]


# A square: each model, norm and form meets each of the others once.
@pytest.mark.parametrize("norm_type", NORMS, ids="norm_{}".format)
def test_clipping_sees_the_norm_of_all_shards(world, norm_type):
    cases = {}
    for at, model in enumerate(("mlp", "uneven", "frozen")):
        foreach = (True, False, None)[(at + NORMS.index(norm_type)) % 3]
        cases[model] = Recipe(model, "sgd", max_norm=0.05, norm_type=norm_type, clip_foreach=foreach), {}
    assert_each_trains(world(2), cases)


def test_clipping_takes_unusual_parameters_and_counts_each_replica_once(threads):
    models = ("scalar_parameter", "mixed_double", "tied_across", "unused")
    assert_each_trains(threads(3), {model: (Recipe(model, "sgd", max_norm=0.05), {}) for model in models})
    assert_each_trains(threads(4), {"replicas": (Recipe("mlp", "sgd", max_norm=0.05), {"mesh_shape": (2, 2)})})


def train_with_an_earlier_optimizer(recipe):
    """The optimizer is made from the plain parameters, then they are sharded."""
    model = build(recipe.model)
    optimizer = make_optimizer(recipe.optimizer, model)
    return steps_sharded(sharded(model), recipe, dist.get_rank(), optimizer=optimizer)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adamw_foreach", "adamw_fused"])
def test_an_optimizer_made_before_sharding_trains_the_shards(threads, optimizer):
    cases = {model: (Recipe(model, optimizer), {}) for model in ("mlp", "tied_inside", "uneven")}
    assert_each_trains(threads(2), cases, train_with_an_earlier_optimizer)


def train_with_toggles(model, recipe, ranks):
    """Block 1 is frozen in the odd steps, and a new optimizer takes what is trained."""
    run = Run()
    for step in range(recipe.steps):
        model.blocks[1].requires_grad_(step % 2 == 0)
        optimizer = make_optimizer(recipe.optimizer, model)
        for rank in ranks:
            (model.loss(model(*model.make_inputs(step, rank))) / len(ranks)).backward()
        finish_step(model, optimizer, recipe, run)
    return run.grads, whole_params(model)


@pytest.mark.parametrize("model", ["mlp", "checkpoint_outside"])
def test_a_unit_may_be_frozen_and_thawed_between_steps(threads, model):
    assert_both_sides_agree(threads(2), train_with_toggles, Recipe(model, "sgd", steps=3))


def train_with_schedule(model, recipe, ranks):
    """Two parameter groups and a learning rate that changes each step."""
    vectors = [param for param in model.parameters() if param.ndim < 2]
    matrices = [param for param in model.parameters() if param.ndim >= 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 0.02}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, eps=EPS)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.steps)
    for step in range(recipe.steps):
        for rank in ranks:
            (model.loss(model(*model.make_inputs(step, rank))) / len(ranks)).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return whole_params(model)


def test_parameter_groups_and_schedules_work_on_shards(threads):
    assert_both_sides_agree(threads(2), train_with_schedule, Recipe("transformer", steps=3))


def train_with_evaluations(recipe, quiet):
    """Before each step, and so after all but the last."""

    def evaluate(model, *_):
        model.eval()
        with quiet():
            first, again = (model(*model.make_inputs(99, dist.get_rank())) for _ in range(2))
            torch.testing.assert_close(first, again, rtol=0, atol=0)
        model.train()

    return train_sharded(recipe, announce=evaluate)


def train_twice(recipe):
    """A second model in the same process, trained in turns with the first, must not disturb it."""
    other = sharded(build("nested", seed=5))
    other.loss(other(*other.make_inputs(0, dist.get_rank()))).backward()
    run = steps_sharded(sharded(build(recipe.model)), recipe, dist.get_rank())
    other.loss(other(*other.make_inputs(0, dist.get_rank()))).backward()
    return run


def test_evaluations_and_another_model_between_steps_change_nothing(world):
    recipe = Recipe("mlp", steps=3)
    quiets = {quiet.__name__: (recipe, {"quiet": quiet}) for quiet in (torch.no_grad, torch.inference_mode)}
    assert_each_trains(world(2), quiets, train_with_evaluations)
    assert_each_trains(world(2), {"another": (recipe, {})}, train_twice)
