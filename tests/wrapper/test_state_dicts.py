"""A wrapped model's state dicts say what the plain model's say, and load wherever they may come to."""

import contextlib
import copy
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sherd
from sherd.api.unsharded import unsharded
from sherd.errors import PolicyError, PolicyTypeError, StateError, WrapperStateError
from sherd.fsdp1.arguments import MixedPrecision, ShardingStrategy
from sherd.fsdp1.state_dict_type import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    ShardedForm,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictSettings,
    StateDictType,
)
from sherd.fsdp1.state_methods import get_state_dict_type, set_state_dict_type, state_dict_type
from sherd.fsdp1.wrapper import FullyShardedDataParallel
from sherd.tensor.ragged import RaggedDTensor
from sherd.wrap import ModuleWrapPolicy
from tests.support.comparing import whole
from tests.support.meshes import mesh_of
from tests.support.models import Wired, build
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.sharding import sharded

FULL, LOCAL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.LOCAL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
KINDS = (FULL, LOCAL, SHARDED)
ROWS = ShardedStateDictConfig(_use_dtensor=True)
FOR_RANK_0 = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
BOTH = (False, True)
"""`use_orig_params`: with a flat parameter, and without."""


class Assorted(nn.Module):
    """Nested units, a tied weight, buffers, fewer rows than ranks, and a parameter to leave out."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor([1.5, 2.5]))
        self.inner = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5))
        self.left_out = nn.Linear(5, 5, bias=False)
        self.out = nn.Linear(5, 2)
        self.again = nn.Linear(5, 2, bias=False)
        self.again.weight = self.out.weight
        self.bn = nn.BatchNorm1d(2)

    def forward(self, x):
        x = self.left_out(self.inner(x))
        return self.bn(self.out(x) + self.again(x)) * self.scale.to(x.dtype)


def plain(seed=0):
    torch.manual_seed(seed)
    model = Assorted()
    with torch.no_grad():
        for each in model.parameters():
            each.normal_()
        model.bn.running_mean.normal_()
    return model


def wrapped(use_orig_params, seed=0, nested=True, ignored=False, **more):
    model = plain(seed)
    if ignored:
        more["ignored_states"] = [model.left_out]
    if nested:
        more["auto_wrap_policy"] = ModuleWrapPolicy({nn.Sequential})
    return FullyShardedDataParallel(model, use_orig_params=use_orig_params, **more)


def around(net):
    """A plain model, one part of which is wrapped."""
    return Wired(None, net=net, head=nn.Linear(2, 2))


def assert_same(found, expected, case=""):
    """The same names in the same order, the same values bit for bit, the same dtypes."""
    assert list(found) == list(expected), case
    for name, value in expected.items():
        mine = whole(found[name])
        assert type(mine) is torch.Tensor, (case, name, type(mine))
        assert mine.dtype == value.dtype, (case, name)
        assert torch.equal(mine.cpu(), value), (case, name)


def assert_holds(model, expected, case=""):
    """The model is as the plain one whose state dict is `expected`, and each part of it in its normal state."""
    assert_same(state_of(model, FULL), expected, case)
    shown = [name for name, _ in model.named_parameters()]
    is_flat = not model._sherd_state.choices.use_orig_params
    assert ("_flat_param" in shown) == is_flat, (case, shown)
    assert ("out.bias" in shown) != is_flat, (case, shown)


def state_of(model, kind, *configs):
    with state_dict_type(model, kind, *configs):
        return model.state_dict()


# Which kind


@on_threads(1)
def test_the_kind_is_each_wrappers_own_and_comes_back_after_a_context():
    model = wrapped(True)
    fresh = StateDictSettings(FULL, FullStateDictConfig(), FullOptimStateDictConfig())
    assert get_state_dict_type(model) == fresh
    assert get_state_dict_type(nn.Linear(1, 1)) is None
    assert set_state_dict_type(nn.Linear(1, 1), FULL) == StateDictSettings(None, None, None)
    assert set_state_dict_type(model, SHARDED) == fresh
    of_shards = StateDictSettings(SHARDED, ShardedStateDictConfig(), ShardedOptimStateDictConfig())
    assert get_state_dict_type(around(model)) == of_shards
    local = StateDictSettings(LOCAL, LocalStateDictConfig(True), LocalOptimStateDictConfig())
    with contextlib.suppress(ZeroDivisionError), model.state_dict_type(model, LOCAL, LocalStateDictConfig(True)):
        assert get_state_dict_type(model) == local
        raise ZeroDivisionError
    assert get_state_dict_type(model) == of_shards
    two_forms = ShardedStateDictConfig(_use_dtensor=True, form=ShardedForm.SHARDED_TENSOR)
    for kind, text, *wrong in (
        (WrapperStateError, "Expected state_dict_config of type sherd.Full", FULL, ShardedStateDictConfig()),
        (RuntimeError, "Expected optim_state_dict_config of .*Sharded", SHARDED, None, FullOptimStateDictConfig()),
        (PolicyTypeError, "FULL", "FULL"),
        (PolicyError, "two forms", SHARDED, two_forms),
        (PolicyTypeError, "ShardedForm", SHARDED, ShardedStateDictConfig(form="rows")),
    ):
        with pytest.raises(kind, match=text):
            set_state_dict_type(model, *wrong)
    set_state_dict_type(model.inner, FULL)
    with pytest.raises(AssertionError, match="must have the same state dict settings"):
        get_state_dict_type(model)
    with state_dict_type(model.inner, LOCAL):
        assert get_state_dict_type(model.inner).state_dict_type is LOCAL
    assert get_state_dict_type(model.inner) == fresh


# Full


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("use_orig", BOTH)
@on_threads()
def test_a_full_state_dict_is_the_plain_models_in_memory_of_its_own(use_orig):
    expected = plain().state_dict()
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        for nested in BOTH:
            case = (strategy, nested)
            model = wrapped(use_orig, nested=nested, sharding_strategy=strategy)
            found = model.state_dict()
            assert_same(found, expected, case)
            assert_holds(model, expected, case)
            assert not any(value.requires_grad for value in found.values())
            with torch.no_grad():
                for each in model.parameters():
                    each.zero_()
            assert_same({**found, "scale": expected["scale"]}, expected, case)
            assert found["out.weight"].untyped_storage().nbytes() == 40, "memory of its own, and no more"
            assert found["again.weight"] is found["out.weight"]
    outer = around(wrapped(use_orig))
    names = [*(f"net.{name}" for name in expected), "head.weight", "head.bias"]
    assert list(outer.state_dict()) == names
    assert list(outer.state_dict(prefix="x.")) == [f"x.{name}" for name in names]
    fresh = around(plain(1))
    fresh.load_state_dict(outer.state_dict())
    assert_same(fresh.net.state_dict(), expected)
    metadata = wrapped(True).state_dict()._metadata
    assert metadata["bn"] == metadata["_fsdp_wrapped_module.bn"] == {"version": 2}


@on_threads(4, use_orig=BOTH)
def test_with_copies_and_shards_each_set_of_shards_gives_the_whole(use_orig):
    mesh = mesh_of((2, 2))
    expected = plain().state_dict()
    model = wrapped(use_orig, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    assert_same(model.state_dict(), expected)
    first = mesh.get_local_rank("shard") == 0
    assert_same(state_of(model, FULL, FullStateDictConfig(rank0_only=True)), expected if first else {})
    for kind in KINDS:
        assert_loads_back(use_orig, kind, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    rows = state_of(model, SHARDED, ROWS)
    assert type(rows["inner.0.weight"]) is DTensor
    assert rows["inner.0.weight"].placements == (Replicate(), Shard(0))
    assert rows["inner.0.weight"].to_local().shape == ((3, 3) if first else (2, 3))


@on_threads(2, use_orig=BOTH)
def test_rank0_only_leaves_the_other_ranks_what_is_not_sharded(use_orig):
    expected = plain().state_dict()
    rank0 = dist.get_rank() == 0
    model = around(wrapped(use_orig, ignored=True))
    found = state_of(model, FULL, FOR_RANK_0)
    kept = ["net.left_out.weight", "head.weight", "head.bias"]
    assert list(found) == ([*(f"net.{name}" for name in expected), *kept[1:]] if rank0 else kept)
    no_shard = wrapped(use_orig, sharding_strategy=ShardingStrategy.NO_SHARD)
    assert_same(state_of(no_shard, FULL, FOR_RANK_0), expected if rank0 else {})


class LiveBytes(TorchDispatchMode):
    """The most bytes that were alive at once, of storages that operations have made inside."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if type(each) is torch.Tensor}
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if type(each) is torch.Tensor:
                storage = each.untyped_storage()
                if storage._cdata not in given | self.alive.keys():
                    self.alive[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, storage._cdata, 0)
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


