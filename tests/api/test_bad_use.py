"""Is every module, mesh and parameter that cannot be sharded refused by name, and left as it was?"""

import copy
import gc
import io
import pickle

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from sherd import (
    DataParallelMeshDims,
    FSDPModule,
    fully_shard,
)
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
from tests.support.comparing import assert_named_close, assert_refused, whole_params
from tests.support.models import WIDTH, Block, build, noise, shard
from tests.support.sharding import shard_children
from tests.support.training import Recipe, assert_all_same, assert_trained, made, mean_square, steps_sharded, train_job


def stack():
    return nn.Sequential(Block(), Block())


def assert_untouched(model):
    """No module of `model` is a unit and no parameter a shard; it can still be sharded and run."""
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
    assert not any(isinstance(param, DTensor) for param in model.parameters())
    fully_shard(model)
    with torch.no_grad():
        model(noise(0, 0))


def mesh_of(shape, names=None):
    _clear_sharding_prop_cache()
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


# Modules


def containers():
    model = nn.Sequential(nn.ModuleList([Block()])[0], Block())
    for container in (nn.ModuleList([Block()]), nn.ModuleDict({"a": Block()})):
        name = type(container).__name__
        assert_refused(lambda c=container: fully_shard(c), ModuleError, ValueError, name, "modules inside")
        assert_refused(lambda c=container: fully_shard([model, c]), ModuleError, ValueError, name)
    assert_untouched(model)


def test_a_container_without_forward_is_refused(world):
    world(1).run(containers)


def parameter_containers():
    """Nobody calls them either."""
    for container in (nn.ParameterList([torch.ones(4)]), nn.ParameterDict({"a": torch.ones(4)})):
        assert_refused(lambda c=container: fully_shard(c), ModuleError, ValueError, type(container).__name__)
        assert not any(isinstance(param, DTensor) for param in container.parameters())


def test_a_container_of_parameters_is_refused(world):
    world(1).run(parameter_containers)


class Iterated(nn.ModuleList):
    """A list with a forward."""

    def forward(self, x):
        for module in self:
            x = module(x)
        return x


def iterated():
    return Iterated([Block(), Block()])


def train_iterated():
    return train_job(shard_children(made(iterated)), mean_square)


def test_a_container_with_a_forward_of_its_own_is_fine(world):
    assert_trained(world(2).run(train_iterated), iterated)


def twice():
    model = made(stack)
    fully_shard(model[0])
    assert_refused(lambda: fully_shard(model[0]), ModuleError, ValueError, "Block", "already")
    assert_refused(lambda: fully_shard([model[1], model[0]]), ModuleError, ValueError, "already")
    assert not isinstance(model[1], FSDPModule)
    assert_refused(lambda: fully_shard([model[1], model[1]]), ModuleError, ValueError, "twice")
    assert_refused(lambda: fully_shard([]), ModuleError, ValueError, "empty")
    fully_shard(model)
    assert_refused(lambda: fully_shard(model), ModuleError, ValueError, "already")
    return train_job(model, mean_square)


def test_a_module_is_sharded_once(world):
    assert_trained(world(2).run(twice), stack)


def not_modules():
    for wrong in (None, "model", [Block(), 3], torch.nn.Linear, {"a": Block()}):
        assert_refused(lambda w=wrong: fully_shard(w), PolicyTypeError, TypeError, "module")


def test_what_is_no_module_is_refused_by_type(world):
    world(1).run(not_modules)


def copies():
    model = shard_children(made(stack))
    outer = nn.Sequential(model, nn.ReLU())
    for each in (model, model[0], outer):
        for copied in (pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
            assert_refused(lambda m=each, c=copied: c(m), ModuleError, ValueError, "cannot be pickled", "state_dict")
    assert_refused(lambda: copy.copy(model), ModuleError, ValueError, "copy.deepcopy")
    return train_job(model, mean_square)


def test_a_sharded_model_is_not_pickled_or_copied_in_part(world):
    assert_trained(world(2).run(copies), stack)


def values_for_one_call():
    """Values from outside for one call: Parameters, plain tensors, DTensors."""
    model, x = shard_children(made(stack)), noise(0, 0)
    before = whole_params(model)
    plain = {name: torch.zeros_like(param) for name, param in made(stack).named_parameters()}
    for values in (plain, {name: nn.Parameter(value) for name, value in plain.items()}, model.state_dict()):
        wrong = {name: value * 1 if values is not plain else value for name, value in values.items()}
        assert_refused(
            lambda given=wrong: torch.func.functional_call(model, given, (x,)),
            UnsupportedError,
            NotImplementedError,
            "functional_call",
            "0.up.weight",
            "plain copy",
        )
    assert_named_close(whole_params(model), before, "parameter", 0, 0)
    return train_job(model, mean_square)


def test_a_sharded_model_is_not_called_with_values_from_outside(world):
    assert_trained(world(2).run(values_for_one_call), stack)


def lazy():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LazyLinear(WIDTH))
    assert_refused(
        lambda: fully_shard(model), ModuleError, ValueError, "1.weight has no shape yet", "run the model once"
    )


def test_a_lazy_module_is_refused_until_it_has_run(world):
    world(1).run(lazy)


# Meshes


def wrong_meshes():
    model = made(stack)
    three = mesh_of((1, 2, 1), ("a", "b", "c"))
    unnamed = mesh_of((1, 2))
    line = mesh_of((2,))
    assert_refused(lambda: fully_shard(model, mesh=three), MeshError, ValueError, "3", "dp_mesh_dims")
    assert_refused(lambda: fully_shard(model, mesh=unnamed), MeshError, ValueError, "mesh_dim_names")
    dims = DataParallelMeshDims(shard="b")
    assert_refused(lambda: fully_shard(model, mesh=line, dp_mesh_dims=dims), MeshError, ValueError, "mesh_dim_names")
    missing = DataParallelMeshDims(shard="b", replicate="x")
    assert_refused(
        lambda: fully_shard(model, mesh=three, dp_mesh_dims=missing), MeshError, ValueError, "'x'", "'a', 'b', 'c'"
    )
    assert_refused(
        lambda: fully_shard(model, mesh=three, dp_mesh_dims=dims), PlacementError, ValueError, "0.up.weight", "DTensor"
    )
    assert_untouched(model)


