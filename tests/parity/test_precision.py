"""Low precision, autocast, loss scaling and offload compute what their plain counterparts compute."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist

from sherd import CPUOffloadPolicy, MixedPrecisionPolicy
from tests.parity.cases import assert_both_sides_agree, assert_each_trains, on_one_side
from tests.support.comparing import assert_named_close, whole_grads, whole_params
from tests.support.models import build
from tests.support.ranks.bodies import on_threads
from tests.support.sharding import sharded
from tests.support.training import Recipe, Run, assert_same_run, finish_step, make_optimizer, train_sharded


def train_plain_bfloat16(recipe, num_ranks):
    """float32 masters; forward and backward on a bfloat16 copy; gradients averaged in float32."""
    master = build(recipe.model)
    optimizer, run = make_optimizer(recipe.optimizer, master), Run()
    losses = []
    for step in range(recipe.steps):
        for rank in range(num_ranks):
            low = copy.deepcopy(master).to(torch.bfloat16)
            low.zero_grad()
            inputs = [t.bfloat16() if t.is_floating_point() else t for t in master.make_inputs(step, rank)]
            loss = low.loss(low(*inputs))
            loss.backward()
            losses.append(loss.item())
            for param, low_param in zip(master.parameters(), low.parameters(), strict=True):
                share = low_param.grad.float() / num_ranks
                param.grad = share if param.grad is None else param.grad + share
        finish_step(master, optimizer, recipe, run)
    run.params = whole_params(master)
    return [Run(losses[rank::num_ranks], run.grads, [], run.params) for rank in range(num_ranks)]


LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        *itertools.product(("mlp", "whole_in_one_unit", "tied_inside"), ({}, {"reshard_after_forward": False})),
        ("mlp", {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    ],
)
def test_bfloat16_compute_with_float32_reduction_is_a_cast_model_with_float32_masters(threads, model, options):
    runs = threads(2).run(train_sharded, Recipe(model), mp_policy=LOW, **options)
    # Nothing is left to chance: casts happen at the same places, sums run in float32.
    for run, plain in zip(runs, train_plain_bfloat16(Recipe(model), 2), strict=True):
        assert_same_run(run, plain)


@on_threads(2)
def test_a_policy_says_which_dtype_each_tensor_has():
    policy, seen = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32), {}
    model = sharded(build("whole_in_one_unit"), mp_policy=policy)
    block = model.blocks[0]
    block.up.register_forward_hook(lambda module, _, __: seen.update(weight=module.weight.dtype))
    block.register_forward_pre_hook(lambda _, args: seen.update(input=args[0].dtype))
    output = model(*model.make_inputs(0, dist.get_rank()))
    model.loss(output).backward()
    assert block.up.weight.dtype == block.up.weight.grad.dtype == output.dtype == torch.float32
    assert seen == {"weight": torch.bfloat16, "input": torch.bfloat16}


def train_under_autocast(model, recipe, ranks):
    optimizer, run = make_optimizer(recipe.optimizer, model), Run()
    for step in range(recipe.steps):
        for rank in ranks:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model.loss(model(*model.make_inputs(step, rank)))
            (loss / len(ranks)).backward()
        finish_step(model, optimizer, recipe, run)
    return run.grads, whole_params(model)


@pytest.mark.parametrize("model", ["mlp", "reentrant_inside", "checkpoint_outside"])
def test_autocast_computes_the_same_around_a_sharded_model(world, model):
    assert_both_sides_agree(world(2), train_under_autocast, Recipe(model))


def train_with_an_overflow(model, recipe, ranks):
    """Five scaled steps; in the third one rank's loss is infinite. Scales, parameters."""
    optimizer = make_optimizer(recipe.optimizer, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    scales = []
    for step in range(recipe.steps):
        for rank in ranks:
            loss = model.loss(model(*model.make_inputs(step, rank)))
            if step == 2 and rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss / len(ranks)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, whole_params(model)


@pytest.mark.parametrize("model", ["mlp", "uneven"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(world, model):
    recipe = Recipe(model, steps=5)
    scales, _ = on_one_side(train_with_an_overflow, recipe, 2)
    assert scales[2] < scales[1], "the plain run must have skipped its third step"
    assert_both_sides_agree(world(2), train_with_an_overflow, recipe)


@pytest.mark.parametrize("reshard", [True, False], ids="reshard_{}".format)
def test_offloaded_shards_train_as_in_one_process(threads, reshard):
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False), "reshard_after_forward": reshard}
    models = ("mlp", "uneven", "frozen", "tied_inside", "scalar_parameter")
    assert_each_trains(threads(2), {model: (Recipe(model, max_norm=1.0), options) for model in models})


@on_threads(2)
def test_two_low_precision_backwards_add_up_in_the_parameters_dtype():
    """A frozen-in-bfloat16 policy must hand out gradients in the parameter's dtype, once per backward."""
    model = sharded(build("mlp"), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    for _ in range(2):
        model.loss(model(*model.make_inputs(0, dist.get_rank()))).backward()
    twice = whole_grads(model)
    model.zero_grad()
    model.loss(model(*model.make_inputs(0, dist.get_rank()))).backward()
    expected = {name: 2 * grad for name, grad in whole_grads(model).items()}
    assert_named_close(twice, expected, "gradient", 1e-6, 0)
