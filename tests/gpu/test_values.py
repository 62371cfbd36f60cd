"""Does training on the device give plain PyTorch's numbers? One rank, streams real, the device's own collectives."""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import sherd
from sherd.comm import transports
from sherd.comm.transport import SingleCalls
from tests.gpu.training import RECIPES, Recipe, Run, assert_same, train_plain, train_sharded, train_wrapped

PLACEMENTS = {
    "Shard(0)": {},
    "Shard(-1)": {"shard_placement_fn": lambda parameter: Shard(parameter.dim() - 1)},
    "Flat": {"placement": sherd.Flat()},
    "Blocks": {"placement": sherd.Blocks(4)},
    "Whole": {"placement": sherd.Owned()},
}


@pytest.fixture(autouse=True, scope="module")
def devices_own_collectives(alone):
    """A group of one rank is served by copies; here the device's collectives are asked."""
    with mock.patch.object(transports, "_ONE_RANK", SingleCalls(dist.group.WORLD)):
        yield


@pytest.fixture(autouse=True)
def every_access_is_ordered(accelerator):
    accelerator.races()
    yield
    assert not accelerator.races()


@functools.cache
def plain(name: str, device: torch.device) -> Run:
    """On the device too: its kernels round as they please."""
    return train_plain(RECIPES[name], device)


@pytest.mark.values
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_placement_trains_as_the_plain_model(placement, recipe, alone, accelerator):
    found = train_sharded(RECIPES[recipe], alone, accelerator.device, **PLACEMENTS[placement])
    assert_same(found, plain(recipe, accelerator.device), RECIPES[recipe])


@pytest.mark.parametrize("recipe", ["float32", "bfloat16", "recomputed", "unsynced", "clipped"])
@pytest.mark.parametrize("placement", ["Shard(0)", "Flat"])
def test_shards_that_rest_in_pinned_host_memory_train_as_the_plain_model(placement, recipe, alone, accelerator):
    found = train_sharded(RECIPES[recipe], alone, accelerator.device, offload=True, **PLACEMENTS[placement])
    assert_same(found, plain(recipe, accelerator.device), RECIPES[recipe])


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("placement", ["Shard(0)", "Flat"])
def test_memory_of_the_process_group_carries_the_same_numbers(placement, reshard, alone, accelerator):
    found = train_sharded(
        Recipe(),
        alone,
        accelerator.device,
        after=lambda unit: unit.set_allocate_memory_from_process_group_for_comm(True),
        reshard_after_forward=reshard,
        **PLACEMENTS[placement],
    )
    assert_same(found, plain("float32", accelerator.device), Recipe())


STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]


@pytest.mark.values
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("use_orig_params", [True, False], ids=["original", "flat"])
def test_the_wrapper_trains_as_the_plain_model(use_orig_params, recipe, alone, accelerator):
    found = train_wrapped(RECIPES[recipe], accelerator.device, device_mesh=alone, use_orig_params=use_orig_params)
    assert_same(found, plain(recipe, accelerator.device), RECIPES[recipe])


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
@pytest.mark.parametrize("use_orig_params", [True, False], ids=["original", "flat"])
def test_every_strategy_of_the_wrapper_trains_as_the_plain_model(strategy, use_orig_params, alone, accelerator):
    strategy = sherd.ShardingStrategy[strategy]
    found = train_wrapped(
        Recipe(), accelerator.device, device_mesh=alone, sharding_strategy=strategy, use_orig_params=use_orig_params
    )
    assert_same(found, plain("float32", accelerator.device), Recipe())


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["original", "flat"])
def test_an_offloading_wrapper_trains_as_the_plain_model(use_orig_params, alone, accelerator):
    found = train_wrapped(
        RECIPES["clipped"], accelerator.device, device_mesh=alone, use_orig_params=use_orig_params, offload=True
    )
    assert_same(found, plain("clipped", accelerator.device), RECIPES["clipped"])


def test_offloaded_shards_and_gradients_lie_in_host_memory_and_the_shards_are_pinned(alone, accelerator):
    model = torch.nn.Linear(64, 64).to(accelerator.device)
    sherd.fully_shard(model, mesh=alone, offload_policy=sherd.CPUOffloadPolicy())
    model(torch.ones(2, 64, device=accelerator.device)).sum().backward()
    for parameter in model.parameters():
        assert parameter.to_local().device.type == "cpu"
        assert parameter.to_local().is_pinned()
        assert parameter.grad.to_local().device.type == "cpu"


def test_whole_parameters_are_freed_after_forward_and_after_backward(alone, accelerator):
    """As the allocator sees it: 64 MiB come, and go."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(3))).to(accelerator.device)
    for layer in model:
        sherd.fully_shard(layer, mesh=alone, reshard_after_forward=True)
    sherd.fully_shard(model, mesh=alone)
    x = torch.ones(1, 4096, device=accelerator.device)
    for _ in range(2):
        model(x).sum().backward()
        model.zero_grad()
    shards = sum(each.to_local().nbytes for each in model.parameters())
    before = accelerator.allocated()
    loss = model(x).sum()
    assert accelerator.allocated() - before < 1 << 20, "nothing is whole between forward and backward"
    loss.backward()
    assert abs(accelerator.allocated() - before - shards) < 1 << 20, "gradients, and nothing else"
