"""Training under every strategy, cut, mesh and choice is that of one process: losses, gradients, norms, parameters."""

import math

import pytest
import torch
import torch.distributed as dist

import sherd
from sherd import CommPolicy, CPUOffloadPolicy, MixedPrecisionPolicy
from sherd.policy import Level
from tests.parity.test_precision import train_with_an_overflow
from tests.strategies.cases import CUTS, PAIRS, Case, assert_each_trains, sharded, train, wrapped
from tests.support.comparing import assert_named_close
from tests.support.meshes import mesh_of
from tests.support.models import build
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.training import Recipe

COPIES, OPTIMIZER, GRADIENTS, PARAMETERS = Level
HFSDP = (OPTIMIZER, PARAMETERS)

MODELS = (
    "uneven",
    "tied_across",
    "frozen",
    "mixed_double",
    "scalar_parameter",
    "branching",
    "tiny_parameter",
    "adapted",
)
"""Dims that do not divide and empty pieces, tied, frozen, of two dtypes, without dims, not used in each step."""


def plain_step(model, **options):
    """What DTensor works out about the operations of a step takes longer than all else; this one's is one operation.

    Momentum is in some of these tests, and with every preset in test_accumulation."""
    return Recipe(model, "sgd", **options)


def recipe_of(at):
    return plain_step(MODELS[at % len(MODELS)], max_norm=0.1, norm_type=math.inf if at % 3 == 2 else 2.0)


def pair(at):
    """Two levels, each pair with another model; cuts and front ends in turn."""
    cut = list(CUTS)[at % len(CUTS)]
    by_wrapper = {"by": wrapped, "options": {"use_orig_params": True}}
    return Case(recipe_of(at), PAIRS[at], cut, **(by_wrapper if at % 4 == 3 and cut not in ("rows", "columns") else {}))


@pytest.mark.parametrize("turn", range(4))
@on_threads(4)
def test_all_pairs_of_levels_train_as_one_process_under_every_cut(turn):
    assert_each_trains({levels: pair(at) for at, levels in enumerate(PAIRS) if at % 4 == turn})


SHAPES = ((1, 4), (4, 1), (1, 1), (3,))


@pytest.mark.front("Strategies as values")
@pytest.mark.parametrize("num_ranks", [1, 3, 4])
@on_threads()
def test_axes_of_one_rank_and_single_axes_train_as_one_process():
    cases = {}
    for at, shape in enumerate(SHAPES):
        for levels in (HFSDP,) if len(shape) == 2 else ((OPTIMIZER,), (GRADIENTS,)):
            cut = list(CUTS)[(at + len(levels)) % len(CUTS)]
            if math.prod(shape) == dist.get_world_size():
                cases[shape, levels] = Case(plain_step("uneven", max_norm=0.1), levels, cut, shape)
    assert_each_trains(cases)


@pytest.mark.parametrize(
    ("levels", "cut", "shape"), [(HFSDP, "flat", (2, 4)), ((PARAMETERS, OPTIMIZER), "whole", (4, 2))]
)
@on_threads(8)
def test_eight_ranks_train_as_one_process(levels, cut, shape):
    assert_each_trains({"eight": Case(Recipe("uneven", max_norm=0.1), levels, cut, shape)})


SHARED = CommPolicy("shared_memory")
OFFLOADED = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
CHOICES = {
    "torch": ("mlp", HFSDP, {"comm_policy": CommPolicy("torch")}),
    "gloo": ("mlp", (OPTIMIZER, OPTIMIZER), {"comm_policy": CommPolicy("gloo")}),
    "shared memory": ("mlp", (OPTIMIZER, GRADIENTS), {"comm_policy": SHARED}),
    "offloaded": ("uneven", HFSDP, OFFLOADED),
    "offloaded copies": ("uneven", (COPIES, COPIES), OFFLOADED),
    "recomputed": ("checkpoint_outside", HFSDP, {}),
    "recomputed, kept": ("reentrant_inside", (OPTIMIZER, OPTIMIZER), {}),
    "shrunk": ("nested", HFSDP, {"reshard_after_forward": 2}),
    "shrunk to one": ("nested", (COPIES, PARAMETERS), {"reshard_after_forward": 1}),
    "kept to backward": ("nested", (PARAMETERS, OPTIMIZER), {"reshard_after_forward": False}),
}


