"""Each private or renamed name of torch that sherd relies on exists, and does what is said of it.

One test a name, called after it: a new torch that breaks one says which.
"""

import inspect
import io
import pickle
import pickletools
import re
import sys
import warnings
import weakref
import zipfile
from datetime import timedelta
from inspect import ismodule
from pathlib import Path
from types import FrameType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _composable, _state_dict_utils, fsdp, pipelining
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from sherd import _torch
from tests.support import versions
from tests.support.meshes import mesh_of
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.sockets import sockets

CPU = torch.device("cpu")
F32 = torch.float32
ROWS = torch.arange(10.0).view(5, 2)


def test_each_name_has_its_contract_here():
    tested = set(re.findall(r"^def test_(\w+?)__", Path(__file__).read_text(), re.MULTILINE))
    public = {name for name, value in vars(_torch).items() if not (name.startswith("_") or ismodule(value))}
    assert tested == {name.lower() for name in public}


# Versions


def test_oldest_torch__is_what_pip_asks_for():
    (found,) = re.findall(r'"torch>=(\d+)\.(\d+)"', (Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert tuple(map(int, found)) == _torch.OLDEST_TORCH


def test_newest_torch__is_two_numbers_as_the_oldest_is():
    assert _torch.NEWEST_TORCH >= _torch.OLDEST_TORCH


def test_minor_of_torch__are_two_numbers(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.101.0a0+git1234")
    assert _torch.minor_of_torch() == (2, 101)


def test_note_untried_torch__says_so_once_a_machine_and_raises_nothing(monkeypatch, caplog):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for version, rank, num_lines in (("2.99.0", None, 1), ("2.99.0", "0", 1), ("2.99.0", "1", 0), ("2.15.3", "0", 0)):
        monkeypatch.setattr(torch, "__version__", version)
        if rank is not None:
            monkeypatch.setenv("LOCAL_RANK", rank)
        caplog.clear()
        _torch.note_untried_torch()
        assert len(caplog.messages) == num_lines, (version, rank)
        assert all("torch 2.99.0, only with 2.11 to" in line for line in caplog.messages)


def named_mesh(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def ones(*placements: Placement) -> DTensor:
    """A DTensor on a mesh of one rank, sharded unless it is placed in another way."""
    return DTensor.from_local(torch.ones(2), mesh_of((1,)), placements or (Shard(0),))


# Collectives


@on_processes(2)
def test_all_gather_single__fills_one_tensor_in_rank_order_without_a_warning():
    output = torch.empty(2)
    _torch.all_gather_single(output, torch.tensor([float(dist.get_rank())]), group=None, async_op=True).wait()
    assert output.tolist() == [0, 1]


@on_processes(2, async_op=[False, True])
def test_bound_all_gather__fills_one_tensor_in_rank_order(async_op):
    output, call = torch.empty(2), _torch.bound_all_gather(dist.group.WORLD)[async_op]
    for rank in (float(dist.get_rank()), dist.get_rank() + 2.0):
        if (pending := call(output, torch.tensor([rank]))) is not None:
            pending.wait()
    assert output.tolist() == [2, 3]


@on_processes(2, async_op=[False, True])
def test_bound_reduce_scatter__sums_each_ranks_part(async_op):
    output, call = torch.empty(1), _torch.bound_reduce_scatter(dist.group.WORLD)[async_op]
    if (pending := call(output, torch.tensor([1.0, 2.0]))) is not None:
        pending.wait()
    assert output.item() == 2 * (1 + dist.get_rank())


@on_processes(2, async_op=[False, True])
def test_all_gather_coalesced__fills_each_tensor_in_rank_order(async_op):
    outputs, rank = [torch.empty(2), torch.empty(4)], float(dist.get_rank())
    pending = _torch.all_gather_coalesced(
        outputs, [torch.tensor([rank]), torch.tensor([rank + 2, 5])], dist.group.WORLD, async_op
    )
    assert (pending is not None) == async_op
    if pending is not None:
        pending.wait()
    assert torch.cat(outputs).tolist() == [0, 1, 2, 5, 3, 5]


@on_processes(2)
def test_coalesces__says_that_gloo_does_not_and_nothing_of_devices_that_a_group_does_not_serve():
    assert not _torch.coalesces(dist.group.WORLD, CPU)
    assert not _torch.coalesces(dist.group.WORLD, torch.device("meta"))


@on_processes(2)
def test_reduce_scatter_single__gives_each_rank_its_part_of_the_sum_without_a_warning():
    output = torch.empty(1)
    _torch.reduce_scatter_single(output, torch.arange(2.0) + 1, op=dist.ReduceOp.SUM, group=None, async_op=True).wait()
    assert output.tolist() == [2 * (dist.get_rank() + 1)]


@on_processes(2)
def test_backend_of__is_the_object_that_knows_whether_it_offers_memory_and_gloo_does_not():
    assert _torch.backend_of(dist.group.WORLD, CPU).supports_tensor_alloc(CPU) is False


@on_threads(2)
def test_device_of__is_where_collectives_of_a_mesh_work():
    assert _torch.device_of(mesh_of((2,))) == CPU


def test_symmetric_memory__has_the_two_functions_that_are_called():
    module = _torch.symmetric_memory()
    assert callable(module.empty)
    assert callable(module.rendezvous)


# DTensors


@on_threads(1, 2)
def test_dtensor_spec__is_what_torch_makes_of_a_contiguous_tensor():
    num_ranks = dist.get_world_size()
    mesh = mesh_of((num_ranks,))
    made = DTensor.from_local(torch.ones(2, 3), mesh, (Shard(0),))._spec
    ours = _torch.dtensor_spec(mesh, (Shard(0),), torch.Size([2 * num_ranks, 3]), F32)
    assert ours == made
    assert ours.tensor_meta == made.tensor_meta


@on_threads(1)
def test_dtensorspec__is_the_class_of_a_dtensors_spec():
    ours = _torch.dtensor_spec(mesh_of((1,)), (Shard(0),), torch.Size([2]), F32)
    assert type(ours) is type(ones()._spec) is _torch.DTensorSpec


@on_threads(2)
def test_dtensor__wraps_the_local_tensor_uncopied_and_outside_autograd():
    local = torch.full((1,), float(dist.get_rank()))
    tensor = _torch.dtensor(local, _torch.dtensor_spec(mesh_of((2,)), (Shard(0),), torch.Size([2]), F32))
    assert tensor.to_local().data_ptr() == local.data_ptr()
    assert not tensor.requires_grad
    assert tensor.full_tensor().tolist() == [0, 1]


@on_threads(1)
def test_local_tensor__is_the_very_object_that_the_dtensor_holds():
    tensors = [ones(Replicate()), ones(), ones()]
    found = list(map(_torch.local_tensor, tensors))
    assert all(mine is _torch.local_tensor(each) for mine, each in zip(found, tensors, strict=True))


@on_threads(1)
def test_replace_local_tensor__gives_other_memory_to_the_object_that_an_optimizer_holds():
    parameter = nn.Parameter(ones())
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    moved = torch.full((2,), 5.0)
    _torch.replace_local_tensor(parameter, moved)
    parameter.grad = ones()
    optimizer.step()
    assert moved.tolist() == parameter.full_tensor().tolist() == [4, 4]
    assert parameter.is_leaf


@on_threads(1)
def test_swap_devices__leaves_class_and_attributes():
    here = nn.Parameter(ones())
    here.mark = 1
    there = _torch.dtensor(torch.ones(2, device="meta"), here._spec)
    _torch.swap_devices(here, there)
    assert (here.device.type, there.device.type, here.mark) == ("meta", "cpu", 1)
    assert isinstance(here, nn.Parameter)


def test_split_factor_of__is_that_of_a_strided_shard_and_of_nothing_else():
    placements = _torch.strided_shard(1, 3), Shard(1), Replicate()
    assert [_torch.split_factor_of(each) for each in placements] == [3, None, None]


@on_threads(4)
def test_strided_shard__is_a_dim_that_an_axis_to_the_right_has_sharded_before():
    mesh = named_mesh(dp=2, tp=2)
    # 8 elements over tp first and then, within each part, over dp: rank (dp, tp) holds part tp's dp-th half.
    dp, tp = mesh.get_coordinate()
    local = torch.arange(8.0)[tp * 4 + dp * 2 :][:2].clone()
    spec = _torch.dtensor_spec(mesh, (_torch.strided_shard(0, 2), Shard(0)), torch.Size([8]), F32)
    assert _torch.dtensor(local, spec).full_tensor().tolist() == list(range(8))


# Meshes


@on_threads(4)
def test_concatenate_meshes__has_the_axes_in_the_order_given():
    mesh = named_mesh(dp=2, pp=1, tp=2)
    joined = _torch.concatenate_meshes([mesh["tp"], mesh["dp"]])
    assert joined.mesh_dim_names == ("tp", "dp")
    assert joined.mesh.tolist() == [[0, 2], [1, 3]]


@on_threads(4)
def test_keeps_root_order__is_false_of_axes_turned_round():
    mesh = named_mesh(dp=2, pp=1, tp=2)
    both = [_torch.concatenate_meshes([mesh[one], mesh[other]]) for one, other in (("dp", "tp"), ("tp", "dp"))]
    with pytest.raises(KeyError, match="ascending order"):  # or it need not be asked any more
        DTensor.from_local(torch.ones(2, 2), both[1], [Shard(0), Shard(0)]).full_tensor()
    assert [_torch.keeps_root_order(each) for each in (mesh, *both)] == [True, True, False]


@on_threads(4)
def test_flatten_mesh__is_one_axis_over_all_ranks_under_the_name_given():
    flat = _torch.flatten_mesh(named_mesh(dp=2, cp=2), "dp_cp")
    assert (flat.ndim, flat.mesh_dim_names) == (1, ("dp_cp",))
    assert dist.get_process_group_ranks(flat.get_group()) == [0, 1, 2, 3]


def test_imagined_ranks__are_a_group_of_any_size_in_one_process_that_is_gone_afterwards():
    with _torch.imagined_ranks(6):
        mesh = named_mesh(dp=2, tp=3)
        dist.all_reduce(torch.ones(1), group=mesh["tp"].get_group())
        assert (dist.get_world_size(), mesh.get_coordinate(), mesh["tp"].size()) == (6, (0, 0), 3)
    assert not dist.is_initialized()
    with _torch.imagined_ranks(6, rank=4):
        assert named_mesh(dp=2, tp=3).get_coordinate() == (1, 1)


def test_group_among__finds_the_group_of_a_collective_among_its_operations_arguments():
    found = []

    class Looking(_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "c10d" or func.overloadpacket.__name__ == "all_reduce":
                found.append(_torch.group_among(args))
            return func(*args, **(kwargs or {}))

    with _torch.imagined_ranks(6):
        group, x = named_mesh(dp=2, tp=3)["tp"].get_group(), torch.zeros(3, device="meta")
        with Looking():
            dist.all_reduce(x, group=group)
            dist.all_to_all_single(torch.empty_like(x), x, group=group)
            functional_collectives.all_reduce(x, "sum", group)
        assert found == [group] * 3


# Memory


def test_composed_on_meta__stands_for_operators_that_torchs_own_functions_call_on_meta_tensors():
    def doubled(x, p, train):
        return x * 2

    x = torch.ones(2, device="meta", requires_grad=True)
    with _torch.composed_on_meta({"dropout": doubled}):
        assert type(nn.functional.dropout(x, 0.5).grad_fn).__name__ == "MulBackward0"
        assert nn.functional.dropout(torch.ones(2), 0.0).tolist() == [1, 1]
    assert nn.functional.dropout(x, 0.0) is x


def test_shares_one_head__is_whether_attention_on_a_cpu_fuses_one_head_of_keys_unasked():
    query = torch.ones(1, 2, 4, 8, requires_grad=True)
    made_by = type(nn.functional.scaled_dot_product_attention(query, query[:, :1], query[:, :1]).grad_fn)
    assert ("FlashAttention" in made_by.__name__) == _torch.SHARES_ONE_HEAD


def test_are_fake__tells_tensors_that_others_compute_with_to_learn_shapes():
    with FakeTensorMode():
        made = torch.ones(2)
    assert _torch.are_fake([torch.Tensor, type(made)])
    assert not _torch.are_fake([torch.Tensor, nn.Parameter])


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_outside_transforms__tensors_have_memory_and_may_be_made_to_require_a_gradient():
    seen = []

    def inside(value):
        with _torch.outside_transforms():
            made = torch.ones(2).requires_grad_()
            seen.append((made.untyped_storage().nbytes(), made.requires_grad))
        with pytest.raises(RuntimeError, match="requires_grad_"):
            torch.ones(2).requires_grad_()
        return value * made

    torch.vmap(inside)(torch.ones(3, 2))
    torch.func.jvp(inside, (torch.ones(2),), (torch.ones(2),))
    assert seen == [(8, True)] * 2


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_are_transforms_active__inside_of_one_only():
    seen = []
    torch.vmap(lambda x: seen.append(_torch.are_transforms_active()) or x)(torch.ones(2))
    assert seen == [True]
    assert not _torch.are_transforms_active()


def test_beneath_transforms__are_the_tensors_that_a_later_backward_goes_through():
    weight = torch.ones(2, requires_grad=True)
    reached = []

    def inside(value):
        result = value * weight
        for each in _torch.beneath_transforms([result]):
            if each.grad_fn is not None:
                each.grad_fn.register_prehook(lambda _: reached.append(True))
        return result

    value, tangent = torch.func.jvp(inside, (torch.ones(2),), (torch.ones(2),))
    for result in (value, tangent, torch.vmap(inside)(torch.ones(3, 2)), inside(torch.ones(2))):
        reached.clear()
        result.sum().backward()
        assert reached
    assert list(_torch.beneath_transforms([weight])) == [weight]


def test_storage_uses__counts_views_also_those_that_autograd_keeps_until_they_go():
    weight = nn.Parameter(torch.ones(2, 2))
    storage = weight.untyped_storage()
    before = _torch.storage_uses(storage._cdata)
    views = [weight.detach(), weight.data]
    assert _torch.storage_uses(storage._cdata) == before + 2
    views.clear()
    assert _torch.storage_uses(storage._cdata) == before
    output = torch.ones(1, 2, requires_grad=True) @ weight.t()
    assert _torch.storage_uses(storage._cdata) > before
    output.sum().backward()
    del output
    assert _torch.storage_uses(storage._cdata) == before


# Modules


class Frozen(nn.Module):
    """A module that refuses attributes."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} cannot be set")


def test_write_into__passes_by_what_a_class_does_with_its_attributes_as_marks_do():
    module = Frozen()
    _torch.manage(module)
    _torch.say_fully_sharded(module)
    assert module._is_fsdp_managed_module is True
    assert not _torch.is_fsdp_of_torch(module)
    _torch.write_into(module, "name_of_nobody", 1)
    assert vars(module)["name_of_nobody"] == 1


def test_give_attributes__writes_what_attributes_of_has_returned():
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))
    first.no_decay = True
    _torch.give_attributes(second, _torch.attributes_of(first))
    assert _torch.attributes_of(second) == {"no_decay": True}


def test_functions_of_torch_and_marks_on_modules_are_written_in_one_place():
    writing = re.compile(r"\bsetattr\(|__setattr__|__dict__\W*(\[|\.update)")
    lines = (line for path in Path(_torch.__file__).parent.glob("*.py") for line in path.read_text().splitlines())
    assert [line.strip() for line in lines if writing.search(line)] == ["object.__setattr__(owner, name, value)"]


def test_module_call__is_the_code_that_hooks_and_forward_run_in():
    found: list[bool] = []
    module = nn.Linear(1, 1)

    def note(*_: object) -> None:
        found.append(_torch.MODULE_CALL in [each.f_code for each in _torch.frames_from(sys._getframe())])

    module.register_forward_pre_hook(note)
    module.register_forward_hook(note)
    module(torch.ones(1))
    note()
    assert found == [True, True, False]


def test_frames_from__yields_a_frame_and_its_callers():
    def inner() -> list[str]:
        return [each.f_code.co_name for each in _torch.frames_from(sys._getframe())]

    assert inner()[:2] == ["inner", "test_frames_from__yields_a_frame_and_its_callers"]


def frame_below_a_module() -> list[FrameType]:
    seen: list[FrameType] = []
    module = nn.Linear(1, 1)
    module.register_forward_pre_hook(lambda *_: seen.append(sys._getframe(1)))
    module(torch.ones(1, 1))
    return seen


def test_is_users__tells_a_programs_frame_from_those_of_torch_and_python():
    assert _torch.is_users(sys._getframe())
    found: list[bool] = []
    module = nn.Linear(1, 1)
    module.register_forward_hook(lambda *_: found.append(_torch.is_users(sys._getframe().f_back)))
    module(torch.ones(1))
    assert found == [False]


def test_users_frame__passes_torchs_own_frames_by():
    (frame,) = frame_below_a_module()
    assert frame.f_code.co_filename != __file__
    found = _torch.users_frame(frame)
    assert found is not None
    assert found.f_code is frame_below_a_module.__code__


def test_users_line__is_the_file_and_line_of_that_frame():
    (frame,) = frame_below_a_module()
    assert re.fullmatch(re.escape(__file__) + r":\d+", _torch.users_line(frame))
    assert _torch.users_line(None) == ""


def test_users_stacklevel__has_a_warning_name_the_users_line():
    module = nn.Linear(1, 1)

    def warn(text, stacklevel):
        warnings.warn(text, stacklevel=stacklevel)

    # The hook is a user's, and so its line; what it calls warns.
    module.register_load_state_dict_pre_hook(lambda *_: warn("found", _torch.users_stacklevel(sys._getframe())))
    with pytest.warns(UserWarning, match="found") as caught:
        module.load_state_dict(module.state_dict())
    assert caught[0].filename == __file__


def test_users_call__is_the_function_of_a_library_that_that_frame_calls():
    called = []
    # torch asks the hook inside of `load_state_dict`.
    module = nn.Linear(1, 1)
    module.register_load_state_dict_pre_hook(lambda *_: called.append(_torch.users_call(sys._getframe().f_back)))
    module.load_state_dict(module.state_dict())
    assert called[0].endswith("load_state_dict")
    assert _torch.users_call(None) == ""


def test_in_functional_call__is_true_while_a_module_runs_with_values_from_outside():
    module, seen = nn.Linear(1, 1), []
    module.register_forward_pre_hook(lambda *_: seen.append(_torch.in_functional_call()))
    torch.func.functional_call(module, {"bias": torch.ones(1)}, (torch.ones(1),))
    module(torch.ones(1))
    assert seen == [True, False]


@on_threads(2)
def test_asked_by_spec__is_true_while_a_spec_compares_its_placements():
    class Asks(Shard):
        def __eq__(self, other):
            asked.append(_torch.asked_by_spec())
            return Shard(self.dim) == other

        __hash__ = Shard.__hash__

    asked = []
    made = DTensor.from_local(torch.ones(2), mesh_of((2,)), [Asks(0)])
    assert True in asked
    asked.clear()
    assert made.placements[0] == Shard(0)
    assert asked == [False]


# Autograd


def test_gradient_hooks__are_those_of_register_hook():
    tensor = torch.ones(1, requires_grad=True)
    assert _torch.gradient_hooks(tensor) == []
    handle = tensor.register_hook(abs)
    assert _torch.gradient_hooks(tensor) == [abs]
    handle.remove()
    assert _torch.gradient_hooks(tensor) == []


def test_hooks_on_gradient__are_there_of_either_kind():
    tensor = torch.ones(1, requires_grad=True)
    assert not any(_torch.hooks_on_gradient(tensor))
    for register in (tensor.register_hook, tensor.register_post_accumulate_grad_hook):
        handle = register(abs)
        assert any(_torch.hooks_on_gradient(tensor))
        handle.remove()
    assert not any(_torch.hooks_on_gradient(tensor))


def test_after_accumulation_hooks__are_those_of_that_method():
    tensor = torch.ones(1, requires_grad=True)
    assert _torch.after_accumulation_hooks(tensor) == []
    tensor.register_post_accumulate_grad_hook(abs)
    assert _torch.after_accumulation_hooks(tensor) == [abs]


def test_exchangeable_hook__has_another_told_in_its_place():
    told = []
    tensor = torch.ones(1, requires_grad=True)
    exchange = _torch.exchangeable_hook(tensor, lambda tensor: told.append("first"))
    for hook in (None, lambda tensor: told.append("second"), told.append):
        if hook is not None:
            exchange(hook)
        (tensor * 2).backward()
    assert told[:2] == ["first", "second"]
    assert told[2] is tensor
    assert len(_torch.after_accumulation_hooks(tensor)) == 1


def test_move_hooks__takes_both_kinds_along_with_their_handles():
    source, target = (torch.ones(1, requires_grad=True) for _ in range(2))
    handles = [source.register_hook(abs), source.register_post_accumulate_grad_hook(abs)]
    _torch.move_hooks(source, target)
    assert _torch.gradient_hooks(target) == _torch.after_accumulation_hooks(target) == [abs]
    for handle in handles:
        handle.remove()
    assert _torch.gradient_hooks(target) == _torch.after_accumulation_hooks(target) == []


def test_in_backward__is_true_inside_a_backward_pass_and_nowhere_else():
    seen: list[bool] = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda gradient: seen.append(_torch.in_backward()))
    assert not _torch.in_backward()
    (x * 2).sum().backward()
    assert seen == [True]
    assert not _torch.in_backward()


def test_at_end_of_backward__calls_after_the_last_hook_and_before_backward_returns_unless_it_raises():
    order: list[str] = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: _torch.at_end_of_backward(lambda: order.append("end")))
    x.register_post_accumulate_grad_hook(lambda tensor: order.append("gradient"))
    y.sum().backward(retain_graph=True)
    order.append("returned")
    assert order == ["gradient", "end", "returned"]

    def fail(gradient):
        raise ValueError("in backward")

    x.register_hook(fail)
    with pytest.raises(ValueError, match="in backward"):
        y.sum().backward()
    assert order == ["gradient", "end", "returned"]


def test_at_end_of_backward__drops_what_it_has_called():
    class Callback:
        def __call__(self):
            called.append(True)

    called, alive = [], []

    def queue(gradient):
        callback = Callback()
        seen = weakref.ref(callback)
        _torch.at_end_of_backward(callback)
        # Autograd still has what was queued when this is called.
        _torch.at_end_of_backward(lambda: alive.append(seen()))

    x = torch.ones(1, requires_grad=True)
    x.register_hook(queue)
    x.sum().backward()
    assert (called, alive) == ([True], [None])


@on_threads(1)
def test_become_view__changes_the_shape_outside_and_inside():
    before, after = (
        _torch.dtensor_spec(mesh_of((1,)), (Replicate(),), torch.Size(size), F32) for size in ((2, 1), (2,))
    )
    tensor = _torch.dtensor(torch.ones(2, 1), before)
    _torch.become_view(tensor, torch.ops.aten.squeeze_.dim, (tensor, 1), {}, torch.ones(2), after)
    assert tensor.shape == tensor.to_local().shape == (2,)


def test_dynamo_disabled__runs_as_it_is_also_inside_a_compiled_function():
    seen: list[bool] = []

    def inside(x):
        seen.append(torch.compiler.is_compiling())
        return x + 1

    @_torch.dynamo_disabled
    def outside(x):
        return inside(x)

    assert outside(1) == 2
    assert torch.compile(lambda x: outside(x * 2) * 3, backend="eager")(torch.ones(1)).item() == 9
    assert torch.compile(lambda x: inside(x), backend="eager")(torch.ones(1)).item() == 2
    assert seen == [False, False, True]


class _Untraced(torch.Tensor):
    """What asks Dynamo to leave it alone."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*(each.inner if isinstance(each, cls) else each for each in args))

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride):
        raise _torch.not_traced("not this one")


def test_not_traced__breaks_the_graph_and_names_the_reason_where_none_may_break():
    given = _Untraced(torch.ones(2)), torch.ones(2)
    assert torch.compile(lambda x, y: x + y, backend="eager")(*given).tolist() == [2, 2]
    with pytest.raises(torch._dynamo.exc.Unsupported, match="not this one"):
        torch.compile(lambda x, y: x + y, backend="eager", fullgraph=True)(*given)


def test_trace_nothing_in__runs_a_packages_functions_as_they_are_but_not_what_they_call():
    _torch.trace_nothing_in("tests.support.versions")
    seen: list[bool] = []

    def inner(x):
        seen.append(torch.compiler.is_compiling())
        return x + 1

    code = compile("def outer(inner, x):\n    return inner(x)", versions.__file__, "exec")
    exec(code, names := {})
    torch.compile(names["outer"], backend="eager")(inner, torch.ones(1))
    assert seen == [True]
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(lambda x: names["outer"](inner, x), backend="eager", fullgraph=True)(torch.ones(1))


# Optimizers


def test_register_optimizer_step_pre_hook__sees_optimizers_made_before_and_after():
    parameter = nn.Parameter(torch.ones(1))
    made = torch.optim.SGD([parameter], lr=0.1)
    seen: list[torch.optim.Optimizer] = []
    handle = _torch.register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: seen.append(optimizer))
    later = torch.optim.AdamW([parameter], lr=0.1)
    made.step()
    later.step()
    handle.remove()
    made.step()
    assert seen == [made, later]


def test_register_optimizer_step_post_hook__is_called_when_the_parameters_have_been_written():
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    seen: list[object] = []
    handles = (
        _torch.register_optimizer_step_pre_hook(lambda *_: seen.append(parameter.item())),
        _torch.register_optimizer_step_post_hook(lambda stepped, *_: seen.extend((stepped, parameter.item()))),
    )
    optimizer.step()
    for handle in handles:
        handle.remove()
    assert seen == [1.0, optimizer, 0.0]
    alive = weakref.ref(optimizer)
    seen.clear()
    del optimizer
    assert alive() is None


# DTensor subclasses


class Sub(DTensor):
    """A DTensor that answers nothing itself."""


@on_threads(1)
def test_new_dtensor__makes_one_of_a_class_outside_autograd():
    local = torch.ones(2)
    spec = _torch.dtensor_spec(mesh_of((1,)), (Shard(0),), torch.Size([2]), F32)
    for kind in (Sub, DTensor):
        tensor = _torch.new_dtensor(kind, local, spec)
        assert type(tensor) is kind
        assert _torch.local_tensor(tensor) is local
        assert _torch.spec_of(tensor) is spec
        assert not tensor.requires_grad


@on_threads(1)
def test_dtensor_of__makes_a_subclass_around_what_it_is_given():
    local = torch.ones(2)
    spec = _torch.dtensor_spec(mesh_of((1,)), (Shard(0),), torch.Size([2]), F32)
    tensor = _torch.dtensor_of(Sub, local, spec, True)
    assert type(tensor) is Sub
    assert _torch.local_tensor(tensor) is local
    assert _torch.spec_of(tensor) is spec
    assert tensor.requires_grad
    assert tensor.shape == (2,)


@on_threads(1)
def test_replace_class__makes_the_same_object_one_of_a_subclass():
    parameter = nn.Parameter(ones())
    spec = _torch.dtensor_spec(parameter.device_mesh, parameter.placements, parameter.shape, F32)
    _torch.replace_class(parameter, Sub, spec)
    assert type(parameter) is Sub
    assert isinstance(parameter, nn.Parameter)
    assert _torch.spec_of(parameter) is spec


@on_threads(1)
def test_spec_of__is_the_very_object_that_the_dtensor_holds():
    tensor = ones()
    assert _torch.spec_of(tensor) is tensor._spec


@on_threads(1)
def test_specs_of__gives_the_same_for_many():
    tensors = ones(), ones()
    first, second = _torch.specs_of(tensors)
    assert first is _torch.spec_of(tensors[0])
    assert second.tensor_meta.dtype is F32


class StandIn(Shard):
    """A placement that DTensorSpec does not take: it equals nothing of torch's."""

    stands_for = Shard(0)

    def __new__(cls):
        return super().__new__(cls, 0)

    def __init__(self):
        super().__init__(0)

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


@on_threads(1)
def test_dtensor_spec__takes_a_placement_that_stands_for_another():
    mesh, placement = mesh_of((1,)), StandIn()
    spec = _torch.dtensor_spec(mesh, (placement,), torch.Size([2, 3]), F32, (1, 2))
    with pytest.raises(AssertionError):
        _torch.DTensorSpec(mesh, (placement,), tensor_meta=spec.tensor_meta)
    assert spec.placements == (placement,)
    assert spec == spec
    assert spec.stride == (1, 2)


class Asked(DTensor):
    """A DTensor that says what it was asked."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        heard.append(f"{func} {kwargs or {}}")
        return torch.zeros(2)


heard: list[str] = []


_torch.dispatches_itself(Asked)


@on_threads(1)
def test_dispatches_itself__lets_a_subclass_of_dtensor_answer_operations():
    heard.clear()
    plain = ones(Replicate())
    answering = _torch.dtensor_of(Asked, torch.ones(2), plain._spec, False)
    assert type(answering.clone()) is type(torch.add(plain, answering, alpha=2)) is torch.Tensor
    assert type(plain + plain) is DTensor
    assert heard == ["aten.clone.default {}", "aten.add.Tensor {'alpha': 2}"]


class Other(torch.Tensor):
    """A tensor of a type that torch.optim does not know."""


def test_register_foreach_type__lets_optimizers_and_clipping_use_foreach(monkeypatch):
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    monkeypatch.setattr(optimizer, "_foreach_supported_types", list(optimizer._foreach_supported_types))
    monkeypatch.setattr(_foreach_utils, "_foreach_supported_types", list(_foreach_utils._foreach_supported_types))
    tensors = [torch.ones(1).as_subclass(Other)]
    assert not _foreach_utils._has_foreach_support(tensors, CPU)
    for _ in range(2):
        _torch.register_foreach_type(Other)
    assert _foreach_utils._has_foreach_support(tensors, CPU)
    assert optimizer._foreach_supported_types.count(Other) == 1


def test_torchdispatchmode__sees_operations_of_forward_and_backward():
    class Seen(_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func.overloadpacket))
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    x = torch.ones(2, requires_grad=True)
    with Seen():
        x.exp().sum().backward()
    assert seen[0] == "aten.exp"
    assert seen[-1] in ("aten.mul", "aten.detach")
    assert {"aten.sum", "aten.mul"} <= set(seen)


class Counted(torch.optim.SGD):
    """An optimizer whose class gets its step late."""


def stepping_late(step) -> Counted:
    optimizer = Counted([torch.ones(1, requires_grad=True)], lr=0.1)
    optimizer.__class__ = type("Late", (Counted,), {"step": _torch.hooked_step(step)})
    return optimizer


def test_put_around_step__is_inside_of_the_hooks_of_a_class_whose_step_torch_has_hooked():
    class Counted(torch.optim.SGD):
        def step(self, closure=None):
            order.append("step")

    def around(step):
        def within(*args):
            order.append("before")
            step(*args)
            order.append("after")

        return within

    order = []
    optimizer = Counted([nn.Parameter(torch.zeros(1))], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: order.append("pre"))
    optimizer.register_step_post_hook(lambda *_: order.append("post"))
    bound = optimizer.step
    for _ in range(2):
        _torch.put_around_step(Counted, around)
    bound()
    assert order == ["pre", "before", "step", "after", "post"]


def test_hooked_step__runs_between_global_hooks_and_the_optimizers_and_takes_what_they_change():
    heard = []
    optimizer = stepping_late(lambda self, *args: heard.append(args))
    optimizer.register_step_pre_hook(lambda *_: heard.append("before"))
    optimizer.register_step_post_hook(lambda *_: heard.append("after"))
    optimizer.step()
    assert heard == ["before", (), "after"]
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: ((*args, "given"), kwargs))
    removes = (
        _torch.register_optimizer_step_pre_hook(lambda *_: heard.append("all before")),
        _torch.register_optimizer_step_post_hook(lambda *_: heard.append("all after")),
    )
    try:
        heard.clear()
        optimizer.step()
        assert heard == ["all before", "before", ("given",), "after", "all after"]
        optimizer.register_step_pre_hook(lambda *_: "nonsense")
        with pytest.raises(RuntimeError, match="nonsense"):
            optimizer.step()
    finally:
        for each in removes:
            each.remove()


def test_hooked_step__has_a_range_in_a_profile():
    optimizer = stepping_late(lambda self: None)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        optimizer.step()
    assert "Optimizer.step#Late.step" in {each.key for each in profile.key_averages()}


def test_gradients_of__are_those_of_the_tensors_themselves():
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("reading a gradient asks nobody")

    tensors = [torch.ones(2, requires_grad=True), torch.ones(1).as_subclass(Loud)]
    tensors[0].sum().backward()
    first, second = _torch.gradients_of(tensors)
    assert first.tolist() == [1, 1]
    assert second is None


def test_reduces_in_grad_dtype__says_which_rule_torchs_fully_shard_follows():
    words = " ".join(inspect.getdoc(fsdp.MixedPrecisionPolicy).split())
    assert ("follows the parameter's ``grad_dtype``" in words) == _torch.REDUCES_IN_GRAD_DTYPE


def test_grad_dtype_of__is_what_was_set_and_set_grad_dtype__sets_it():
    for dtype in (torch.bfloat16, None):
        parameter = nn.Parameter(torch.ones(2))
        assert _torch.grad_dtype_of(parameter) == ()
        _torch.set_grad_dtype(parameter, dtype)
        assert _torch.grad_dtype_of(parameter) == (dtype,)
        parameter.sum().backward()
        assert parameter.grad.dtype == (dtype or F32)


def test_set_grad_dtype__survives_a_conversion_of_the_parameter():
    layer = nn.Linear(2, 2)
    _torch.set_grad_dtype(layer.weight, torch.float64)
    assert _torch.grad_dtype_of(layer.bfloat16().weight) == (torch.float64,)


def test_chunk_cat__has_each_tensors_chunks_side_by_side():
    rows = torch.zeros(2, 5)
    _torch.chunk_cat([torch.arange(4.0).view(2, 2), torch.tensor([4.0, 5]), torch.arange(6.0, 10)], 0, 2, out=rows)
    assert rows.tolist() == [[0, 1, 4, 6, 7], [2, 3, 5, 8, 9]]
    assert _torch.chunk_cat([ROWS, ROWS[0]], 0, 1).tolist() == [[*range(10), 0, 1]]


@on_threads(1)
def test_local_gradients__are_the_objects_inside_the_gradients():
    parameters = [nn.Parameter(ones()) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = ones()
    found = _torch.local_gradients(parameters)
    assert all(mine is _torch.local_tensor(each.grad) for mine, each in zip(found, parameters, strict=True))
    plain = nn.Parameter(torch.ones(1))
    plain.grad = torch.ones(1)
    for other in (plain, nn.Parameter(torch.ones(1))):
        with pytest.raises(AttributeError):
            _torch.local_gradients([*parameters, other])


def test_asked_by_checkpointing__is_true_below_torchs_state_dict_functions_only():
    def telling(name):
        def method(self, *args, **kwargs):
            told = _torch.asked_by_checkpointing(), _torch.asked_by_checkpointing(directly=True)
            answers.append((name, kwargs.get("recurse"), *told))
            return getattr(nn.Linear, name)(self, *args, **kwargs)

        return method

    answers = []
    methods = "state_dict", "load_state_dict", "named_parameters"
    model = type("Asked", (nn.Linear,), {name: telling(name) for name in methods})(1, 1)
    nn.Sequential(model).state_dict()
    assert answers == [("state_dict", None, False, False)]
    answers.clear()
    values = state_dict.get_model_state_dict(nn.Sequential(model))
    assert answers == [("named_parameters", False, True, True), ("state_dict", None, True, False)]
    answers.clear()
    state_dict.set_model_state_dict(model, {key.removeprefix("0."): value for key, value in values.items()})
    assert ("named_parameters", False, True, True) in answers
    assert answers[-1] == ("load_state_dict", None, True, True)


def test_answer_checkpointing__is_asked_once_for_a_function_that_torchs_state_dict_functions_call(monkeypatch):
    def answer(theirs, *args):
        asked.append(theirs.__name__)
        return theirs(*args)

    asked = []
    monkeypatch.setattr("sherd._torch.checkpointing._originals", {})  # or the process takes sherd's for made already
    names = ("_init_optim_state", "_get_model_state_dict", "_get_optim_state_dict", "_load_optim_state_dict")
    for name in names:
        theirs = getattr(state_dict, name)
        monkeypatch.setattr(state_dict, name, getattr(theirs, "__wrapped__", theirs))
    for _ in range(2):
        _torch.answer_checkpointing(dict.fromkeys(names, answer))
    model = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters())
    values, states = state_dict.get_state_dict(model, optimizer)
    assert asked == ["_get_model_state_dict", "_get_optim_state_dict", "_init_optim_state"]
    asked.clear()
    state_dict.set_state_dict(model, optimizer, model_state_dict=values, optim_state_dict=states)
    assert asked == ["_load_optim_state_dict", "_init_optim_state"]
    theirs = _state_dict_utils._distribute_tensors
    theirs = getattr(theirs, "__wrapped__", theirs)
    monkeypatch.setattr(_state_dict_utils, "_distribute_tensors", theirs)
    _torch.answer_checkpointing({"_distribute_tensors": answer})
    asked.clear()
    _state_dict_utils._distribute_tensors({}, [], CPU, object())
    assert asked == ["_distribute_tensors"]


@on_threads(2)
def test_sharded_tensor_of_rows__gives_each_rank_its_chunk():
    made, few = (_torch.sharded_tensor_of_rows(each, dist.group.WORLD) for each in (ROWS, ROWS[:1]))
    (mine,) = made.local_shards()
    begin, end, num_few = ((0, 3, 1), (3, 5, 0))[dist.get_rank()]
    assert tuple(made.metadata().size) == (5, 2)
    assert mine.metadata.shard_offsets == [begin, 0]
    assert mine.tensor.tolist() == ROWS[begin:end].tolist()
    assert len(few.local_shards()) == num_few


@on_threads(2)
def test_full_of_sharded_tensor__puts_the_shards_together():
    made, few = (_torch.sharded_tensor_of_rows(each, dist.group.WORLD) for each in (ROWS, ROWS[:1]))
    assert _torch.full_of_sharded_tensor(made, CPU).tolist() == ROWS.tolist()
    assert _torch.full_of_sharded_tensor(few, CPU).tolist() == ROWS[:1].tolist()
    assert _torch.full_of_sharded_tensor(ROWS, CPU) is None
    assert _torch.full_of_sharded_tensor(made, CPU, few.local_shards())[:1].tolist() == ROWS[:1].tolist()


@on_threads(2)
def test_is_sharded_tensor__tells_it_from_a_plain_one():
    assert _torch.is_sharded_tensor(_torch.sharded_tensor_of_rows(ROWS, dist.group.WORLD))
    assert not _torch.is_sharded_tensor(ROWS)


@on_threads(1)
def test_is_tensor_parallel__is_what_was_distributed():
    by_plan = parallelize_module(nn.Linear(2, 2), mesh_of((1,)), ColwiseParallel())
    modules = by_plan, distribute_module(nn.Linear(2, 2), mesh_of((1,))), nn.Linear(2, 2)
    assert [_torch.is_tensor_parallel(each) for each in modules] == [True, True, False]


@on_threads(1)
def test_is_replicated__is_what_ddp_was_composed_with():
    modules = _composable.replicate(nn.Linear(2, 2)), _composable.checkpoint(nn.Linear(2, 2)), nn.Linear(2, 2)
    assert [_torch.is_replicated(each) for each in modules] == [True, False, False]


def test_is_fsdp_of_torch__is_what_either_of_torchs_has_in_hand():
    def told(module):
        return [_torch.is_fsdp_of_torch(each) for each in module.modules()]

    plain, ours = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
    _torch.manage(ours)
    with _torch.imagined_ranks(2):
        assert told(fsdp.FullyShardedDataParallel(nn.Sequential(nn.Linear(2, 2)), device_id=CPU)) == [True] * 3
        assert told(fsdp.fully_shard(nn.Sequential(nn.Linear(2, 2)))) == [True] * 2
    assert told(plain) == [False] * 2
    assert told(ours) == [False]


def test_gatherstate__says_what_a_gather_of_torchs_is_for():
    assert {"FORWARD", "PRE_BACKWARD"} <= set(_fsdp_common.TrainingState.__members__)
    seen, module = [], nn.Linear(4, 4)

    def before(mesh, size, stride, module, policy):
        group = module._get_fsdp_state()._fsdp_param_group
        seen.append((group._reshard_after_forward, group._training_state))
        return (_torch.local_tensor(module.weight).clone(),), None

    def after(gathered, metadata, dtype, *, out=None):
        return None if out is not None else (gathered[0], gathered)

    with _torch.imagined_ranks(2):
        model = fsdp.fully_shard(nn.Sequential(fsdp.fully_shard(module), nn.Linear(4, 4)))
        shard = _torch.local_tensor(module.weight)
        shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = before, after
        model(torch.ones(1, 4, requires_grad=True)).sum().backward()
    ours = nn.Linear(2, 2)
    for phase, of_torch in zip(("forward", "backward"), seen, strict=True):
        group = _torch.GatherState.of(ours, phase)._fsdp_param_group
        assert ours._get_fsdp_state()._fsdp_param_group is group
        assert of_torch == (group._reshard_after_forward, group._training_state), phase
        assert group.was_read
    assert not _torch.GatherState.of(ours, "both")._reshard_after_forward
    assert _torch.GatherState.of(module, "both") is None, "torch's own"


def test_manage__says_what_dynamo_asks_for():
    module = nn.Linear(2, 2)
    _torch.manage(module)
    assert module._is_fsdp_managed_module
    assert module._fsdp_use_orig_params


def test_say_fully_sharded__is_what_replicate_asks_for():
    module = nn.Linear(2, 2)
    _torch.say_fully_sharded(module)
    with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
        _composable.replicate(module)


def test_steps_in_backward__is_what_was_given_optimizers():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit.[a-z]+. is deprecated")  # which torch still calls there
        from torch.distributed.optim import _apply_optimizer_in_backward

    weight, bias = nn.Linear(1, 1).parameters()
    _apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 1.0}, register_hook=False)
    assert [_torch.steps_in_backward(each) for each in (weight, bias)] == [True, False]


def test_attributes_of__is_what_users_write_and_not_what_classes_do():
    class Own(torch.Tensor):
        """A subclass that keeps something on each of its tensors."""

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            result = super().__torch_function__(func, types, args, kwargs or {})
            if isinstance(result, Own):
                result.inner = "of the class"
            return result

    own = torch.ones(2).as_subclass(Own)
    own.inner = "of the class"
    for data in (torch.ones(2), own):
        parameter = nn.Parameter(data)
        parameter.register_hook(lambda gradient: gradient)
        parameter.register_post_accumulate_grad_hook(lambda tensor: None)
        parameter.grad = torch.ones(2)
        torch._dynamo.mark_static_address(parameter)
        assert _torch.attributes_of(parameter) == {}
        parameter.written = 1
        assert _torch.attributes_of(parameter) == {"written": 1}


def timeout_of(group: dist.ProcessGroup) -> float:
    return _torch.backend_of(group, CPU).options._timeout.total_seconds()


@on_processes(2)
def test_named_group__is_made_by_its_ranks_whatever_other_groups_they_know_of():
    rank = dist.get_rank()
    dist.new_group([0])  # of which rank 0 alone knows
    pair = _torch.named_group("a pair", range(2), timedelta(seconds=9))
    alone = _torch.named_group(f"alone {rank}", [rank])
    for group, ranks, timeout in ((pair, [0, 1], 9), (alone, [rank], dist.default_pg_timeout.total_seconds())):
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert total.item() == len(ranks)
        assert dist.get_process_group_ranks(group) == ranks
        assert timeout_of(group) == timeout


@on_processes(2)
def test_named_group__splits_no_group_that_is_bound_to_a_device():
    default, seen = dist.group.WORLD, []
    make, device = dist.distributed_c10d._new_process_group_helper, torch.device("cuda", 0)

    def noting(*args, **kwargs):
        seen.append(default.bound_device_id)
        return make(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.distributed_c10d, "_new_process_group_helper", noting)
        default.bound_device_id = device
        try:
            _torch.named_group("not split", [dist.get_rank()])
            assert [*seen, default.bound_device_id] == [None, device]
        finally:
            default.bound_device_id = None


@on_processes(2)
def test_store_beside__is_one_of_all_processes():
    rank, world = dist.get_rank(), dist.group.WORLD
    store, other = _torch.store_beside(world, "here"), _torch.store_beside(world, "there", connects=False)
    assert not store.check([f"{rank}"])
    assert not other.check(["from 0"])
    store.set(f"from {rank}", str(rank))
    dist.barrier()
    numbers = [0, 0]
    dist.all_gather_object(numbers, store.add("number", 1))
    assert sorted(numbers) == [1, 2]
    assert store.check(["from 0", "from 1"])
    assert not other.check(["from 0"])
    assert store.get(f"from {1 - rank}") == str(1 - rank).encode()


@on_processes(4)
def test_gloo_on_demand__connects_ranks_that_send_each_other_something():
    rank, before = dist.get_rank(), len(sockets())
    group = _torch.named_group("on demand", range(4), timedelta(seconds=9), _torch.gloo_on_demand())
    assert timeout_of(group) == 9
    assert len(sockets()) == before + 1  # it listens
    dist.barrier()
    numbers = [torch.zeros(1) for _ in range(4)]
    dist.all_gather(numbers, torch.full((1,), float(rank)), group=group)  # in a ring
    assert [int(each) for each in numbers] == [0, 1, 2, 3]
    assert len(sockets()) == before + 3


@on_processes(2)
def test_gloo_on_demand__gives_up_a_rank_that_listens_and_never_answers():
    store = _torch.store_beside(dist.group.WORLD, "never answers")
    group = _torch.named_group("never answers", range(2), timedelta(seconds=0.2), _torch.gloo_on_demand())
    if dist.get_rank() == 1:
        with pytest.raises(RuntimeError, match=r"[Tt]ime"):
            dist.all_reduce(torch.ones(1), group=group)
        store.set("gave up", "")
    store.get("gave up")


@on_processes(2)
def test_wait_on_host__comes_back_with_what_the_collective_brings():
    total = torch.ones(1)
    _torch.wait_on_host(dist.all_reduce(total, async_op=True))
    assert total.item() == 2


@on_processes(2)
def test_has_ended__is_false_until_the_others_come_and_leaves_the_work_as_it_was():
    store = _torch.store_beside(dist.group.WORLD, "has ended")
    if dist.get_rank() == 1:
        store.get("asked")  # waits for it
    work = dist.all_reduce(torch.ones(1), async_op=True)
    if dist.get_rank() == 0:
        assert not _torch.has_ended(work, 0.01)
        assert not _torch.has_ended(work, 0)
        store.set("asked", "")
    assert _torch.has_ended(work, 60)


@on_threads(2)
def test_store_beside__is_none_where_ranks_are_threads():
    assert _torch.store_beside(dist.group.WORLD, "here") is None


def test_store__is_what_torchs_stores_can():
    store: _torch.Store = dist.HashStore()
    store.set("a", "1")
    assert store.get("a") == b"1"
    assert store.add("b", 2) == 2
    assert store.check(["a", "b"])
    assert not store.check(["c"])


class Recorded:
    """A backend that writes down what it is told."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def name(self) -> str:
        return self._name

    def __getattr__(self, called: str):
        if self._name in ("gloo", "nccl2", "nccl-lazy") and called.startswith("_group"):
            raise AttributeError(called)
        return lambda: self._log.append(f"{self._name} {called}")


def test_abort_groups__breaks_off_those_of_accelerators_as_one_but_not_gloos_and_forgets_none(monkeypatch):
    assert hasattr(dist.distributed_c10d.ProcessGroup, "_device_types")
    assert hasattr(torch._C._distributed_c10d.Backend, "abort")
    with _torch.imagined_ranks(2):
        others = {device.type for device in dist.group.WORLD._device_types} - {"cpu"}
        assert others
        each_alone = ["abort"] * len(others)
        for name, said in (
            ("nccl", ["_group_start", *each_alone, "_group_end"]),
            ("nccl2", each_alone),
            ("nccl-lazy", each_alone),
            ("gloo", []),
        ):
            log: list[str] = []
            found = {"cpu": Recorded("gloo", log), **{each: Recorded(name, log) for each in others}}
            monkeypatch.setattr(_torch.collectives, "backend_of", lambda _, device, found=found: found[device.type])
            _torch.abort_groups()
            assert dist.is_initialized()
            assert log == [f"{name} {each}" for each in said], name


def test_abort_groups__aborts_nccls_as_one_also_behind_a_backend_that_is_not_grouped(monkeypatch):
    """torch 2.15 has NCCL twice, and only the older one is grouped."""
    log: list[str] = []
    found = [Recorded("nccl2", log), Recorded("nccl", log)]
    monkeypatch.setattr(_torch.collectives, "backend_of", lambda group, device: found[device.index])
    with _torch.imagined_ranks(2):
        devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
        world = SimpleNamespace(pg_map=[SimpleNamespace(_device_types=devices)])
        with monkeypatch.context() as patch:
            patch.setattr(dist.distributed_c10d, "_world", world)
            _torch.abort_groups()
    assert log == ["nccl _group_start", "nccl2 abort", "nccl abort", "nccl _group_end"]


@on_processes(2)
def test_read_objects_with__is_what_turns_bytes_into_objects():
    before = dist.distributed_c10d._tensor_to_object
    try:
        for expected in (["x", "xx"], [(torch.uint8, "x"), (torch.uint8, "xx")]):
            told: list[object] = [None, None]
            dist.all_gather_object(told, "x" * (dist.get_rank() + 1))
            assert told == expected
            _torch.read_objects_with(lambda tensor: (tensor.dtype, pickle.loads(bytes(tensor.tolist()))))
        if not versions.torch_is_older(2, 14):
            dist.all_gather_object(told, torch.ones(1), weights_only=True)
            assert told == [torch.ones(1)] * 2
    finally:
        dist.distributed_c10d._tensor_to_object = before


@on_processes(2)
def test_timeout_of__is_what_a_group_was_made_with():
    own = dist.new_group(timeout=timedelta(seconds=11))
    assert _torch.timeout_of(own, CPU) == timedelta(seconds=11)
    assert _torch.timeout_of(dist.group.WORLD, CPU) is not None


@on_processes(2)
def test_connection_of__is_none_of_groups_that_keep_their_members():
    """tests/comm/test_reconfigured.py has groups that do not."""
    assert _torch.connection_of(dist.group.WORLD) is None
    assert _torch.connection_of(dist.new_group()) is None


@on_processes(2)
def test_adopt_timeout__is_for_groups_that_were_given_none():
    before = timeout_of(dist.group.WORLD)
    groups = dist.new_group(), dist.new_group(timeout=timedelta(seconds=9))
    try:
        versions.set_group_timeout(timedelta(seconds=7))
        for each in groups:
            _torch.adopt_timeout(each)
        assert [timeout_of(each) for each in groups] == [7, 9]
    finally:
        versions.set_group_timeout(timedelta(seconds=before))


@on_processes(2)
def test_splitting_stage__is_one_of_torchs_own_kind_under_a_zero_bubble_schedule():
    class Seen(pipelining.PipelineStage):
        shows_whole_parameters = True

    class Asking(nn.Linear):
        def forward(self, x):
            stage = _torch.splitting_stage()
            answers.append(None if stage is None else stage.stage_index)
            return super().forward(x)

    rank = dist.get_rank()
    for schedule, kind, expected in (
        (pipelining.ScheduleInterleavedZeroBubble, pipelining.PipelineStage, {rank, rank + 2, None}),  # None: outside
        (pipelining.ScheduleLoopedBFS, pipelining.PipelineStage, {None}),
        (pipelining.ScheduleInterleavedZeroBubble, Seen, {None}),
    ):
        answers: list[int | None] = []
        # Two ranks in a ring: before 2.12 a rank whose stages are neighbours sends to itself, which gloo cannot.
        stages = [kind(Asking(2, 2), index, 4, CPU) for index in (rank, rank + 2)]
        driven = schedule(stages, 2, loss_fn=nn.functional.mse_loss)
        driven.step(*[torch.ones(2, 2)] * (rank == 0), target=torch.ones(2, 2))
        assert {*answers, _torch.splitting_stage()} == expected, (schedule, kind)


def test_stages_keep_buffers__unless_a_schedule_has_them_let_go_of_what_was_sent():
    lets_go = hasattr(pipelining.PipelineStage, "release_fwd_send_outputs")
    assert lets_go != _torch.STAGES_KEEP_BUFFERS


def test_defers_reductions__is_of_a_schedule_whose_step_is_not_to_reduce():
    class Schedule:
        def __init__(self, **fields):
            vars(self).update(fields)

        def step(self, asking):
            return asking()

    def asking():
        return _torch.defers_reductions()

    asked = [
        Schedule(**fields).step(asking)
        for fields in ({}, {"_finalize_gradients": True}, {"_finalize_gradients": False})
    ]
    assert asked == [False, False, True]
    if not versions.torch_is_older(2, 15):
        assert "_finalize_gradients" in pipelining.ScheduleGPipe.step.__code__.co_names


# Gradients to come


def test_will_get_gradient__is_true_of_leaves_that_backward_accumulates_in():
    used, unused, x = (torch.ones(2, requires_grad=True) for _ in range(3))
    told = []
    y = (used * x).exp()
    y.grad_fn.register_prehook(lambda _: told.append([_torch.will_get_gradient(each) for each in (used, unused, x)]))
    y.sum().backward(retain_graph=True)
    torch.autograd.backward(y.sum(), inputs=[x], retain_graph=True)
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert told == [[True, False, True], [False, False, True], [False, False, False]]


def test_set_grad_enabled__does_as_no_grad():
    x = torch.ones(2, requires_grad=True)
    _torch.set_grad_enabled(False)
    quiet = x * 2
    _torch.set_grad_enabled(True)
    assert (quiet.requires_grad, (x * 2).requires_grad) == (False, True)


def test_increment_versions__adds_a_write_to_each():
    tensors = [torch.ones(2), torch.ones(2)]
    _torch.increment_versions(tensors)
    assert [each._version for each in tensors] == [1, 1]


def test_set_versions__counts_writes_that_nobody_made():
    x = torch.ones(2, requires_grad=True)
    y = x * x
    _torch.set_versions((x,), (x._version + 1,))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    _torch.set_versions((x,), (x._version - 1,))
    y = x * x
    y.sum().backward()
    assert x._version == 0


# Saved tensors


def kept(tensor):
    return tensor


def test_saving_hooks__are_the_innermost_that_were_pushed_and_none_if_there_are_none():
    assert _torch.saving_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(kept, kept):
        assert _torch.saving_hooks() == (kept, kept)


def test_savinghooks__are_a_pair_of_functions():
    assert len(_torch.SavingHooks.__args__) == 2


def users_hooks_seen_inside(pack):
    """The hooks that selective checkpointing takes for a user's."""
    _torch.push_saving_hooks((pack, kept))
    try:
        return torch.utils.checkpoint._current_user_saved_tensors_hooks()
    finally:
        _torch.pop_saving_hooks()


@versions.needs_torch(2, 14, "selective checkpointing asks for no hooks")
def test_packhook__is_no_users_hook():
    assert users_hooks_seen_inside(_torch.PackHook(kept)) is None


@versions.needs_torch(2, 14, "selective checkpointing asks for no hooks")
def test_packhookaround__is_a_users_hook_if_the_hook_inside_is():
    users, ours = (_torch.PackHookAround(kept, each) for each in (kept, _torch.PackHook(kept)))
    assert users_hooks_seen_inside(users) == (users, kept)
    assert users_hooks_seen_inside(ours) is None


def test_push_saving_hooks__has_autograd_call_them_with_what_it_saves():
    seen = []
    _torch.push_saving_hooks((lambda tensor: seen.append(tensor.tolist()) or tensor, kept))
    try:
        torch.tensor([2.0], requires_grad=True).square()
    finally:
        _torch.pop_saving_hooks()
    assert seen == [[2.0]]


def test_pop_saving_hooks__takes_the_innermost_away():
    _torch.push_saving_hooks((kept, kept))
    _torch.pop_saving_hooks()
    assert _torch.saving_hooks() is None


def test_may_hook_saving__is_false_where_a_transform_forbids_it():
    seen = []
    torch.func.grad(lambda x: seen.append(_torch.may_hook_saving()) or x.sin())(torch.tensor(1.0))
    assert seen == [False]
    assert _torch.may_hook_saving()


@pytest.fixture
def own_stack(monkeypatch):
    """The functions for saving hooks are put back after the test."""
    stack = torch._C._autograd
    for name in ("_push_saved_tensors_default_hooks", "_saved_tensors_hooks_disable", "_saved_tensors_hooks_enable"):
        monkeypatch.setattr(stack, name, getattr(stack, name))


@pytest.mark.usefixtures("own_stack")
def test_share_saving_hooks__goes_round_others_and_is_taken_off_by_transforms():
    seen = []
    ours = (lambda tensor: tensor, kept)
    _torch.share_saving_hooks(
        lambda hooks: hooks == ours, lambda hooks: (lambda tensor: seen.append("ours") or hooks[0](tensor), hooks[1])
    )
    _torch.push_saving_hooks(ours)
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: seen.append("theirs") or tensor, kept):
            torch.tensor([2.0], requires_grad=True).square()
        inner = torch.func.grad(torch.func.grad(torch.sin))(torch.tensor(0.5))
        assert _torch.saving_hooks() == ours
    finally:
        _torch.pop_saving_hooks()
    assert seen == ["ours", "theirs"]
    torch.testing.assert_close(inner, -torch.sin(torch.tensor(0.5)))


@pytest.mark.usefixtures("own_stack")
def test_share_saving_hooks__changes_nothing_where_there_are_only_others():
    _torch.share_saving_hooks(lambda hooks: False, lambda hooks: hooks)
    with torch.autograd.graph.saved_tensors_hooks(kept, kept):
        assert _torch.saving_hooks() == (kept, kept)
        with pytest.raises(RuntimeError, match="saved tensor hooks"):
            torch.func.grad(torch.sin)(torch.tensor(0.5))


def test_storage_address__is_that_of_each_view_and_raises_where_there_is_no_storage():
    tensor = torch.ones(2, 3)
    assert _torch.storage_address(tensor.t()[1:]) == tensor.untyped_storage()._cdata
    tensor.untyped_storage().resize_(0)
    assert _torch.storage_address(tensor) == tensor.untyped_storage()._cdata
    with pytest.raises(NotImplementedError):
        _torch.storage_address(torch.ones(2).to_sparse())


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        result = x * 2
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


@pytest.mark.parametrize(
    ("makes", "saves_it"),
    [
        (torch.exp, True),
        (lambda x: x.softmax(-1), True),
        (Doubled.apply, True),
        (lambda x: x + 1, False),
        (lambda x: x * x, False),
        (lambda x: x @ x, False),
        (lambda x: x.view(-1), False),
        (nn.functional.silu, False),
    ],
)
def test_save_no_result__has_nodes_that_save_arguments_only(makes, saves_it):
    result = makes(torch.ones(3, 3, requires_grad=True))
    assert (type(result.grad_fn) in _torch.SAVE_NO_RESULT) is not saves_it


def test_save_no_result__has_no_node_that_names_a_result():
    nodes = [node for node in vars(torch._C._functions).values() if isinstance(node, type)]
    named = [node for node in nodes if any(re.search("_raw_saved_(result|out)", name) for name in vars(node))]
    assert len(named) > 50
    assert _torch.SAVE_NO_RESULT.isdisjoint(named)


# Files that are written


def test_rebuild_tensor__is_named_by_files_of_torch_save():
    assert named_in_a_file_of(torch.ones(2)) == full_name(_torch.rebuild_tensor())


def test_rebuild_tensor_of_bytes__is_named_for_dtypes_without_a_storage_class():
    assert named_in_a_file_of(torch.ones(2).to(torch.float8_e4m3fn)) == full_name(_torch.rebuild_tensor_of_bytes())


def full_name(function) -> str:
    return f"{function.__module__} {function.__name__}"


def named_in_a_file_of(tensor: torch.Tensor) -> str:
    """The first name in the pickle of a file of `torch.save`."""
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    with zipfile.ZipFile(buffer) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith("data.pkl")]
        operations = pickletools.genops(archive.read(name))
        return next(text for operation, text, _ in operations if operation.name == "GLOBAL")


def test_storage_info__is_what_a_reader_of_torchs_checkpoints_looks_for():
    info = _torch.storage_info("__0_0.distcp", 3, 5)
    assert (info.relative_path, info.offset, info.length, info.transform_descriptors) == ("__0_0.distcp", 3, 5, None)
    assert pickle.loads(pickle.dumps(info)) == info


def test_keep_loaded_state__says_what_an_optimizer_keeps_or_leaves_it_to_torch(monkeypatch):
    monkeypatch.setattr(
        torch.optim.Optimizer,
        "_process_value_according_to_param_policy",
        staticmethod(torch.optim.Optimizer._process_value_according_to_param_policy),
    )
    heard = []

    def kept(parameter, value, key):
        heard.append(key)
        return value.double() if key == "exp_avg" else None

    _torch.keep_loaded_state(kept)
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert set(heard) == {"step", "exp_avg", "exp_avg_sq"}
    state = optimizer.state[weight]
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (torch.float64, torch.bfloat16)