def test_a_mesh_of_the_wrong_shape_or_without_names_is_refused(world):
    world(2).run(wrong_meshes)


def mesh_of_the_wrong_type():
    model = made(stack)
    assert_refused(lambda: fully_shard(model, mesh="cpu"), PolicyTypeError, TypeError, "mesh", "str")
    assert_refused(
        lambda: fully_shard(model, mesh=mesh_of((1,), ("a",)), dp_mesh_dims="a"),
        PolicyTypeError,
        TypeError,
        "dp_mesh_dims",
        "str",
    )
    assert_untouched(model)


def test_what_is_no_mesh_is_refused_by_type(world):
    world(1).run(mesh_of_the_wrong_type)


def rank_outside():
    """A mesh of rank 0 alone: rank 1 is not in it."""
    mesh, model = DeviceMesh("cpu", [0]), made(stack)
    if dist.get_rank() == 1:
        assert_refused(lambda: fully_shard(model, mesh=mesh), MeshError, ValueError, "rank 1")
        assert not any(isinstance(param, DTensor) for param in model.parameters())


def test_a_rank_outside_the_mesh_is_told_so(world):
    world(2).run(rank_outside)


def wrong_dims():
    assert_refused(DataParallelMeshDims, PolicyError, ValueError, "shard", "replicate")
    assert_refused(lambda: DataParallelMeshDims(("a", "b"), "a"), PolicyError, ValueError, "twice", "a")


def test_named_axes_must_name_each_axis_once():
    wrong_dims()


def wrongly_placed():
    """A DTensor that the data-parallel axis finds cut already, and one on another mesh."""
    mesh = mesh_of((2, 1), ("dp", "tp"))
    dims = DataParallelMeshDims(shard="dp")
    for placements, on, words in (
        ([Shard(0), Replicate()], mesh, ("'dp'", "Replicate()")),
        ([Replicate()], mesh["tp"], ("not on the mesh",)),
    ):
        model = nn.Linear(WIDTH, WIDTH, bias=False)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), on, placements))
        before = model.weight
        assert_refused(
            lambda m=model: fully_shard(m, mesh=mesh, dp_mesh_dims=dims), PlacementError, ValueError, "weight", *words
        )
        assert model.weight is before
        assert not isinstance(model, FSDPModule)


def test_a_dtensor_must_be_replicated_where_it_is_to_be_sharded(world):
    world(2).run(wrongly_placed)


# Parameters


def two_hands():
    """A tied weight: its two modules are sharded over different meshes."""
    mesh = mesh_of((2, 2), ("a", "b"))
    model = build("tied_across")
    fully_shard(model.embed, mesh=mesh["a"])
    before = model.head.weight
    assert_refused(lambda: fully_shard(model.head, mesh=mesh["b"]), OwnershipError, ValueError, "weight", "Embedding")
    assert not isinstance(model.head, FSDPModule)
    assert model.head.weight is before


def test_a_parameter_of_two_units_under_two_meshes_is_refused(world):
    world(4).run(two_hands)


def left_behind():
    """The shard outlives its unit."""
    owner = Block()
    fully_shard(owner)
    orphan = owner.up.weight
    del owner
    gc.collect()
    heir = nn.Linear(WIDTH, 2 * WIDTH)
    heir.weight = orphan
    assert_refused(lambda: fully_shard(heir), OwnershipError, ValueError, "weight", "build the model anew")
    assert not isinstance(heir, FSDPModule)


def test_a_shard_whose_unit_is_gone_is_refused(world):
    world(2).run(left_behind)


def bad_placements():
    model = made(stack)
    wrong = (
        (lambda param: Shard(2), ("0.up.weight", "Shard(2)", "(16, 8)")),
        (lambda param: Shard(-3), ("0.up.weight", "Shard(-3)")),
        (lambda param: Shard(1), ("0.up.bias", "Shard(1)")),
        (lambda param: Replicate(), ("0.up.weight", "Replicate()", "Shard")),
        (lambda param: 0, ("0.up.weight", "0", "Shard")),
    )
    for function, words in wrong:
        assert_refused(lambda f=function: fully_shard(model, shard_placement_fn=f), PlacementError, ValueError, *words)
    scalar = nn.Module()
    scalar.gain = nn.Parameter(torch.tensor(1.0))
    assert_refused(
        lambda: fully_shard(scalar, shard_placement_fn=lambda param: Shard(0)),
        PlacementError,
        ValueError,
        "gain",
        "None",
    )
    assert_untouched(model)


def test_a_placement_that_cannot_be_is_refused_by_the_parameters_name(world):
    world(2).run(bad_placements)


def on_meta():
    model = build("mlp", device="meta")
    shard(model)
    x = noise(0, dist.get_rank())
    assert_refused(
        lambda: model(x), StateError, RuntimeError, "meta", "first.weight", "blocks.1", "to_empty", "reset_parameters"
    )
    model.to_empty(device="cpu")
    source = build("mlp").state_dict()
    model.load_state_dict(source)
    return steps_sharded(model, Recipe("mlp", steps=2), dist.get_rank())


def test_parameters_on_meta_are_named_at_the_first_forward_and_can_be_filled_then(world):
    assert_all_same(world(2).run(on_meta), Recipe("mlp", steps=2))
