"""Do the collectives move the right elements on processes, threads and a fake group, under both of torch's names?"""

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
from sherd.policy import TRANSPORTS, CommPolicy
from tests.support.ranks.forked import answer_of

CPU = torch.device("cpu")


def collectives(async_op: bool = False, transport: str = "auto") -> tuple[list[float], list[float], list[float]]:
    """What this rank gets of the three, each rank giving its own number."""
    size, rank = dist.get_world_size(), dist.get_rank()
    chosen = transport_of(dist.group.WORLD, CPU, CommPolicy(transport))
    gathered, scattered = torch.empty(2 * size), torch.empty(2)
    total = torch.tensor([1.0, 10.0 * rank])
    works = [
        chosen.all_gather(gathered, torch.tensor([rank, -rank]).float(), (2,) * size, async_op),
        chosen.reduce_scatter(scattered, torch.arange(2.0 * size), (2,) * size, async_op),
        chosen.all_reduce(total, async_op),
    ]
    for work in works:
        if work is not None:
            work.wait()
    return gathered.tolist(), scattered.tolist(), total.tolist()


EXPECTED_OF_TWO = [
    ([0, 0, 1, -1], [0, 2], [2, 10]),
    ([0, 0, 1, -1], [4, 6], [2, 10]),
]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("async_op", [False, True])
def test_processes_gather_scatter_and_sum(world, async_op, transport):
    assert world(2).run(collectives, async_op, transport) == EXPECTED_OF_TWO


def test_threads_gather_scatter_and_sum(threads):
    assert threads(2).run(collectives) == EXPECTED_OF_TWO


def test_a_group_of_one_rank_copies(world):
    assert world(1).run(collectives) == [([0, 0], [0, 1], [1, 0])]


def test_no_group_at_all_copies_and_leaves_a_sum_as_it_is():
    output, total = torch.empty(2), torch.ones(2)
    alone = transport_of(None, CPU, CommPolicy())
    assert alone.all_gather(output, torch.tensor([3.0, 4.0]), (2,), async_op=True) is None
    assert output.tolist() == [3, 4]
    assert alone.reduce_scatter(output, torch.tensor([5.0, 6.0]), (2,), async_op=True) is None
    assert output.tolist() == [5, 6]
    assert alone.all_reduce(total, async_op=True) is None
    assert total.tolist() == [1, 1]


def collectives_on_memory_of_the_group() -> list[float]:
    group = dist.group.WORLD
    gather, scatter = GroupMemoryAllGather(group, CPU), GroupMemoryReduceScatter(group, CPU)
    size = dist.get_world_size()
    rows = gather.allocate((size, 3), dtype=torch.float32, device=CPU)
    assert (rows.shape, rows.dtype, rows.device) == ((size, 3), torch.float32, CPU)
    gather(rows.view(-1), torch.full((3,), float(dist.get_rank())), group)
    part = scatter.allocate((3,), dtype=torch.float32, device=CPU)
    scatter(part, rows.view(-1).contiguous(), group, dist.ReduceOp.SUM)
    return part.tolist()


def test_a_group_without_an_allocator_of_its_own_uses_ordinary_memory(world):
    assert world(2).run(collectives_on_memory_of_the_group) == [[0, 0, 0], [2, 2, 2]]


def test_symmetric_memory_on_a_cpu_is_refused_and_so_is_a_backend_nobody_knows(world):
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


def test_the_new_names_are_taken_where_torch_has_them(names, monkeypatch):
    monkeypatch.setattr(dist, "all_gather_single", "new gather", raising=False)
    monkeypatch.setattr(dist, "reduce_scatter_single", "new scatter", raising=False)
    module = names()
    assert (module.all_gather_single, module.reduce_scatter_single) == ("new gather", "new scatter")


def test_the_older_names_do_the_same_where_torch_has_only_those(names, monkeypatch):
    monkeypatch.delattr(dist, "all_gather_single", raising=False)
    monkeypatch.delattr(dist, "reduce_scatter_single", raising=False)
    module = names()
    assert module.all_gather_single is dist.all_gather_into_tensor
    assert module.reduce_scatter_single is dist.reduce_scatter_tensor


def results_under_older_names() -> tuple[list[float], list[float]]:
    size, rank = dist.get_world_size(), dist.get_rank()
    gathered, scattered = torch.empty(size), torch.empty(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)]))
        dist.reduce_scatter_tensor(scattered, torch.arange(float(size)), op=dist.ReduceOp.SUM)
    return gathered.tolist(), scattered.tolist()


def test_the_older_names_take_the_same_arguments(world):
    assert world(2).run(results_under_older_names) == [([0, 1], [0]), ([0, 1], [2])]
