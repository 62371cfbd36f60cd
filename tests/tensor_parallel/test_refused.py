"""What cannot be combined is refused by name, with the model as it was."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import sherd
from sherd import DataParallelMeshDims
from sherd._torch import dtensor, imagined_ranks, local_tensor, spec_of
from sherd.errors import MeshError, OwnershipError, PlacementError
from tests.support.comparing import assert_refused
from tests.support.ranks.bodies import on_threads
from tests.tensor_parallel.test_smaller_mesh import Exact
from tests.tensor_parallel.training import EVEN, assert_trains, built, mesh_of, plain, sharded, train

WIDTH = 8


def linear(mesh, *placements, partial=False):
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    values = layer.weight.detach()
    given = (
        DTensor.from_local(values, mesh, placements, run_check=False)
        if partial
        else distribute_tensor(values, mesh, placements)
    )
    layer.weight = nn.Parameter(given)
    return layer


def refused(error, layer, mesh, words, **options):
    before = layer.weight
    assert_refused(lambda: sherd.fully_shard(layer, mesh=mesh, **options), error, Exception, "weight", *words)
    assert layer.weight is before
    assert type(layer) is nn.Linear


def test_a_mesh_that_does_not_fit_the_parameters_is_refused_before_anything_is_moved():
    with imagined_ranks(4):
        mesh = mesh_of((2, 2), "dp", "tp")
        swapped = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "rest"))
        flat = init_device_mesh("cpu", (4,))
        other_order = DeviceMesh("cpu", [[0, 3], [2, 1]], mesh_dim_names=("a", "b"))
        on_tp = linear(mesh["tp"], Shard(0))
        refused(OwnershipError, on_tp, mesh["tp"], ("the very mesh", "another axis"))
        refused(MeshError, on_tp, mesh, ("in common", "tp=2", "mesh['dp']", "dp_mesh_dims"))
        refused(MeshError, on_tp, flat, ("in common", "mesh['dp']"))
        refused(MeshError, on_tp, None, ("in common", "mesh['dp']"))
        refused(MeshError, on_tp, swapped["tp"], ("'tp' would be named twice",))
        refused(MeshError, on_tp, other_order["a"], ("one mesh",))
        refused(MeshError, linear(mesh, Replicate(), Shard(0)), mesh["dp"], ("in common", "dp_mesh_dims"))


def test_a_sum_that_was_not_made_and_a_data_axis_that_is_taken_are_refused():
    with imagined_ranks(4):
        mesh = mesh_of((2, 2), "dp", "tp")
        dims = {"dp_mesh_dims": DataParallelMeshDims(shard="dp")}
        words = ("'tp'", "P(sum)", "redistribute")
        refused(PlacementError, linear(mesh["tp"], Partial(), partial=True), mesh["dp"], words)
        refused(PlacementError, linear(mesh, Replicate(), Partial(), partial=True), mesh, words, **dims)
        refused(PlacementError, linear(mesh, Shard(0), Replicate()), mesh, ("'dp'", "Replicate()"), **dims)
        refused(PlacementError, linear(mesh["tp"], Shard(0)), mesh, ("not on the mesh",), **dims)


@on_threads(4)
def test_parallelize_module_refuses_a_sharded_module():
    """torch refuses to distribute a shard; the parameters stay as they were, and train."""
    mesh = mesh_of((2, 2), "dp", "tp")
    net = sharded(built(), mesh=mesh["dp"])
    with pytest.raises(ValueError, match="Cannot distribute a DTensor"):
        parallelize_module(net, mesh["tp"], {"head": ColwiseParallel()})
    assert_trains(train(net, EVEN, [mesh.get_local_rank("dp")]), plain(EVEN, 2))


def test_a_parameter_made_tensor_parallel_after_it_was_sharded_is_named_at_the_next_forward():
    """What a user does to get around torch's refusal."""
    with imagined_ranks(4):
        mesh = mesh_of((2, 2), "dp", "tp")
        net = sharded(built(), mesh=mesh["dp"])
        whole = net.head.weight.full_tensor().detach()
        net.head.weight = nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(0)]))
        with pytest.raises(OwnershipError, match=r"head\.weight.*tp=2.*parallelize_module"):
            net(torch.zeros(1, 12, dtype=torch.int64))


def test_a_tensor_that_gathers_itself_is_cut_between_rows_only():
    with imagined_ranks(4):
        mesh = mesh_of((2, 2), "dp", "tp")
        layer = linear(mesh["tp"], Shard(0))
        layer.weight = nn.Parameter(dtensor(Exact(local_tensor(layer.weight.detach())), spec_of(layer.weight)))
        refused(PlacementError, layer, mesh["dp"], ("Exact", "between rows only"), placement=Shard(1))


def test_a_plain_parameter_is_cut_over_folded_axes_where_all_are_data_parallel():
    with imagined_ranks(4):
        layer = nn.Linear(WIDTH, WIDTH)
        dims = DataParallelMeshDims(shard=("dp", "cp"))
        sherd.fully_shard(layer, mesh=mesh_of((2, 2), "dp", "cp"), dp_mesh_dims=dims)
        assert layer.weight.placements == (Shard(0),)
        assert layer.weight.device_mesh.mesh_dim_names == ("dp_cp",)
