"""A run has the same losses however it is sharded, and goes on from a checkpoint under any other choice."""

from unittest import mock

import pytest
from torch import nn

from sherd import FSDPModule
from sherd.optim import FlatStep
from sherd.train.config import Config, InputError
from sherd.train.parallel import build
from sherd.train.saved import newest
from tests.support.refusals import refusal
from tests.train.test_loop import TREE, grid, plain_losses, run, trainer_of

SHORT = {"optimizer": {"batch": 8, "micro_batch": 2}, "run": {"steps": 3, "sample": 0, "save_every": 0}}
SMALL = {"model": {"layers": 1}}
# Parts of the choices below.
CUT = {"model": {"heads": 2, "kv_heads": 2}}
EXPERTS = {"model": {"experts": 4, "balance": 0.1}}
TWO_STAGES = {"model": {"layers": 2, "tied": False}}
SELECTIVE = {"checkpointing": True, "recompute": "selective"}
REPLICATED = {"run": {"mesh": "replicate=2,dp=2"}}
# Each way in which parameters are cut, moved or computed otherwise than by default.
CHOICES = {
    "flat": {"shard": {"placement": "flat"}, "optimizer": {"flatten": True}},
    "blocks": {"shard": {"placement": "blocks", "rows": 4, "transport": "gloo"}},
    "whole, resharded": {"shard": {"placement": "whole", "reshard": "always"}},
    "kept, offloaded": {"shard": {"reshard": "never", "offload": True, "transport": "torch"}},
    "flattened": {"optimizer": {"flatten": True}, "shard": {"transport": "shared_memory"}},
    "zero1": {"shard": {"strategy": "zero1"}},
    "zero2 flat": {"shard": {"strategy": "zero2", "placement": "flat"}},
    "ddp, not clipped": {"shard": {"strategy": "ddp"}, "optimizer": {"clip": 0}},
    "a micro-batch that fits": {"optimizer": {"micro_batch": 0}},
    "recomputed": {"run": {"checkpointing": True}},
    "recomputed flat": {"run": {"checkpointing": True}, "shard": {"placement": "flat", "transport": "coalesced"}},
    "selectively recomputed": {"run": SELECTIVE},
}
WRAPPINGS = {
    "pairs": {"shard": {"wrapping": "pairs"}, "model": {"layers": 3}},
    "pairs flat recomputed": {
        "shard": {"wrapping": "pairs", "placement": "flat"},
        "model": {"layers": 3},
        "run": {"checkpointing": True, "checkpointing_share": 0.34},
    },
    "parts": {"shard": {"wrapping": "parts"}, "run": {"checkpointing": True}},
    "ends": {"shard": {"wrapping": "ends", "reshard": "always"}, "model": {"tied": False}},
    "pairs zero2": {"shard": {"wrapping": "pairs", "strategy": "zero2"}},
}
MESHES = {
    "parts of experts": {**EXPERTS, "shard": {"wrapping": "parts"}, "run": {"mesh": "dp=4,ep=2"}},
    "pairs of a stage": {
        "model": {"layers": 5, "tied": False},
        "shard": {"wrapping": "pairs"},
        "run": {"mesh": "pp=2,dp=2"},
    },
    "ends of stages with tp": {
        "model": {**TWO_STAGES["model"], **CUT["model"]},
        "shard": {"wrapping": "ends"},
        "run": {"mesh": "pp=2,tp=2"},
    },
    "tp selectively recomputed": {**CUT, "run": {"mesh": "dp=2,tp=2", **SELECTIVE}},
    "pp selectively recomputed": {**TWO_STAGES, "run": {"mesh": "pp=2,cp=2", **SELECTIVE}},
    "ep selectively recomputed": {**EXPERTS, "run": {"mesh": "dp=4,ep=2", **SELECTIVE}},
    "hfsdp": {**REPLICATED, "shard": {"strategy": "hfsdp", "placement": "flat"}},
    "zero1 within": {**REPLICATED, "shard": {"strategy": "zero1_across_zero2_within"}},
    "hsdp_zero2": {**REPLICATED, "shard": {"strategy": "hsdp_zero2"}},
    "tp flat recomputed": {
        **CUT,
        "shard": {"placement": "flat"},
        "run": {"mesh": "dp=2,tp=2", "checkpointing": True},
    },
    "pp zero1 flattened": {
        **TWO_STAGES,
        "shard": {"strategy": "zero1"},
        "optimizer": {"flatten": True},
        "run": {"mesh": "pp=2,dp=2", "checkpointing": True},
    },
    "ep flat recomputed": {
        **EXPERTS,
        "shard": {"placement": "flat"},
        "run": {"mesh": "dp=4,ep=2", "checkpointing": True},
    },
}


