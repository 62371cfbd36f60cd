"""A run has the same losses under every mesh, and goes on from a checkpoint under any other."""

import math
from dataclasses import replace

import pytest
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from sherd.train.axes import axes_of
from sherd.train.config import Config, assigned
from tests.train.test_loop import TREE, plain_losses, run, trainer_of

MODELS = {"tied": "layers=1", "untied": "tied=false"}
MESHES = ["dp=2,tp=2", "replicate=2,tp=2"]


def num_ranks(mesh):
    """The ranks of a mesh that names all axes."""
    sizes = dict(axis.split("=") for axis in mesh.split(",")) if mesh else {}
    return math.prod(map(int, sizes.values()))


def config(text, mesh, model, **fields):
    words = assigned(["heads=4", "kv_heads=2", "batch=8", *MODELS[model].split()])
    chosen = Config.of(TREE, {"data": text, "mesh": mesh}, words, fields)
    # Two micro-batches, by whatever samples are divided.
    return replace(chosen, micro_batch=4 // axes_of(chosen, num_ranks(mesh)).num_data)


def go_on(*words):
    # DTensor's answers hold the mesh they were first asked for, whose groups went with the test before.
    _clear_sharding_prop_cache()
    return run(*words)


def train_and_judge(config):
    trainer = trainer_of(config)
    steps = [trainer.step() for _ in range(config.steps)]
    norms = [step.gradient_norm for step in steps]
    return [step.loss for step in steps], norms, trainer.judge(4), trainer.sample(2)


def train_under(configs):
    _clear_sharding_prop_cache()
    return [train_and_judge(each) for each in configs]


@pytest.mark.parametrize("model", MODELS)
def test_losses_norms_evaluation_and_sample_are_the_same_under_every_mesh(world, text, model):
    chosen = [config(text, mesh, model, steps=2) for mesh in MESHES]
    expected = plain_losses(chosen[0])
    (alone,) = world(1).run(train_under, [config(text, "", model, steps=2)])[0]
    assert alone[0] == pytest.approx(expected, rel=1e-5)
    for of_rank in world(4).run(train_under, chosen):
        for mesh, (losses, norms, bits, sample) in zip(MESHES, of_rank, strict=True):
            assert losses == pytest.approx(expected, rel=1e-5), mesh
            assert norms == pytest.approx(alone[1], rel=1e-4), mesh
            assert bits == pytest.approx(alone[2], rel=1e-5), mesh
            assert sample == alone[3], mesh


def train_with_muon(configs):
    _clear_sharding_prop_cache()
    trainers = [trainer_of(config) for config in configs]
    return [[each.step().loss for _ in range(each.config.steps)] for each in trainers]


@pytest.mark.parametrize("model", MODELS)
def test_muon_has_the_same_losses_under_every_mesh(world, text, model):
    """Its products are in float32 or bfloat16, as the CPU has units for them: then sums in another order show."""
    meshes = ["", *MESHES]
    chosen = [config(text, mesh, model, steps=3, optimizer="muon") for mesh in meshes]
    (expected,) = world(1).run(train_with_muon, chosen[:1])[0]
    for of_rank in world(4).run(train_with_muon, chosen[1:]):
        for mesh, losses in zip(meshes[1:], of_rank, strict=True):
            assert losses == pytest.approx(expected, rel=1e-3), mesh


def test_a_run_goes_on_under_other_meshes_as_if_never_stopped(world, text, tmp_path):
    meshes, model = ["dp=1", "dp=2", "dp=2,tp=2", "replicate=2,dp=2", "replicate=2,tp=2", ""], "untied"
    whole = plain_losses(config(text, "", model, steps=len(meshes)))
    losses = {}
    for number, mesh in enumerate(meshes):
        chosen = config(text, mesh, model, steps=len(meshes))
        resume, stop_after = number > 0, 1 + number if mesh else None
        losses |= world(num_ranks(mesh)).run(go_on, chosen, tmp_path, resume, stop_after)[0][0]
    assert [losses[step] for step in sorted(losses)] == pytest.approx(whole, rel=1e-5)
    assert sorted(losses) == list(range(1, len(whole) + 1))
