"""Does training on a GPU give plain PyTorch's numbers? One rank, lanes and streams real, collectives by NCCL."""

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
def nccl_collectives(nccl_alone):
    """A group of one rank is served by copies; here NCCL is asked."""
    with mock.patch.object(transports, "_ALONE", SingleCalls(dist.group.WORLD)):
        yield


@functools.cache
def plain(name: str, device: torch.device) -> Run:
    return train_plain(RECIPES[name], device)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_placement_trains_as_the_plain_model(placement, recipe, nccl_alone, gpu):
    found = train_sharded(RECIPES[recipe], nccl_alone, gpu, **PLACEMENTS[placement])
    assert_same(found, plain(recipe, gpu), RECIPES[recipe])


@pytest.mark.parametrize("recipe", ["float32", "bfloat16", "recomputed", "unsynced", "clipped"])
@pytest.mark.parametrize("placement", ["Shard(0)", "Flat"])
def test_shards_that_rest_in_pinned_host_memory_train_as_the_plain_model(placement, recipe, nccl_alone, gpu):
    found = train_sharded(RECIPES[recipe], nccl_alone, gpu, offload=True, **PLACEMENTS[placement])
    assert_same(found, plain(recipe, gpu), RECIPES[recipe])


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("placement", ["Shard(0)", "Flat"])
def test_memory_of_the_process_group_carries_the_same_numbers(placement, reshard, nccl_alone, gpu):
    found = train_sharded(
        Recipe(),
        nccl_alone,
        gpu,
        after=lambda unit: unit.set_allocate_memory_from_process_group_for_comm(True),
        reshard_after_forward=reshard,
        **PLACEMENTS[placement],
    )
    assert_same(found, plain("float32", gpu), Recipe())


STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("use_orig_params", [True, False], ids=["original", "flat"])
def test_the_wrapper_trains_as_the_plain_model(use_orig_params, recipe, nccl_alone, gpu):
    found = train_wrapped(RECIPES[recipe], gpu, device_mesh=nccl_alone, use_orig_params=use_orig_params)
    assert_same(found, plain(recipe, gpu), RECIPES[recipe])


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
@pytest.mark.parametrize("use_orig_params", [True, False], ids=["original", "flat"])
def test_every_strategy_of_the_wrapper_trains_as_the_plain_model(strategy, use_orig_params, nccl_alone, gpu):
    strategy = sherd.ShardingStrategy[strategy]
    found = train_wrapped(
        Recipe(), gpu, device_mesh=nccl_alone, sharding_strategy=strategy, use_orig_params=use_orig_params
    )
    assert_same(found, plain("float32", gpu), Recipe())


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["original", "flat"])
def test_an_offloading_wrapper_trains_as_the_plain_model(use_orig_params, nccl_alone, gpu):
    found = train_wrapped(
        RECIPES["clipped"], gpu, device_mesh=nccl_alone, use_orig_params=use_orig_params, offload=True
    )
    assert_same(found, plain("clipped", gpu), RECIPES["clipped"])


def test_offloaded_shards_and_gradients_lie_in_host_memory_and_the_shards_are_pinned(nccl_alone, gpu):
    model = torch.nn.Linear(64, 64).to(gpu)
    sherd.fully_shard(model, mesh=nccl_alone, offload_policy=sherd.CPUOffloadPolicy())
    model(torch.ones(2, 64, device=gpu)).sum().backward()
    for parameter in model.parameters():
        assert parameter.to_local().device.type == "cpu"
        assert parameter.to_local().is_pinned()
        assert parameter.grad.to_local().device.type == "cpu"


def test_whole_parameters_are_freed_after_forward_and_after_backward(nccl_alone, gpu):
    """As the allocator sees it: 64 MiB come, and go."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(3))).to(gpu)
    for layer in model:
        sherd.fully_shard(layer, mesh=nccl_alone, reshard_after_forward=True)
    sherd.fully_shard(model, mesh=nccl_alone)
    x = torch.ones(1, 4096, device=gpu)
    for _ in range(2):
        model(x).sum().backward()
        model.zero_grad()
    shards = sum(each.to_local().nbytes for each in model.parameters())
    before = torch.cuda.memory_allocated()
    loss = model(x).sum()
    assert torch.cuda.memory_allocated() - before < 1 << 20, "nothing is whole between forward and backward"
    loss.backward()
    assert abs(torch.cuda.memory_allocated() - before - shards) < 1 << 20, "gradients, and nothing else"
