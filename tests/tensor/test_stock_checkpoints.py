"""What torch's own checkpointing saves of a model in any placement loads under every other, and into torch's FSDP2, by
the methods of our tensors, which come before torch 2.14's attributes of a `CheckpointableTensor`."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torchs
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import sherd
from sherd import StateDictType as Kind
from tests.support.comparing import assert_same, plain_name, whole_params
from tests.support.ranks.bodies import on_threads
from tests.support.sharding import PLACEMENTS, WRAPPERS, sharded


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


def on_one_axis(seed, front):
    return torchs(net(seed)) if front == "torch" else sharded(net(seed), front)


def of_replicas(seed, front):
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    if front in WRAPPERS:
        return sharded(net(seed), front, device_mesh=mesh, sharding_strategy=sherd.ShardingStrategy.HYBRID_SHARD)
    return torchs(net(seed), mesh=mesh) if front == "torch" else sharded(net(seed), front, mesh=mesh)


def tensor_parallel(seed, front):
    """The first layer in columns and the second in rows, of sizes that two ranks do not divide."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(net(seed), mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    if front in WRAPPERS:
        return sharded(model, front, device_mesh=mesh["dp"])
    return torchs(model, mesh=mesh["dp"]) if front == "torch" else sharded(model, front, mesh=mesh["dp"])


def state_of(model, kind):
    if kind is not None:
        sherd.FullyShardedDataParallel.set_state_dict_type(model, kind)
    return model.state_dict()


LAYOUTS = {
    f"{make.__name__} {front}{'' if kind is None else kind.name}": (make, front, kind)
    for make in (on_one_axis, of_replicas, tensor_parallel)
    for front in (*PLACEMENTS, *WRAPPERS, "torch")
    for kind in ((Kind.SHARDED_STATE_DICT, Kind.FULL_STATE_DICT) if front in WRAPPERS else (None,))
}


def save_each(folder):
    for name, (make, front, kind) in LAYOUTS.items():
        dcp.save(state_of(make(1, front), kind), checkpoint_id=f"{folder}/{name}")


def load_each(folder):
    """Layouts on one axis from every third layout, and others from every sixth, so that each is loaded."""
    expected = dict(net(1).named_parameters())
    for at, (name, (make, front, kind)) in enumerate(LAYOUTS.items()):
        if make is not on_one_axis and dist.get_world_size() % 2:
            continue
        every = 3 if make is on_one_axis else 6
        for saved in list(LAYOUTS)[at % every :: every]:
            model = make(2, front)
            state = state_of(model, kind)
            dcp.load(state, checkpoint_id=f"{folder}/{saved}")
            model.load_state_dict(state)
            found = {plain_name(each): value for each, value in whole_params(model).items()}
            assert_same(found, expected, f"{saved} into {name}")


@pytest.mark.parametrize("loading", [3, 2, 4])
def test_stock_checkpoints_of_four_ranks_load_on_any_number_and_into_torch(world, tmp_path, loading):
    world(4).run(save_each, str(tmp_path))
    world(loading).run(load_each, str(tmp_path))


@on_threads(2, front=["shard", "flat", "blocks", "owned"])
def test_the_methods_of_a_tensor_come_before_the_attributes_of_torchs_protocol(front):
    weight = sherd.fully_shard(nn.Linear(4, 4), placement=PLACEMENTS[front]).weight.data
    before = _create_write_items("weight", weight)
    for name in ("global_shape", "global_offsets", "local_offsets", "local_sizes"):
        setattr(weight, name, ((9, 9),))
    assert _create_write_items("weight", weight) == before
