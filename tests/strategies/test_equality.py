"""Is training under every strategy, cut, mesh and choice that of one process: losses, gradients, norms, parameters?"""

import math

import pytest
import torch
import torch.distributed as dist

import sherd
from sherd import CommPolicy, CPUOffloadPolicy, MixedPrecisionPolicy
from sherd.api.placements import PRESETS
from sherd.policy import Level
from tests.strategies.cases import CUTS, PAIRS, assert_plain, sharded, train, wrapped
from tests.support.meshes import mesh_of
from tests.support.models import build
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


def each_pair():
    """All pairs of levels, each with another model; cuts and front ends in turn."""
    found = []
    for at, levels in enumerate(PAIRS):
        recipe, cut = recipe_of(at), list(CUTS)[at % len(CUTS)]
        if at % 4 == 3 and cut not in ("rows", "columns"):
            model = wrapped(build(recipe.model), levels, cut, (2, 2), use_orig_params=True)
        else:
            model = sharded(build(recipe.model), levels, cut, (2, 2))
        found.append(train(model, recipe))
    return found


def test_all_pairs_of_levels_train_as_one_process_under_every_cut(world):
    runs = world(4).run(each_pair, timeout=240)
    for at, levels in enumerate(PAIRS):
        assert_plain([run[at] for run in runs], recipe_of(at), levels)


SHAPES = ((1, 4), (4, 1), (1, 1), (3,))


def on_shapes(shapes):
    found = []
    for at, shape in enumerate(shapes):
        for levels in (HFSDP,) if len(shape) == 2 else ((OPTIMIZER,), (GRADIENTS,)):
            cut = list(CUTS)[(at + len(levels)) % len(CUTS)]
            found.append(train(sharded(build("uneven"), levels, cut, shape), plain_step("uneven", max_norm=0.1)))
    return found


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_axes_of_one_rank_and_single_axes_train_as_one_process(world, num_ranks):
    shapes = [shape for shape in SHAPES if math.prod(shape) == num_ranks]
    runs = world(num_ranks).run(on_shapes, shapes)
    for case in range(len(runs[0])):
        assert_plain([run[case] for run in runs], plain_step("uneven", max_norm=0.1), case)


def on_threads(levels, cut, shape, recipe):
    return train(sharded(build(recipe.model), levels, cut, shape), recipe)


@pytest.mark.parametrize(
    ("levels", "cut", "shape"),
    [
        (HFSDP, "flat", (2, 4)),
        ((PARAMETERS, OPTIMIZER), "whole", (4, 2)),
    ],
)
def test_eight_ranks_train_as_one_process(threads, levels, cut, shape):
    recipe = Recipe("uneven", "momentum", 2, max_norm=0.1)
    assert_plain(threads(8).run(on_threads, levels, cut, shape, recipe), recipe, (levels, cut, shape))


