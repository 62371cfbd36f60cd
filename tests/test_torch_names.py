"""Does each private or renamed name of torch that sherd relies on still exist, and do what is said of it?

One test a name, called after it: a new torch that breaks one says which.
"""

import io
import logging
import pickle
import pickletools
import re
import sys
import warnings
import weakref
import zipfile
from datetime import timedelta
from pathlib import Path
from types import FrameType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from sherd import _torch
from tests.support import versions

CPU = torch.device("cpu")
F32 = torch.float32


def test_each_name_has_its_contract_here():
    tested = set(re.findall(r"^def test_(\w+?)__", Path(__file__).read_text(), re.MULTILINE))
    assert tested == {name.lower() for name in _torch.__all__}


def mesh_of(*shape: int, names: tuple[str, ...] | None = None):
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


# Collectives


def gathered() -> list[float]:
    output = torch.empty(dist.get_world_size())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        work = _torch.all_gather_single(output, torch.tensor([float(dist.get_rank())]), group=None, async_op=True)
    work.wait()
    return output.tolist()


def test_all_gather_single__fills_one_tensor_in_rank_order_without_a_warning(world):
    assert world(2).run(gathered) == [[0, 1], [0, 1]]


def gathered_as_one(async_op: bool) -> list[float]:
    outputs, rank = [torch.empty(2), torch.empty(4)], float(dist.get_rank())
    pending = _torch.all_gather_coalesced(
        outputs, [torch.tensor([rank]), torch.tensor([rank + 2, 5])], dist.group.WORLD, async_op
    )
    assert (pending is not None) == async_op
    if pending is not None:
        pending.wait()
    return torch.cat(outputs).tolist()


@pytest.mark.parametrize("async_op", [False, True])
def test_all_gather_coalesced__fills_each_tensor_in_rank_order(world, async_op):
    assert world(2).run(gathered_as_one, async_op) == [[0, 1, 2, 5, 3, 5]] * 2


def scattered() -> list[float]:
    output = torch.empty(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        work = _torch.reduce_scatter_single(
            output, torch.arange(2.0) + 1, op=dist.ReduceOp.SUM, group=None, async_op=True
        )
    work.wait()
    return output.tolist()


def test_reduce_scatter_single__gives_each_rank_its_part_of_the_sum_without_a_warning(world):
    assert world(2).run(scattered) == [[2], [4]]


def offers_memory() -> bool:
    return _torch.backend_of(dist.group.WORLD, CPU).supports_tensor_alloc(CPU)


def test_backend_of__is_the_object_that_knows_whether_it_offers_memory_and_gloo_does_not(world):
    assert world(2).run(offers_memory) == [False, False]


def test_device_of__is_where_collectives_of_a_mesh_work(threads):
    assert threads(2).run(lambda: _torch.device_of(mesh_of(2))) == [CPU, CPU]


def test_symmetric_memory__has_the_two_functions_that_are_called():
    module = _torch.symmetric_memory()
    assert callable(module.empty)
    assert callable(module.rendezvous)


# DTensors


def spec_like_torchs() -> bool:
    mesh = mesh_of(dist.get_world_size())
    made = DTensor.from_local(torch.ones(2, 3), mesh, (Shard(0),))._spec
    ours = _torch.dtensor_spec(mesh, (Shard(0),), torch.Size([2 * dist.get_world_size(), 3]), torch.float32)
    return ours == made and ours.tensor_meta == made.tensor_meta and isinstance(ours, _torch.DTensorSpec)


def test_dtensor_spec__is_what_torch_makes_of_a_contiguous_tensor(world):
    assert world(2).run(spec_like_torchs) == [True, True]


def test_dtensorspec__is_the_class_of_a_dtensors_spec(world):
    assert world(1).run(spec_like_torchs) == [True]


def made_dtensor() -> tuple[bool, bool, list[float]]:
    mesh, local = mesh_of(dist.get_world_size()), torch.full((1,), float(dist.get_rank()))
    spec = _torch.dtensor_spec(mesh, (Shard(0),), torch.Size([dist.get_world_size()]), torch.float32)
    tensor = _torch.dtensor(local, spec)
    shares = tensor.to_local().data_ptr() == local.data_ptr()
    return shares, tensor.requires_grad, tensor.full_tensor().tolist()


def test_dtensor__wraps_the_local_tensor_uncopied_and_outside_autograd(world):
    assert world(2).run(made_dtensor) == [(True, False, [0, 1])] * 2


def held_object() -> bool:
    local = torch.ones(1)
    tensor = DTensor.from_local(local, mesh_of(1), (Replicate(),))
    return _torch.local_tensor(tensor) is _torch.local_tensor(tensor)


def test_local_tensor__is_the_very_object_that_the_dtensor_holds(world):
    assert world(1).run(held_object) == [True]


def storages_of_shells() -> list[bool]:
    tensor = DTensor.from_local(torch.ones(2), mesh_of(1), (Replicate(),))
    shell, own = tensor.untyped_storage(), torch.ones(2).untyped_storage()
    same = tensor.untyped_storage() is shell
    tensor.data = tensor.data.add_(1)
    kept = tensor.untyped_storage() is shell
    tensor.data = tensor + 1
    return [_torch.has_bytes(shell), _torch.has_bytes(own), same, kept, tensor.untyped_storage() is shell]


def test_has_bytes__tells_a_plain_tensors_storage_from_a_dtensors_which_only_an_assignment_exchanges(world):
    assert world(1).run(storages_of_shells) == [[False, True, True, True, False]]


def replaced() -> tuple[list[float], list[float], bool]:
    mesh = mesh_of(1)
    parameter = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, (Shard(0),)))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    moved = torch.full((2,), 5.0)
    _torch.replace_local_tensor(parameter, moved)
    parameter.grad = DTensor.from_local(torch.ones(2), mesh, (Shard(0),))
    optimizer.step()
    return moved.tolist(), parameter.full_tensor().tolist(), parameter.is_leaf


