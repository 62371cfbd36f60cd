"""Tensor-parallel shards that are runs become torch's own, and they and their optimizer state go through torch's
checkpointing, in whichever order a user's mesh has its axes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from sherd import Blocks, Flat, Owned
from sherd.errors import PlacementError
from tests.support import checkpoints
from tests.support.ranks.bodies import on_processes
from tests.tensor_parallel.training import (
    ODD,
    built,
    close,
    mesh_of,
    optimizer_of,
    sharded,
    step,
    tensor_parallel,
    whole,
    wholes,
)

TWO = (Replicate(), Replicate())
STOCK = [TWO, (Shard(0), Replicate()), (Replicate(), Shard(0)), (Shard(0), Shard(0))]
OF_MATRICES = [(Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(1), Shard(1))]


def made(names, placement):
    mesh = mesh_of((2, 2), *names)
    net = sharded(tensor_parallel(built(ODD), mesh["tp"]), mesh=mesh["dp"], placement=placement)
    return net, optimizer_of(net), mesh.get_local_rank("dp")


def moments(net, optimizer):
    names = {id(each): name for name, each in net.named_parameters()}
    return {
        f"{names[id(each)]} {key}": whole(value)
        for each, state in optimizer.state.items()
        for key, value in state.items()
    }


ORDERS = [("dp", "tp"), ("tp", "dp")]
PLACEMENTS = [Flat(), Blocks(2), Owned()]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("names", ORDERS)
@pytest.mark.parametrize("placement", PLACEMENTS)
@on_processes(4)
def test_runs_of_tensor_parallel_parts_become_shards_of_torchs_own(names, placement):
    net, _, _ = made(names, placement)
    expected = wholes(built(ODD))
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter.full_tensor(), expected[name])
        for placements in STOCK + (OF_MATRICES if parameter.ndim > 1 else []):
            stock = parameter.redistribute(placements=placements)
            assert type(stock) is DTensor
            assert stock.placements == placements
            same = distribute_tensor(expected[name], stock.device_mesh, placements, src_data_rank=None)
            assert torch.equal(stock.to_local(), same.to_local()), (name, placements)
            assert torch.equal(stock.full_tensor(), expected[name]), (name, placements)
        (gradient,) = torch.autograd.grad(parameter.redistribute(placements=TWO).to_local().sum(), parameter)
        assert torch.equal(gradient.full_tensor(), torch.ones_like(expected[name]))


@on_processes(4)
def test_a_parameter_on_the_data_axis_alone_may_be_told_to_be_replicated_on_both_axes_as_in_torch():
    mesh = mesh_of((2, 2), "dp", "tp")
    for placement in (None, *PLACEMENTS):
        weight = sharded(nn.Linear(3, 5), mesh=mesh["dp"], placement=placement).weight
        found = weight.redistribute(placements=TWO)
        assert torch.equal(found.to_local(), weight.full_tensor()), placement
        found.to_local().sum().backward()
        assert torch.equal(weight.grad.full_tensor(), torch.ones(5, 3)), placement
    with pytest.raises(PlacementError, match=r"one Replicate\(\) or Shard\(dim\) per axis"):
        weight.redistribute(placements=(Replicate(), Shard(0)))


@pytest.mark.values
@pytest.mark.parametrize("names", ORDERS)
@pytest.mark.parametrize("placement", PLACEMENTS)
@on_processes(4)
def test_runs_and_their_optimizer_state_go_through_torchs_checkpointing(names, placement, tmp_path):
    """What was kept after a step: whole, whole from rank 0 alone, and by file; each into a new model."""
    net, optimizer, rank = made(names, placement)
    step(net, optimizer, ODD, (0, rank))
    params, state = wholes(net), moments(net, optimizer)
    for way in ("whole", "from rank 0", "as shards"):
        other, its, _ = made(names, placement)
        if way == "as shards":
            checkpoints.save(net, optimizer, tmp_path)
            checkpoints.load(other, its, tmp_path)
        else:
            of_first = way == "from rank 0"
            options = StateDictOptions(full_state_dict=True, cpu_offload=of_first)
            of_model, of_optimizer = get_state_dict(net, optimizer, options=options)
            if not of_first:
                close(of_model, params)
            elif dist.get_rank():
                of_model, of_optimizer = {}, {}
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=of_first)
            set_model_state_dict(other, of_model, options=options)
            set_optimizer_state_dict(other, its, of_optimizer, options=options)
        close(wholes(other), params, f" {way}")
        close(moments(other, its), state, f" {way}")
    one = built(ODD)
    its = optimizer_of(one)
    step(one, its, ODD, (0, 0), (0, 1))
    close(params, wholes(one))
    close(state, moments(one, its))
