"""Are sherd's own groups made once, by their ranks alone, and whatever groups a program has made or given up before?"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sherd import fully_shard
from sherd.comm.groups import group_beside, one_rank_group

CPU = torch.device("cpu")


def train_with_groups_of_rank_0(reshard_after_forward):
    dist.new_group([0])
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for each in (*model, model):
        fully_shard(each, reshard_after_forward=reshard_after_forward)
    model(torch.ones(2, 4)).sum().backward()
    return model[0].weight.grad.full_tensor()


@pytest.mark.parametrize("reshard_after_forward", [True, 2])
def test_ranks_that_know_of_different_numbers_of_groups_train(world, reshard_after_forward):
    gradients = world(4).run(train_with_groups_of_rank_0, reshard_after_forward)
    assert all(each.equal(gradients[0]) and each.any() for each in gradients)


def make_while_groups_come_and_go():
    """Whether each is the one made first, and the ranks of all of them."""
    rank, every = dist.get_rank(), range(dist.get_world_size())
    half = [0, 1] if rank < 2 else [2, 3]
    parent = dist.new_group()
    wanted = [("first", every), ("first", half), ("second", every)]
    made = [group_beside(parent, purpose, ranks, CPU) for purpose, ranks in wanted]
    other = dist.new_group()
    beside_other = group_beside(other, "first", every, CPU)
    dist.destroy_process_group(other)
    again = [group_beside(parent, purpose, ranks, CPU) for purpose, ranks in wanted]
    same = [each is one for each, one in zip(again, made, strict=True)]
    assert len({id(each) for each in (*made, beside_other)}) == 4
    assert one_rank_group() is one_rank_group()
    return same, [dist.get_process_group_ranks(each) for each in (*made, beside_other, one_rank_group())]


def test_a_group_is_made_once_for_each_purpose_and_ranks_beside_each_parent(world):
    every = [0, 1, 2, 3]
    for rank, (same, ranks) in enumerate(world(4).run(make_while_groups_come_and_go)):
        assert same == [True] * 3
        assert ranks == [every, [0, 1] if rank < 2 else [2, 3], every, every, [rank]]
