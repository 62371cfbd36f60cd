"""A module is refused by name that another unit, or torch's own FSDP, has in hand already."""

from functools import partial

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import sherd
from sherd.errors import ModuleError
from tests.api.checks import assert_trains, on_ranks
from tests.support.models import Block, chain
from tests.support.training import made

CPU = torch.device("cpu")
FRONT_ENDS = {
    "fully_shard": sherd.fully_shard,
    "Flat": partial(sherd.fully_shard, placement=sherd.Flat()),
    "wrapper": partial(sherd.FullyShardedDataParallel, use_orig_params=True),
    "flat parameter": partial(sherd.FullyShardedDataParallel, use_orig_params=False),
}
TORCHS = {
    "FSDP1": partial(torch_fsdp.FullyShardedDataParallel, use_orig_params=True, device_id=CPU),
    "FSDP1 flat": partial(torch_fsdp.FullyShardedDataParallel, use_orig_params=False, device_id=CPU),
    "FSDP2": torch_fsdp.fully_shard,
}


def inside_of(model):
    return model.module if hasattr(model, "module") else model


# From the outside in


@on_ranks(2)
def test_units_made_from_the_outside_in_are_refused_with_the_name_of_the_outer_one():
    for way, shard in FRONT_ENDS.items():
        for inner in (0, [0, 1]):
            if isinstance(inner, list) and not way.startswith(("fully", "Flat")):
                continue
            model = shard(chain())
            below = inside_of(model)
            modules = [below[index] for index in inner] if isinstance(inner, list) else below[inner]
            front_end = FRONT_ENDS["wrapper" if way == "flat parameter" else way]
            with pytest.raises(ModuleError, match="made before") as raised:
                front_end(modules)
            for words in ("a Block cannot become a unit", "Go from the inside out", "up.weight"):
                assert words in str(raised.value), way
            model(torch.ones(2, 8)).sum().backward()  # the unit that there is goes on


def each_block(module, recurse, **_):
    return recurse or isinstance(module, Block)


@on_ranks(2)
def test_a_policy_that_comes_later_is_refused_too():
    model = sherd.fully_shard(chain())
    with pytest.raises(ModuleError, match="Block cannot become a unit: unit Sequential"):
        sherd.auto_shard(nn.Sequential(model[0]), each_block)


class Shared(nn.Module):
    """Two branches that use one module, and hold nothing else; a head tied to the stem, and one without parameters."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 8, bias=False)
        self.left = nn.Sequential(nn.Linear(8, 8))
        self.right = nn.Sequential(self.left[0], nn.Tanh())
        self.shard_buffer = nn.Tanh()
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.stem.weight

    def forward(self, x):
        return self.head(self.shard_buffer(self.right(self.left(self.stem(x)))))


@on_ranks(2)
def test_units_whose_parameters_others_have_or_that_have_none_train_as_before():
    model = made(Shared)
    for module in (model.stem, model.left, model.right, model.head, model.shard_buffer, model):
        sherd.fully_shard(module)
    assert_trains(model, Shared)


def apart():
    return nn.Sequential(Block(), nn.ReLU(), Block())


@on_ranks(2)
def test_what_an_outer_unit_ignored_may_become_a_unit_later():
    model = made(apart)
    sherd.fully_shard(model, ignored_params=set(model[0].parameters()))
    sherd.fully_shard(model[0])  # all of it was left
    sherd.fully_shard(model[1])  # nothing to take
    assert_trains(model, apart)


# Torch's own FSDP


EACH_PAIR = [(way, ours, theirs) for way, ours in FRONT_ENDS.items() for theirs in TORCHS.values()]


@on_ranks(2)
def test_torchs_fsdp_within_a_unit_is_refused_before_anything_is_touched():
    for way, ours, theirs in EACH_PAIR:
        model = chain()
        model[1] = theirs(model[1])
        with pytest.raises(ModuleError, match=r"1, a (FSDPBlock|FullyShardedDataParallel): ") as raised:
            ours(model)
        assert "torch's own FSDP has it" in str(raised.value), way
        assert "one library for the whole model" in str(raised.value), way
        assert not any(isinstance(each, sherd.FSDPModule) for each in model.modules()), way
    model = chain()
    model[1] = TORCHS["FSDP2"](model[1])
    with pytest.raises(ModuleError, match="1, a FSDPBlock"):
        sherd.auto_shard(model, each_block)
    assert not any(isinstance(each, sherd.FSDPModule) for each in model.modules())


@on_ranks(2)
def test_a_part_of_what_torchs_fsdp_has_is_refused():
    for _, ours, theirs in EACH_PAIR:
        model = theirs(chain())
        with pytest.raises(ModuleError, match="a Block: torch's own FSDP has it"):
            ours(inside_of(model)[0])


@on_ranks(2)
def test_what_torchs_fsdp_has_and_is_put_in_later_is_named_by_the_first_forward():
    for way, ours, theirs in EACH_PAIR:
        model = ours(chain())
        below = inside_of(model)
        below[0] = theirs(below[0] if way == "flat parameter" else Block())
        with pytest.raises(ModuleError, match=r"0, a .*: torch's own FSDP has it"):
            model(torch.ones(2, 8))


@on_ranks(2)
def test_around_a_unit_torchs_fsdp_raises_by_itself():
    for _, ours, theirs in EACH_PAIR:
        model = chain()
        model[0] = ours(model[0])
        with pytest.raises((RuntimeError, ValueError, TypeError)):
            theirs(model)
