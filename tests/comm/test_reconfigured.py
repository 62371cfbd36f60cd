"""A model over a process group whose members can change (torch 2.14): it trains, and the group's change is named."""

from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sherd import CommPolicy, fully_shard
from sherd.errors import MeshError
from tests.support.comparing import assert_same
from tests.support.ranks.process import Setup
from tests.support.versions import needs_torch

pytestmark = needs_torch(2, 14, "its groups keep their members")


def let_members_change(rank):
    dist.init_process_group = partial(dist.init_process_group, enable_reconfigure=True)


def connect(number, members, store):
    """Have the ranks `members` be the default group from now on, for the `number`-th time."""
    store.set(f"{number} {dist.get_rank()}", dist._get_reconfigure_handle())
    handles = [store.get(f"{number} {rank}").decode() for rank in members]
    dist._reconfigure(uuid=number, handles=handles).wait()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4))


def trained(model, rank=0, size=1):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        model(rows.chunk(size)[rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def assert_trains(transport):
    model = net()
    for each in (model[0], model[2], model):
        fully_shard(each, comm_policy=CommPolicy(transport))
    trained(model, dist.get_rank(), dist.get_world_size())
    for mine, expected in zip(model.parameters(), trained(net()).parameters(), strict=True):
        assert_same(mine.full_tensor(), expected, rtol=None, atol=None)
    return model


def on_each_of_three_ranks():
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    with pytest.raises(MeshError, match=r"is not connected: call torch\.distributed\._reconfigure"):
        fully_shard(net())
    connect(1, range(3), store)
    model, *_ = (assert_trains(transport) for transport in ("auto", "gloo", "torch"))
    connect(2, range(3), store)
    with pytest.raises(MeshError, match=f"began with 3 ranks, has 3, and this process is its rank {rank} now"):
        model(torch.ones(1, 4))
    if rank == 2:
        return
    connect(3, range(2), store)
    with pytest.raises(MeshError, match=r"began with 3 ranks, has 2.*shard a new model and load the last checkpoint"):
        model(torch.ones(1, 4))
    with pytest.raises(MeshError, match=r"call destroy_process_group\(\) and init_process_group"):
        fully_shard(net())
    dist.destroy_process_group()
    store = dist.PrefixStore("two", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    connect(4, range(2), store)
    assert_trains("auto")


def test_a_model_trains_over_a_group_whose_members_can_change_and_says_so_when_they_have_changed(world):
    world(3, Setup(prepare=let_members_change, timeout=timedelta(seconds=60))).run(on_each_of_three_ranks)
