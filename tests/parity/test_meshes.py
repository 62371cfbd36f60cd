"""Does training on a mesh of two axes (HSDP), or on an explicit one, equal training in one process?"""

import pytest
import torch
import torch.distributed as dist

from tests.support.comparing import whole_params
from tests.support.meshes import mesh_of
from tests.support.models import build, shard
from tests.support.training import (
    Recipe,
    assert_all_same,
    assert_each_same,
    steps_sharded,
    train_each,
    train_plain,
    train_sharded,
)


@pytest.mark.parametrize("reshard", [True, False], ids="reshard_{}".format)
def test_two_replicas_of_two_shards_train_as_one_process(world, reshard):
    recipes = [Recipe(model) for model in ("mlp", "tied_across", "frozen", "uneven", "scalar_parameter")]
    assert_each_same(world(4).run(train_each, recipes, mesh_shape=(2, 2), reshard_after_forward=reshard))


@pytest.mark.parametrize("mesh_shape", [(1, 2), (2, 1), (3, 2)], ids=lambda s: "x".join(map(str, s)))
def test_replicas_and_shards_may_be_of_any_number(threads, mesh_shape):
    recipes = [Recipe(model) for model in ("mlp", "uneven", "nested", "branching")]
    num_ranks = mesh_shape[0] * mesh_shape[1]
    assert_each_same(threads(num_ranks).run(train_each, recipes, mesh_shape=mesh_shape))


def test_four_shards_twice_may_reshard_to_pairs_after_forward(threads):
    recipe = Recipe("nested")
    runs = threads(8).run(train_sharded, recipe, mesh_shape=(2, 4), reshard_after_forward=2)
    assert_all_same(runs, recipe)


def test_an_explicit_mesh_of_one_axis_is_the_default(threads):
    recipe = Recipe("transformer")
    assert_all_same(threads(3).run(train_sharded, recipe, mesh_shape=(3,)), recipe)


def train_on_a_larger_mesh(recipe):
    mesh = dist.init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("copies", "stages", "pieces"))
    model = shard(build(recipe.model), mesh=mesh["copies", "pieces"])
    return steps_sharded(model, recipe, dist.get_rank())


def test_a_mesh_may_be_part_of_a_larger_one(threads):
    recipe = Recipe("mlp")
    assert_all_same(threads(4).run(train_on_a_larger_mesh, recipe), recipe)


def replicas_after_unsynced_steps(recipe):
    """Two backwards: reduced among shards only, then among replicas too; no optimizer step between."""
    model = shard(build(recipe.model), mesh=mesh_of((2, 2)))
    rank = dist.get_rank()
    for micro, last in ((0, False), (1, True)):
        model.set_requires_all_reduce(last)
        (model.loss(model(*model.make_inputs(100 * micro, rank))) / 2).backward()
    grads = {name: param.grad.full_tensor() for name, param in model.named_parameters()}
    return grads, whole_params(model)


def test_the_all_reduce_between_replicas_may_wait_for_the_last_micro_batch(world):
    recipe = Recipe("mlp", steps=1, micro_batches=2)
    expected = train_plain(recipe, 4)[0].grads[0]
    for grads, _ in world(4).run(replicas_after_unsynced_steps, recipe):
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-6)
