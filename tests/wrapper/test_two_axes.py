"""Does the wrapper do for tensor-parallel parameters what it does for others, over one and two axes of its own?"""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import fsdp as torchs
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from sherd import (
    CPUOffload,
    DTensorExtensions,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardedForm,
    ShardedGradScaler,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    explain_migration,
)
from sherd._torch import sharded_tensor_of_rows
from sherd.errors import MeshError, ModuleError, PlacementError, PolicyTypeError, UnsupportedError
from sherd.wrap import ModuleWrapPolicy
from tests.support.on_ranks import on_processes, on_threads
from tests.tensor_parallel.conftest import meshes_know_their_thread  # noqa: F401  a fixture for threads
from tests.tensor_parallel.training import (
    EVEN,
    ODD,
    Block,
    assert_same,
    built,
    close,
    mesh_of,
    optimizer_of,
    plain,
    tensor_parallel,
    tokens,
    train,
    whole,
    whole_loss_of,
    wholes,
)

FSDP = FullyShardedDataParallel
FULL, LOCAL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.LOCAL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
ROWS = ShardedStateDictConfig(form=ShardedForm.ROWS)
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def axes_of(shape):
    """The mesh and the data-parallel part of it; `shape` is (dp, tp), (replicate, dp, tp), or (dp,)."""
    mesh = mesh_of(shape, *("replicate", "dp", "tp")[3 - max(2, len(shape)) :][: len(shape)])
    return mesh, mesh["replicate", "dp"] if len(shape) == 3 else mesh["dp"]


def net_on(shape, sizes=ODD, change=None, **options):
    """The net, in units of its own; the rank's number among those that have other batches; and the optimizer."""
    mesh, data = axes_of(shape)
    net = built(sizes)
    if change is not None:
        change(net)
    if "tp" in mesh.mesh_dim_names:
        tensor_parallel(net, mesh["tp"])
    if len(shape) == 3:
        options.setdefault("sharding_strategy", ShardingStrategy.HYBRID_SHARD)
    options = {"use_orig_params": True, "auto_wrap_policy": ModuleWrapPolicy({Block}), **options}
    model = FSDP(net, device_mesh=data, **options)
    rank = 0
    for axis in range(data.ndim):
        rank = rank * data.size(axis) + data.get_local_rank(axis)
    return model, rank, optimizer_of(model)