def test_replace_local_tensor__gives_other_memory_to_the_object_that_an_optimizer_holds(world):
    assert world(1).run(replaced) == [([4, 4], [4, 4], True)]


def swapped() -> tuple[str, str, bool, int]:
    mesh = mesh_of(1)
    here = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, (Shard(0),)))
    here.mark = 1
    there = _torch.dtensor(torch.ones(2, device="meta"), here._spec)
    _torch.swap_devices(here, there)
    return here.device.type, there.device.type, isinstance(here, nn.Parameter), here.mark


def test_swap_devices__leaves_class_and_attributes(world):
    assert world(1).run(swapped) == [("meta", "cpu", True, 1)]


def parts_of_a_twice_sharded_tensor() -> list[float]:
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    # 8 elements over tp first and then, within each part, over dp: rank (dp, tp) holds part tp's dp-th half.
    dp, tp = mesh.get_coordinate()
    local = torch.arange(8.0)[tp * 4 + dp * 2 :][:2].clone()
    placements = (_torch.strided_shard(0, 2), Shard(0))
    spec = _torch.dtensor_spec(mesh, placements, torch.Size([8]), torch.float32)
    logging.disable(logging.WARNING)  # that two gathers are needed, which is so
    whole = _torch.dtensor(local, spec).full_tensor()
    logging.disable(logging.NOTSET)
    return whole.tolist()


def test_split_factor_of__is_that_of_a_strided_shard_and_of_nothing_else():
    assert [_torch.split_factor_of(each) for each in (_torch.strided_shard(1, 3), Shard(1), Replicate())] == [
        3,
        None,
        None,
    ]


def test_strided_shard__is_a_dim_that_an_axis_to_the_right_has_sharded_before(world):
    assert world(4).run(parts_of_a_twice_sharded_tensor) == [list(range(8))] * 4


# Meshes


def concatenated() -> tuple[tuple[str, ...], list[list[int]]]:
    mesh = mesh_of(2, 1, 2, names=("dp", "pp", "tp"))
    joined = _torch.concatenate_meshes([mesh["tp"], mesh["dp"]])
    return joined.mesh_dim_names, joined.mesh.tolist()


def test_concatenate_meshes__has_the_axes_in_the_order_given(world):
    assert world(4).run(concatenated)[0] == (("tp", "dp"), [[0, 2], [1, 3]])


def orders_kept() -> list[bool]:
    mesh = mesh_of(2, 1, 2, names=("dp", "pp", "tp"))
    both = [_torch.concatenate_meshes([mesh[one], mesh[other]]) for one, other in (("dp", "tp"), ("tp", "dp"))]
    with pytest.raises(KeyError, match="ascending order"):  # or it need not be asked any more
        DTensor.from_local(torch.ones(2, 2), both[1], [Shard(0), Shard(0)]).full_tensor()
    return [_torch.keeps_root_order(each) for each in (mesh, *both)]


def test_keeps_root_order__is_false_of_axes_turned_round(world):
    assert world(4).run(orders_kept) == [[True, True, False]] * 4


def flattened() -> tuple[int, list[int], tuple[str, ...]]:
    mesh = mesh_of(2, 2, names=("dp", "cp"))
    flat = _torch.flatten_mesh(mesh, "dp_cp")
    return flat.ndim, dist.get_process_group_ranks(flat.get_group()), flat.mesh_dim_names


def test_flatten_mesh__is_one_axis_over_all_ranks_under_the_name_given(world):
    assert world(4).run(flattened) == [(1, [0, 1, 2, 3], ("dp_cp",))] * 4


def test_imagined_ranks__are_a_group_of_any_size_in_one_process_that_is_gone_afterwards():
    with _torch.imagined_ranks(6):
        mesh = mesh_of(2, 3, names=("dp", "tp"))
        dist.all_reduce(torch.ones(1), group=mesh["tp"].get_group())
        assert (dist.get_world_size(), mesh.get_coordinate(), mesh["tp"].size()) == (6, (0, 0), 3)
    assert not dist.is_initialized()
    with _torch.imagined_ranks(6, rank=4):
        assert mesh_of(2, 3, names=("dp", "tp")).get_coordinate() == (1, 1)