@on_processes(2, use_orig=BOTH)
def test_a_full_state_dict_takes_one_unit_more_than_what_it_gives(use_orig):
    model = nn.Sequential(*(nn.Linear(63, 64) for _ in range(4)))
    model = FullyShardedDataParallel(model, use_orig_params=use_orig, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    model.state_dict()
    with LiveBytes() as live:
        found = state_of(model, FULL, FOR_RANK_0)
    gets_it = dist.get_rank() == 0
    assert len(found) == (8 if gets_it else 0)
    least, most = (4.9, 5.02) if gets_it else (0.9, 1.02)
    assert least < live.peak / (64 * 64 * 4) < most, "in units"


@pytest.mark.filterwarnings("ignore:mixed_precision and auto_wrap_policy were both given")
@on_threads(1, use_orig=BOTH)
def test_buffers_are_saved_in_the_dtype_that_the_user_gave_them(use_orig):
    expected = plain().state_dict()
    model = wrapped(use_orig, mixed_precision=MixedPrecision(buffer_dtype=torch.float16))
    assert model.module.scale.dtype == torch.float16
    for kind in (FULL, SHARDED):
        assert state_of(model, kind)["scale"].dtype == torch.float32
        assert state_of(model, kind)["bn.num_batches_tracked"].dtype == torch.int64
    assert state_of(model, LOCAL)["scale"].dtype == torch.float16
    model.load_state_dict({**expected, "scale": torch.tensor([3.0, 4.0])})
    assert model.module.scale.dtype == torch.float16
    assert model.state_dict()["scale"].tolist() == [3, 4]


# Sharded, local


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("use_orig", BOTH)
@on_threads()
def test_a_sharded_state_dict_has_each_parameter_under_its_name_in_the_form_asked_for(use_orig):
    expected = plain().state_dict()
    rank = dist.get_rank()
    model = wrapped(use_orig)
    found = state_of(model, SHARDED)
    assert_same(found, expected)
    assert type(found["out.bias"]) is RaggedDTensor
    assert type(found["scale"]) is torch.Tensor
    assert state_of(model, SHARDED, ShardedStateDictConfig(offload_to_cpu=True)).keys() == expected.keys()
    rows = state_of(model, SHARDED, ROWS)
    assert_same(rows, expected)
    on_host = ShardedStateDictConfig(offload_to_cpu=True, form=ShardedForm.SHARDED_TENSOR)
    tensors = state_of(model, SHARDED, on_host)
    assert list(tensors) == list(expected)
    for name, value in expected.items():
        if name in dict(plain().named_parameters(remove_duplicate=False)):
            chunks = value.chunk(dist.get_world_size())
            mine = chunks[rank] if rank < len(chunks) else value[:0]
            assert type(rows[name]) is DTensor
            assert torch.equal(rows[name].to_local(), mine)
            assert isinstance(tensors[name], ShardedTensor)
            shards = tensors[name].local_shards()
            assert torch.equal(shards[0].tensor if shards else value[:0], mine)
    for dicts in (found, rows, tensors):
        for other in BOTH:
            into = wrapped(other, seed=1, nested=other)
            given = dict(dicts)
            into.load_state_dict(dicts)
            assert all(dicts[name] is given[name] for name in given), "what is given stays as it is"
            assert_holds(into, expected)


@on_threads(2)
def test_a_local_state_dict_of_other_shapes_is_refused_where_padding_makes_both_of_one_length():
    of_5, of_6 = (FullyShardedDataParallel(nn.Linear(4, rows), use_orig_params=False) for rows in (5, 6))
    given = state_of(of_5, LOCAL)
    given["_flat_param"] = state_of(of_6, LOCAL)["_flat_param"]
    with pytest.raises(ValueError, match=r"_flat_param of unit .* of .*6, 4.* in the model and .*5, 4.* in the "):
        of_6.load_state_dict(given)


def assert_loads_back(use_orig, kind, **more):
    expected = plain().state_dict()
    found = {name: copy.deepcopy(value) for name, value in state_of(wrapped(use_orig, **more), kind).items()}
    model = wrapped(use_orig, seed=1, **more)
    with state_dict_type(model, kind):
        assert str(model.load_state_dict(found)) == "<All keys matched successfully>"
    assert_holds(model, expected, (use_orig, kind))


@on_processes(2)
def test_a_local_state_dict_is_what_the_optimizer_sees_and_loads_back():
    expected = plain().state_dict()
    model = wrapped(False)
    found = state_of(model, LOCAL)
    buffers = ["scale", "bn.running_mean", "bn.running_var", "bn.num_batches_tracked"]
    assert list(found) == ["_flat_param", "scale", "inner._flat_param", *buffers[1:]]
    flat = found["_flat_param"]
    assert type(flat) is RaggedDTensor
    assert flat.to_local().data_ptr() == model._flat_param.to_local().data_ptr()
    assert_holds(model, expected)
    assert_same(state_of(wrapped(True), LOCAL), expected)
    for use_orig in BOTH:
        for kind in KINDS:
            assert_loads_back(use_orig, kind)
            assert_loads_back(use_orig, kind, ignored=True, nested=False)
    outer = around(wrapped(False))
    fresh = around(wrapped(False, seed=1))
    names = list(state_of(outer, LOCAL))
    assert names[0] == "net._flat_param"
    fresh.load_state_dict(state_of(outer, LOCAL))
    assert_holds(fresh.net, expected)
    other = wrapped(False, nested=False)
    with pytest.raises(ValueError, match=r"_flat_param of unit Ful.* LOCAL_STATE_DICT loads into the wrapping"):
        other.load_state_dict(found)
    assert [name for name, _ in other.named_parameters()] == ["_flat_param"]
    assert_holds(other, expected)
    for kind in (LOCAL, SHARDED):
        unsharded_model = wrapped(False, nested=False, sharding_strategy=ShardingStrategy.NO_SHARD)
        with pytest.warns(UserWarning, match=r"NO_SHARD, so a full state dict is given, though"):
            found = state_of(unsharded_model, kind)
        assert_same(found, expected)
        assert not any(isinstance(value, DTensor) for value in found.values())


# Loading


@on_threads(2, use_orig=BOTH)
def test_what_does_not_fit_is_named_as_in_the_users_model(use_orig):
    expected = plain().state_dict()
    for model in (wrapped(use_orig), around(wrapped(use_orig))):
        at = "" if isinstance(model, FullyShardedDataParallel) else "net."
        good = model.state_dict()
        bad = dict(good)
        del bad[at + "inner.0.bias"], bad[at + "bn.running_var"]
        bad[at + "inner.zzz"] = torch.ones(1)
        given = dict(bad)
        with pytest.raises(RuntimeError) as raised:
            model.load_state_dict(bad)
        assert f'Missing key(s) in state_dict: "{at}inner.0.bias", "{at}bn.running_var"' in str(raised.value)
        assert f'Unexpected key(s) in state_dict: "{at}inner.zzz"' in str(raised.value)
        assert list(bad) == list(given)
        assert all(bad[name] is given[name] for name in given)
        keys = model.load_state_dict(bad, strict=False)
        assert keys.missing_keys == [at + "inner.0.bias", at + "bn.running_var"]
        assert keys.unexpected_keys == [at + "inner.zzz"]
        with pytest.raises(RuntimeError) as raised:
            model.load_state_dict({**good, at + "out.bias": torch.ones(7)})
        assert f"size mismatch for {at}out.bias: copying a param with shape torch.Size([7])" in str(raised.value)
        assert "_wrapped_module" not in str(raised.value)
        model.load_state_dict(good)
        assert_holds(getattr(model, "net", model), expected)
    module = model.net.module.out
    if not use_orig:
        with pytest.raises(StateError, match=r"state_dict\(\) of a Linear inside wrapped unit .* on the wrapper"):
            module.state_dict()
        with pytest.raises(StateError, match=r"load_state_dict\(\) of a Linear inside"):
            module.load_state_dict({"weight": torch.ones(2, 5), "bias": torch.ones(2)})
    given = plain(2).state_dict()
    model.net.load_state_dict(given, assign=True)
    assert_holds(model.net, given)
    x = torch.randn(4, 3)
    torch.testing.assert_close(model.net(x), plain(2)(x))  # the optimizer's memory is what is gathered


@pytest.mark.front("One engine for both front ends")
@on_threads(2, use_orig=BOTH)
def test_either_front_end_and_the_plain_model_load_what_the_other_saves(use_orig):
    expected = plain().state_dict()
    composed = plain()
    for each in (composed.inner, composed):
        sherd.fully_shard(each)
    model = wrapped(use_orig, seed=1)
    model.load_state_dict(composed.state_dict())
    assert_holds(model, expected)
    for kind, config in ((FULL, None), (SHARDED, None), (SHARDED, ROWS)):
        other = plain(2)
        sherd.fully_shard(other.inner, placement=sherd.Blocks(1))
        sherd.fully_shard(other)
        other.load_state_dict(state_of(model, kind, config))
        assert_same(other.state_dict(), expected)
    into = plain(3)
    into.load_state_dict(model.state_dict())
    assert_same(into.state_dict(), expected)
    # Written shards are what the next forward gathers, also where whole ones are kept.
    kept = wrapped(use_orig, seed=1, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    x = torch.randn(4, 3)
    loss = kept(x).sum()
    kept.load_state_dict(expected)
    del loss
    torch.testing.assert_close(kept(x), plain()(x))


# At odd moments


@on_threads(2, use_orig=BOTH)
def test_state_dicts_at_odd_moments_are_right_or_refused(use_orig):
    expected = plain().state_dict()
    model = wrapped(use_orig)
    seen = []

    def look(module, args):
        for act in (model.state_dict, lambda: model.load_state_dict(expected)):
            try:
                act()
            except StateError as error:
                seen.append(str(error))

    handle = model.module.out.register_forward_pre_hook(look)
    loss = model(torch.randn(4, 3)).sum()
    handle.remove()
    assert len(seen) == 2, seen
    model.state_dict()
    loss.backward()
    model.load_state_dict(expected)
    assert_holds(model, expected)

    def fail(*_):
        raise ZeroDivisionError

    bn = model.module.bn
    for register, act in (
        (bn.register_state_dict_pre_hook, model.state_dict),
        (bn.register_load_state_dict_pre_hook, lambda: model.load_state_dict(expected)),
    ):
        hook = register(fail)
        with pytest.raises(ZeroDivisionError):
            act()
        hook.remove()
        assert_holds(model, expected)
    model(torch.randn(4, 3))
    assert ("_flat_param" in dict(model.named_parameters())) != use_orig
    model.load_state_dict(expected)
    assert_holds(model, expected)

    with unsharded(model):
        model.module.out.bias.data.fill_(7)
        assert model.state_dict()["out.bias"].tolist() == [7, 7]
        assert whole(state_of(model, SHARDED)["out.bias"]).tolist() == [7, 7]
        model.load_state_dict({**expected, "out.bias": torch.tensor([8.0, 9.0])})
        assert "out.bias" in dict(model.named_parameters())
    assert model.state_dict()["out.bias"].tolist() == [8, 9]
    with unsharded(model, writeback=False, rank0_only=True):
        found = model.state_dict()
        assert list(found) == (list(expected) if dist.get_rank() == 0 else [])
        if dist.get_rank() == 0:
            assert model.state_dict().keys() == found.keys(), "rank 0 may ask alone"


@on_threads(2, front=("flat wrapper", "wrapper"))
def test_a_weight_tied_across_units_is_saved_under_both_names(front):
    expected, model = build("tied_across").state_dict(), sharded(build("tied_across"), front)
    assert_same(model.state_dict(), expected)
    assert_same(state_of(model, SHARDED), expected)
    assert_same(model.head.state_dict(), {"weight": expected["head.weight"]})
    added = {name: value + 1 for name, value in expected.items()}
    model.load_state_dict(added)
    assert_same(model.state_dict(), added)


# Checkpoints


def save_to(folder, use_orig):
    model = wrapped(use_orig)
    dcp.save({"model": state_of(model, SHARDED), "by_dcp": get_model_state_dict(model)}, checkpoint_id=folder)


def load_from(folder):
    expected = plain().state_dict()
    for use_orig in BOTH:
        for key in ("model", "by_dcp"):
            model = wrapped(use_orig, seed=1, nested=use_orig)
            values = state_of(model, SHARDED)
            dcp.load({key: values}, checkpoint_id=folder)
            model.load_state_dict(values)
            assert_holds(model, expected)
    rows = state_of(wrapped(True, seed=1), SHARDED, ShardedStateDictConfig(form=ShardedForm.SHARDED_TENSOR))
    dcp.load({"model": rows}, checkpoint_id=folder)
    model.load_state_dict(rows)
    assert_holds(model, expected)
    other = plain(1)
    sherd.fully_shard(other)
    values = other.state_dict()
    dcp.load({"model": values}, checkpoint_id=folder)
    other.load_state_dict(values)
    assert_same(other.state_dict(), expected)


@pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")  # torch's, of what it is asked to load
@pytest.mark.parametrize("use_orig", BOTH)
def test_a_checkpoint_loads_on_other_numbers_of_ranks_and_under_other_wrappings(world, tmp_path, use_orig):
    world(2).run(save_to, str(tmp_path), use_orig)
    for num_ranks in (1, 3):
        world(num_ranks).run(load_from, str(tmp_path))


@pytest.mark.parametrize("use_orig", BOTH)
@on_processes(2, at=("", "net."))
def test_torchs_checkpoint_functions_get_and_set_the_model(use_orig, at):
    """The wrapper, or a model around it."""

    def make(seed):
        net = wrapped(use_orig, seed)
        return net, around(net) if at else net

    expected = plain().state_dict()
    model = make(0)[1]
    values = get_model_state_dict(model)
    assert isinstance(values[at + "out.bias"], RaggedDTensor)
    assert_same({name[len(at) :]: v for name, v in values.items() if "head" not in name}, expected)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert type(full[at + "out.bias"]) is torch.Tensor
    rank0 = dist.get_rank() == 0
    on_host = StateDictOptions(full_state_dict=True, cpu_offload=True)
    assert bool(get_model_state_dict(model, options=on_host)) == rank0
    sent, whole_ones = full if rank0 else {}, {"full_state_dict": True}
    cases = {
        "default": (values, {}),
        "full": (full, whole_ones),
        "full, not strict": ({**full, "zzz": torch.ones(1)}, {**whole_ones, "strict": False}),
        "from rank 0": (sent, {**whole_ones, "broadcast_from_rank0": True}),
        "from rank 0, not strict": (sent, {**whole_ones, "broadcast_from_rank0": True, "strict": False}),
    }
    for case, (given, options) in cases.items():
        net, into = make(1)
        set_model_state_dict(into, dict(given), options=StateDictOptions(**options))
        assert_holds(net, expected, case)


@pytest.mark.filterwarnings("ignore:a sharded tensor is pickled")
@on_threads(2, use_orig=BOTH)
def test_every_kind_goes_through_a_file(tmp_path, use_orig):
    expected = plain().state_dict()
    model = wrapped(use_orig)
    for kind in KINDS:
        path = tmp_path / f"{use_orig}-{kind.name}-{dist.get_rank()}"
        torch.save(state_of(model, kind), path)
        into = wrapped(use_orig, seed=1)
        into.load_state_dict(torch.load(path, weights_only=True))
        assert_holds(into, expected, (use_orig, kind))
    assert pickle.loads(pickle.dumps(get_state_dict_type(model))) == get_state_dict_type(model)
