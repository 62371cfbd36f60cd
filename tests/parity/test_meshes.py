"""Training on a mesh of two axes (HSDP), or on an explicit one, equals training in one process."""

import math

import pytest
import torch.distributed as dist

from tests.support.comparing import assert_named_close, whole_grads
from tests.support.meshes import mesh_of
from tests.support.models import build
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.sharding import sharded
from tests.support.training import (
    Recipe,
    assert_all_same,
    assert_each_same,
    assert_same_run,
    steps_sharded,
    train_each,
    train_plain,
    train_sharded,
)


@pytest.mark.parametrize("reshard", [True, False], ids="reshard_{}".format)
@pytest.mark.parametrize("models", [("mlp", "tied_across"), ("frozen", "uneven", "scalar_parameter")])
def test_two_replicas_of_two_shards_train_as_one_process(world, models, reshard):
    recipes = [Recipe(model) for model in models]
    assert_each_same(world(4).run(train_each, recipes, mesh_shape=(2, 2), reshard_after_forward=reshard))


@pytest.mark.parametrize("mesh_shape", [(1, 2), (2, 1), (3, 2)], ids=lambda s: "x".join(map(str, s)))
def test_replicas_and_shards_may_be_of_any_number(threads, mesh_shape):
    recipes = [Recipe(model) for model in ("mlp", "uneven", "nested", "branching")]
    assert_each_same(threads(math.prod(mesh_shape)).run(train_each, recipes, mesh_shape=mesh_shape))


@pytest.mark.parametrize(
    ("model", "mesh_shape", "reshard"),
    [("nested", (2, 4), 2), ("transformer", (3,), True)],
    ids=["four shards twice, in pairs after forward", "one explicit axis"],
)
def test_a_mesh_may_be_wide_or_of_one_axis(threads, model, mesh_shape, reshard):
    runs = threads(math.prod(mesh_shape)).run(
        train_sharded, Recipe(model), mesh_shape=mesh_shape, reshard_after_forward=reshard
    )
    assert_all_same(runs, Recipe(model))


@on_threads(4)
def test_a_mesh_may_be_part_of_a_larger_one():
    recipe, rank = Recipe("mlp"), dist.get_rank()
    mesh = dist.init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("copies", "stages", "pieces"))
    model = sharded(build("mlp"), mesh=mesh["copies", "pieces"])
    assert_same_run(steps_sharded(model, recipe, rank), train_plain(recipe, 4)[rank])


@on_processes(4)
def test_the_all_reduce_between_replicas_may_wait_for_the_last_micro_batch():
    """Two backwards: reduced among shards only, then among replicas too; no optimizer step between."""
    model = sharded(build("mlp"), mesh=mesh_of((2, 2)))
    rank = dist.get_rank()
    for micro, last in ((0, False), (1, True)):
        model.set_requires_all_reduce(last)
        (model.loss(model(*model.make_inputs(100 * micro, rank))) / 2).backward()
    expected = train_plain(Recipe("mlp", steps=1, micro_batches=2), 4)[0].grads[0]
    assert_named_close(whole_grads(model), expected, "gradient", 1e-5, 1e-6)