def config(text, *trees):
    return Config.of(TREE, SMALL, {"data": {"path": text}}, SHORT, *trees)


def losses(configs):
    found = []
    for each in configs:
        trainer = trainer_of(each)
        assert isinstance(trainer.optimizer, FlatStep) == each.optimizer.flatten
        found.append([trainer.step().loss for _ in range(each.run.steps)])
    return found


def require_losses_of_plain_pytorch(ranks, text, choices):
    chosen = [config(text, choice) for choice in choices.values()]
    for of_rank in ranks.run(losses, chosen):
        for name, each, found in zip(choices, chosen, of_rank, strict=True):
            assert found == pytest.approx(plain_losses(each), rel=1e-5), name


@pytest.mark.parametrize("turn", range(4))
def test_losses_are_those_of_plain_pytorch_however_a_run_is_sharded_in_units_of_all_sizes(world, text, turn):
    choices = {**CHOICES, **WRAPPINGS}
    require_losses_of_plain_pytorch(world(2), text, {name: choices[name] for name in list(choices)[turn::4]})


@pytest.mark.parametrize("turn", range(4))
def test_losses_are_the_same_over_several_axes(world, text, turn):
    require_losses_of_plain_pytorch(world(4), text, {name: MESHES[name] for name in list(MESHES)[turn::4]})


def go_on(config, out, number):
    return run(config, out, resume=number > 0, stop_after=number + 1)


def test_a_run_goes_on_under_other_choices_as_if_never_stopped_and_keeps_them_in_its_manifest(world, text, tmp_path):
    chosen = [config(text, choice) for choice in (CHOICES["flat"], CHOICES["zero1"], CHOICES["recomputed"])]
    found = {}
    for number, each in enumerate(chosen):
        found |= world(2).run(go_on, each, tmp_path, number)[0][0]
        saved = newest(tmp_path)
        assert Config.of(saved.config).shard == each.shard
        assert saved.changes(config(text)) == []
    assert [found[step] for step in (1, 2, 3)] == pytest.approx(plain_losses(chosen[0]), rel=1e-5)


def compiled_blocks(config):
    """Losses, and of each block that was compiled whether it is a unit."""
    compiled = []
    real = nn.Module.compile

    def compile_quickly(module, **options):
        compiled.append(module)
        real(module, backend="aot_eager", **options)

    with mock.patch.object(nn.Module, "compile", compile_quickly):
        (found,) = losses([config])
    return found, [isinstance(module, FSDPModule) for module in compiled]


def refused_here(config):
    return refusal(InputError, build, config, grid(config))


def test_what_the_engine_refuses_is_told_in_one_line(threads, text):
    chosen = config(text, {"shard": {"transport": "shared_memory"}})  # which needs gloo
    for said in threads(2).run(refused_here, chosen):
        assert said.startswith("[shard] does not go with this model or mesh: CommPolicy(transport='shared_memory')")
        assert "\n" not in said


# Dynamo looks at `.grad` of every graph input, a block's hidden states too, and is warned for it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_each_block_is_compiled_also_where_it_is_recomputed(world, text, recompute):
    chosen = config(text, {"run": {"compile": True, "checkpointing": True, "recompute": recompute}})
    for found, are_units in world(2).run(compiled_blocks, chosen):
        assert found == pytest.approx(plain_losses(chosen), rel=1e-5)
        assert are_units == [True]
