"""Extensions for tensor-parallel parameters are asked when they should be, and what cannot be done says what to do."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from sherd import DTensorExtensions, ShardingStrategy, explain_migration
from sherd import FullyShardedDataParallel as FSDP
from sherd._torch import sharded_tensor_of_rows
from sherd.errors import MeshError, ModuleError, PlacementError, PolicyTypeError, UnsupportedError
from tests.support.comparing import whole
from tests.support.ranks.bodies import on_threads
from tests.tensor_parallel.conftest import meshes_know_their_thread  # noqa: F401  a fixture for threads
from tests.tensor_parallel.training import EVEN, built, close
from tests.wrapper.two_axes import PLAN, ROWS, SHARDED, SHARDED_TENSORS, WHOLE_AFTER, axes_of, wholes, zeroed

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")


def mlp_of(mesh, plan=PLAN):
    """Of even sizes, tensor parallel."""
    return parallelize_module(built(EVEN).blocks[0].mlp, mesh["tp"], plan)


def legacy_state(model):
    """What is not tensor parallel, as `ShardedTensor`s."""
    FSDP.set_state_dict_type(model, SHARDED, SHARDED_TENSORS)
    return {key: value for key, value in model.state_dict().items() if key.startswith("down")}


class Seen(DTensorExtensions):
    """Notes when it is asked, and what."""

    def __init__(self):
        super().__init__()
        self.asked, self.restored = [], []

    def pre_flatten_transform(self, tensor):
        self.asked.append(("pre_flatten", isinstance(tensor, DTensor)))
        plain, extension = super().pre_flatten_transform(tensor)
        return (plain * 2, extension) if extension is not None else (plain, None)

    def post_unflatten_transform(self, tensor, param_extension):
        self.restored.append(tuple(tensor.shape))
        return super().post_unflatten_transform(tensor, param_extension)

    def chunk_dtensor(self, tensor, rank, device_mesh):
        self.asked.append(("chunk_dtensor", rank, device_mesh.mesh_dim_names))
        return super().chunk_dtensor(tensor, rank, device_mesh)

    def chunk_tensor(self, tensor, rank, world_size, num_devices_per_node, pg, device=None):
        self.asked.append(("chunk_tensor", rank, world_size))
        part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return super().chunk_tensor(part, rank, world_size, num_devices_per_node, pg, device)

    def pre_load_state_dict_transform(self, tensor):
        self.asked.append(("pre_load",))
        return super().pre_load_state_dict_transform(tensor)

    def all_gather_dtensor(self, tensor, parent_mesh):
        self.asked.append(("all_gather", parent_mesh.mesh_dim_names))
        return super().all_gather_dtensor(tensor, parent_mesh) + 1


@on_threads(4)
def test_extensions_are_asked_when_parameters_are_sharded_saved_and_loaded():
    mesh, data = axes_of((2, 2))
    mlp = mlp_of(mesh, {"up": WHOLE_AFTER})
    before, rank, seen = wholes(mlp), data.get_local_rank(), Seen()
    model = FSDP(mlp, device_mesh=data, use_orig_params=True, extensions=seen)
    parts = [(EVEN.hidden // 2, EVEN.width), (EVEN.hidden // 2,)]

    def assert_was_asked(*asked, restored=None):
        """Since the last time."""
        assert sorted(seen.asked) == sorted(asked)
        assert restored is None or seen.restored == restored
        seen.asked.clear()
        seen.restored.clear()

    assert_was_asked(*[("pre_flatten", False)] * 2, *[("pre_flatten", True)] * 2)
    full = model.state_dict()
    gathers = [("all_gather", ("dp", "tp"))] * 2
    assert_was_asked(*gathers)
    close(full, {name: 2 * each + 1 if name.startswith("up") else each for name, each in before.items()})
    with FSDP.state_dict_type(model, SHARDED, ROWS):
        rows = model.state_dict()
        assert_was_asked(*[("chunk_dtensor", rank, ("dp",))] * 4, restored=parts)
        model.load_state_dict(rows)
        assert_was_asked(*gathers, restored=parts)
    close(wholes(model), full)
    legacy = legacy_state(model)
    assert_was_asked(*[("chunk_tensor", rank, 2)] * 4)
    model.load_state_dict(legacy, strict=False)
    assert_was_asked(("pre_load",), ("pre_load",))
    for _ in range(2):
        model(torch.ones(2, EVEN.width)).sum().backward()
    assert_was_asked(restored=parts)  # once for each unsharded buffer
    with FSDP.summon_full_params(model):
        assert_was_asked(restored=parts)
    close(wholes(model), full)
    if dist.get_rank() == 0:
        assert "# - extensions: nothing to say" in explain_migration(extensions=Seen())


class Forgets(Seen):
    """Takes a `ShardedTensor` apart and does not give it back."""

    def pre_load_state_dict_transform(self, tensor):
        return None, super().pre_load_state_dict_transform(tensor)[1]


@on_threads(4)
def test_extensions_that_give_no_sharded_tensor_back_are_named():
    mesh, data = axes_of((2, 2))
    model = FSDP(mlp_of(mesh), device_mesh=data, use_orig_params=True, extensions=Forgets())
    legacy = legacy_state(model)
    with pytest.raises(PlacementError, match=r"Forgets.pre_load_state_dict_transform returned a NoneType"):
        model.load_state_dict(legacy, strict=False)


@on_threads(4)
def test_a_nested_sharded_tensor_is_loaded():
    """As torch's FSDP1 has it: over the ranks of tensor parallelism, of one over those of data parallelism."""
    mesh, data = axes_of((2, 2))
    mlp = mlp_of(mesh)
    weight, tp = mlp.up.weight.detach(), mesh["tp"].get_group()
    inner = sharded_tensor_of_rows(weight.to_local().clone(), data.get_group())
    rows = EVEN.hidden // 2
    parts = [
        ShardMetadata([rank * rows, 0], [rows, EVEN.width], f"rank:{dist.get_global_rank(tp, rank)}/cpu")
        for rank in range(2)
    ]
    outer = ShardedTensor._init_from_local_shards_and_global_metadata(
        [sharded_tensor.Shard(inner, parts[tp.rank()])],
        sharded_tensor.ShardedTensorMetadata(parts, weight.shape, inner.metadata().tensor_properties),
        process_group=tp,
    )
    expected = whole(weight)
    model = FSDP(mlp, device_mesh=data, use_orig_params=True)
    zeroed(model)
    model.load_state_dict({"up.weight": outer}, strict=False)
    assert torch.equal(whole(model.up.weight), expected)


