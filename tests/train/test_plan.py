"""--dry-run says what a run then takes, for any number of ranks and models that fit nowhere, and starts nothing."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from sherd import memory_report, track_memory
from sherd.train.cli import main
from sherd.train.config import Config
from sherd.train.plan import planned
from sherd.train.trees import assigned
from tests.train.test_loop import trainer_of

TREE = {
    "model": {"layers": 3, "width": 64, "heads": 4, "kv_heads": 2, "hidden": 96},
    "data": {"context": 32, "held_out": 0.1},
    "optimizer": {"batch": 8},
    "run": {"steps": 2},
}
RUNS = {
    "default": "",
    "flat": "shard.placement=flat",
    "zero1, accumulated": "shard.strategy=zero1 optimizer.micro_batch=1",
    "accumulated": "optimizer.micro_batch=2",
    "kept unsharded, bf16": "shard.reshard=never run.precision=bf16",
    "recomputed": "run.checkpointing=true",
    "selectively recomputed": "run.checkpointing=true run.recompute=selective",
}


def held(configs):
    """Of each run, after two steps: parameters, gradients and optimizer state; the most that buffers took in the
    second; and what autograd kept of a micro-batch, parameters apart, counted by storages."""
    found = []
    for each in configs:
        trainer = trainer_of(each)
        activations = kept_by_autograd(trainer)
        gradients = []
        hook = trainer.optimizer.register_step_pre_hook(
            lambda optimizer, *_, seen=gradients: seen.append(
                sum(p.grad.to_local().nbytes for group in optimizer.param_groups for p in group["params"])
            )
        )
        trainer.step()
        with track_memory(trainer.model) as peak:
            trainer.step()
        hook.remove()
        rows = memory_report(trainer.model, trainer.optimizer).rows
        params, states = (
            sum(row.now for row in rows if row.kind in kinds)
            for kinds in (("shards", "unsharded"), ("optimizer state",))
        )
        found.append((params, gradients[-1], states, peak.nbytes, activations))
    return found


def kept_by_autograd(trainer):
    """Of one micro-batch, parameters apart."""
    micro_batch = next(trainer._micro_batches())
    kept = {}

    def note(tensor):
        # A unit that runs shows its unsharded parameters.
        shown = [each for each in trainer.model.parameters() if not isinstance(each, DTensor)]
        if tensor.untyped_storage().data_ptr() not in {each.untyped_storage().data_ptr() for each in shown}:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = trainer.passes._losses(*micro_batch).mean()
        nbytes = sum(each.nbytes() for each in kept.values())
        kept.clear()
    loss.backward()
    trainer.optimizer.zero_grad()
    return nbytes


def test_what_is_planned_is_what_two_ranks_hold(world, text):
    chosen = {name: Config.of(TREE, {"data": {"path": text}}, assigned(words.split())) for name, words in RUNS.items()}
    plans = {name: planned(each, 2) for name, each in chosen.items()}
    held_by_rank = world(2).run(held, list(chosen.values()))
    for of_rank in held_by_rank:
        for (name, plan), (parameters, gradients, optimizer, peak, kept) in zip(plans.items(), of_rank, strict=True):
            assert (plan.parameters, plan.optimizer) == (parameters, optimizer), name
            assert plan.gradients == pytest.approx(gradients, rel=1e-3), name  # and a flag per tensor
            assert peak <= plan.parameters + plan.gradients + plan.passing <= 1.2 * peak, name
            if not plan.config.run.checkpointing:
                assert plan.activations == pytest.approx(kept, rel=0.01), name
    kept = {name: each[-1] for name, each in zip(plans, held_by_rank[0], strict=True)}
    assert kept["recomputed"] < plans["recomputed"].activations < plans["default"].activations / 2
    again = "recomputed", "selectively recomputed"
    assert plans[again[0]].activations < plans[again[1]].activations < plans["default"].activations


def dry(capsys, *words):
    assert main(["train", "--dry-run", *words]) == 0
    return capsys.readouterr().out


def test_a_plan_says_ranks_tokens_and_steps_and_writes_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = dry(capsys, "--nproc", "8", "--mesh", "dp=2,tp=2,cp=2", "--steps", "30", "optimizer.batch=4")
    assert "model    820,352 parameters, on 8 ranks: dp=2,cp=2,tp=2" in said
    assert "step     4 samples x 128 tokens = 512 tokens" in said
    assert "rank     1 micro-batch of 2 x 64 tokens in a step" in said
    assert "run      30 steps = 15,360 tokens" in said
    assert "optimizer.warmup = 50 lasts longer than the run of 30 steps" in said
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_fits_nowhere_is_planned_without_memory_and_what_a_run_would_refuse_is_refused(capsys):
    large = ["model.width=65536", "model.layers=100", "model.hidden=262144", "optimizer.batch=1024"]
    for words in (["--nproc", "64", "--mesh", "pp=2,replicate=2", "model.tied=false"], ["--nproc", "1024"]):
        assert "model    6,442," in dry(capsys, *words, *large), words
    assert main(["train", "--dry-run", "--nproc", "5"]) == 2
    assert "optimizer.batch=15" in capsys.readouterr().err


def test_each_rank_of_twice_as_many_has_half():
    config = Config.of(TREE, {"optimizer": {"batch": 64}})
    few, many = planned(config, 4), planned(config, 8)
    for name in ("parameters", "gradients", "optimizer"):
        assert getattr(few, name) == pytest.approx(2 * getattr(many, name), rel=0.01)