def test_group_among__finds_the_group_of_a_collective_among_its_operations_arguments():
    found = []

    class Looking(_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "c10d" or func.overloadpacket.__name__ == "all_reduce":
                found.append(_torch.group_among(args))
            return func(*args, **(kwargs or {}))

    with _torch.imagined_ranks(6):
        group = mesh_of(2, 3, names=("dp", "tp"))["tp"].get_group()
        x = torch.zeros(3, device="meta")
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


def test_fake_tensors__have_a_device_and_no_memory_and_are_saved_for_backward():
    saved = []
    with _torch.fake_tensors(), torch.autograd.graph.saved_tensors_hooks(saved.append, lambda each: each):
        weight = torch.ones(1 << 20, 1 << 20, requires_grad=True)
        torch.exp(weight)
    assert (weight.device, weight.untyped_storage().nbytes()) == (CPU, 1 << 42)
    assert [each.shape for each in saved] == [weight.shape]


def test_are_fake__tells_tensors_that_others_compute_with_to_learn_shapes():
    with _torch.fake_tensors():
        made = torch.ones(2)
    assert _torch.are_fake([torch.Tensor, type(made)])
    assert not _torch.are_fake([torch.Tensor, nn.Parameter])


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
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


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
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


def test_storage_uses__counts_views_and_forgets_them_when_they_go():
    tensor = torch.ones(4)
    storage = tensor.untyped_storage()
    before = _torch.storage_uses(storage._cdata)
    views = [tensor[1:], tensor.data]
    assert _torch.storage_uses(storage._cdata) == before + 2
    views.clear()
    assert _torch.storage_uses(storage._cdata) == before


def test_storage_uses__counts_a_view_that_autograd_keeps_for_backward():
    weight = nn.Parameter(torch.ones(2, 2))
    storage = weight.untyped_storage()
    before = _torch.storage_uses(storage._cdata)
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


def test_marks_are_written_on_a_module_that_refuses_attributes():
    module = Frozen()
    _torch.manage(module)
    _torch.say_fully_sharded(module)
    assert module._is_fsdp_managed_module is True
    assert not _torch.is_fsdp_of_torch(module)


def test_write_into__passes_by_what_a_class_does_with_its_attributes():
    module = Frozen()
    _torch.write_into(module, "name_of_nobody", 1)
    assert vars(module)["name_of_nobody"] == 1


def test_give_attributes__writes_what_attributes_of_has_returned():
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))
    first.no_decay = True
    _torch.give_attributes(second, _torch.attributes_of(first))
    assert _torch.attributes_of(second) == {"no_decay": True}


def test_functions_of_torch_and_marks_on_modules_are_written_in_one_place():
    folder = Path(_torch.__file__).parent
    writers = {
        path.name
        for path in folder.glob("*.py")
        if re.search(r"\bsetattr\(|__setattr__|__dict__\W*(\[|\.update)", path.read_text())
    }
    assert writers == {"writes.py"}


def test_module_call__is_the_code_that_hooks_and_forward_run_in():
    codes: list[list[object]] = []
    module = nn.Linear(1, 1)

    def note(*_: object) -> None:
        frame, found = sys._getframe(), []
        while frame is not None:
            found.append(frame.f_code)
            frame = frame.f_back
        codes.append(found)

    module.register_forward_pre_hook(note)
    module.register_forward_hook(note)
    module(torch.ones(1))
    note()
    assert [_torch.MODULE_CALL in each for each in codes] == [True, True, False]


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


def test_in_functional_call__is_true_while_a_module_runs_with_values_from_outside():
    module, seen = nn.Linear(1, 1), []
    module.register_forward_pre_hook(lambda *_: seen.append(_torch.in_functional_call()))
    torch.func.functional_call(module, {"bias": torch.ones(1)}, (torch.ones(1),))
    module(torch.ones(1))
    assert seen == [True, False]


# Autograd


def test_gradient_hooks__are_those_of_register_hook():
    tensor = torch.ones(1, requires_grad=True)
    assert _torch.gradient_hooks(tensor) == []
    handle = tensor.register_hook(abs)
    assert _torch.gradient_hooks(tensor) == [abs]
    handle.remove()
    assert _torch.gradient_hooks(tensor) == []


def test_have_gradient_hooks__tells_of_either_kind():
    tensors = [torch.ones(1, requires_grad=True) for _ in range(2)]
    assert not _torch.have_gradient_hooks(tensors)
    for register in (tensors[1].register_hook, tensors[1].register_post_accumulate_grad_hook):
        handle = register(abs)
        assert _torch.have_gradient_hooks(tensors)
        handle.remove()
    assert not _torch.have_gradient_hooks(tensors)


def test_after_accumulation_hooks__are_those_of_that_method():
    tensor = torch.ones(1, requires_grad=True)
    assert _torch.after_accumulation_hooks(tensor) == []
    tensor.register_post_accumulate_grad_hook(abs)
    assert _torch.after_accumulation_hooks(tensor) == [abs]


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


