"""Do stock optimizers, clipping and schedules act on shards as on unsharded parameters?"""

import pytest
import torch
import torch.distributed as dist

from sherd import fully_shard
from tests.support.comparing import assert_named_close, whole_params
from tests.support.models import build, shard
from tests.support.training import (
    EPS,
    OPTIMIZERS,
    Recipe,
    Run,
    assert_all_same,
    finish_step,
    make_optimizer,
    steps_sharded,
    train_sharded,
)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", ["mlp", "uneven", "tiny_parameter", "scalar_parameter"])
def test_an_optimizer_updates_shards_as_it_updates_whole_parameters(world, model, optimizer):
    recipe = Recipe(model, optimizer)
    assert_all_same(world(2).run(train_sharded, recipe), recipe)


CLIPPED = ["mlp", "uneven", "frozen"]
NORMS = [2.0, 1.0, float("inf")]


# A square: each model, norm and form meets each of the others once.
@pytest.mark.parametrize("norm_type", NORMS, ids="norm_{}".format)
@pytest.mark.parametrize("model", CLIPPED)
def test_clipping_sees_the_norm_of_all_shards(world, model, norm_type):
    foreach = (True, False, None)[(CLIPPED.index(model) + NORMS.index(norm_type)) % 3]
    recipe = Recipe(model, "sgd", max_norm=0.05, norm_type=norm_type, clip_foreach=foreach)
    assert_all_same(world(2).run(train_sharded, recipe), recipe)


@pytest.mark.parametrize("model", ["scalar_parameter", "mixed_double", "tied_across", "unused"])
def test_clipping_takes_unusual_parameters(threads, model):
    recipe = Recipe(model, "sgd", max_norm=0.05)
    assert_all_same(threads(3).run(train_sharded, recipe), recipe)


def test_clipping_counts_each_replica_once(threads):
    recipe = Recipe("mlp", "sgd", max_norm=0.05)
    assert_all_same(threads(4).run(train_sharded, recipe, mesh_shape=(2, 2)), recipe)


def train_with_an_earlier_optimizer(recipe):
    """The optimizer is made from the plain parameters, then they are sharded."""
    model, run = build(recipe.model), Run()
    optimizer = make_optimizer(recipe.optimizer, model)
    shard(model)
    rank = dist.get_rank()
    for step in range(recipe.steps):
        loss = model.loss(model(*model.make_inputs(step, rank)))
        loss.backward()
        run.losses.append(loss.item())
        finish_step(model, optimizer, recipe, run)
    run.params = whole_params(model)
    return run


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adamw_foreach", "adamw_fused"])
@pytest.mark.parametrize("model", ["mlp", "tied_inside", "uneven"])
def test_an_optimizer_made_before_sharding_trains_the_shards(world, model, optimizer):
    recipe = Recipe(model, optimizer)
    assert_all_same(world(2).run(train_with_an_earlier_optimizer, recipe), recipe)


def step_with_earlier_state():
    """An optimizer that holds whole states of parameters which are sharded afterwards."""
    model = build("mlp")
    optimizer = make_optimizer("adamw", model)
    model.loss(model(*model.make_inputs(0, 0))).backward()
    optimizer.step()
    optimizer.zero_grad()
    for unit in model.units():
        fully_shard(unit)
    model.loss(model(*model.make_inputs(1, dist.get_rank()))).backward()
    with pytest.raises(RuntimeError, match="optimizer") as raised:
        optimizer.step()
    return str(raised.value)


def test_an_optimizer_that_holds_state_of_whole_parameters_is_never_silent(threads):
    for message in threads(2).run(step_with_earlier_state):
        assert "state" in message


def train_with_toggles(recipe, num_ranks=None):
    """Block 1 is frozen in the odd steps, and a new optimizer takes what is trained."""
    model = build(recipe.model)
    if num_ranks is None:
        shard(model)
    ranks = [dist.get_rank()] if num_ranks is None else range(num_ranks)
    run = Run()
    for step in range(recipe.steps):
        model.blocks[1].requires_grad_(step % 2 == 0)
        optimizer = make_optimizer(recipe.optimizer, model)
        for rank in ranks:
            (model.loss(model(*model.make_inputs(step, rank))) / len(ranks)).backward()
        finish_step(model, optimizer, recipe, run)
    run.params = whole_params(model)
    return run


@pytest.mark.parametrize("model", ["mlp", "checkpoint_outside"])
def test_a_unit_may_be_frozen_and_thawed_between_steps(world, model):
    recipe = Recipe(model, "sgd", steps=3)
    plain = train_with_toggles(recipe, 2)
    for run in world(2).run(train_with_toggles, recipe):
        for found, expected in zip(run.grads, plain.grads, strict=True):
            assert_named_close(found, expected, "gradient", 1e-5, 1e-6)
        assert_named_close(run.params, plain.params, "parameter", 1e-5, 1e-6)


def train_with_schedule(recipe, num_ranks=None):
    """Two parameter groups and a learning rate that changes each step."""
    model = build(recipe.model)
    if num_ranks is None:
        shard(model)
    ranks = [dist.get_rank()] if num_ranks is None else range(num_ranks)
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


def test_parameter_groups_and_schedules_work_on_shards(world):
    recipe = Recipe("transformer", steps=3)
    expected = train_with_schedule(recipe, 2)
    for params in world(2).run(train_with_schedule, recipe):
        assert_named_close(params, expected, "parameter", 1e-5, 1e-6)


def test_evaluation_between_steps_changes_nothing(world):
    recipe = Recipe("mlp", steps=3)
    assert_all_same(world(2).run(train_with_evaluations, recipe, torch.no_grad), recipe)
    assert_all_same(world(2).run(train_with_evaluations, recipe, torch.inference_mode), recipe)


def train_with_evaluations(recipe, quiet):
    model, rank = shard(build(recipe.model)), dist.get_rank()
    run = Run()
    optimizer = make_optimizer(recipe.optimizer, model)
    for step in range(recipe.steps):
        model.train()
        loss = model.loss(model(*model.make_inputs(step, rank)))
        loss.backward()
        run.losses.append(loss.item())
        finish_step(model, optimizer, recipe, run)
        model.eval()
        with quiet():
            first, again = (model(*model.make_inputs(99, rank)) for _ in range(2))
            torch.testing.assert_close(first, again, rtol=0, atol=0)
    run.params = whole_params(model)
    return run


def train_twice(recipe):
    """A second model in the same process, trained in turns with the first, must not disturb it."""
    rank = dist.get_rank()
    other = shard(build("nested", seed=5))
    other.loss(other(*other.make_inputs(0, rank))).backward()
    run = steps_sharded(shard(build(recipe.model)), recipe, rank)
    other.loss(other(*other.make_inputs(0, rank))).backward()
    return run


def test_two_models_train_beside_each_other(world):
    recipe = Recipe("mlp", steps=3)
    assert_all_same(world(2).run(train_twice, recipe), recipe)