def step(model, rank, optimizer):
    whole_loss_of(model, tokens(ODD, 0, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


def zeroed(net):
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()


def moments(state):
    """What AdamW keeps, whole."""
    return {f"{name} {key}": whole(value) for name, its in state.items() for key, value in its.items()}


BFLOAT16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
SHAPES = [pytest.param((2, 2), id="dp2_tp2"), pytest.param((2, 2, 2), id="replicate2_dp2_tp2")]


def size_of(shape):
    return torch.Size(shape).numel()


# Training


def trained(shape):
    model, rank, _ = net_on(shape)
    return train(model, ODD, [rank])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_tensor_parallel_model_trains_as_in_one_process(threads, shape):
    runs = threads(size_of(shape)).run(trained, shape)
    assert_same(runs, plain(ODD, size_of(shape[:-1])))


def trained_with_choices():
    """Offloaded, from values that only rank 0 of the data-parallel axis has, with what one unit leaves alone."""
    _, data = axes_of((2, 2))

    def change(net):
        if data.get_local_rank() != 0:
            zeroed(net)

    offloaded, rank, _ = net_on((2, 2), EVEN, change, cpu_offload=CPUOffload(True), sync_module_states=True)
    run = train(offloaded, EVEN, [rank])
    # Two batches, of which the first is not reduced, scaled, and clipped over both axes.
    model, rank, optimizer = net_on((2, 2))
    scaler, norms = ShardedGradScaler("cpu", init_scale=8.0), []
    for number in range(2):
        with model.no_sync():
            scaler.scale(whole_loss_of(model, tokens(ODD, number, rank)) / 2).backward()
        scaler.scale(whole_loss_of(model, tokens(ODD, number + 2, rank)) / 2).backward()
        scaler.unscale_(optimizer)
        norms.append(model.clip_grad_norm_(0.1).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return run, norms, wholes(model), train_beside_ignored()


def train_beside_ignored():
    """The head stays as it is: tensor parallel, and nobody's shard."""
    mesh, data = axes_of((2, 2))
    net = built(EVEN)
    tensor_parallel(net, mesh["tp"])
    head = net.head.weight
    model = FSDP(net, device_mesh=data, use_orig_params=True, ignored_modules=[net.head])
    whole_loss_of(model, tokens(EVEN, 0, 0)).backward()
    return net.head.weight is head, tuple(map(str, head.placements)), whole(head.grad)


def one_process_in_two_batches():
    net, norms = built(ODD), []
    optimizer = optimizer_of(net)
    for number in range(2):
        for rank in (0, 1):
            for at in (number, number + 2):
                (whole_loss_of(net, tokens(ODD, at, rank)) / 4).backward()
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, wholes(net)


def test_offload_synchronized_values_no_sync_scaling_clipping_and_ignored_modules_hold_over_both_axes(threads):
    found = threads(4).run(trained_with_choices)
    assert_same([each[0] for each in found], plain(EVEN, 2))
    norms, params = one_process_in_two_batches()
    one = built(EVEN)
    whole_loss_of(one, tokens(EVEN, 0, 0)).backward()
    for _, its_norms, its_params, (stays, placements, grad) in found:
        assert its_norms == pytest.approx(norms, rel=1e-4)
        close(its_params, params)
        assert stays, "the same Parameter"
        assert placements == ("S(0)",)
        torch.testing.assert_close(grad, one.head.weight.grad)


def as_torch_trains(sizes, low):
    """torch's FSDP1 over tensor parallelism, and ours; in lower precision if that is given."""
    mesh, data = axes_of((2, 2))
    theirs = parallelize_module(built(sizes).blocks[0].mlp, mesh["tp"], PLAN)
    ours = parallelize_module(built(sizes).blocks[0].mlp, mesh["tp"], PLAN)
    options = {"device_mesh": data, "use_orig_params": True}
    models = [
        torchs.FullyShardedDataParallel(
            theirs, device_id=torch.device("cpu"), mixed_precision=torchs.MixedPrecision(**low), **options
        ),
        FSDP(ours, mixed_precision=MixedPrecision(**low), **options),
    ]
    found = []
    for model in models:
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3), []
        for number in range(3):
            generator = torch.Generator().manual_seed(10 * number + mesh.get_local_rank("dp"))
            loss = model(torch.randn(2, sizes.width, generator=generator)).square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        with type(model).summon_full_params(model, writeback=False):
            names = {name.replace("_fsdp_wrapped_module.", ""): each for name, each in model.named_parameters()}
            found.append((losses, {name: (whole(each), each.placements) for name, each in names.items()}))
    return found


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("low", [{}, BFLOAT16], ids=["float32", "bfloat16"])
def test_the_numbers_are_those_of_torchs_fsdp1_over_tensor_parallelism(world, low):
    for theirs, ours in world(4).run(as_torch_trains, EVEN, low):
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-7)
        assert {name: each[1] for name, each in ours[1].items()} == {name: each[1] for name, each in theirs[1].items()}
        close({name: each[0] for name, each in ours[1].items()}, {name: each[0] for name, each in theirs[1].items()})


# State dicts


def saved_in_every_kind(shape):
    """Each kind of a model, loaded into another one of zeros; the optimizer's state likewise."""
    model, rank, optimizer = net_on(shape)
    step(model, rank, optimizer)
    expected, other = wholes(model), net_on(shape)
    found = {}
    kinds = {"full": (FULL, None), "runs": (SHARDED, None), "rows": (SHARDED, ROWS), "local": (LOCAL, None)}
    for kind, (state_dict_type, config) in kinds.items():
        zeroed(other[0])
        with FSDP.state_dict_type(model, state_dict_type, config), FSDP.state_dict_type(other[0], state_dict_type):
            state = model.state_dict()
            other[0].load_state_dict(state)
        found[kind] = state["head.weight"], state["norm.weight"], state["blocks.0.mlp.down.weight"]
        close(wholes(other[0]), expected, f" as {kind}")
    with FSDP.state_dict_type(model, FULL, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)):
        of_first = model.state_dict()
    layouts = {
        kind: [tuple(map(str, each.placements)) if isinstance(each, DTensor) else "plain" for each in its]
        for kind, its in found.items()
    }
    optimizer_states = []
    for kind in (FULL, SHARDED):
        with FSDP.state_dict_type(model, kind), FSDP.state_dict_type(other[0], kind):
            state = FSDP.optim_state_dict(model, optimizer)
            other[2].load_state_dict(FSDP.optim_state_dict_to_load(other[0], other[2], state))
            loaded = FSDP.optim_state_dict(other[0], other[2])
        close(moments(loaded["state"]), moments(state["state"]), f" as {kind.name}")
        optimizer_states.append(moments(state["state"]))
    close(*optimizer_states)
    with FSDP.summon_full_params(model):
        shown = {name: getattr(each, "placements", None) for name, each in model.named_parameters()}
        zeroed(model)
    assert not any(each.any() for each in wholes(model).values()), "what was changed is written back"
    kept = {key: value.clone() for key, value in of_first.items()}
    return expected, kept, layouts, optimizer_states[0], shown


