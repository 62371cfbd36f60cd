"""Is every placement and transport that means nothing refused by name, and the model left as it was?"""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from sherd import Blocks, CommPolicy, DataParallelMeshDims, Flat, FSDPModule, Owned, fully_shard
from sherd.errors import MeshError, OwnershipError, PlacementError, PolicyError, PolicyTypeError
from tests.api.own_collectives import GatherByList, ReduceByAllReduce
from tests.support.comparing import assert_refused
from tests.support.models import WIDTH, Block
from tests.support.training import assert_trained, made, mean_square, train_job


def stack():
    return nn.Sequential(Block(), Block())


def assert_untouched(model, before):
    """No unit, no shard, the same Parameters with the same values."""
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
    for param, (same, value) in zip(model.parameters(), before, strict=True):
        assert param is same
        assert torch.equal(param.to_local() if isinstance(param, DTensor) else param, value)


def remembered(model):
    return [
        (param, (param.to_local() if isinstance(param, DTensor) else param).detach().clone())
        for param in model.parameters()
    ]


WRONG_ARGUMENTS = [
    ({"placement": "flat"}, PolicyTypeError, TypeError, ("placement='flat'", "Flat()")),
    ({"placement": Flat}, PolicyTypeError, TypeError, ("placement", "Flat()")),
    ({"placement": Blocks}, PolicyTypeError, TypeError, ("placement", "Blocks")),
    ({"placement": 0}, PolicyTypeError, TypeError, ("placement=0", "Flat()")),
    ({"placement": Replicate()}, PolicyTypeError, TypeError, ("placement", "Replicate")),
    ({"placement": (Flat(),)}, PolicyTypeError, TypeError, ("placement=(Flat()", "Flat()")),
    ({"placement": lambda parameter: Flat()}, PolicyTypeError, TypeError, ("placement", "function")),
    ({"placement": Shard(2)}, PlacementError, ValueError, ("0.up.weight", "Shard(2)")),
    ({"placement": Shard(1)}, PlacementError, ValueError, ("0.up.bias", "Shard(1)")),
    ({"shard_placement_fn": Flat()}, PolicyTypeError, TypeError, ("shard_placement_fn", "Flat")),
    ({"shard_placement_fn": lambda parameter: Flat}, PlacementError, ValueError, ("0.up.weight", "Flat()")),
    ({"shard_placement_fn": lambda parameter: "flat"}, PlacementError, ValueError, ("0.up.weight", "'flat'")),
    ({"shard_placement_fn": lambda parameter: 1}, PlacementError, ValueError, ("0.up.weight", "1", "Blocks(rows)")),
    ({"shard_placement_fn": lambda parameter: Partial()}, PlacementError, ValueError, ("0.up.weight", "Partial")),
    (
        {"shard_placement_fn": lambda parameter: Owned() if parameter.dim() == 2 else True},
        PlacementError,
        ValueError,
        ("0.up.bias", "True"),
    ),
    ({"comm_policy": "gloo"}, PolicyTypeError, TypeError, ("comm_policy", "CommPolicy", "str")),
    ({"comm_policy": CommPolicy}, PolicyTypeError, TypeError, ("comm_policy", "CommPolicy")),
]


def wrong_arguments():
    for arguments, kind, also, words in WRONG_ARGUMENTS:
        model = made(stack)
        before = remembered(model)
        assert_refused(lambda m=model, a=arguments: fully_shard(m, **a), kind, also, *words)
        assert_untouched(model, before)
    fully_shard(model, placement=Flat())
    return train_job(model, mean_square)


def test_a_placement_that_means_nothing_is_refused_before_anything_is_touched(world):
    assert_trained(world(2).run(wrong_arguments), stack)


@pytest.mark.parametrize("rows", [0, -1, "2", True, None, 1.0])
def test_blocks_are_of_a_positive_number_of_rows(rows):
    assert_refused(lambda: Blocks(rows), PlacementError, ValueError, repr(rows), "positive int")


@pytest.mark.parametrize("transport", ["nccl", "", "GLOO", 3, None, ["gloo"], True])
def test_a_transport_is_one_of_four_names(transport):
    words = (repr(transport), "auto, torch, coalesced, gloo, shared_memory")
    assert_refused(lambda: CommPolicy(transport), PolicyError, ValueError, *words)


def wrong_transport(transport):
    """Threads are no gloo ranks."""
    model = made_in_turn()
    before = remembered(model)

    def used():
        fully_shard(model, comm_policy=CommPolicy(transport))
        model(torch.ones(1, WIDTH))

    assert_refused(used, MeshError, ValueError, "gloo", transport, "'auto'")
    assert_untouched(model, before)
    fully_shard(model)
    return model(torch.ones(1, WIDTH)).detach()


