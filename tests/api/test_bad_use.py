"""Every module, mesh and parameter that cannot be sharded is refused by name, and left as it was."""

import copy
import gc
import io
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from sherd import Blocks, CommPolicy, DataParallelMeshDims, Flat, FSDPModule, Owned, fully_shard
from sherd.errors import (
    MeshError,
    ModuleError,
    OwnershipError,
    PlacementError,
    PolicyError,
    PolicyTypeError,
    StateError,
    UnsupportedError,
)
from tests.api.checks import assert_refuses, assert_trains, named_mesh, untouched
from tests.support.comparing import assert_named_close, whole_params
from tests.support.models import WIDTH, Block, build, chain, noise
from tests.support.ranks.bodies import on_threads
from tests.support.sharding import sharded
from tests.support.training import made

# Modules


@on_threads(1)
def test_a_container_without_forward_is_refused():
    model = chain()
    for container in (nn.ModuleList([Block()]), nn.ModuleDict({"a": Block()})):
        name = type(container).__name__
        with untouched(model, container):
            assert_refuses(partial(fully_shard, container), ModuleError, name, "modules inside")
            assert_refuses(partial(fully_shard, [model, container]), ModuleError, name)
    for container in (nn.ParameterList([torch.ones(4)]), nn.ParameterDict({"a": torch.ones(4)})):
        with untouched(container):
            assert_refuses(partial(fully_shard, container), ModuleError, type(container).__name__)
    assert_trains(fully_shard(model), chain)


class Iterated(nn.ModuleList):
    """A list with a forward."""

    def forward(self, x):
        for module in self:
            x = module(x)
        return x


def iterated():
    return Iterated([Block(), Block()])


@on_threads(2)
def test_a_container_with_a_forward_of_its_own_is_fine():
    assert_trains(sharded(made(iterated)), iterated)


@on_threads(2)
def test_a_module_is_sharded_once():
    model = chain()
    fully_shard(model[0])
    assert_refuses(lambda: fully_shard(model[0]), ModuleError, "Block", "already")
    assert_refuses(lambda: fully_shard([model[1], model[0]]), ModuleError, "already")
    assert not isinstance(model[1], FSDPModule)
    assert_refuses(lambda: fully_shard([model[1], model[1]]), ModuleError, "twice")
    assert_refuses(lambda: fully_shard([]), ModuleError, "empty")
    fully_shard(model)
    assert_refuses(lambda: fully_shard(model), ModuleError, "already")
    assert_trains(model, chain)


@on_threads(1)
def test_what_is_no_module_or_mesh_is_refused_by_type():
    for wrong in (None, "model", [Block(), 3], torch.nn.Linear, {"a": Block()}):
        assert_refuses(partial(fully_shard, wrong), PolicyTypeError, "module")
    model, mesh = chain(), named_mesh((1,), "a")
    with untouched(model):
        assert_refuses(lambda: fully_shard(model, mesh="cpu"), PolicyTypeError, "mesh", "str")
        assert_refuses(lambda: fully_shard(model, mesh=mesh, dp_mesh_dims="a"), PolicyTypeError, "dp_mesh_dims", "str")
    assert_trains(fully_shard(model), chain)


@on_threads(2)
def test_a_sharded_model_is_not_pickled_or_copied_in_part():
    model = sharded(chain())
    for module in (model, model[0], nn.Sequential(model, nn.ReLU())):
        for copied in (pickle.dumps, lambda each: torch.save(each, io.BytesIO())):
            assert_refuses(partial(copied, module), ModuleError, "cannot be pickled", "state_dict")
    assert_refuses(lambda: copy.copy(model), ModuleError, "copy.deepcopy")
    assert_trains(model, chain)


@on_threads(2)
def test_a_sharded_model_is_not_called_with_values_from_outside():
    """Plain tensors, Parameters, and DTensors."""
    model, x = sharded(chain()), noise(0, 0)
    before = whole_params(model)
    plain = {name: torch.zeros_like(param) for name, param in chain().named_parameters()}
    computed = {name: nn.Parameter(value) * 1 for name, value in plain.items()}
    for values in (plain, computed, {name: value * 1 for name, value in model.state_dict().items()}):
        call = partial(torch.func.functional_call, model, values, (x,))
        assert_refuses(call, UnsupportedError, "functional_call", "0.up.weight", "plain copy")
    assert_named_close(whole_params(model), before, "parameter", 0, 0)
    assert_trains(model, chain)


@on_threads(1)
@pytest.mark.filterwarnings("ignore:.*(beta state|nested tensors is in prototype|quantize_per_tensor)")
def test_a_parameter_without_memory_that_can_be_cut_is_refused_before_anything_changes():
    for kind, value in {
        "sparse": torch.eye(3).to_sparse(),
        "compressed": torch.eye(3).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    }.items():
        model = nn.Linear(2, 2)
        model.other = nn.Parameter(value, requires_grad=False)
        assert_refuses(lambda model=model: fully_shard(model), PlacementError, "other is sparse, nested or quantized")
        assert type(model.weight) is nn.Parameter, kind


