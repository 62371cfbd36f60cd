"""The methods of a sharded module change when and how things move, and nothing else."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from sherd import UnshardHandle
from tests.parity.cases import assert_each_trains
from tests.support.comparing import assert_named_close, whole_grads
from tests.support.meshes import mesh_of
from tests.support.models import build
from tests.support.ranks.bodies import on_processes
from tests.support.sharding import sharded
from tests.support.training import Recipe, steps_sharded, train_plain


def prefetch_in_order(model):
    *blocks, _ = model.units()
    for one, then in pairwise(blocks):
        one.set_modules_to_forward_prefetch([then])
        then.set_modules_to_backward_prefetch([one])


def prefetch_two_ahead(model):
    *blocks, _ = model.units()
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 3])
        block.set_modules_to_backward_prefetch(blocks[max(0, i - 2) : i][::-1])


def prefetch_what_is_not_next(model):
    first, *_, last, _ = model.units()
    first.set_modules_to_forward_prefetch([last])
    last.set_modules_to_backward_prefetch([first])


def prefetch_nothing(model):
    for unit in model.units():
        unit.set_modules_to_forward_prefetch([])
        unit.set_modules_to_backward_prefetch([])


def keep_the_root_only(model):
    model.set_reshard_after_forward(True)
    model.set_reshard_after_forward(False, recurse=False)


SETTINGS = {
    "prefetch in order": prefetch_in_order,
    "prefetch two ahead": prefetch_two_ahead,
    "prefetch what is not next": prefetch_what_is_not_next,
    "prefetch nothing": prefetch_nothing,
    "keep after forward": lambda model: model.set_reshard_after_forward(False),
    "keep the root only": keep_the_root_only,
    "sum first": lambda model: model.set_force_sum_reduction_for_comms(True),
    "reduce absent gradients": lambda model: model.set_reduce_scatter_unused_params(True),
    "few reduction buffers": lambda model: model.set_reduce_scatter_max_input_buffers(1),
}
SET_MODELS = ["mlp", "checkpoint_outside", "uneven"]


# Each setting meets each model at one of the turns.
@pytest.mark.parametrize("turn", range(len(SET_MODELS)))
def test_a_setting_changes_no_number(threads, turn):
    cases = {
        name: (Recipe(SET_MODELS[(at + turn) % len(SET_MODELS)]), {"prepare": setting})
        for at, (name, setting) in enumerate(SETTINGS.items())
    }
    assert_each_trains(threads(2), cases)


def unshard_by_hand(recipe, async_op):
    """Each block is gathered by hand before the step, and once more looked at and put back."""
    model = sharded(build(recipe.model))
    plain = {name: param.detach() for name, param in build(recipe.model).named_parameters()}
    for _ in range(2):
        for index, block in enumerate(model.blocks):
            handle = block.unshard(async_op=async_op)
            if async_op:
                assert isinstance(handle, UnshardHandle)
                handle.wait()
            else:
                assert handle is None
            assert not isinstance(block.up.weight, DTensor)
            torch.testing.assert_close(block.up.weight.detach(), plain[f"blocks.{index}.up.weight"])
            block.reshard()
            assert isinstance(block.up.weight, DTensor)
    for block in model.blocks:
        block.unshard(async_op=async_op)
    return steps_sharded(model, recipe, dist.get_rank())


def test_units_may_be_gathered_and_freed_by_hand(world):
    cases = {is_async: (Recipe("mlp"), {"async_op": is_async}) for is_async in (False, True)}
    assert_each_trains(world(2), cases, unshard_by_hand)


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=["shards", "replicas"])
@on_processes(4)
def test_a_divide_factor_replaces_the_number_of_ranks(mesh_shape):
    mean = train_plain(Recipe("mlp", steps=1), 4)[0].grads[0]
    for factor in (1.0, 3.0, 7.5):
        model = sharded(build("mlp"), mesh=mesh_of(mesh_shape))
        for unit in model.units():
            unit.set_gradient_divide_factor(factor)
        model.loss(model(*model.make_inputs(0, dist.get_rank()))).backward()
        expected = {name: grad * 4 / factor for name, grad in mean.items()}
        assert_named_close(whole_grads(model), expected, f"divided by {factor}: gradient", 1e-5, 1e-6)


def pairs_then_nothing_then_pairs(model):
    """The choice may change while the model is at rest."""
    for choice in (2, False, 2):
        model.set_reshard_after_forward(choice)
        model.loss(model(*model.make_inputs(0, dist.get_rank()))).backward()
        model.zero_grad()


def test_a_number_of_ranks_to_reshard_to_may_be_set_later(threads):
    for setting in (lambda model: model.set_reshard_after_forward(2), pairs_then_nothing_then_pairs):
        options = {"prepare": setting, "reshard_after_forward": False}
        assert_each_trains(threads(4), {model: (Recipe(model), options) for model in SET_MODELS})
