"""Several micro-batches make one large batch's step, with and without a reduction after each."""

import pytest
import torch
from torch import nn

from sherd import fully_shard
from tests.support.meshes import mesh_of
from tests.support.models import Wired
from tests.support.ranks.bodies import on_threads
from tests.support.training import Recipe, assert_all_same, assert_each_same, train_each, train_sharded

MODELS = ["mlp", "tied_inside", "frozen", "uneven", "reentrant_outside", "transformer"]


def reduce_each(model, number, is_last):
    pass


def reduce_the_last(model, number, is_last):
    model.set_requires_gradient_sync(is_last)


def reduce_every_second(model, number, is_last):
    """What was not reduced joins the next reduction."""
    model.set_requires_gradient_sync(number % 2 == 1)


def as_fsdp2_programs_do(model, number, is_last):
    """Everything such a loop says: last backward, sync, and no reshard between micro-batches."""
    model.set_is_last_backward(is_last)
    model.set_requires_gradient_sync(is_last)
    model.set_reshard_after_backward(is_last)


@pytest.mark.parametrize("reshard", [True, False], ids="reshard_{}".format)
@pytest.mark.parametrize("announce", [reduce_each, reduce_the_last, reduce_every_second, as_fsdp2_programs_do])
def test_micro_batches_make_the_step_of_one_large_batch(threads, announce, reshard):
    recipes = [Recipe(model, micro_batches=4) for model in MODELS]
    assert_each_same(threads(2).run(train_each, recipes, announce=announce, reshard_after_forward=reshard))


def test_replicas_accumulate_without_sync_too(threads):
    recipes = [Recipe(model, micro_batches=2) for model in ("mlp", "uneven", "branching")]
    assert_each_same(threads(4).run(train_each, recipes, mesh_shape=(2, 2), announce=reduce_the_last))


def test_accumulating_in_float32_beside_clipping_gives_the_same_norms(world):
    recipe = Recipe("mlp", micro_batches=2, max_norm=0.1)
    assert_all_same(world(2).run(train_sharded, recipe, announce=reduce_the_last), recipe)


@on_threads(4, placements=("hsdp", "hfsdp"), set_to_none=(True, False))
def test_one_module_of_a_unit_is_cleared_alone(placements, set_to_none):
    """Two modules of one unit, with gradients that are reduced, summed over the shards only, and not reduced at all."""
    first, second = (nn.Linear(3, 4, bias=False) for _ in range(2))
    model, mesh = Wired(lambda self, x: self.first(x) + self.second(x), first=first, second=second), mesh_of((2, 2))
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
    assert first.weight.grad.full_tensor().equal(torch.full((4, 3), 1.0))
    assert second.weight.grad.full_tensor().equal(torch.full((4, 3), 15.0))
