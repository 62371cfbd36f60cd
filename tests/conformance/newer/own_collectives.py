"""Collectives of the program's own, an all-reduce hook, memory from the process group; what cannot go together."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sherd import fully_shard
from tests.conformance.newer.behaviours import (
    MLP,
    Gather,
    Scatter,
    alike,
    averaged,
    batch,
    behaviour,
    cases,
    equal,
    raises,
    rank,
    same,
    units,
)


def own(sums):
    plain = nn.Sequential(MLP(6), MLP(6))
    model = units(fully_shard, copy.deepcopy(plain))
    gather, scatter = Gather(), Scatter()
    for m in model:
        m.set_custom_all_gather(gather), m.set_custom_reduce_scatter(scatter), m.set_force_sum_reduction_for_comms(sums)
    for i in range(2):
        alike(model, plain, batch(3, 6, seed=i), clear=True)
    equal((gather.calls, scatter.calls), (8, 4), "calls")
    equal((bool(gather.buffers), bool(scatter.buffers)), (True, True), "buffers of their own")


cases(
    2,
    own_all_gather_and_reduce_scatter=lambda: own(False),
    own_all_gather_and_reduce_scatter_with_sums=lambda: own(True),
)


@behaviour(2)
def memory_of_the_group_trains_alike():
    plain = nn.Sequential(MLP(6), MLP(6))
    model = units(fully_shard, copy.deepcopy(plain))
    for enable in (True, False):
        for m in (*model, model):
            m.set_allocate_memory_from_process_group_for_comm(enable)
        alike(model, plain, batch(3, 6), clear=True)


@behaviour(2)
def memory_of_the_group_after_an_own_collective_is_refused():
    model = fully_shard(nn.Linear(6, 6))
    model.set_allocate_memory_from_process_group_for_comm(True)
    model.set_custom_all_gather(Gather())  # this order is allowed
    raises(
        (AssertionError, ValueError),
        lambda: model.set_allocate_memory_from_process_group_for_comm(True),
        "memory of the group after an own all-gather",
    )


@behaviour(4)
def an_all_reduce_hook_makes_replicas():
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mesh = DeviceMesh.from_group(groups[rank() // 2], "cpu", mesh_dim_names=("shard",))
    model = MLP(10, 4, bias=False)
    (
        nn.init.constant_(model.in_proj.weight, 1.0 * (rank() // 2)),
        nn.init.constant_(model.out_proj.weight, 2.0 * (rank() // 2)),
    )
    fully_shard(model, mesh=mesh)
    called = []

    def hook(output):
        called.append(output.shape)
        dist.all_reduce(output, group=across[rank() % 2]), output.div_(2)

    model.set_all_reduce_hook(hook)
    model(torch.arange(10.0).view(1, 10).requires_grad_()).sum().backward()
    equal(len(called), 1, "calls of the hook")
    same(model.out_proj.weight.grad.to_local(), torch.full((5, 40), 22.5), "out_proj")
    same(model.in_proj.weight.grad.to_local(), torch.arange(0.0, 100, 10).repeat(20, 1), "in_proj")


@behaviour(4)
def an_all_reduce_hook_sees_the_replicas_sum():
    plain = nn.Linear(4, 4, bias=False)
    model = fully_shard(
        copy.deepcopy(plain), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    )

    def hook(output):
        output.mul_(3)

    model.set_all_reduce_hook(hook)
    for m in (model, plain):
        m(batch(2, 4)).square().sum().backward()
    averaged(plain)
    same(model.weight.grad, 3 * plain.weight.grad)
    raises(
        ValueError,
        lambda: model.set_all_reduce_hook(lambda output: None, stream=torch.cpu.Stream()),
        "a stream beside native replicas",
    )
