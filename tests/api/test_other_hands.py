"""A module is refused by name that another unit, or torch's own FSDP, has in hand already; torch's DDP, around units,
and the units, below it, each train their own parameters."""

import copy
from collections import OrderedDict
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import sherd
from sherd.errors import ModuleError, OwnershipError
from sherd.interop import torch_fsdp_identity
from sherd.tensor.ragged import local_part
from sherd.wrap.names import plain_name
from tests.api.checks import assert_trains
from tests.support.comparing import assert_named_close, whole_params
from tests.support.models import Block, chain
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.training import made, mean_square, train_job, train_job_plain

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


@on_threads(2)
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


@on_threads(2)
def test_a_policy_that_comes_later_is_refused_too():
    model = sherd.fully_shard(chain())
    with pytest.raises(ModuleError, match="Block cannot become a unit: unit Sequential"):
        sherd.auto_shard(nn.Sequential(model[0]), each_block)


# Wrapped again


def wrapped_again(again, flat, drops):
    """Returns a trained model's loss, and that of the module in it under `again`, which then trains."""
    model = sherd.FullyShardedDataParallel(chain(), use_orig_params=not flat)
    x = torch.linspace(-1, 1, 16).view(2, 8) * (1 + dist.get_rank())
    train_one(model, x)
    before, inner = model(x).detach(), model.module
    if drops:
        del model
    other = again(inner)
    torch.testing.assert_close(other(x), before)
    own = [each.detach().clone() for each in other.parameters()]
    train_one(other, x)
    assert not all(map(torch.equal, map(local_part, other.parameters()), map(local_part, own)))


def train_one(model, x):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).square().mean().backward()
    optimizer.step()


@on_threads(2)
def test_a_module_that_is_wrapped_again_keeps_its_values_and_trains():
    for sync, drops in ((True, True), (True, False), (False, True), (False, False)):
        again = partial(sherd.FullyShardedDataParallel, use_orig_params=True, sync_module_states=sync)
        wrapped_again(again, flat=False, drops=drops)
    wrapped_again(sherd.fully_shard, flat=False, drops=True)


@on_threads(2)
def test_a_flat_parameter_that_the_second_wrapper_would_hide_is_refused():
    for again in FRONT_ENDS.values():
        for drops in (True, False):
            with pytest.raises(ModuleError, match=r"flat parameter of unit|Go from the inside out"):
                wrapped_again(again, flat=True, drops=drops)


@on_threads(2)
def test_a_copy_of_a_wrapper_is_wrapped_again_and_a_copy_of_its_module_alone_is_refused():
    x = torch.linspace(-1, 1, 16).view(2, 8)
    wrapped = partial(sherd.FullyShardedDataParallel, use_orig_params=True)
    model = wrapped(chain())
    before = model(x).detach()
    other = wrapped(copy.deepcopy(model).module, sync_module_states=True)
    torch.testing.assert_close(other(x), before)
    train_one(other, x)
    torch.testing.assert_close(model(x), before)
    for shard in (wrapped, sherd.fully_shard):
        for again in (partial(wrapped, sync_module_states=True), sherd.fully_shard):
            alone = nn.Sequential(*(copy.deepcopy(each) for each in inside_of(shard(chain()))))
            with pytest.raises(OwnershipError, match="something has sharded it already"):
                again(alone)


@on_threads(2)
def test_a_model_whose_backward_has_raised_is_wrapped_again():
    def fail(_):
        raise MemoryError("no memory")

    model = sherd.FullyShardedDataParallel(chain(), use_orig_params=True)
    x = torch.ones(2, 8)
    before = model(x).detach()
    output = model(x)
    output.register_hook(fail)
    with pytest.raises(MemoryError):
        output.sum().backward()
    again = sherd.FullyShardedDataParallel(model.module, use_orig_params=True)
    torch.testing.assert_close(again(x), before)
    train_one(again, x)


def sharing():
    """Two branches that use one module, and hold nothing else; a head tied to the stem, and one without parameters."""
    stem, head = (nn.Linear(8, 8, bias=False) for _ in range(2))
    head.weight = stem.weight
    left = nn.Sequential(nn.Linear(8, 8))
    right = nn.Sequential(left[0], nn.Tanh())
    return nn.Sequential(OrderedDict(stem=stem, left=left, right=right, shard_buffer=nn.Tanh(), head=head))


@on_threads(2)
def test_units_whose_parameters_others_have_or_that_have_none_train_as_before():
    model = made(sharing)
    for module in (model.stem, model.left, model.right, model.head, model.shard_buffer, model):
        sherd.fully_shard(module)
    assert_trains(model, sharing)


