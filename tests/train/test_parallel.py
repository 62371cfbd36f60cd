"""A run has the same losses under every mesh, and goes on from a checkpoint under any other."""

import math
from dataclasses import replace

import pytest
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from sherd.train.axes import axes_of
from sherd.train.config import Config, assigned
from tests.train.test_loop import TREE, plain_losses, run, trainer_of

MODELS = {
    "dense": "model.layers=1",
    "untied": "model.tied=false",
    "experts": "model.layers=1 model.experts=4 model.balance=0.1",
}
MESHES = {"dense": ["cp=2,tp=2"], "untied": ["pp=2,tp=2"], "experts": ["dp=2,ep=2,cp=2", "replicate=2,dp=2,ep=2"]}


def num_ranks(mesh):
    """The ranks of a mesh that names all axes."""
    sizes = dict(axis.split("=") for axis in mesh.split(",")) if mesh else {}
    return math.prod(int(size) for axis, size in sizes.items() if axis != "ep")


def config(text, mesh, model, **run):
    usual = "model.heads=4 model.kv_heads=2 optimizer.batch=8 optimizer.micro_batch=1 run.sample=2"
    words = assigned([*usual.split(), *MODELS[model].split(), f"run.mesh={mesh}"])
    chosen = Config.of(TREE, {"data": {"path": text}}, words, {"run": run})
    # Two micro-batches, by whatever samples are divided.
    size = 4 // axes_of(chosen, num_ranks(mesh)).num_data
    return replace(chosen, optimizer=replace(chosen.optimizer, micro_batch=size))


def go_on(*words):
    # DTensor's answers hold the mesh they were first asked for, whose groups went with the test before.
    _clear_sharding_prop_cache()
    return run(*words)


def train_and_judge(config):
    trainer = trainer_of(config)
    steps = [trainer.step() for _ in range(config.run.steps)]
    norms = [step.gradient_norm for step in steps]
    return [step.loss for step in steps], norms, trainer.judge(4).bits, trainer.sample()


def train_under(configs):
    _clear_sharding_prop_cache()
    return [train_and_judge(each) for each in configs]


@pytest.mark.parametrize("model", MODELS)
def test_losses_norms_evaluation_and_sample_are_the_same_under_every_mesh(world, text, model):
    chosen = [config(text, mesh, model, steps=2) for mesh in MESHES[model]]
    expected = plain_losses(chosen[0])
    (alone,) = world(1).run(train_under, [config(text, "", model, steps=2)])[0]
    assert alone[0] == pytest.approx(expected, rel=1e-5)
    for of_rank in world(4).run(train_under, chosen):
        for mesh, (losses, norms, bits, sample) in zip(MESHES[model], of_rank, strict=True):
            assert losses == pytest.approx(expected, rel=1e-5), mesh
            assert norms == pytest.approx(alone[1], rel=1e-4), mesh
            assert bits == pytest.approx(alone[2], rel=1e-5), mesh
            assert sample == alone[3], mesh


def train_with_muon(configs):
    _clear_sharding_prop_cache()
    trainers = [trainer_of(config) for config in configs]
    return [[each.step().loss for _ in range(each.config.run.steps)] for each in trainers]


@pytest.mark.parametrize("model", MODELS)
def test_muon_has_the_same_losses_under_every_mesh(world, text, model):
    """Its products are in float32 or bfloat16, as the CPU has units for them: then sums in another order show."""
    meshes = ["", *MESHES[model]]
    chosen = [config(text, mesh, model, steps=3) for mesh in meshes]
    chosen = [replace(each, optimizer=replace(each.optimizer, name="muon")) for each in chosen]
    (expected,) = world(1).run(train_with_muon, chosen[:1])[0]
    for of_rank in world(4).run(train_with_muon, chosen[1:]):
        for mesh, losses in zip(meshes[1:], of_rank, strict=True):
            assert losses == pytest.approx(expected, rel=1e-3), mesh


@pytest.mark.parametrize(
    ("model", "meshes"),
    [
        ("untied", ["replicate=2,tp=2", "pp=2,dp=2", ""]),
        ("experts", ["dp=2,ep=2,tp=2", "dp=4,ep=4", ""]),
        ("untied", ["dp=1", "dp=2", "dp=2,tp=2", "replicate=2,dp=2", "dp=2,cp=2", "pp=2", ""]),
    ],
)
def test_a_run_goes_on_under_other_meshes_as_if_never_stopped(world, text, tmp_path, model, meshes):
    whole = plain_losses(config(text, "", model, steps=len(meshes)))
    losses = {}
    for number, mesh in enumerate(meshes):
        chosen = config(text, mesh, model, steps=len(meshes))
        resume, stop_after = number > 0, 1 + number if mesh else None
        losses |= world(num_ranks(mesh)).run(go_on, chosen, tmp_path, resume, stop_after)[0][0]
    assert [losses[step] for step in sorted(losses)] == pytest.approx(whole, rel=1e-5)
    assert sorted(losses) == list(range(1, len(whole) + 1))