def full_of_one_process(num_ranks):
    net = built(ODD)
    optimizer = optimizer_of(net)
    for rank in range(num_ranks):
        (whole_loss_of(net, tokens(ODD, 0, rank)) / num_ranks).backward()
    optimizer.step()
    return net, optimizer


@pytest.mark.parametrize("shape", SHAPES)
def test_every_kind_of_state_dict_is_saved_and_loaded(threads, shape):
    net, optimizer = full_of_one_process(size_of(shape[:-1]))
    names = [name for name, _ in net.named_parameters()]
    state = {names[number]: each for number, each in optimizer.state_dict()["state"].items()}
    for number, (params, of_first, layouts, its, shown) in enumerate(
        threads(size_of(shape)).run(saved_in_every_kind, shape)
    ):
        close(params, wholes(net))
        close(its, moments(state))
        dp_rank = number // shape[-1] % shape[-2]
        assert of_first.keys() == (params.keys() if dp_rank == 0 else set())
        close(of_first, params if of_first else {})
        copies = ("R",) * (len(shape) - 2)
        assert layouts["full"] == ["plain"] * 3
        # The head has 23 rows: 12 and 11 on tp, which read from the left only if tp is there.
        assert layouts["rows"][1:] == [(*copies, "S(0)", "R"), (*copies, "S(0)", "S(1)")]
        assert all("RaggedShard" in str(each) for kind in ("runs", "local") for each in layouts[kind])
        assert shown["blocks.0.mlp.down.weight"] == (Shard(1),)
        assert shown["norm.weight"] == (Replicate(),)


def moved_to_other_shapes(folder):
    """From (dp, tp) to four ranks of dp, to one flat parameter, and into a plain model: as files, and full."""
    model, rank, optimizer = net_on((2, 2))
    step(model, rank, optimizer)
    full, full_state = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    states = {}
    for target, options in {"dp4": {}, "flat": {"use_orig_params": False}, "dp2_tp2": {}}.items():
        shape = (2, 2) if target == "dp2_tp2" else (4,)
        other, _, its = net_on(shape, **options)
        zeroed(other)
        for each in (model, other):
            FSDP.set_state_dict_type(each, SHARDED)
        if not (folder / ".metadata").exists():
            dcp.save(
                {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)},
                checkpoint_id=folder,
            )
        step(other, 0, its)  # so that there is state to be loaded into
        state = {"model": other.state_dict(), "optimizer": FSDP.optim_state_dict(other, its)}
        dcp.load(state, checkpoint_id=folder)
        other.load_state_dict(state["model"])
        its.load_state_dict(FSDP.optim_state_dict_to_load(other, its, state["optimizer"]))
        FSDP.set_state_dict_type(other, FULL)
        read = other.state_dict(), moments(FSDP.optim_state_dict(other, its)["state"])
        zeroed(other)
        other.load_state_dict(full)
        its.load_state_dict(FSDP.optim_state_dict_to_load(other, its, full_state))
        states[target] = read, (other.state_dict(), moments(FSDP.optim_state_dict(other, its)["state"]))
    net = built(ODD)
    its = optimizer_of(net)
    net.load_state_dict(full)
    its.load_state_dict(FSDP.optim_state_dict_to_load(net, its, full_state))
    states["plain"] = ((wholes(net), moments(FSDP.optim_state_dict(net, its)["state"])),)
    return states