def made_in_turn():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("transport", ["gloo", "shared_memory"])
def test_a_transport_that_cannot_serve_the_ranks_is_refused(threads, transport):
    threads(2).run(wrong_transport, transport)


# Parameters that are more than plain tensors


def sums():
    """A tensor-parallel parameter is cut into runs, but not one that is a sum over ranks still."""
    _clear_sharding_prop_cache()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    for placement in (Flat(), Blocks(2), Owned()):
        model = made(stack)
        for block in model:
            weight = block.up.weight.detach()
            block.up.weight = nn.Parameter(DTensor.from_local(weight, mesh["tp"], [Partial()], run_check=False))
        before = remembered(model)
        assert_refused(
            lambda m=model, p=placement: fully_shard(m, mesh=mesh["dp"], placement=p),
            PlacementError,
            ValueError,
            "0.up.weight",
            "sum",
            "redistribute",
        )
        assert_untouched(model, before)


def test_a_parameter_that_is_a_sum_is_not_cut_into_runs(world):
    world(2).run(sums)


def plain_on_a_larger_mesh():
    """Plain tensors beside named axes of a larger mesh are refused whatever the placement."""
    _clear_sharding_prop_cache()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    for placement in (None, Flat(), Owned()):
        model = made(stack)
        before = remembered(model)
        assert_refused(
            lambda m=model, p=placement: fully_shard(
                m, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"), placement=p
            ),
            PlacementError,
            ValueError,
            "0.up.weight",
            "DTensor",
        )
        assert_untouched(model, before)


def test_a_plain_parameter_on_a_larger_mesh_is_refused_under_every_placement(world):
    world(2).run(plain_on_a_larger_mesh)


class GathersItself(torch.Tensor):
    """A tensor that brings its own all-gather."""

    def fsdp_pre_all_gather(self, mesh):
        return (self.as_subclass(torch.Tensor),), None

    def fsdp_post_all_gather(self, gathered, metadata, dtype, *, out=None):
        return None if out is not None else (gathered[0], gathered)


def self_gathering():
    for placement in (Flat(), Blocks(1), Owned()):
        model = nn.Linear(WIDTH, WIDTH)
        model.weight = nn.Parameter(model.weight.detach().as_subclass(GathersItself))
        before = remembered(model)
        words = ("weight", "GathersItself", "Shard(0)")
        assert_refused(lambda m=model, p=placement: fully_shard(m, placement=p), PlacementError, ValueError, *words)
        assert_untouched(model, before)


def test_a_tensor_that_gathers_itself_is_not_cut_into_runs(world):
    world(2).run(self_gathering)


def sharded_shards():
    """A shard is cut once, ragged or not."""
    owner = made(stack)
    fully_shard(owner[0], placement=Flat())
    stolen = nn.Parameter(owner[0].up.weight.detach())
    for placement in (None, Flat(), Owned()):
        thief = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        thief.weight = stolen
        with pytest.raises((PlacementError, OwnershipError), match="weight"):
            fully_shard(thief, placement=placement)
        assert thief.weight is stolen
    fully_shard(owner, placement=Owned())
    return train_job(owner, mean_square)


def test_a_ragged_shard_is_not_sharded_again(world):
    assert_trained(world(2).run(sharded_shards), stack)


# Own collectives


def uneven_stack():
    """Wide rows, and a short vector beside them."""
    return nn.Sequential(nn.Linear(WIDTH, 41), nn.Linear(41, WIDTH))


def own_collectives(placement):
    """They are given equal parts, which `Owned` and large blocks have not."""
    model = made(uneven_stack)
    for unit in (*model, model):
        fully_shard(unit, placement=placement)
    words = ("weight", "unequal", "Flat()")
    for call in (
        lambda: model[0].set_custom_all_gather(GatherByList(waits=True)),
        lambda: model[0].set_custom_reduce_scatter(ReduceByAllReduce()),
        lambda: model[0].set_allocate_memory_from_process_group_for_comm(True),
    ):
        assert_refused(call, PolicyError, ValueError, *words)
    return train_job(model, mean_square)


def test_own_collectives_of_unequal_parts_are_refused(world):
    assert_trained(world(2).run(own_collectives, Owned()), uneven_stack)
    assert_trained(world(3).run(own_collectives, Blocks(40)), uneven_stack)


def own_collectives_that_serve():
    model = made(stack)
    for unit in (*model, model):
        fully_shard(unit, placement=Flat())
    model[0].set_custom_all_gather(GatherByList(waits=True))
    model[1].set_custom_reduce_scatter(ReduceByAllReduce())
    return train_job(model, mean_square)


def test_own_collectives_serve_equal_runs(world):
    assert_trained(world(2).run(own_collectives_that_serve), stack)