@on_threads(1)
def test_a_lazy_module_is_refused_until_it_has_run():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LazyLinear(WIDTH))
    assert_refuses(lambda: fully_shard(model), ModuleError, "1.weight has no shape yet", "run the model once")


# Meshes


@on_threads(2)
def test_a_mesh_of_the_wrong_shape_or_without_names_is_refused():
    model, dims, missing = chain(), DataParallelMeshDims(shard="b"), DataParallelMeshDims(shard="b", replicate="x")
    three, unnamed, line = named_mesh((1, 2, 1), "a", "b", "c"), named_mesh((1, 2)), named_mesh((2,))
    for mesh, named, kind, words in (
        (three, None, MeshError, ("3", "dp_mesh_dims")),
        (unnamed, None, MeshError, ("mesh_dim_names",)),
        (line, dims, MeshError, ("mesh_dim_names",)),
        (three, missing, MeshError, ("'x'", "'a', 'b', 'c'")),
        (three, dims, PlacementError, ("0.up.weight", "DTensor")),
    ):
        with untouched(model):
            assert_refuses(partial(fully_shard, model, mesh=mesh, dp_mesh_dims=named), kind, *words)
    assert_trains(fully_shard(model), chain)


@on_threads(2)
def test_a_rank_outside_the_mesh_is_told_so():
    mesh, model = DeviceMesh("cpu", [0]), chain()  # of rank 0 alone
    if dist.get_rank() == 1:
        with untouched(model):
            assert_refuses(lambda: fully_shard(model, mesh=mesh), MeshError, "rank 1")


def test_named_axes_must_name_each_axis_once():
    assert_refuses(DataParallelMeshDims, PolicyError, "shard", "replicate")
    assert_refuses(lambda: DataParallelMeshDims(("a", "b"), "a"), PolicyError, "twice", "a")


@on_threads(2)
def test_a_dtensor_must_be_replicated_where_it_is_to_be_sharded():
    """A DTensor that the data-parallel axis finds cut already, and one on another mesh."""
    mesh, dims = named_mesh((2, 1), "dp", "tp"), DataParallelMeshDims(shard="dp")
    for placements, on, words in (
        ([Shard(0), Replicate()], mesh, ("'dp'", "Replicate()")),
        ([Replicate()], mesh["tp"], ("not on the mesh",)),
    ):
        model = nn.Linear(WIDTH, WIDTH, bias=False)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), on, placements))
        with untouched(model):
            assert_refuses(partial(fully_shard, model, mesh=mesh, dp_mesh_dims=dims), PlacementError, "weight", *words)


@on_threads(2)
def test_a_transport_that_cannot_serve_the_ranks_is_refused():
    """Threads are no gloo ranks."""
    for transport in ("gloo", "shared_memory"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH))

        def used(model=model, transport=transport):
            fully_shard(model, comm_policy=CommPolicy(transport))
            model(torch.ones(1, WIDTH))

        with untouched(model):
            assert_refuses(used, MeshError, "gloo", transport, "'auto'")
        fully_shard(model)(torch.ones(1, WIDTH))


@on_threads(2)
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
            assert_refuses(shard, PlacementError, "0.up.weight", "sum", "redistribute")


@on_threads(2)
def test_a_plain_parameter_on_a_larger_mesh_is_refused_under_every_placement():
    mesh, model = named_mesh((2, 1), "dp", "tp"), chain()
    for placement in (None, Flat(), Owned()):
        with untouched(model):
            options = {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(shard="dp"), "placement": placement}
            assert_refuses(partial(fully_shard, model, **options), PlacementError, "0.up.weight", "DTensor")


# Parameters


@on_threads(4)
def test_a_parameter_of_two_units_under_two_meshes_is_refused():
    """A tied weight: its two modules are sharded over different meshes."""
    mesh, model = named_mesh((2, 2), "a", "b"), build("tied_across")
    fully_shard(model.embed, mesh=mesh["a"])
    with untouched(model.head):
        assert_refuses(lambda: fully_shard(model.head, mesh=mesh["b"]), OwnershipError, "weight", "Embedding")


@on_threads(2)
def test_a_shard_whose_unit_is_gone_is_refused():
    owner = fully_shard(Block())
    orphan = owner.up.weight
    del owner
    gc.collect()
    heir = nn.Linear(WIDTH, 2 * WIDTH)
    heir.weight = orphan
    with untouched(heir):
        assert_refuses(lambda: fully_shard(heir), OwnershipError, "weight", "build the model again")


@on_threads(2)
def test_parameters_on_meta_are_named_at_the_first_forward_and_can_be_filled_then():
    model = sharded(build("mlp", device="meta"))
    words = ("meta", "first.weight", "blocks.0", "to_empty", "reset_parameters")
    assert_refuses(lambda: model(noise(0, dist.get_rank())), StateError, *words)
    model.to_empty(device="cpu")
    model.load_state_dict(build("mlp").state_dict())
    assert all(isinstance(param, DTensor) for param in model.parameters())
    assert_trains(model, partial(build, "mlp"))


@on_threads(2)
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