def test_a_checkpoint_goes_to_another_mesh_to_flat_parameters_and_to_a_plain_model(world, tmp_path):
    net, optimizer = full_of_one_process(2)
    names = [name for name, _ in net.named_parameters()]
    state = {names[number]: each for number, each in optimizer.state_dict()["state"].items()}
    for states in world(4).run(moved_to_other_shapes, tmp_path):
        for target, ways in states.items():
            for params, its in ways:
                close(params, wholes(net), f" in {target}")
                close(its, moments(state), f" in {target}")


# Extensions


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
        inner, shards = super().pre_load_state_dict_transform(tensor)
        return inner, shards

    def all_gather_dtensor(self, tensor, parent_mesh):
        self.asked.append(("all_gather", parent_mesh.mesh_dim_names))
        return super().all_gather_dtensor(tensor, parent_mesh) + 1


def asked_at_every_moment():
    mesh, data = axes_of((2, 2))
    mlp = parallelize_module(built(EVEN).blocks[0].mlp, mesh["tp"], {"up": ColwiseParallel(output_layouts=Replicate())})
    before = {name: whole(each) for name, each in mlp.named_parameters()}
    seen = Seen()
    model = FSDP(mlp, device_mesh=data, use_orig_params=True, extensions=seen)
    rounds = []

    def noted(what):
        rounds.append((what, seen.asked[:], seen.restored[:]))
        seen.asked.clear()
        seen.restored.clear()

    noted("made")
    full = model.state_dict()
    noted("full")
    with FSDP.state_dict_type(model, SHARDED, ROWS):
        rows = model.state_dict()
        noted("rows")
        model.load_state_dict(rows)
        noted("rows loaded")
    loaded = wholes(model)
    FSDP.set_state_dict_type(model, SHARDED, ShardedStateDictConfig(form=ShardedForm.SHARDED_TENSOR))
    legacy = {key: value for key, value in model.state_dict().items() if key.startswith("down")}
    noted("legacy")
    model.load_state_dict(legacy, strict=False)
    noted("legacy loaded")
    model(torch.ones(2, EVEN.width)).sum().backward()
    model(torch.ones(2, EVEN.width)).sum().backward()
    noted("gathered")
    with FSDP.summon_full_params(model):
        noted("summoned")
    return before, full, loaded, wholes(model), rounds


@pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")
def test_extensions_are_asked_when_parameters_are_sharded_saved_and_loaded(threads):
    for rank, (before, full, loaded, last, rounds) in enumerate(threads(4).run(asked_at_every_moment)):
        parallel = {"up.weight", "up.bias"}
        close(full, {name: 2 * each + 1 if name in parallel else each for name, each in before.items()})
        close(loaded, full)
        close(last, loaded)
        asked = {what: its for what, its, _ in rounds}
        restored = {what: its for what, _, its in rounds}
        assert sorted(asked["made"]) == [("pre_flatten", False)] * 2 + [("pre_flatten", True)] * 2
        assert asked["full"] == asked["rows loaded"] == [("all_gather", ("dp", "tp"))] * 2
        assert asked["rows"] == [("chunk_dtensor", rank // 2, ("dp",))] * 4
        assert asked["legacy"] == [("chunk_tensor", rank // 2, 2)] * 4
        assert asked["legacy loaded"] == [("pre_load",)] * 2
        parts = [(EVEN.hidden // 2, EVEN.width), (EVEN.hidden // 2,)]
        assert restored["rows loaded"] == parts
        assert restored["gathered"] == restored["summoned"] == restored["rows"] == parts, (
            "once for each unsharded buffer"
        )
    assert "# - extensions: nothing to say" in explain_migration(extensions=Seen())


class Forgets(Seen):
    """Takes a `ShardedTensor` apart and does not give it back."""

    def pre_load_state_dict_transform(self, tensor):
        return None, super().pre_load_state_dict_transform(tensor)[1]


@pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")
@on_threads(4)
def test_extensions_that_give_no_sharded_tensor_back_are_named():
    mesh, data = axes_of((2, 2))
    mlp = parallelize_module(built(EVEN).blocks[0].mlp, mesh["tp"], PLAN)
    model = FSDP(mlp, device_mesh=data, use_orig_params=True, extensions=Forgets())
    FSDP.set_state_dict_type(model, SHARDED, ShardedStateDictConfig(form=ShardedForm.SHARDED_TENSOR))
    legacy = {key: value for key, value in model.state_dict().items() if key.startswith("down")}
    with pytest.raises(PlacementError, match=r"Forgets.pre_load_state_dict_transform returned a NoneType"):
        model.load_state_dict(legacy, strict=False)


def loaded_from_a_nested_sharded_tensor():
    """As torch's FSDP1 has it: over the ranks of tensor parallelism, of one over those of data parallelism."""
    mesh, data = axes_of((2, 2))
    mlp = parallelize_module(built(EVEN).blocks[0].mlp, mesh["tp"], PLAN)
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
    return whole(model.up.weight), expected


@pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")
def test_a_nested_sharded_tensor_is_loaded(world):
    for found, expected in world(4).run(loaded_from_a_nested_sharded_tensor):
        assert torch.equal(found, expected)


class Copies(DTensorExtensions):
    def post_unflatten_transform(self, tensor, param_extension):
        return super().post_unflatten_transform(tensor.clone(), param_extension)


# What is refused


@pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")
@on_processes(4)
def test_what_cannot_be_done_over_two_axes_says_what_to_do():
    mesh, data = axes_of((2, 2))

    def parallel():
        return parallelize_module(built(EVEN).blocks[0].mlp, mesh["tp"], PLAN)

    def raised(error, text, call):
        with pytest.raises(error, match=text):
            call()

    raised(MeshError, r"take one axis, mesh\['dp'\]", lambda: FSDP(parallel(), device_mesh=mesh, use_orig_params=True))
    hybrid = functools.partial(FSDP, sharding_strategy=ShardingStrategy.HYBRID_SHARD, use_orig_params=True)
    raised(MeshError, r"in common: .*mesh\['dp'\]", lambda: hybrid(parallel(), device_mesh=mesh))
    copying = FSDP(parallel(), device_mesh=data, use_orig_params=True, extensions=Copies())
    raised(PlacementError, "of the memory it was given", lambda: copying(torch.ones(2, EVEN.width)))
    raised(PolicyTypeError, "extensions=3", lambda: FSDP(parallel(), device_mesh=data, extensions=3))
    flat = FSDP(built(EVEN).blocks[0].mlp.up, device_mesh=data)
    parallelize_module(flat.module, mesh["tp"], ColwiseParallel())
    raised(ModuleError, "parallelize_module, and wrap it then", lambda: flat(torch.ones(2, EVEN.width)))
    orig = FSDP(built(EVEN).blocks[0].mlp, device_mesh=data, use_orig_params=True)
    raised(ValueError, "Cannot distribute", lambda: parallelize_module(orig.module, mesh["tp"], PLAN))
    model = FSDP(parallel(), device_mesh=data, use_orig_params=True)
    FSDP.set_state_dict_type(model, SHARDED, ShardedStateDictConfig(form=ShardedForm.SHARDED_TENSOR))
    raised(UnsupportedError, "form=ShardedForm.ROWS", model.state_dict)
