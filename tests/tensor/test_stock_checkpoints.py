"""What torch's own checkpointing saves of a model in any placement loads under every other, and into torch's FSDP2, by
the methods of our tensors, which come before torch 2.14's attributes of a `CheckpointableTensor`."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.planner_helpers import _create_write_items

import sherd
from tests.support.comparing import assert_same, whole_params
from tests.support.ranks.bodies import on_threads
from tests.support.sharding import PLACEMENTS, sharded


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


def save_each(folder):
    for front in PLACEMENTS:
        dcp.save(sharded(net(1), front).state_dict(), checkpoint_id=f"{folder}/{front}")


def load_each(folder):
    from torch.distributed.fsdp import fully_shard as torchs

    for saved in PLACEMENTS:
        for front in (*PLACEMENTS, torchs):
            model = torchs(net(2)) if front is torchs else sharded(net(2), front)
            state = model.state_dict()
            dcp.load(state, checkpoint_id=f"{folder}/{saved}")
            assert_same(whole_params(model), dict(net(1).named_parameters()), f"{saved} into {front}")


@pytest.mark.parametrize("loading", [1, 3])
def test_stock_checkpoints_of_two_ranks_load_on_others_and_into_torch(world, tmp_path, loading):
    world(2).run(save_each, str(tmp_path))
    world(loading).run(load_each, str(tmp_path))


@on_threads(2, front=["shard", "flat", "blocks", "owned"])
def test_the_methods_of_a_tensor_come_before_the_attributes_of_torchs_protocol(front):
    weight = sherd.fully_shard(nn.Linear(4, 4), placement=PLACEMENTS[front]).weight.data
    before = _create_write_items("weight", weight)
    for name in ("global_shape", "global_offsets", "local_offsets", "local_sizes"):
        setattr(weight, name, ((9, 9),))
    assert _create_write_items("weight", weight) == before
