"""A run has the same losses however it is sharded, and goes on from a checkpoint under any other choice."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn

from sherd import FSDPModule
from sherd.train.axes import Axes
from sherd.train.config import Config, InputError, assigned
from sherd.train.mesh import RankGrid
from sherd.train.models import Decoder
from sherd.train.parallel import build
from sherd.train.saved import folder_in, newest
from tests.support.ranks.bodies import on_threads
from tests.support.refusals import one_line
from tests.train.test_loop import TREE, plain_losses, run, trainer_of

# Of what `sherd train` is told, that which is the same in all runs here.
SHORT = "layers=1 batch=8 micro_batch=2 steps=3 every=0"
RECOMPUTED = "checkpointing=1"
SELECTIVE = f"{RECOMPUTED} recompute=selective"
# Each way in which parameters are cut, moved or computed otherwise than by default, and units of all sizes.
FLAT, ZERO1 = "placement=flat", "strategy=zero1"
CHOICES = [
    FLAT,
    "placement=whole",
    "reshard=false offload=true",
    "offload=state:0.5",
    ZERO1,
    "strategy=zero2 placement=flat",
    "strategy=ddp",
    "micro_batch=0",
    RECOMPUTED,
    SELECTIVE,
    "wrapping=pairs layers=3",
    "wrapping=pairs placement=flat layers=3 checkpointing=0.34",
    f"wrapping=parts {RECOMPUTED}",
    "wrapping=ends tied=false",
    "wrapping=pairs strategy=zero2",
]
CUT = "heads=2 kv_heads=2"
MESHES = [
    f"mesh=dp=2,tp=2 {CUT} {SELECTIVE}",
    "mesh=replicate=2,dp=2 strategy=hfsdp placement=flat",
    "mesh=replicate=2,dp=2 strategy=zero1_across_zero2_within",
    "mesh=replicate=2,dp=2 strategy=hsdp_zero2",
    f"mesh=dp=2,tp=2 {CUT} placement=flat {RECOMPUTED}",
    f"mesh=replicate=2,tp=2 {CUT} tied=false wrapping=ends",
]


def config(text, words=""):
    return Config.of(TREE, assigned(SHORT.split()), {"data": text}, assigned(words.split()))


def losses(configs):
    found = []
    for each in configs:
        trainer = trainer_of(each)
        found.append([trainer.step().loss for _ in range(each.steps)])
    return found


def require_losses_of_plain_pytorch(ranks, text, choices):
    chosen = [config(text, words) for words in choices]
    for of_rank in ranks.run(losses, chosen):
        for words, each, found in zip(choices, chosen, of_rank, strict=True):
            assert found == pytest.approx(plain_losses(each), rel=1e-5), words


@pytest.mark.parametrize("turn", range(4))
def test_losses_are_those_of_plain_pytorch_however_a_run_is_sharded_in_units_of_all_sizes(world, text, turn):
    require_losses_of_plain_pytorch(world(2), text, CHOICES[turn::4])


@pytest.mark.parametrize("turn", range(2))
def test_losses_are_the_same_over_several_axes(world, text, turn):
    require_losses_of_plain_pytorch(world(4), text, MESHES[turn::2])


def go_on(config, out, number):
    return run(config, out, resume=number > 0, stop_after=number + 1)


def test_a_run_goes_on_under_other_choices_as_if_never_stopped_and_keeps_them_in_its_manifest(world, text, tmp_path):
    chosen = [config(text, words) for words in (FLAT, ZERO1, RECOMPUTED)]
    found = {}
    for number, each in enumerate(chosen):
        found |= world(2).run(go_on, each, tmp_path, number)[0][0]
        saved = newest(folder_in(tmp_path))
        assert Config.of(saved.config) == each
        assert saved.changes(config(text)) == []
    assert [found[step] for step in (1, 2, 3)] == pytest.approx(plain_losses(chosen[0]), rel=1e-5)


def rounded(of):
    """The first weights of a model, in bfloat16."""
    return lambda *values: of(*values).to(torch.bfloat16).float()


def losses_of_rounded(config, out):
    """Losses of a run from first weights in bfloat16, which goes on with masters where they were left out, and back."""
    with mock.patch.object(Decoder, "_first_value", rounded(Decoder._first_value)):
        plain = losses([replace(config, offload="nothing")])[0]
        near = losses([config])[0]
        turns = ("nothing", config.offload, "nothing")
        found = {}
        for number, offload in enumerate(turns):
            found |= run(replace(config, offload=offload), out, resume=number > 0, stop_after=number + 1)[0]
    return plain, near, [found[step] for step in sorted(found)]


@pytest.mark.values
@pytest.mark.parametrize("words", ["offload=masters", "offload=masters:0.5", "offload=masters mesh=dp=1,tp=2"])
def test_a_run_with_masters_has_the_losses_of_float32_weights_to_the_last_bit_also_when_it_goes_on(
    world, text, tmp_path, words
):
    chosen = config(text, f"precision=bf16 {CUT} {words}")
    for plain, near, going_on in world(2).run(losses_of_rounded, chosen, tmp_path / "run"):
        assert near == plain
        assert going_on == plain


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
    chosen = config(text, "strategy=hsdp")
    said = one_line(InputError, build, chosen, RankGrid(Axes(dp=2), "cpu"))
    assert said.startswith("this model or mesh cannot be sharded so: ")


# Dynamo looks at `.grad` of every graph input, a block's hidden states too, and is warned for it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_each_block_is_compiled_also_where_it_is_recomputed(world, text, recompute):
    chosen = config(text, f"compile=true {RECOMPUTED} recompute={recompute}")
    for found, are_units in world(2).run(compiled_blocks, chosen):
        assert found == pytest.approx(plain_losses(chosen), rel=1e-5)
        assert are_units == [True]