SHARED = CommPolicy("shared_memory")
CHOICES = {
    "torch": ("mlp", HFSDP, {"comm_policy": CommPolicy("torch")}),
    "gloo": ("mlp", (OPTIMIZER, OPTIMIZER), {"comm_policy": CommPolicy("gloo")}),
    "shared memory": ("mlp", (OPTIMIZER, GRADIENTS), {"comm_policy": SHARED}),
    "offloaded": ("uneven", HFSDP, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "offloaded copies": ("uneven", (COPIES, COPIES), {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "recomputed": ("checkpoint_outside", HFSDP, {}),
    "recomputed, kept": ("reentrant_inside", (OPTIMIZER, OPTIMIZER), {}),
    "shrunk": ("nested", HFSDP, {"reshard_after_forward": 2}),
    "shrunk to one": ("nested", (COPIES, PARAMETERS), {"reshard_after_forward": 1}),
    "kept to backward": ("nested", (PARAMETERS, OPTIMIZER), {"reshard_after_forward": False}),
}


def each_choice():
    found = {}
    for at, (name, (model, levels, options)) in enumerate(CHOICES.items()):
        cut = ("flat", "rows", "whole")[at % 3]
        found[name] = train(sharded(build(model), levels, cut, (2, 2), **options), plain_step(model, max_norm=0.1))
    return found


def test_transports_offload_recomputation_and_resharding_go_with_every_strategy(world):
    runs = world(4).run(each_choice)
    for name, (model, _, _) in CHOICES.items():
        assert_plain([run[name] for run in runs], plain_step(model, max_norm=0.1), name)


def flat_parameters():
    """The wrapper's, with clipping; and a flat step of the optimizer."""
    found = {}
    for preset in ("ddp", "zero1", "hfsdp"):
        levels = PRESETS[preset]
        shape = (2, 2) if len(levels) == 2 else (4,)
        found[preset, "flat"] = train(wrapped(build("mlp"), levels, "flat", shape), Recipe("mlp", max_norm=0.1))
        stepped = sharded(build("mlp"), levels, "flat", shape)
        found[preset, "stepped"] = train(stepped, Recipe("mlp", max_norm=0.1), flatten=True)
    return found


def test_flat_parameters_and_flat_steps_train_as_one_process(world):
    runs = world(4).run(flat_parameters)
    for case in runs[0]:
        assert_plain([run[case] for run in runs], Recipe("mlp", max_norm=0.1), case)


def from_the_meta_device():
    """Built without data, sharded, given memory and then the plain model's values."""
    found = []
    for levels in ((OPTIMIZER,), (COPIES,), HFSDP):
        model = sharded(build("uneven", device="meta"), levels, "rows", (2, 2) if len(levels) == 2 else (4,))
        model.to_empty(device="cpu")
        model.load_state_dict(build("uneven").state_dict())
        found.append(train(model, plain_step("uneven")))
    return found


def test_models_without_data_are_given_it_after_sharding(world):
    runs = world(4).run(from_the_meta_device)
    for case in range(len(runs[0])):
        assert_plain([run[case] for run in runs], plain_step("uneven"), case)


def low_precision(reduce_dtype):
    """Gradients of one backward under bfloat16 compute, by strategy."""
    policy, found = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype), {}
    for levels in ((COPIES,), (OPTIMIZER,), HFSDP, (OPTIMIZER, GRADIENTS), (PARAMETERS,)):
        model = sharded(build("mlp"), levels, "flat", (2, 2) if len(levels) == 2 else (4,), mp_policy=policy)
        found[levels] = train(model, plain_step("mlp")).params
    return found


@pytest.mark.parametrize(("reduce_dtype", "atol"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-3)])
def test_low_precision_computes_what_the_default_strategy_does(world, reduce_dtype, atol):
    """Casts happen at the same places; sums in float32 in another order, those in bfloat16 round otherwise."""
    for found in world(4).run(low_precision, reduce_dtype):
        expected = found[(PARAMETERS,)]
        for levels, params in found.items():
            for name, value in expected.items():
                torch.testing.assert_close(params[name], value, rtol=0, atol=atol, msg=f"{levels}: {name}")


def scaled_steps():
    """Of four scaled steps rank 3 overflows in the second: scales, and whether parameters moved."""
    found = {}
    for levels in ((COPIES,), (OPTIMIZER,), HFSDP):
        model = sharded(build("mlp"), levels, "flat", (2, 2) if len(levels) == 2 else (4,))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
        scales, moved = [], []
        for step in range(4):
            before = [each.to_local().clone() for each in model.parameters()]
            loss = model.loss(model(*model.make_inputs(step, dist.get_rank())))
            scaler.scale(loss * (math.inf if step == 1 and dist.get_rank() == 3 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            now = [each.to_local() for each in model.parameters()]
            moved.append(any(not torch.equal(a, b) for a, b in zip(before, now, strict=True)))
            scales.append(scaler.get_scale())
        found[levels] = scales, moved
    return found


def test_all_ranks_skip_the_step_in_which_one_overflows(world):
    for found in world(4).run(scaled_steps):
        for scales, moved in found.values():
            assert scales == [64.0, 32.0, 32.0, 32.0]
            assert moved == [True, False, True, True]


def replicated():
    """Over both axes of a mesh."""
    model = build("mlp")
    for unit in model.units():
        sherd.replicate(unit, mesh=mesh_of((2, 2)))
    own = all(each.to_local().shape == each.shape for each in model.parameters())
    return own, train(model, Recipe("mlp", max_norm=0.1))


def test_replicate_keeps_whole_parameters_and_trains_as_one_process(world):
    found = world(4).run(replicated)
    assert all(own for own, _ in found)
    assert_plain([run for _, run in found], Recipe("mlp", max_norm=0.1), "replicate")