class Copies(DTensorExtensions):
    def post_unflatten_transform(self, tensor, param_extension):
        return super().post_unflatten_transform(tensor.clone(), param_extension)


@on_threads(4)
def test_what_cannot_be_done_over_two_axes_says_what_to_do():
    mesh, data = axes_of((2, 2))
    wrap = functools.partial(FSDP, use_orig_params=True)

    def raised(error, text, call):
        with pytest.raises(error, match=text):
            call()

    raised(MeshError, r"take one axis, mesh\['dp'\]", lambda: wrap(mlp_of(mesh), device_mesh=mesh))
    hybrid = functools.partial(wrap, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    raised(MeshError, r"in common: .*mesh\['dp'\]", lambda: hybrid(mlp_of(mesh), device_mesh=mesh))
    copying = wrap(mlp_of(mesh), device_mesh=data, extensions=Copies())
    raised(PlacementError, "of the memory it was given", lambda: copying(torch.ones(2, EVEN.width)))
    raised(PolicyTypeError, "extensions=3", lambda: FSDP(mlp_of(mesh), device_mesh=data, extensions=3))
    flat = FSDP(built(EVEN).blocks[0].mlp.up, device_mesh=data)
    parallelize_module(flat.module, mesh["tp"], ColwiseParallel())
    raised(ModuleError, "parallelize_module, and wrap it then", lambda: flat(torch.ones(2, EVEN.width)))
    orig = wrap(built(EVEN).blocks[0].mlp, device_mesh=data)
    raised(ValueError, "Cannot distribute", lambda: parallelize_module(orig.module, mesh["tp"], PLAN))
    model = wrap(mlp_of(mesh), device_mesh=data)
    FSDP.set_state_dict_type(model, SHARDED, SHARDED_TENSORS)
    raised(UnsupportedError, "form=ShardedForm.ROWS", model.state_dict)