def apart():
    return nn.Sequential(Block(), nn.ReLU(), Block())


@on_threads(2)
def test_what_an_outer_unit_ignored_may_become_a_unit_later():
    model = made(apart)
    sherd.fully_shard(model, ignored_params=set(model[0].parameters()))
    sherd.fully_shard(model[0])  # all of it was left
    sherd.fully_shard(model[1])  # nothing to take
    assert_trains(model, apart)


# Torch's own FSDP


EACH_PAIR = [(way, ours, theirs) for way, ours in FRONT_ENDS.items() for theirs in TORCHS.values()]


@on_threads(2)
def test_torchs_fsdp_within_a_unit_is_refused_before_anything_is_touched():
    for way, ours, theirs in EACH_PAIR:
        model = chain()
        model[1] = theirs(model[1])
        with pytest.raises(ModuleError, match=r"1, a (FSDPBlock|FullyShardedDataParallel): ") as raised:
            ours(model)
        assert "torch's own FSDP has it" in str(raised.value), way
        assert "one library for the full model" in str(raised.value), way
        assert not any(isinstance(each, sherd.FSDPModule) for each in model.modules()), way
    model = chain()
    model[1] = TORCHS["FSDP2"](model[1])
    with pytest.raises(ModuleError, match="1, a FSDPBlock"):
        sherd.auto_shard(model, each_block)
    assert not any(isinstance(each, sherd.FSDPModule) for each in model.modules())


@on_threads(2)
def test_a_part_of_what_torchs_fsdp_has_is_refused():
    for _, ours, theirs in EACH_PAIR:
        model = theirs(chain())
        with pytest.raises(ModuleError, match="a Block: torch's own FSDP has it"):
            ours(inside_of(model)[0])


@on_threads(2)
def test_what_torchs_fsdp_has_and_is_put_in_later_is_named_by_the_first_forward():
    for way, ours, theirs in EACH_PAIR:
        model = ours(chain())
        below = inside_of(model)
        below[0] = theirs(below[0] if way == "flat parameter" else Block())
        with pytest.raises(ModuleError, match=r"0, a .*: torch's own FSDP has it"):
            model(torch.ones(2, 8))


@on_threads(2)
def test_around_a_unit_torchs_fsdp_raises_by_itself():
    for _, ours, theirs in EACH_PAIR:
        model = chain()
        model[0] = ours(model[0])
        with pytest.raises((RuntimeError, ValueError, TypeError)):
            theirs(model)


# Torch's DDP around units


def torchs(model):
    torch_fsdp.fully_shard(model[1])


def by_sherd(model, **options):
    sherd.fully_shard(model[1], **options)


def listed(model):
    sherd.fully_shard([model[1].up, model[1].down])
    sherd.fully_shard(model[1])


def wrapped(model, use_orig_params):
    model[1] = sherd.FullyShardedDataParallel(model[1], use_orig_params=use_orig_params)


WAYS = {
    "torch's": torchs,
    "Shard(0)": by_sherd,
    "Flat": partial(by_sherd, placement=sherd.Flat()),
    "Whole": partial(by_sherd, placement=sherd.Owned()),
    "zero2": partial(by_sherd, placements="zero2"),
    "a list": listed,
    "wrapper": partial(wrapped, use_orig_params=True),
    "flat parameter": partial(wrapped, use_orig_params=False),
}


def around(model, kind):
    """DDP of either kind, that leaves alone what is sharded."""
    if kind == "replicate":
        return replicate(model)
    sharded = [name for name, each in model.named_parameters() if isinstance(each, DTensor)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sharded)
    return DistributedDataParallel(model)


def train_within(way, kind, identity=False):
    model = chain(3)
    with torch_fsdp_identity(identity):
        WAYS[way](model)
        train_job(around(model, kind), mean_square)
    with sherd.unsharded(model[1]) if way != "torch's" else nullcontext():
        found = {plain_name(name): each for name, each in whole_params(model).items()}
    assert_named_close(found, train_job_plain(chain(3), mean_square, 2), "parameter", 1e-5, 1e-6)


@pytest.mark.parametrize("identity", [False, True])
@pytest.mark.parametrize("way", WAYS)
@on_processes(2)
def test_torchs_replicate_leaves_units_alone_and_they_train_as_torchs_do_there(way, identity):
    train_within(way, "replicate", identity)


@pytest.mark.parametrize("way", WAYS)
@on_processes(2)
def test_ddp_that_was_told_to_ignore_the_shards_trains_beside_them(way):
    train_within(way, "DDP")


@on_threads(1)
def test_torchs_replicate_refuses_a_unit_itself_as_it_refuses_torchs():
    with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
        replicate(sherd.fully_shard(chain()))
