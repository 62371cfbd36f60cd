"""Torch's DDP, around sherd's units, and the units, below it, each train their own parameters."""

from contextlib import nullcontext
from functools import partial

import pytest
from torch.distributed import fsdp
from torch.distributed._composable import replicate
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import sherd
from sherd import fully_shard
from sherd.engine.state.parameter import plain_name
from sherd.interop import torch_fsdp_identity
from tests.api.checks import on_ranks
from tests.support.comparing import assert_named_close, whole_params
from tests.support.models import chain
from tests.support.training import mean_square, train_job, train_job_plain


def torchs(model):
    fsdp.fully_shard(model[1])


def ours(model, **options):
    fully_shard(model[1], **options)


def listed(model):
    fully_shard([model[1].up, model[1].down])
    fully_shard(model[1])


def wrapped(model, use_orig_params):
    model[1] = sherd.FullyShardedDataParallel(model[1], use_orig_params=use_orig_params)


WAYS = {
    "torch's": torchs,
    "Shard(0)": ours,
    "Flat": partial(ours, placement=sherd.Flat()),
    "Whole": partial(ours, placement=sherd.Owned()),
    "zero2": partial(ours, placements="zero2"),
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
@on_ranks(2, "world")
def test_torchs_replicate_leaves_units_alone_and_they_train_as_torchs_do_there(way, identity):
    train_within(way, "replicate", identity)


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2, "world")
def test_ddp_that_was_told_to_ignore_the_shards_trains_beside_them(way):
    train_within(way, "DDP")


@on_ranks(1)
def test_torchs_replicate_refuses_a_unit_itself_as_it_refuses_torchs():
    with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
        replicate(fully_shard(chain()))
