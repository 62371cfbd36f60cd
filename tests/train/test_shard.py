"""Does a run have the same losses however it is sharded, and go on from a checkpoint under any other choice?"""

import pytest
from torch import nn

from sherd import FSDPModule
from sherd.optim import FlatStep
from sherd.train.config import Config, InputError
from sherd.train.loop import Trainer
from sherd.train.parallel import build
from sherd.train.saved import newest
from sherd.train.text import read_corpus
from tests.train.test_loop import TREE, grid, plain_losses, run, text  # noqa: F401  a fixture

SHORT = {"optimizer": {"batch": 8, "micro_batch": 2}, "run": {"steps": 3, "sample": 0, "save_every": 0}}
SMALL = {"model": {"layers": 1}}
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
    "selectively recomputed": {"run": {"checkpointing": True, "recompute": "selective"}},
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
    "parts of experts": {
        "model": {"experts": 4, "balance": 0.1},
        "shard": {"wrapping": "parts"},
        "run": {"mesh": "dp=4,ep=2"},
    },
    "pairs of a stage": {
        "model": {"layers": 5, "tied": False},
        "shard": {"wrapping": "pairs"},
        "run": {"mesh": "pp=2,dp=2"},
    },
    "ends of stages with tp": {
        "model": {"layers": 2, "tied": False, "heads": 2, "kv_heads": 2},
        "shard": {"wrapping": "ends"},
        "run": {"mesh": "pp=2,tp=2"},
    },
    "tp selectively recomputed": {
        "model": {"heads": 2, "kv_heads": 2},
        "run": {"mesh": "dp=2,tp=2", "checkpointing": True, "recompute": "selective"},
    },
    "pp selectively recomputed": {
        "model": {"layers": 2, "tied": False},
        "run": {"mesh": "pp=2,cp=2", "checkpointing": True, "recompute": "selective"},
    },
    "ep selectively recomputed": {
        "model": {"experts": 4, "balance": 0.1},
        "run": {"mesh": "dp=4,ep=2", "checkpointing": True, "recompute": "selective"},
    },
    "hfsdp": {"shard": {"strategy": "hfsdp", "placement": "flat"}, "run": {"mesh": "replicate=2,dp=2"}},
    "zero1 within": {"shard": {"strategy": "zero1_across_zero2_within"}, "run": {"mesh": "replicate=2,dp=2"}},
    "hsdp_zero2": {"shard": {"strategy": "hsdp_zero2"}, "run": {"mesh": "replicate=2,dp=2"}},
    "tp flat recomputed": {
        "shard": {"placement": "flat"},
        "model": {"heads": 2, "kv_heads": 2},
        "run": {"mesh": "dp=2,tp=2", "checkpointing": True},
    },
    "pp zero1 flattened": {
        "shard": {"strategy": "zero1"},
        "optimizer": {"flatten": True},
        "model": {"layers": 2, "tied": False},
        "run": {"mesh": "pp=2,dp=2", "checkpointing": True},
    },
    "ep flat recomputed": {
        "model": {"experts": 4, "balance": 0.1},
        "shard": {"placement": "flat"},
        "run": {"mesh": "dp=4,ep=2", "checkpointing": True},
    },
}


def config(text, *trees):  # noqa: F811
    return Config.of(TREE, SMALL, {"data": {"path": text}}, SHORT, *trees)


def losses(configs):
    found = []
    for each in configs:
        trainer = Trainer(each, read_corpus(each.data), grid(each))
        assert isinstance(trainer.optimizer, FlatStep) == each.optimizer.flatten
        found.append([trainer.step().loss for _ in range(each.run.steps)])
    return found


def same(world, text, choices, num_ranks):  # noqa: F811
    chosen = [config(text, choice) for choice in choices.values()]
    for of_rank in world(num_ranks).run(losses, chosen):
        for name, each, found in zip(choices, chosen, of_rank, strict=True):
            assert found == pytest.approx(plain_losses(each), rel=1e-5), name


def test_losses_are_those_of_plain_pytorch_however_a_run_is_sharded(world, text):  # noqa: F811
    same(world, text, CHOICES, 2)


def test_losses_are_the_same_with_units_of_all_sizes(world, text):  # noqa: F811
    same(world, text, WRAPPINGS, 2)


def test_losses_are_the_same_over_several_axes(world, text):  # noqa: F811
    same(world, text, MESHES, 4)


def go_on(config, out, number):
    return run(config, out, resume=number > 0, stop_after=number + 1)


def test_a_run_goes_on_under_other_choices_as_if_never_stopped_and_keeps_them_in_its_manifest(world, text, tmp_path):  # noqa: F811
    chosen = [config(text, choice) for choice in (CHOICES["flat"], CHOICES["zero1"], CHOICES["recomputed"])]
    found = {}
    for number, each in enumerate(chosen):
        found |= world(2).run(go_on, each, tmp_path, number)[0][0]
        saved = newest(tmp_path)
        assert Config.of(saved.config).shard == each.shard
        assert saved.changes(config(text)) == []
    assert [found[step] for step in (1, 2, 3)] == pytest.approx(plain_losses(chosen[0]), rel=1e-5)


def compiled_blocks(config):
    """Losses, and how often blocks were compiled."""
    compiled = []
    real = nn.Module.compile

    def compile_quickly(module, **options):
        compiled.append(module)
        real(module, backend="aot_eager", **options)

    nn.Module.compile = compile_quickly
    try:
        (found,) = losses([config])
    finally:
        nn.Module.compile = real
    return found, [isinstance(module, FSDPModule) for module in compiled]


def refusal(config):
    try:
        build(config, grid(config))
    except InputError as error:
        return str(error)
    return "no error"


def test_what_the_engine_refuses_is_told_in_one_line(threads, text):  # noqa: F811
    chosen = config(text, {"shard": {"transport": "shared_memory"}})  # which needs gloo
    for said in threads(2).run(refusal, chosen):
        assert said.startswith("[shard] does not go with this model or mesh: CommPolicy(transport='shared_memory')")
        assert "\n" not in said


# Dynamo looks at `.grad` of every graph input, a block's hidden states too, and is warned for it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_each_block_is_compiled_also_where_it_is_recomputed(world, text, recompute):  # noqa: F811
    chosen = config(text, {"run": {"compile": True, "checkpointing": True, "recompute": recompute}})
    for found, are_units in world(2).run(compiled_blocks, chosen):
        assert found == pytest.approx(plain_losses(chosen), rel=1e-5)
        assert are_units == [True]