def test_at_end_of_backward__calls_after_the_last_hook_and_before_backward_returns():
    order: list[str] = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: _torch.at_end_of_backward(lambda: order.append("end")))
    x.register_post_accumulate_grad_hook(lambda tensor: order.append("gradient"))
    y.sum().backward()
    order.append("returned")
    assert order == ["gradient", "end", "returned"]


def test_at_end_of_backward__does_not_call_when_the_backward_raises():
    called: list[bool] = []
    x = torch.ones(1, requires_grad=True)

    def fail(gradient):
        raise ValueError("in backward")

    y = x * 2
    x.register_hook(fail)
    y.register_hook(lambda gradient: _torch.at_end_of_backward(lambda: called.append(True)))
    with pytest.raises(ValueError, match="in backward"):
        y.sum().backward()
    assert called == []


def shape_after_squeezing():
    tensor = _torch.dtensor(torch.ones(2, 1), _torch.dtensor_spec(mesh_of(1), (Replicate(),), torch.Size((2, 1)), F32))
    squeezed = _torch.dtensor_spec(mesh_of(1), (Replicate(),), torch.Size((2,)), F32)
    _torch.become_view(tensor, torch.ops.aten.squeeze_.dim, (tensor, 1), {}, torch.ones(2), squeezed)
    return tuple(tensor.shape), tuple(tensor.to_local().shape)


def test_become_view__changes_the_shape_outside_and_inside(threads):
    assert threads(1).run(shape_after_squeezing) == [((2,), (2,))]


def test_dynamo_disabled__runs_as_it_is_and_keeps_its_result():
    assert _torch.dynamo_disabled(lambda x: x + 1)(1) == 2


def test_dynamo_disabled__is_not_traced_inside_a_compiled_function():
    seen: list[bool] = []

    @_torch.dynamo_disabled
    def outside(x):
        seen.append(torch.compiler.is_compiling())
        return x + 1

    @torch.compile(backend="eager")
    def compiled(x):
        return outside(x * 2) * 3

    assert compiled(torch.ones(1)).item() == 9
    assert seen == [False]


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


