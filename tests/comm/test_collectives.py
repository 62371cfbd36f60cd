"""The collectives on memory of the group, on a fake group, and under both of torch's names."""

import importlib
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from sherd import fully_shard
from sherd._torch import collectives as renamed
from sherd.comm.collectives import GroupMemoryAllGather, GroupMemoryReduceScatter, SymmetricAllGather
from sherd.comm.transports import transport_of
from sherd.errors import PolicyError
from sherd.policy import CommPolicy
from tests.support.ranks.bodies import on_processes
from tests.support.ranks.forked import answer_of

CPU = torch.device("cpu")


@on_processes(2)
def test_a_group_without_an_allocator_of_its_own_uses_ordinary_memory():
    group = dist.group.WORLD
    gather, scatter = GroupMemoryAllGather(group, CPU), GroupMemoryReduceScatter(group, CPU)
    size = dist.get_world_size()
    rows = gather.allocate((size, 3), dtype=torch.float32, device=CPU)
    assert (rows.shape, rows.dtype, rows.device) == ((size, 3), torch.float32, CPU)
    gather(rows.view(-1), torch.full((3,), float(dist.get_rank())), group)
    part = scatter.allocate((3,), dtype=torch.float32, device=CPU)
    scatter(part, rows.view(-1).contiguous(), group, dist.ReduceOp.SUM)
    assert part.tolist() == [2.0 * dist.get_rank()] * 3


def test_symmetric_memory_on_a_cpu_is_refused_and_so_is_a_backend_nobody_knows():
    with pytest.raises(PolicyError, match=r"only 'NCCL' is known"):
        SymmetricAllGather(None, "GLOO")
    with pytest.raises(PolicyError, match="needs a CUDA device, the mesh is on cpu"):
        SymmetricAllGather(None, "NCCL").allocate((2,), dtype=torch.float32, device=CPU)


# In a process of its own: a fake group would be this process's default one.


def on_the_fake_group() -> tuple[tuple[int, ...], tuple[int, ...]]:
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=1024)
    calls = transport_of(dist.group.WORLD, CPU, CommPolicy())
    calls.all_gather(torch.empty(1024), torch.ones(1), (1,) * 1024, async_op=False)
    calls.reduce_scatter(torch.empty(1), torch.ones(1024), (1,) * 1024, async_op=True).wait()
    calls.all_reduce(torch.ones(1), async_op=True).wait()
    model = fully_shard(torch.nn.Linear(64, 2048))
    model(torch.ones(2, 64)).sum().backward()
    return tuple(model.weight.to_local().shape), tuple(model.weight.grad.to_local().shape)


def test_a_thousand_ranks_of_the_fake_group_step_in_one_process():
    assert answer_of(on_the_fake_group) == ((2, 64), (2, 64))


# The names that torch 2.13 gave two of them, and the older ones


@pytest.fixture
def names():
    """`sherd._torch.collectives` made anew under other names in torch.distributed; as it was afterwards."""
    saved = dict(vars(renamed))
    yield lambda: importlib.reload(renamed)
    vars(renamed).update(saved)


def test_the_new_names_are_taken_where_torch_has_them_and_else_the_older_ones(names, monkeypatch):
    for name in ("all_gather_single", "reduce_scatter_single"):
        monkeypatch.setattr(dist, name, f"new {name}", raising=False)
    module = names()
    found = module.all_gather_single, module.reduce_scatter_single
    assert found == ("new all_gather_single", "new reduce_scatter_single")
    for name in ("all_gather_single", "reduce_scatter_single"):
        monkeypatch.delattr(dist, name)
    module = names()
    assert module.all_gather_single is dist.all_gather_into_tensor
    assert module.reduce_scatter_single is dist.reduce_scatter_tensor


@on_processes(2)
def test_the_older_names_take_the_same_arguments():
    size, rank = dist.get_world_size(), dist.get_rank()
    gathered, scattered = torch.empty(size), torch.empty(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)]))
        dist.reduce_scatter_tensor(scattered, torch.arange(float(size)), op=dist.ReduceOp.SUM)
    assert gathered.tolist() == [0, 1]
    assert scattered.tolist() == [2 * rank]
