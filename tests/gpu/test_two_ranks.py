"""Do two ranks on one GPU train as the plain model? Two processes, CUDA tensors over gloo, where gloo takes them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import sherd
from sherd._torch import all_gather_single, reduce_scatter_single
from tests.gpu.training import RECIPES, assert_same, train_here, train_plain
from tests.ranks import RanksFailed


def device_of_rank():
    """Both ranks share the first GPU. Made current before a mesh is made, which would take one GPU a rank."""
    torch.cuda.init()
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def refused_by_gloo():
    """On a rank: which collectives on CUDA tensors gloo refuses or gets wrong, by name, with what it said."""
    device, rank = device_of_rank(), dist.get_rank()
    mine = torch.full((2,), float(rank + 1), device=device)

    def single_gather():
        rows = torch.zeros(4, device=device)
        all_gather_single(rows, mine, group=dist.group.WORLD, async_op=False)
        return rows.tolist() == [1, 1, 2, 2]

    def single_scatter():
        part, rows = torch.zeros(2, device=device), mine.repeat(2)
        reduce_scatter_single(part, rows, op=dist.ReduceOp.SUM, group=dist.group.WORLD, async_op=False)
        return part.tolist() == [3, 3]

    def list_gather():
        parts = [torch.zeros(2, device=device) for _ in range(2)]
        dist.all_gather(parts, mine)
        return [part.tolist() for part in parts] == [[1, 1], [2, 2]]

    def all_reduce():
        total = mine.clone()
        dist.all_reduce(total)
        return total.tolist() == [3, 3]

    refused = {}
    for call in (single_gather, single_scatter, list_gather, all_reduce):
        try:
            if not call():
                refused[call.__name__] = "wrong values"
        except Exception as error:
            refused[call.__name__] = str(error).splitlines()[0]
    return refused


@pytest.fixture(scope="module")
def refused(world):
    try:
        return world(2).run(refused_by_gloo)[0]
    except RanksFailed as error:
        return {"all": str(error)}


def skip_without(refused, *calls):
    missing = {call: why for call, why in refused.items() if call in (*calls, "all")}
    if missing:
        pytest.skip(f"gloo does not do this with CUDA tensors: {missing}")


def train_on_gpu(recipe, how, options):
    """On a rank."""
    return train_here(recipe, how, device_of_rank(), options)


def assert_ranks_train_plainly(world, recipe, how, **options):
    expected = train_plain(recipe, device_of_rank(), num_ranks=2)
    expected.params = {name: each.cpu() for name, each in expected.params.items()}
    for found in world(2).run(train_on_gpu, recipe, how, options, timeout=120):
        assert_same(found, expected, recipe, own_losses=False)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("placement", [None, sherd.Flat()], ids=["Shard(0)", "Flat"])
def test_torchs_calls_carry_it(placement, recipe, world, refused):
    skip_without(refused, "single_gather", "single_scatter", "all_reduce")
    assert_ranks_train_plainly(world, RECIPES[recipe], "torch's calls", placement=placement)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("placement", [None, sherd.Flat()], ids=["Shard(0)", "Flat"])
def test_a_users_own_calls_carry_it(placement, recipe, world, refused):
    skip_without(refused, "list_gather", "all_reduce")
    assert_ranks_train_plainly(world, RECIPES[recipe], "own collectives", placement=placement)


@pytest.mark.parametrize("recipe", ["float32", "unsynced", "clipped"])
@pytest.mark.parametrize("placement", [None, sherd.Flat()], ids=["Shard(0)", "Flat"])
def test_offloaded_shards_are_carried_too(placement, recipe, world, refused):
    skip_without(refused, "list_gather", "all_reduce")
    assert_ranks_train_plainly(world, RECIPES[recipe], "own collectives", placement=placement, offload=True)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("use_orig_params", [True, False], ids=["original", "flat"])
def test_the_wrapper_carries_it(use_orig_params, recipe, world, refused):
    skip_without(refused, "single_gather", "single_scatter", "all_reduce")
    assert_ranks_train_plainly(world, RECIPES[recipe], "wrapper", use_orig_params=use_orig_params)