@pytest.mark.parametrize("choice", CHOICES)
@on_processes(4, timeout=240)
def test_transports_offload_recomputation_and_resharding_go_with_every_strategy(choice):
    model, levels, options = CHOICES[choice]
    cut = ("flat", "rows", "whole")[list(CHOICES).index(choice) % 3]
    assert_each_trains({choice: Case(plain_step(model, max_norm=0.1), levels, cut, options=options)})


@pytest.mark.parametrize("preset", ["ddp", "zero1", "hfsdp"])
@on_threads(4)
def test_flat_parameters_and_flat_steps_train_as_one_process(preset):
    recipe = Recipe("mlp", max_norm=0.1)
    flat, stepped = Case(recipe, preset, by=wrapped), Case(recipe, preset, how={"flatten": True})
    assert_each_trains({"flat": flat, "stepped": stepped})


def from_the_meta_device(_, levels, cut, mesh):
    """Built without data, sharded, given memory and then the plain model's values."""
    model = sharded(build("uneven", device="meta"), levels, cut, mesh)
    model.to_empty(device="cpu")
    model.load_state_dict(build("uneven").state_dict())
    return model


def replicated(model, levels, cut, mesh):
    """Over both axes of a mesh."""
    for unit in model.units():
        sherd.replicate(unit, mesh=mesh_of((2, 2)))
    assert all(each.to_local().shape == each.shape for each in model.parameters())
    return model


@pytest.mark.parametrize(
    "case",
    [
        *(
            Case(plain_step("uneven"), each, "rows", by=from_the_meta_device)
            for each in ((OPTIMIZER,), (COPIES,), HFSDP)
        ),
        Case(Recipe("mlp", max_norm=0.1), (COPIES, COPIES), by=replicated),
    ],
    ids=["ZeRO-1", "copies", "HFSDP", "replicate"],
)
@on_threads(4)
def test_models_without_data_and_replicated_ones_train_as_one_process(case):
    assert_each_trains({case.by.__name__: case})


@pytest.mark.parametrize(("reduce_dtype", "atol"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-3)])
@on_threads(4)
def test_low_precision_computes_what_the_default_strategy_does(reduce_dtype, atol):
    """Casts happen at the same places; sums in float32 in another order, those in bfloat16 round otherwise."""
    policy, found = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype), {}
    for levels in ((COPIES,), (OPTIMIZER,), HFSDP, (OPTIMIZER, GRADIENTS), (PARAMETERS,)):
        model = sharded(build("mlp"), levels, "flat", mp_policy=policy)
        found[levels] = train(model, plain_step("mlp")).params
    for levels, params in found.items():
        assert_named_close(params, found[(PARAMETERS,)], f"{levels}: parameter", 0, atol)


@on_threads(4)
def test_all_ranks_skip_the_step_in_which_one_overflows():
    """Of five scaled steps rank 1 overflows in the third."""
    recipe = Recipe("mlp", steps=5)
    scales, params = train_with_an_overflow(build("mlp"), recipe, range(4))
    assert scales == [64.0, 128.0, 64.0, 64.0, 128.0], "the plain run must have skipped its third step"
    for levels in ((COPIES,), (OPTIMIZER,), HFSDP):
        model = sharded(build("mlp"), levels, "flat")
        its_scales, its_params = train_with_an_overflow(model, recipe, [dist.get_rank()])
        assert its_scales == scales, levels
        assert_named_close(its_params, params, f"{levels}: parameter", 1e-5, 1e-6)
