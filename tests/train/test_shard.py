"""A run has the same losses however it is sharded, and goes on from a checkpoint under any other choice."""

from unittest import mock

import pytest
from torch import nn

from sherd import FSDPModule
from sherd.optim import FlatStep
from sherd.train.config import Config, InputError, assigned
from sherd.train.parallel import build
from sherd.train.saved import newest
from tests.support.ranks.bodies import on_threads
from tests.support.refusals import one_line
from tests.train.test_loop import TREE, grid, plain_losses, run, trainer_of

# Of what `sherd train` is told, that which is the same in all runs here.
SHORT = "model.layers=1 optimizer.batch=8 optimizer.micro_batch=2 run.steps=3 run.sample=0 run.save_every=0"
CUT = "model.heads=2 model.kv_heads=2"
EXPERTS = "model.experts=4 model.balance=0.1"
TWO_STAGES = "model.layers=2 model.tied=false"
RECOMPUTED = "run.checkpointing=true"
SELECTIVE = f"{RECOMPUTED} run.recompute=selective"
# Each way in which parameters are cut, moved or computed otherwise than by default, and units of all sizes.
FLAT, ZERO1 = "shard.placement=flat optimizer.flatten=true", "shard.strategy=zero1"
CHOICES = [
    FLAT,
    "shard.placement=blocks shard.rows=4 shard.transport=gloo",
    "shard.placement=whole shard.reshard=always",
    "shard.reshard=never shard.offload=true shard.transport=torch",
    "optimizer.flatten=true shard.transport=shared_memory",
    ZERO1,
    "shard.strategy=zero2 shard.placement=flat",
    "shard.strategy=ddp optimizer.clip=0",
    "optimizer.micro_batch=0",
    RECOMPUTED,
    f"{RECOMPUTED} shard.placement=flat shard.transport=coalesced",
    SELECTIVE,
    "shard.wrapping=pairs model.layers=3",
    f"shard.wrapping=pairs shard.placement=flat model.layers=3 {RECOMPUTED} run.checkpointing_share=0.34",
    f"shard.wrapping=parts {RECOMPUTED}",
    "shard.wrapping=ends shard.reshard=always model.tied=false",
    "shard.wrapping=pairs shard.strategy=zero2",
]
MESHES = [
    f"run.mesh=dp=4,ep=2 {EXPERTS} shard.wrapping=parts",
    "run.mesh=pp=2,dp=2 model.layers=5 model.tied=false shard.wrapping=pairs",
    f"run.mesh=pp=2,tp=2 {TWO_STAGES} {CUT} shard.wrapping=ends",
    f"run.mesh=dp=2,tp=2 {CUT} {SELECTIVE}",
    f"run.mesh=pp=2,cp=2 {TWO_STAGES} {SELECTIVE}",
    f"run.mesh=dp=4,ep=2 {EXPERTS} {SELECTIVE}",
    "run.mesh=replicate=2,dp=2 shard.strategy=hfsdp shard.placement=flat",
    "run.mesh=replicate=2,dp=2 shard.strategy=zero1_across_zero2_within",
    "run.mesh=replicate=2,dp=2 shard.strategy=hsdp_zero2",
    f"run.mesh=dp=2,tp=2 {CUT} shard.placement=flat {RECOMPUTED}",
    f"run.mesh=pp=2,dp=2 {TWO_STAGES} {ZERO1} optimizer.flatten=true {RECOMPUTED}",
    f"run.mesh=dp=4,ep=2 {EXPERTS} shard.placement=flat {RECOMPUTED}",
]


def config(text, words=""):
    return Config.of(TREE, assigned(SHORT.split()), {"data": {"path": text}}, assigned(words.split()))


def losses(configs):
    found = []
    for each in configs:
        trainer = trainer_of(each)
        assert isinstance(trainer.optimizer, FlatStep) == each.optimizer.flatten
        found.append([trainer.step().loss for _ in range(each.run.steps)])
    return found


def require_losses_of_plain_pytorch(ranks, text, choices):
    chosen = [config(text, words) for words in choices]
    for of_rank in ranks.run(losses, chosen):
        for words, each, found in zip(choices, chosen, of_rank, strict=True):
            assert found == pytest.approx(plain_losses(each), rel=1e-5), words


@pytest.mark.parametrize("turn", range(4))
def test_losses_are_those_of_plain_pytorch_however_a_run_is_sharded_in_units_of_all_sizes(world, text, turn):
    require_losses_of_plain_pytorch(world(2), text, CHOICES[turn::4])


@pytest.mark.parametrize("turn", range(4))
def test_losses_are_the_same_over_several_axes(world, text, turn):
    require_losses_of_plain_pytorch(world(4), text, MESHES[turn::4])


def go_on(config, out, number):
    return run(config, out, resume=number > 0, stop_after=number + 1)


def test_a_run_goes_on_under_other_choices_as_if_never_stopped_and_keeps_them_in_its_manifest(world, text, tmp_path):
    chosen = [config(text, words) for words in (FLAT, ZERO1, RECOMPUTED)]
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


@on_threads(2)
def test_what_the_engine_refuses_is_told_in_one_line(text):
    chosen = config(text, "shard.transport=shared_memory")  # which needs gloo
    said = one_line(InputError, build, chosen, grid(chosen))
    assert said.startswith("[shard] does not go with this model or mesh: CommPolicy(transport='shared_memory')")


# Dynamo looks at `.grad` of every graph input, a block's hidden states too, and is warned for it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_each_block_is_compiled_also_where_it_is_recomputed(world, text, recompute):
    chosen = config(text, f"run.compile=true {RECOMPUTED} run.recompute={recompute}")
    for found, are_units in world(2).run(compiled_blocks, chosen):
        assert found == pytest.approx(plain_losses(chosen), rel=1e-5)
        assert are_units == [True]
