"""A placement or transport that cannot serve what it is given is refused by name, and the model is left as it was."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from sherd import Blocks, CommPolicy, DataParallelMeshDims, Flat, Owned, fully_shard
from sherd.errors import MeshError, OwnershipError, PlacementError
from tests.api.checks import assert_trains, named_mesh, on_ranks, refused, untouched
from tests.support.models import WIDTH, chain


@on_ranks(2)
def test_a_transport_that_cannot_serve_the_ranks_is_refused():
    """Threads are no gloo ranks."""
    for transport in ("gloo", "shared_memory"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH))

        def used(model=model, transport=transport):
            fully_shard(model, comm_policy=CommPolicy(transport))
            model(torch.ones(1, WIDTH))

        with untouched(model):
            refused(used, MeshError, "gloo", transport, "'auto'")
        fully_shard(model)(torch.ones(1, WIDTH))


@on_ranks(2)
def test_a_parameter_that_is_a_sum_is_not_cut_into_runs():
    """A tensor-parallel parameter is cut into runs, but not one that is a sum over ranks still."""
    mesh = named_mesh((2, 1), "dp", "tp")
    model = chain()
    for block in model:
        weight = DTensor.from_local(block.up.weight.detach(), mesh["tp"], [Partial()], run_check=False)
        block.up.weight = nn.Parameter(weight)
    for placement in (Flat(), Blocks(2), Owned()):
        with untouched(model):
            shard = partial(fully_shard, model, mesh=mesh["dp"], placement=placement)
            refused(shard, PlacementError, "0.up.weight", "sum", "redistribute")


@on_ranks(2)
def test_a_plain_parameter_on_a_larger_mesh_is_refused_under_every_placement():
    mesh, model = named_mesh((2, 1), "dp", "tp"), chain()
    for placement in (None, Flat(), Owned()):
        with untouched(model):
            options = {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(shard="dp"), "placement": placement}
            refused(partial(fully_shard, model, **options), PlacementError, "0.up.weight", "DTensor")


class GathersItself(torch.Tensor):
    """A tensor that brings its own all-gather."""

    def fsdp_pre_all_gather(self, mesh):
        return (self.as_subclass(torch.Tensor),), None

    def fsdp_post_all_gather(self, gathered, metadata, dtype, *, out=None):
        return None if out is not None else (gathered[0], gathered)


@on_ranks(2)
def test_a_tensor_that_gathers_itself_is_not_cut_into_runs():
    model = nn.Linear(WIDTH, WIDTH)
    model.weight = nn.Parameter(model.weight.detach().as_subclass(GathersItself))
    for placement in (Flat(), Blocks(1), Owned()):
        with untouched(model):
            words = ("weight", "GathersItself", "Shard(0)")
            refused(partial(fully_shard, model, placement=placement), PlacementError, *words)


@on_ranks(2)
def test_a_ragged_shard_is_not_sharded_again():
    owner = chain()
    fully_shard(owner[0], placement=Flat())
    stolen = nn.Parameter(owner[0].up.weight.detach())
    for placement in (None, Flat(), Owned()):
        thief = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        thief.weight = stolen
        with pytest.raises((PlacementError, OwnershipError), match="weight"):
            fully_shard(thief, placement=placement)
        assert thief.weight is stolen
    assert_trains(fully_shard(owner, placement=Owned()), chain)
