"""Do several micro-batches make one large batch's step, with and without a reduction after each?"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from sherd import fully_shard
from tests.support.comparing import whole_params
from tests.support.meshes import mesh_of
from tests.support.models import build, shard
from tests.support.training import (
    Recipe,
    Run,
    assert_all_same,
    assert_each_same,
    finish_step,
    make_optimizer,
    steps_sharded,
    train_sharded,
)

MODELS = ["mlp", "tied_inside", "frozen", "uneven", "reentrant_outside", "transformer"]


@pytest.mark.parametrize("model", MODELS)
def test_reducing_after_every_micro_batch_accumulates_shards(world, model):
    recipe = Recipe(model, micro_batches=3)
    assert_all_same(world(2).run(train_sharded, recipe), recipe)


def train_without_sync(recipe, mesh_shape=None, **options):
    model = shard(build(recipe.model), mesh=mesh_of(mesh_shape), **options)
    return steps_sharded(model, recipe, dist.get_rank(), sync_each=False)


@pytest.mark.parametrize("reshard", [True, False], ids="reshard_{}".format)
@pytest.mark.parametrize("model", MODELS)
def test_reducing_after_the_last_micro_batch_only_gives_the_same(world, model, reshard):
    recipe = Recipe(model, micro_batches=3)
    assert_all_same(world(2).run(train_without_sync, recipe, reshard_after_forward=reshard), recipe)


def train_each_without_sync(recipes, mesh_shape):
    return {recipe: train_without_sync(recipe, mesh_shape) for recipe in recipes}


def test_replicas_accumulate_without_sync_too(threads):
    recipes = [Recipe(model, micro_batches=2) for model in ("mlp", "uneven", "branching")]
    assert_each_same(threads(4).run(train_each_without_sync, recipes, mesh_shape=(2, 2)))


def test_accumulating_in_float32_beside_clipping_gives_the_same_norms(world):
    recipe = Recipe("mlp", micro_batches=2, max_norm=0.1)
    assert_all_same(world(2).run(train_without_sync, recipe), recipe)


def train_as_fsdp2_programs_do(recipe):
    """Everything such a loop says: last backward, sync, and no reshard between micro-batches."""
    rank = dist.get_rank()
    model = shard(build(recipe.model))
    optimizer, run = make_optimizer(recipe.optimizer, model), Run()
    for step in range(recipe.steps):
        total = 0.0
        for micro in range(recipe.micro_batches):
            last = micro == recipe.micro_batches - 1
            model.set_is_last_backward(last)
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last)
            loss = model.loss(model(*model.make_inputs(step + 100 * micro, rank))) / recipe.micro_batches
            loss.backward()
            total += loss.item()
        run.losses.append(total)
        finish_step(model, optimizer, recipe, run)
    run.params = whole_params(model)
    return run


@pytest.mark.parametrize("model", ["mlp", "nested", "uneven"])
def test_parameters_may_stay_whole_between_micro_batches(world, model):
    recipe = Recipe(model, micro_batches=3)
    assert_all_same(world(2).run(train_as_fsdp2_programs_do, recipe), recipe)


def train_with_some_micro_batches_reduced(recipe):
    """Of four micro-batches the second and the last reduce."""
    rank = dist.get_rank()
    model = shard(build(recipe.model))
    optimizer, run = make_optimizer(recipe.optimizer, model), Run()
    for step in range(recipe.steps):
        total = 0.0
        for micro in range(recipe.micro_batches):
            model.set_requires_gradient_sync(micro % 2 == 1)
            loss = model.loss(model(*model.make_inputs(step + 100 * micro, rank))) / recipe.micro_batches
            loss.backward()
            total += loss.item()
        run.losses.append(total)
        finish_step(model, optimizer, recipe, run)
    run.params = whole_params(model)
    return run


def test_unreduced_gradients_join_the_next_reduction(world):
    recipe = Recipe("mlp", micro_batches=4)
    assert_all_same(world(2).run(train_with_some_micro_batches_reduced, recipe), recipe)


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4, bias=False)
        self.second = nn.Linear(3, 4, bias=False)

    def forward(self, x):
        return self.first(x) + self.second(x)


def clear_the_first(placements, set_to_none):
    """Two modules of one unit, with gradients that are reduced, summed over the shards only, and not reduced at all."""
    model, mesh = Both(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard([model.first, model.second], mesh=mesh, placements=placements)
    fully_shard(model, mesh=mesh, placements=placements)

    def add(value, over_shards, over_copies):
        model.set_requires_gradient_sync(over_shards)
        model.set_requires_all_reduce(over_copies)
        model(torch.full((1, 3), value)).sum().backward()

    add(8.0, True, True)
    add(4.0, True, False)
    add(2.0, False, False)
    model.first.zero_grad(set_to_none)
    add(1.0, True, True)
    return [model.first.weight.grad.full_tensor(), model.second.weight.grad.full_tensor()]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("placements", ["hsdp", "hfsdp"])
def test_one_module_of_a_unit_is_cleared_alone(threads, placements, set_to_none):
    for first, second in threads(4).run(clear_the_first, placements, set_to_none):
        assert first.equal(torch.full((4, 3), 1.0))
        assert second.equal(torch.full((4, 3), 15.0))
