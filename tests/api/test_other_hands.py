"""Is a module refused by name that another unit, or torch's own FSDP, has in hand already?"""

from functools import partial

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import sherd
from sherd.errors import ModuleError
from tests.support.models import Block
from tests.support.training import assert_trained, made, mean_square, train_job

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


def stack():
    return nn.Sequential(Block(), nn.ReLU(), Block())


def inside_of(model):
    return model.module if hasattr(model, "module") else model


# From the outside in


def outside_in(ways):
    told = []
    for way in ways:
        for inner in (0, [0, 2]):
            if isinstance(inner, list) and not way.startswith(("fully", "Flat")):
                continue
            model = FRONT_ENDS[way](made(stack))
            below = inside_of(model)
            modules = [below[index] for index in inner] if isinstance(inner, list) else below[inner]
            front_end = FRONT_ENDS["wrapper" if way == "flat parameter" else way]
            with pytest.raises(ModuleError, match="made before") as raised:
                front_end(modules)
            told.append(str(raised.value))
            model(torch.ones(2, 8)).sum().backward()  # the unit that there is goes on
    return told


def test_units_made_from_the_outside_in_are_refused_with_the_name_of_the_outer_one(world):
    for told in world(2).run(outside_in, list(FRONT_ENDS))[0]:
        assert "a Block cannot become a unit" in told
        assert "Go from the inside out" in told
        assert "up.weight" in told


def by_a_policy():
    model = sherd.fully_shard(made(stack))
    with pytest.raises(ModuleError, match="Block cannot become a unit: unit Sequential"):
        sherd.auto_shard(nn.Sequential(model[0]), lambda module, recurse, **_: recurse or isinstance(module, Block))


def test_a_policy_that_comes_later_is_refused_too(world):
    world(2).run(by_a_policy)


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


def units_without_parameters_of_their_own():
    model = made(Shared)
    for module in (model.stem, model.left, model.right, model.head, model.shard_buffer, model):
        sherd.fully_shard(module)
    return train_job(model, mean_square)


def test_units_whose_parameters_others_have_or_that_have_none_train_as_before(world):
    assert_trained(world(2).run(units_without_parameters_of_their_own), Shared)


def what_the_outer_unit_left():
    model = made(stack)
    sherd.fully_shard(model, ignored_params=set(model[0].parameters()))
    sherd.fully_shard(model[0])  # all of it was left
    sherd.fully_shard(model[1])  # nothing to take
    return train_job(model, mean_square)


def test_what_an_outer_unit_ignored_may_become_a_unit_later(world):
    assert_trained(world(2).run(what_the_outer_unit_left), stack)


# Torch's own FSDP


def torchs_within(front_ends):
    for way in front_ends:
        for name, theirs in TORCHS.items():
            model = nn.Sequential(Block(), nn.ReLU(), Block())
            model[2] = theirs(model[2])
            with pytest.raises(ModuleError, match=r"2, a (FSDPBlock|FullyShardedDataParallel): ") as raised:
                FRONT_ENDS[way](model)
            assert "torch's own FSDP has it" in str(raised.value)
            assert "one library for the whole model" in str(raised.value), name
            assert not any(isinstance(each, sherd.FSDPModule) for each in model.modules())


def test_torchs_fsdp_within_a_unit_is_refused_before_anything_is_touched(world):
    world(2).run(torchs_within, list(FRONT_ENDS))


def torchs_around(front_ends):
    for way in front_ends:
        for theirs in TORCHS.values():
            model = theirs(nn.Sequential(Block(), nn.ReLU(), Block()))
            with pytest.raises(ModuleError, match="a Block: torch's own FSDP has it"):
                FRONT_ENDS[way](inside_of(model)[0])


def test_a_part_of_what_torchs_fsdp_has_is_refused(world):
    world(2).run(torchs_around, list(FRONT_ENDS))


def torchs_put_in_later(front_ends):
    for way in front_ends:
        for theirs in TORCHS.values():
            model = FRONT_ENDS[way](made(stack))
            below = inside_of(model)
            below[0] = theirs(below[0] if way == "flat parameter" else Block())
            with pytest.raises(ModuleError, match=r"0, a .*: torch's own FSDP has it"):
                model(torch.ones(2, 8))


def test_what_torchs_fsdp_has_and_is_put_in_later_is_named_by_the_first_forward(world):
    world(2).run(torchs_put_in_later, list(FRONT_ENDS))


def torch_refuses(ways):
    for way in ways:
        for theirs in TORCHS.values():
            model = made(stack)
            model[0] = FRONT_ENDS[way](model[0])
            with pytest.raises((RuntimeError, ValueError, TypeError)):
                theirs(model)


def test_around_a_unit_torchs_fsdp_raises_by_itself(world):
    world(2).run(torch_refuses, list(FRONT_ENDS))


def part_by_a_policy():
    model = made(stack)
    model[2] = TORCHS["FSDP2"](model[2])
    with pytest.raises(ModuleError, match="2, a FSDPBlock"):
        sherd.auto_shard(model, lambda module, recurse, **_: recurse or isinstance(module, Block))
    assert not any(isinstance(each, sherd.FSDPModule) for each in model.modules())


def test_auto_shard_refuses_torchs_fsdp_before_it_begins(world):
    world(2).run(part_by_a_policy)