@pytest.fixture
def steps():
    """The optimizers that stepped, by which hook saw them; the hooks are taken off again."""
    seen: list[tuple[str, torch.optim.Optimizer]] = []
    handles = [
        _torch.register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: seen.append(("before", optimizer))),
        _torch.register_optimizer_step_post_hook(lambda optimizer, args, kwargs: seen.append(("after", optimizer))),
    ]
    yield seen
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_register_optimizer_step_pre_hook__sees_optimizers_made_before_and_after(steps, kind):
    optimizer = kind([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.step()
    assert steps[0] == ("before", optimizer)


def test_register_optimizer_step_post_hook__is_called_when_the_parameters_have_been_written(steps):
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    seen: list[float] = []
    handle = _torch.register_optimizer_step_post_hook(lambda *_: seen.append(parameter.item()))
    optimizer.step()
    handle.remove()
    assert steps == [("before", optimizer), ("after", optimizer)]
    assert seen == [0.0]
    alive = weakref.ref(optimizer)
    steps.clear()
    del optimizer
    assert alive() is None


# DTensor subclasses


class Sub(DTensor):
    """A DTensor that answers nothing itself."""


def made_subclass() -> tuple[bool, ...]:
    mesh, local = mesh_of(1), torch.ones(2)
    spec = _torch.dtensor_spec(mesh, (Shard(0),), torch.Size([2]), torch.float32)
    tensor = _torch.dtensor_of(Sub, local, spec, True)
    held = _torch.local_tensor(tensor) is local and _torch.spec_of(tensor) is spec
    return type(tensor) is Sub, held, tensor.requires_grad, tensor.shape == (2,)


def test_dtensor_of__makes_a_subclass_around_what_it_is_given(world):
    assert world(1).run(made_subclass) == [(True, True, True, True)]


def specs_held() -> tuple[bool, bool]:
    tensors = [DTensor.from_local(torch.ones(2), mesh_of(1), (Shard(0),)) for _ in range(2)]
    first, second = _torch.specs_of(tensors)
    return first is _torch.spec_of(tensors[0]), second.tensor_meta.dtype is torch.float32


def test_spec_of__is_the_very_object_that_the_dtensor_holds(world):
    assert world(1).run(specs_held) == [(True, True)]


def test_specs_of__gives_the_same_for_many(world):
    assert world(1).run(specs_held) == [(True, True)]


def locals_held() -> bool:
    tensors = [DTensor.from_local(torch.ones(2), mesh_of(1), (Shard(0),)) for _ in range(2)]
    found = list(map(_torch.local_tensor, tensors))
    return all(mine is _torch.local_tensor(each) for mine, each in zip(found, tensors, strict=True))


def test_local_tensor__of_many_are_the_objects_that_the_dtensors_hold(world):
    assert world(1).run(locals_held) == [True]


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


def spec_with_stand_in() -> tuple[bool, bool, tuple[int, ...]]:
    mesh, placement = mesh_of(1), StandIn()
    spec = _torch.dtensor_spec(mesh, (placement,), torch.Size([2, 3]), torch.float32, (1, 2))
    with pytest.raises(AssertionError):
        _torch.DTensorSpec(mesh, (placement,), tensor_meta=spec.tensor_meta)
    return spec.placements == (placement,), spec == spec, spec.stride


def test_dtensor_spec__takes_a_placement_that_stands_for_another(world):
    assert world(1).run(spec_with_stand_in) == [(True, True, (1, 2))]


class Asked(DTensor):
    """A DTensor that says what it was asked."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        heard.append(f"{func} {kwargs or {}}")
        return torch.zeros(2)


heard: list[str] = []


_torch.dispatches_itself(Asked)


def ask() -> None:
    mesh = mesh_of(1)
    plain = DTensor.from_local(torch.ones(2), mesh, [Replicate()])
    answering = _torch.dtensor_of(Asked, torch.ones(2), plain._spec, False)
    assert type(answering.clone()) is type(torch.add(plain, answering, alpha=2)) is torch.Tensor
    assert type(plain + plain) is DTensor


def test_dispatches_itself__lets_a_subclass_of_dtensor_answer_operations(threads):
    heard.clear()
    threads(1).run(ask)
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


def test_no_torch_function__makes_results_of_a_subclass_plain():
    class Quiet(torch.Tensor):
        __torch_function__ = _torch.NO_TORCH_FUNCTION

    quiet = torch.ones(2).as_subclass(Quiet)
    assert type(quiet + 1) is type(quiet.view(1, 2)) is torch.Tensor
    assert type(quiet) is Quiet


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


def test_hooked_step__runs_between_the_hooks_of_the_optimizer():
    heard = []
    late = type("Late", (Counted,), {"step": _torch.hooked_step(lambda self: heard.append("step"))})
    optimizer = Counted([torch.ones(1, requires_grad=True)], lr=0.1)
    optimizer.__class__ = late
    optimizer.register_step_pre_hook(lambda *_: heard.append("before"))
    optimizer.register_step_post_hook(lambda *_: heard.append("after"))
    optimizer.step()
    assert heard == ["before", "step", "after"]


def test_hooked_step__calls_global_hooks_around_its_own_and_takes_what_they_change():
    heard = []
    late = type("Late", (Counted,), {"step": _torch.hooked_step(lambda self, *args: heard.append(args))})
    optimizer = Counted([torch.ones(1, requires_grad=True)], lr=0.1)
    optimizer.__class__ = late
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: ((*args, "given"), kwargs))
    optimizer.register_step_post_hook(lambda *_: heard.append("own"))
    removes = (
        _torch.register_optimizer_step_pre_hook(lambda *_: heard.append("all before")),
        _torch.register_optimizer_step_post_hook(lambda *_: heard.append("all after")),
    )
    try:
        optimizer.step()
        assert heard == ["all before", ("given",), "own", "all after"]
        optimizer.register_step_pre_hook(lambda *_: "nonsense")
        with pytest.raises(RuntimeError, match="nonsense"):
            optimizer.step()
    finally:
        for each in removes:
            each.remove()


def test_hooked_step__has_a_range_in_a_profile():
    late = type("Late", (Counted,), {"step": _torch.hooked_step(lambda self: None)})
    optimizer = Counted([torch.ones(1, requires_grad=True)], lr=0.1)
    optimizer.__class__ = late
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


def local_gradients_held() -> bool:
    parameters = [nn.Parameter(DTensor.from_local(torch.ones(2), mesh_of(1), (Shard(0),))) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = DTensor.from_local(torch.ones(2), mesh_of(1), (Shard(0),))
    found = _torch.local_gradients(parameters)
    same = all(mine is _torch.local_tensor(each.grad) for mine, each in zip(found, parameters, strict=True))
    plain = nn.Parameter(torch.ones(1))
    plain.grad = torch.ones(1)
    for other in (plain, nn.Parameter(torch.ones(1))):
        with pytest.raises(AttributeError):
            _torch.local_gradients([*parameters, other])
    return same


def test_local_gradients__are_the_objects_inside_the_gradients(world):
    assert world(1).run(local_gradients_held) == [True]


def test_asked_by_checkpointing__is_true_below_torchs_state_dict_functions_only():
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    class Asked(nn.Linear):
        def state_dict(self, *args, **kwargs):
            answers.append(("get", _torch.asked_by_checkpointing(), _torch.asked_by_checkpointing(directly=True)))
            return super().state_dict(*args, **kwargs)

        def load_state_dict(self, *args, **kwargs):
            answers.append(("set", _torch.asked_by_checkpointing(), _torch.asked_by_checkpointing(directly=True)))
            return super().load_state_dict(*args, **kwargs)

        def named_parameters(self, *args, **kwargs):
            answers.append((kwargs, _torch.asked_by_checkpointing(), _torch.asked_by_checkpointing(directly=True)))
            return super().named_parameters(*args, **kwargs)

    answers = []
    model = Asked(1, 1)
    values = nn.Sequential(model).state_dict()
    assert answers == [("get", False, False)]
    answers.clear()
    values = get_model_state_dict(nn.Sequential(model))
    assert answers == [({"recurse": False}, True, True), ("get", True, False)]
    answers.clear()
    set_model_state_dict(model, {key.removeprefix("0."): value for key, value in values.items()})
    assert ({"recurse": False}, True, True) in answers
    assert answers[-1] == ("set", True, True)


def test_answer_checkpointing__is_asked_once_for_a_function_that_torchs_state_dict_functions_call(monkeypatch):
    from torch.distributed.checkpoint import state_dict

    def answer(theirs, *args):
        asked.append(theirs.__name__)
        return theirs(*args)

    asked = []
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


def sharded_tensor_made() -> list[object]:
    group, whole = dist.group.WORLD, torch.arange(10.0).view(5, 2)
    made = _torch.sharded_tensor_of_rows(whole, group)
    (mine,) = made.local_shards()
    few = _torch.sharded_tensor_of_rows(whole[:1], group)
    back = [_torch.full_of_sharded_tensor(each, CPU).tolist() for each in (made, few)]
    assert back == [whole.tolist(), whole[:1].tolist()]
    assert _torch.full_of_sharded_tensor(whole, CPU) is None
    assert _torch.full_of_sharded_tensor(made, CPU, few.local_shards())[:1].tolist() == whole[:1].tolist()
    assert [_torch.is_sharded_tensor(each) for each in (made, whole)] == [True, False]
    return [tuple(made.metadata().size), mine.metadata.shard_offsets, mine.tensor.tolist(), len(few.local_shards())]


def test_sharded_tensor_of_rows__gives_each_rank_its_chunk(world):
    assert world(2).run(sharded_tensor_made) == [
        [(5, 2), [0, 0], [[0, 1], [2, 3], [4, 5]], 1],
        [(5, 2), [3, 0], [[6, 7], [8, 9]], 0],
    ]


def test_full_of_sharded_tensor__puts_the_shards_together(world):
    world(2).run(sharded_tensor_made)


def test_is_sharded_tensor__tells_it_from_a_plain_one(world):
    world(2).run(sharded_tensor_made)


def modules_distributed() -> list[bool]:
    mesh = mesh_of(1)
    by_plan = parallelize_module(nn.Linear(2, 2), mesh, ColwiseParallel())
    modules = (by_plan, distribute_module(nn.Linear(2, 2), mesh), nn.Linear(2, 2))
    return [_torch.is_tensor_parallel(each) for each in modules]


def test_is_tensor_parallel__is_what_was_distributed(world):
    assert world(1).run(modules_distributed) == [[True, True, False]]


def modules_replicated() -> list[bool]:
    from torch.distributed._composable import checkpoint, replicate

    modules = replicate(nn.Linear(2, 2)), checkpoint(nn.Linear(2, 2)), nn.Linear(2, 2)
    return [_torch.is_replicated(each) for each in modules]


def test_is_replicated__is_what_ddp_was_composed_with(threads):
    assert threads(1).run(modules_replicated) == [[True, False, False]]


def modules_of_torchs_fsdp() -> list[list[bool]]:
    from torch.distributed import fsdp

    def told(module):
        return [_torch.is_fsdp_of_torch(each) for each in module.modules()]

    first = fsdp.FullyShardedDataParallel(nn.Sequential(nn.Linear(2, 2)), device_id=CPU)
    plain, ours = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
    _torch.manage(ours)
    return [told(first), told(fsdp.fully_shard(nn.Sequential(nn.Linear(2, 2)))), told(plain), told(ours)]


def test_is_fsdp_of_torch__is_what_either_of_torchs_has_in_hand(world):
    assert world(2).run(modules_of_torchs_fsdp) == [[[True] * 3, [True] * 2, [False] * 2, [False]]] * 2


def test_manage__says_what_dynamo_asks_for():
    module = nn.Linear(2, 2)
    _torch.manage(module)
    assert module._is_fsdp_managed_module
    assert module._fsdp_use_orig_params


def test_say_fully_sharded__is_what_replicate_asks_for():
    from torch.distributed._composable import replicate

    module = nn.Linear(2, 2)
    _torch.say_fully_sharded(module)
    with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
        replicate(module)


def test_steps_in_backward__is_what_was_given_optimizers():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit.script, which torch still calls there
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


def timeouts_set() -> list[float]:
    before = timeout_of(dist.group.WORLD), dist.distributed_c10d.default_pg_timeout
    try:
        _torch.set_timeout(timedelta(seconds=7))
        groups = [dist.group.WORLD, dist.new_group(), dist.new_group(timeout=timedelta(seconds=9))]
        return [timeout_of(each) for each in groups]
    finally:
        _torch.set_timeout(timedelta(seconds=before[0]))
        dist.distributed_c10d.default_pg_timeout = before[1]


def test_set_timeout__is_for_the_default_group_and_those_made_later(world):
    assert world(2).run(timeouts_set) == [[7, 7, 9], [7, 7, 9]]


def numbers_of_named_groups() -> list[tuple[list[int], float]]:
    """Of groups that the ranks make while rank 0 knows of one group more: their ranks and timeout, and a sum."""
    dist.new_group([0])
    pair = _torch.named_group("a pair", range(2), timedelta(seconds=9))
    alone = _torch.named_group(f"alone {dist.get_rank()}", [dist.get_rank()])
    sums = [torch.ones(1), torch.ones(1)]
    for group, each in zip((pair, alone), sums, strict=True):
        dist.all_reduce(each, group=group)
    return [
        (dist.get_process_group_ranks(group), timeout_of(group), each.item())
        for group, each in zip((pair, alone), sums, strict=True)
    ]


def test_named_group__is_made_by_its_ranks_whatever_other_groups_they_know_of(world):
    default = dist.default_pg_timeout.total_seconds()
    assert world(2).run(numbers_of_named_groups) == [[([0, 1], 9, 2), ([rank], default, 1)] for rank in range(2)]


def bound_while_a_group_is_made() -> list[torch.device | None]:
    """The device that the default group is bound to while torch makes a named group, and after."""
    default, seen = dist.group.WORLD, []
    make = dist.distributed_c10d._new_process_group_helper

    def noting(*args, **kwargs):
        seen.append(default.bound_device_id)
        return make(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.distributed_c10d, "_new_process_group_helper", noting)
        default.bound_device_id = torch.device("cuda", 0)
        try:
            _torch.named_group("not split", [dist.get_rank()])
            return [*seen, default.bound_device_id]
        finally:
            default.bound_device_id = None


def test_named_group__splits_no_group_that_is_bound_to_a_device(world):
    assert world(2).run(bound_while_a_group_is_made) == [[None, torch.device("cuda", 0)]] * 2


def left_in_a_store() -> tuple[list[bool], int, bytes]:
    """What each of two ranks finds in a store of both, over connections of their own."""
    rank, world = dist.get_rank(), dist.group.WORLD
    store, other = _torch.store_beside(world, "here"), _torch.store_beside(world, "there")
    found = [store.check([f"{rank}"]), other.check(["from 0"])]
    store.set(f"from {rank}", str(rank))
    dist.barrier()
    number = store.add("number", 1)
    dist.barrier()
    return [*found, store.check(["from 0", "from 1"]), other.check(["from 0"])], number, store.get(f"from {1 - rank}")


def test_store_beside__is_one_of_all_processes(world):
    (first, one, from_other), (second, another, from_first) = world(2).run(left_in_a_store)
    assert first == second == [False, False, True, False]
    assert {one, another} == {1, 2}
    assert (from_other, from_first) == (b"1", b"0")


def stores_of_threads() -> object:
    return _torch.store_beside(dist.group.WORLD, "here")


def test_store_beside__is_none_where_ranks_are_threads(threads):
    assert threads(2).run(stores_of_threads) == [None, None]


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
        if self._name == "gloo" and called.startswith("_group"):
            raise AttributeError(called)
        return lambda: self._log.append(f"{self._name} {called}")


def aborted(monkeypatch, by_device: dict[str, str]) -> list[str]:
    log: list[str] = []
    found = {device: Recorded(name, log) for device, name in by_device.items()}
    with _torch.imagined_ranks(2):
        monkeypatch.setattr(_torch.collectives, "backend_of", lambda group, device: found[device.type])
        _torch.abort_groups()
        assert dist.is_initialized()
    return log


def test_abort_groups__breaks_off_those_of_accelerators_as_one_and_forgets_none(monkeypatch):
    assert hasattr(dist.distributed_c10d.ProcessGroup, "_device_types")
    assert hasattr(torch._C._distributed_c10d.Backend, "abort")
    with _torch.imagined_ranks(2):
        types = {device.type for device in dist.group.WORLD._device_types}
    log = aborted(monkeypatch, {each: "gloo" if each == "cpu" else "nccl" for each in types})
    others = len(types - {"cpu"})
    assert others
    assert log == ["nccl _group_start", *["nccl abort"] * others, "nccl _group_end"]


def test_abort_groups__leaves_gloo_alone_also_where_it_serves_devices(monkeypatch, world):
    with _torch.imagined_ranks(2):
        types = {device.type for device in dist.group.WORLD._device_types}
    assert aborted(monkeypatch, dict.fromkeys(types, "gloo")) == []


def timeouts_adopted() -> list[float]:
    before = timeout_of(dist.group.WORLD)
    groups = [dist.new_group(), dist.new_group(timeout=timedelta(seconds=9))]
    try:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=7))
        for each in groups:
            _torch.adopt_timeout(each)
        return [timeout_of(each) for each in groups]
    finally:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=before))


def objects_read() -> list[list[object]]:
    """What a gather of objects finds, in torch's own way and read in another."""
    found: list[list[object]] = []
    before = dist.distributed_c10d._tensor_to_object
    try:
        for _ in range(2):
            told: list[object] = [None] * dist.get_world_size()
            dist.all_gather_object(told, "x" * (dist.get_rank() + 1))
            found.append(told)
            _torch.read_objects_with(lambda tensor: (tensor.dtype, pickle.loads(bytes(tensor.tolist()))))
    finally:
        dist.distributed_c10d._tensor_to_object = before
    return found


def test_read_objects_with__is_what_turns_bytes_into_objects(world):
    byte = torch.uint8
    assert world(2).run(objects_read) == [[["x", "xx"], [(byte, "x"), (byte, "xx")]]] * 2


def timeouts_told() -> list[float | None]:
    groups = [dist.group.WORLD, dist.new_group(timeout=timedelta(seconds=11))]
    told = [_torch.timeout_of(each, CPU) for each in groups]
    return [None if each is None else each.total_seconds() for each in told]


def test_timeout_of__is_what_a_group_was_made_with(world):
    for default, own in world(2).run(timeouts_told):
        assert default is not None
        assert own == 11


def test_adopt_timeout__is_for_groups_that_were_given_none(world):
    assert world(2).run(timeouts_adopted) == [[7, 9], [7, 9]]


def splitting_stages_seen() -> list[tuple[str, list[int | None]]]:
    from torch.distributed import pipelining

    class Seen(pipelining.PipelineStage):
        shows_whole_parameters = True

    class Asking(nn.Linear):
        def forward(self, x):
            stage = _torch.splitting_stage()
            answers.append(None if stage is None else stage.stage_index)
            return super().forward(x)

    kinds = [
        (pipelining.ScheduleInterleavedZeroBubble, pipelining.PipelineStage),
        (pipelining.ScheduleLoopedBFS, pipelining.PipelineStage),
        (pipelining.ScheduleInterleavedZeroBubble, Seen),
    ]
    found = []
    for schedule, kind in kinds:
        answers: list[int | None] = []
        # Two ranks in a ring: before 2.12 a rank whose stages are neighbours sends to itself, which gloo cannot.
        stages = [kind(Asking(2, 2), index, 4, CPU) for index in (dist.get_rank(), dist.get_rank() + 2)]
        driven = schedule(stages, 2, loss_fn=nn.functional.mse_loss)
        driven.step(*[torch.ones(2, 2)] * (dist.get_rank() == 0), target=torch.ones(2, 2))
        answers.append(_torch.splitting_stage())
        found.append((f"{schedule.__name__} {kind.__name__}", sorted(set(answers), key=str)))
    return found


def test_splitting_stage__is_one_of_torchs_own_kind_under_a_zero_bubble_schedule(world):
    assert world(2).run(splitting_stages_seen) == [
        [
            ("ScheduleInterleavedZeroBubble PipelineStage", [rank, rank + 2, None]),  # None: outside
            ("ScheduleLoopedBFS PipelineStage", [None]),
            ("ScheduleInterleavedZeroBubble Seen", [None]),
        ]
        for rank in range(2)
    ]


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


def restored(monkeypatch):
    stack = torch._C._autograd
    for name in (
        "_push_saved_tensors_default_hooks",
        "_saved_tensors_hooks_disable",
        "_saved_tensors_hooks_enable",
    ):
        monkeypatch.setattr(stack, name, getattr(stack, name))


def test_share_saving_hooks__goes_round_others_and_is_taken_off_by_transforms(monkeypatch):
    restored(monkeypatch)
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


def test_share_saving_hooks__changes_nothing_where_there_are_only_others(monkeypatch):
    restored(monkeypatch)
    _torch.share_saving_hooks(lambda hooks: False, lambda hooks: hooks)
    with torch.autograd.graph.saved_tensors_hooks(kept, kept):
        assert _torch.saving_hooks() == (kept, kept)
        with pytest.raises(RuntimeError, match="saved tensor hooks"):
            torch.func.grad(torch.sin)(torch.tensor(0.5))


# Files that are written


def test_rebuild_tensor__is_named_by_files_of_torch_save():
    buffer = io.BytesIO()
    torch.save(torch.ones(2), buffer)
    assert named_by(buffer) == f"{_torch.rebuild_tensor().__module__} {_torch.rebuild_tensor().__name__}"


def test_rebuild_tensor_of_bytes__is_named_for_dtypes_without_a_storage_class():
    buffer = io.BytesIO()
    torch.save(torch.ones(2).to(torch.float8_e4m3fn), buffer)
    rebuild = _torch.rebuild_tensor_of_bytes()
    assert named_by(buffer) == f"{rebuild.__module__} {rebuild.__name__}"


def named_by(buffer):
    """The first name in the pickle of a file of `torch.save`."""
    with zipfile.ZipFile(buffer) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith("data.pkl")]
        operations = pickletools.genops(archive.read(name))
        return next(text for operation, text, _ in operations if operation.name == "GLOBAL")


def test_storage_info__is_what_a_reader_of_torchs_checkpoints_looks_for():
    info = _torch.storage_info("__0_0.distcp", 3, 5)
    assert (info.relative_path, info.offset, info.length, info.transform_descriptors) == ("__0_0.distcp", 3, 5, None)
    assert pickle.loads(pickle.dumps(info)) == info
