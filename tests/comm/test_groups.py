"""Sherd's own groups are made once, by their ranks alone, whatever groups a program has made or given up before."""

import gc
import os
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from sherd import FullyShardedDataParallel, ShardingStrategy, fully_shard
from sherd.comm.groups import group_beside, is_destroyed, one_rank_group
from sherd.comm.objects import all_gather_objects
from sherd.errors import CommError
from tests.support.ranks.bodies import on_processes
from tests.support.ranks.process import forget_meshes

CPU = torch.device("cpu")


@pytest.mark.parametrize("reshard_after_forward", [True, 2])
@on_processes(4)
def test_ranks_that_know_of_different_numbers_of_groups_train(reshard_after_forward):
    dist.new_group([0])
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for each in (*model, model):
        fully_shard(each, reshard_after_forward=reshard_after_forward)
    model(torch.ones(2, 4)).sum().backward()
    gradient = model[0].weight.grad.full_tensor()
    assert gradient.any()
    assert all_gather_objects(gradient.tolist(), "") == [gradient.tolist()] * 4


@on_processes(4)
def test_a_group_is_made_once_for_each_purpose_and_ranks_beside_each_parent():
    rank, every = dist.get_rank(), range(dist.get_world_size())
    half = [0, 1] if rank < 2 else [2, 3]
    parent = dist.new_group()
    wanted = [("first", every), ("first", half), ("second", every)]
    made = [group_beside(parent, purpose, ranks, CPU) for purpose, ranks in wanted]
    other = dist.new_group()
    beside_other = group_beside(other, "first", every, CPU)
    dist.destroy_process_group(other)
    again = [group_beside(parent, purpose, ranks, CPU) for purpose, ranks in wanted]
    assert all(each is one for each, one in zip(again, made, strict=True))
    assert len({id(each) for each in (*made, beside_other)}) == 4
    assert one_rank_group() is one_rank_group()
    ranks = [dist.get_process_group_ranks(each) for each in (*made, one_rank_group())]
    assert ranks == [[0, 1, 2, 3], half, [0, 1, 2, 3], [rank]]
    group_beside(parent, "third", every, CPU)  # a new group, before which those of lost parents are destroyed
    assert is_destroyed(beside_other)


@on_processes(2)
def test_a_rank_that_does_not_come_to_make_a_group_is_named():
    parent = dist.new_group(timeout=timedelta(seconds=1))
    if dist.get_rank() == 0:
        with pytest.raises(CommError) as error:
            group_beside(parent, "votes", [0, 1], CPU)
        assert "the start of the group for votes among ranks [0, 1] failed on rank 0 with rank 1" in str(error.value)


def live_after(use, make):
    """How many of three groups live when the fourth is in use: `use(group, number)` of what `make()` returns."""
    gone = []
    for number in range(4):
        group = make()
        gone.append(weakref.ref(group))
        use(group, number)
        dist.barrier()
        dist.destroy_process_group(group)
        del group
    forget_meshes()
    gc.collect()
    return sum(each() is not None for each in gone[:3])


@on_processes(2)
def test_a_destroyed_group_of_a_wrapper_is_let_go_when_the_next_one_is_used():
    def use(group, number):
        FullyShardedDataParallel(nn.Linear(4, 4), process_group=group)(torch.ones(2, 4)).sum().backward()

    assert live_after(use, dist.new_group) == 0


@on_processes(4)
def test_a_destroyed_replicate_group_is_let_go_and_a_later_one_is_not_taken_for_it():
    """Beside the same shard group."""
    shard, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])

    def use(replicate, number):
        model = FullyShardedDataParallel(
            nn.Linear(4, 4, bias=False),
            process_group=(shard, replicate),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            use_orig_params=True,
        )
        model(torch.full((1, 4), float(dist.get_rank() + number))).sum().backward()
        for each in model.parameters():
            assert torch.equal(each.grad.full_tensor(), torch.full((4, 4), 1.5 + number))

    assert live_after(use, lambda: dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0]) == 0


@on_processes(2)
def test_what_was_made_beside_groups_goes_when_they_go():
    """A model over a group of its own makes groups beside that: threads and sockets stay as many as they were."""
    counts = []
    for _ in range(6):
        group = dist.new_group()
        model = fully_shard(nn.Linear(4, 4), mesh=DeviceMesh.from_group(group, "cpu"))
        model(torch.ones(2, 4)).sum().backward()
        del model
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        gc.collect()
        counts.append([len(os.listdir(f"/proc/self/{each}")) for each in ("fd", "task")])
    assert counts[2] == counts[-1]
