"""A checkpoint of a tensor-parallel model that is sharded too loads into any other mesh, and back."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

import sherd
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


def made(shape):
    """A model with all-zero parameters, on `shape` (dp, tp); plain for None. And the batches of this rank."""
    net, ranks = built(ODD), [0, 1]
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    if shape is not None:
        mesh = mesh_of(shape, "dp", "tp")
        if shape[1] > 1:
            tensor_parallel(net, mesh["tp"])
        sharded(net, mesh=mesh["dp"])
        rank, num = mesh.get_local_rank("dp"), mesh["dp"].size()
        ranks = [each for each in (0, 1) if num == 1 or rank * 2 // num == each]
    return net, ranks


def continued(shape, folder, number):
    """Load what is in `folder`, check that all states are there, take a step, save; the parameters before and after."""
    net, ranks = made(shape)
    optimizer = optimizer_of(net)
    if number == 0:
        net.load_state_dict(built(ODD).state_dict())
    else:
        checkpoints.load(net, optimizer, f"{folder}/{number}")
    loaded = wholes(net)
    step(net, optimizer, ODD, *((number, rank) for rank in ranks))
    checkpoints.save(net, optimizer, f"{folder}/{number + 1}")
    return loaded, wholes(net)


def plain_steps(num_steps):
    net = built(ODD)
    optimizer, params = optimizer_of(net), []
    for number in range(num_steps):
        params.append(wholes(net))
        step(net, optimizer, ODD, (number, 0), (number, 1))
    return [*params, wholes(net)]


@pytest.mark.slow
def test_training_goes_on_from_mesh_to_mesh_to_one_process_and_back(world, tmp_path):
    shapes = [(2, 2), (4, 1), (1, 4), None, (2, 2)]
    expected = plain_steps(len(shapes))
    for number, shape in enumerate(shapes):
        runs = world(4 if shape else 1).run(continued, shape, str(tmp_path), number)
        for loaded, after in runs:
            close(loaded, expected[number], f" as loaded into {shape}")
            close(after, expected[number + 1], f" after a step on {shape}")


@on_processes(4)
def test_state_dicts_of_shards_and_full_ones_load_into_any_cut():
    mesh = mesh_of((2, 2), "dp", "tp")
    net, other = (
        sharded(tensor_parallel(built(ODD), mesh["tp"]), mesh=mesh["dp"], shard_placement_fn=placement)
        for placement in (None, lambda parameter: Shard(parameter.ndim - 1))
    )
    shards = net.state_dict()
    full = whole(shards)
    for state, assign in ((shards, False), (full, False), (full, True)):
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        other.load_state_dict(state, assign=assign)
        close(wholes(other), wholes(built(ODD)))
    layout = {name: tuple(map(str, each.placements)) for name, each in shards.items() if isinstance(each, DTensor)}
    with sherd.unsharded(net):
        whole_on_dp = {name: tuple(map(str, each.placements)) for name, each in net.named_parameters()}
    assert layout["embed.weight"] == layout["blocks.0.mlp.up.weight"] == ("_S(0, 2)", "S(0)")
    assert layout["blocks.0.mlp.down.weight"] == ("S(0)", "S(1)")
    assert layout["norm.weight"] == ("S(0)", "R")
    assert whole_on_dp["blocks.0.mlp.down.weight"] == ("S(1)",)
    assert whole_on_dp["norm.weight"] == ("R",)
