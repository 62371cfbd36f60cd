"""Every private or renamed torch name sherd relies on: what for, since when, what would replace it.

Nothing else in the package may import a name that torch does not promise (`tests/test_layers.py`); a contract test pins
each one here (`tests/test_torch_names.py`).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.nn.utils.stateless import _functional_call
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

__all__ = [
    "MODULE_CALL",
    "NO_TORCH_FUNCTION",
    "DTensorSpec",
    "SavingHooks",
    "adopt_timeout",
    "after_accumulation_hooks",
    "all_gather_coalesced",
    "all_gather_single",
    "answer_checkpointing",
    "asked_by_checkpointing",
    "at_end_of_backward",
    "attributes_of",
    "backend_of",
    "become_view",
    "beneath_transforms",
    "concatenate_meshes",
    "device_of",
    "dispatches_itself",
    "dtensor",
    "dtensor_of",
    "dtensor_spec",
    "dynamo_disabled",
    "fake_tensors",
    "flatten_mesh",
    "full_of_sharded_tensor",
    "gradient_hooks",
    "gradients_of",
    "has_bytes",
    "have_gradient_hooks",
    "hooked_step",
    "imagined_ranks",
    "in_backward",
    "in_functional_call",
    "is_fsdp_of_torch",
    "is_replicated",
    "is_sharded_tensor",
    "is_tensor_parallel",
    "keeps_root_order",
    "local_gradients",
    "local_tensor",
    "local_tensors",
    "manage",
    "may_hook_saving",
    "move_hooks",
    "move_versions",
    "named_group",
    "not_traced",
    "outside_transforms",
    "pop_saving_hooks",
    "push_saving_hooks",
    "read_objects_with",
    "reduce_scatter_single",
    "register_foreach_type",
    "register_optimizer_step_post_hook",
    "register_optimizer_step_pre_hook",
    "replace_local_tensor",
    "saving_hooks",
    "say_fully_sharded",
    "set_timeout",
    "sharded_tensor_of_rows",
    "share_saving_hooks",
    "spec_of",
    "specs_of",
    "splitting_stage",
    "steps_in_backward",
    "storage_uses",
    "strided_shard",
    "symmetric_memory",
    "timeout_of",
    "trace_nothing_in",
    "will_get_gradient",
]

DTensorKind = TypeVar("DTensorKind", bound=DTensor)

# torch 2.13 renamed the two single-tensor collectives and warns about the old names; 2.11 and 2.12 know only those.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_coalesced(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: dist.ProcessGroup, async_op: bool
) -> Any:
    """Several all-gathers as one: on NCCL one launch. What it returns has a `wait()`; None without `async_op`.

    The context has no public name (2.1 to 2.13). Gloo takes outputs of 1 dimension only.
    """
    with dist.distributed_c10d._coalescing_manager(group=group, async_ops=async_op) as pending:
        for output, given in zip(outputs, inputs, strict=True):
            all_gather_single(output, given, group=group, async_op=async_op)
    return pending if async_op else None


def dtensor_spec(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: torch.Size,
    dtype: torch.dtype,
    strides: tuple[int, ...] | None = None,
) -> DTensorSpec:
    """What a DTensor is, apart from its data. DTensorSpec and TensorMeta have no public constructor (2.11 to 2.13).

    Contiguous, unless `strides` say otherwise. A placement with an attribute `stands_for` is one that DTensorSpec does
    not know: the spec is made with that instead, and then told the placement.
    """
    known = tuple(getattr(each, "stands_for", each) for each in placements)
    spec = DTensorSpec(mesh, known, tensor_meta=TensorMeta(shape, strides or _contiguous(shape), dtype))
    if known != placements:
        spec.placements = placements
    return spec


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    strides: list[int] = []
    run = 1
    for size in reversed(shape):
        strides.insert(0, run)
        run *= max(size, 1)
    return tuple(strides)


def dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor around `local`, uncopied and outside autograd; `DTensor.from_local` is public but 20 times slower."""
    return DTensor(local, spec, requires_grad=False)


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """The shard inside a DTensor, as the object it holds; `to_local()` would make a new view on each call."""
    return tensor._local_tensor


def replace_local_tensor(tensor: DTensor, local: torch.Tensor) -> None:
    """Give a DTensor other memory while it stays the same object, which the user's optimizer holds.

    The one private attribute that is written; torch's own FSDP does the same, and `swap_tensors` fails on tensors with
    hooks. Needed because `module.to()` and `load_state_dict(assign=True)` move shards out of their buffer.
    """
    tensor._local_tensor = local


def become_view(tensor: DTensor, func: Any, args: Any, kwargs: Any, local: torch.Tensor, spec: DTensorSpec) -> None:
    """Let a DTensor, `args[0]`, be what the in-place view `func` (`squeeze_`) makes of it, around `local`. A wrapper's
    own shape is changed by no public call; DTensor does it likewise (2.11 to 2.13)."""
    from torch.utils._python_dispatch import return_and_correct_aliasing

    tensor._local_tensor, tensor._spec = local, spec
    return_and_correct_aliasing(func, args, kwargs, tensor)


def has_bytes(storage: torch.UntypedStorage) -> bool:
    """Whether there is memory in `storage`, unlike in that of a DTensor, whose memory is its local tensor's.

    To ask the latter for its address raises since 2.1, as no page says.
    """
    try:
        return storage.data_ptr() != 0
    except RuntimeError:
        return False


def symmetric_memory() -> Any:
    """The module of symmetric memory (`empty`, `rendezvous`); private since 2.6, imported when asked for."""
    import torch.distributed._symmetric_memory as module

    return module


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend of `group` for `device`, whose allocator NCCL offers. `_get_backend` has no public name (2.11 to
    2.13)."""
    return group._get_backend(device)


def named_group(
    name: str, ranks: Sequence[int], timeout: timedelta | None = None, backend: str | None = None
) -> dist.ProcessGroup:
    """A process group that is made by its own ranks alone, which all give it the same name, one that is free.

    `dist.new_group(use_local_synchronization=True)` derives the name from how many groups a rank knows of. Ranks that
    know of different numbers, one group that only some of them are in is enough, then wait for each other under
    different names; and a name that was given up is given again. And where the default group is bound to a device, NCCL
    makes a group by splitting that one, which all ranks have to do together: stages of a pipeline, which wait for each
    other's tensors, would not. `_new_process_group_helper`, `_world` and `_get_default_timeout` have no public names,
    and no public call takes a name or splits nothing (2.11 to 2.13).
    """
    world, default = distributed_c10d._world, dist.group.WORLD
    assert default is not None, "no group is made before the default one"
    default_backend, store = world.pg_map[default]
    backend = dist.Backend(backend or default_backend)
    timeout = timeout or distributed_c10d._get_default_timeout(backend)
    ranks, key = list(ranks), distributed_c10d.GroupName(name)
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        group, _ = distributed_c10d._new_process_group_helper(
            len(ranks), ranks.index(dist.get_rank()), ranks, backend, store, key, timeout=timeout, group_desc=name
        )
    finally:
        default.bound_device_id = bound
    assert isinstance(group, dist.ProcessGroup), "this rank is one of them"
    world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
    return group


def read_objects_with(read: Callable[[torch.Tensor], Any]) -> None:
    """Let torch's own calls for objects (`gather_object` and its kin, which its checkpointing makes) turn the bytes
    that have arrived, 1-D and uint8, into an object by `read`, from now on. Their own way goes through numpy, and
    nothing public gives them another (2.11 to 2.13)."""

    def to_object(tensor: torch.Tensor, numel: Any, *_: Any) -> Any:
        return read(tensor[: int(numel)])

    distributed_c10d._tensor_to_object = to_object


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """The timeout that `group` was made with; None where its backend does not say (2.11 to 2.13)."""
    try:
        backend = backend_of(group, device)
    except RuntimeError:  # a group of threads has none
        return None
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


def dynamo_disabled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, and what it calls, never traced by Dynamo."""
    disabled: Callable[..., Any] = torch.compiler.disable(function, recursive=True)
    return disabled


def trace_nothing_in(*packages: str) -> None:
    """Let Dynamo run all functions of these packages as they are, but not stop at what they call. A decorator on each,
    `torch.compiler.disable`, takes a microsecond of every call, and nothing public names a package (2.2 to 2.13)."""
    from torch._dynamo import trace_rules

    for package in packages:
        trace_rules.add(package)


def not_traced(reason: str) -> Exception:
    """The error by which a tensor that Dynamo wants a fake copy of has it break the graph, and run what works on the
    tensor as it is; with `fullgraph=True` it is the user's. Nothing public does this outside of what Dynamo traces
    (2.11 to 2.13)."""
    from torch._dynamo.exc import Unsupported

    return Unsupported(reason)


_AS_IT_IS = contextlib.nullcontext()


def outside_transforms() -> contextlib.AbstractContextManager[Any]:
    """Where tensors are what they are, also inside a function that `torch.func.jvp`, `vmap` and the like transform.
    They have no public way out (2.11 to 2.13)."""
    return _outside() if torch._C._are_functorch_transforms_active() else _AS_IT_IS


@contextlib.contextmanager
def _outside() -> Iterator[None]:
    functorch = torch._C._functorch
    allowed = functorch.get_inplace_requires_grad_allowed()
    with torch._C._DisableFuncTorch():
        functorch.set_inplace_requires_grad_allowed(True)  # refused in there even for tensors that are outside
        try:
            yield
        finally:
            functorch.set_inplace_requires_grad_allowed(allowed)


def beneath_transforms(tensors: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    """`tensors`, each with what it stands for inside a function that is transformed: the tensors it wraps, level by
    level, and their forward-mode tangents. Each may have an autograd node of its own. No public name (2.11 to 2.13)."""
    if not torch._C._are_functorch_transforms_active():
        return tensors
    return [each for tensor in tensors for each in _beneath(tensor)]


def _beneath(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    yield tensor
    tangent = torch.autograd.forward_ad.unpack_dual(tensor).tangent
    if tangent is not None:
        yield from _beneath(tangent)
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        yield from _beneath(torch._C._functorch.get_unwrapped(tensor))


MODULE_CALL: CodeType = torch.nn.Module._call_impl.__code__
"""The code that a module's call runs in, hooks and forward both: a frame of it is on the stack as long as the call is
being made. No public name (2.11 to 2.13)."""


def gradient_hooks(tensor: torch.Tensor) -> list[Callable[[Any], Any]]:
    """What `tensor.register_hook` was given. No public name (2.11 to 2.13)."""
    return list((tensor._backward_hooks or {}).values())


def have_gradient_hooks(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether any of `tensors` was given a hook of either kind on its gradient. No public name (2.11 to 2.13)."""
    return any(each._backward_hooks or getattr(each, "_post_accumulate_grad_hooks", None) for each in tensors)


def after_accumulation_hooks(tensor: torch.Tensor) -> list[Callable[[Any], Any]]:
    """What `tensor.register_post_accumulate_grad_hook` was given. No public name (2.11 to 2.13)."""
    return list((getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values())


def move_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Have `target` know the hooks on gradients that `source` was given; their handles remove them from there too. No
    public name (2.11 to 2.13)."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(source, name, None)
        if hooks:
            setattr(target, name, hooks)


def storage_uses(storage: torch.UntypedStorage) -> int:
    """How many tensors and handles share a storage's memory. No public name (2.11 to 2.13)."""
    return torch._C._storage_Use_Count(storage._cdata)


def in_backward() -> bool:
    """Whether this thread is inside a backward pass; no public name (2.11 to 2.13)."""
    return torch._C._current_graph_task_id() != -1


def will_get_gradient(leaf: torch.Tensor) -> bool:
    """Whether the present backward pass will accumulate a gradient in `optimizer_param`: it is reached, and the pass is
    none of `torch.autograd.grad`. Nothing public tells (2.11 to 2.13)."""
    with outside_transforms():
        node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        found: bool = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # `torch.autograd.grad` for this very leaf
        return False
    return found


def move_versions(tensors: Sequence[torch.Tensor], by: int) -> None:
    """Count `by` writes more, or fewer, to each of `tensors`. Public is only `increment_version` (2.11 to 2.13)."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(each._version + by for each in tensors))


SavingHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""A pair of hooks: autograd calls the first with each tensor that it saves, and the second with what the first returned
when backward reads the tensor."""

_saved: Any = torch._C._autograd


def saving_hooks() -> SavingHooks | None:
    """The innermost default hooks on saved tensors in this thread. No public name tells (2.11 to 2.13)."""
    hooks: SavingHooks | None = _saved._top_saved_tensors_default_hooks(True)
    return hooks


def may_hook_saving() -> bool:
    """Whether default hooks on saved tensors may be pushed: not inside `torch.func.grad` and its kin, which refuse
    them. No public name tells (2.11 to 2.13)."""
    enabled: bool = _saved._saved_tensors_hooks_is_enabled()
    return enabled


_push = _saved._push_saved_tensors_default_hooks


def push_saving_hooks(hooks: SavingHooks) -> None:
    """Push default hooks as `torch.autograd.graph.saved_tensors_hooks` does, which is only to be had by a `with` (2.11
    to 2.13)."""
    _push(*hooks)


def pop_saving_hooks() -> None:
    """Pop the innermost default hooks, as leaving `torch.autograd.graph.saved_tensors_hooks` does (2.11 to 2.13)."""
    _saved._pop_saved_tensors_default_hooks()


def share_saving_hooks(are_ours: Callable[[SavingHooks], bool], around: Callable[[SavingHooks], SavingHooks]) -> None:
    """Let default hooks on saved tensors for which `are_ours` is true share the stack with other users of it.

    Others that are pushed over them become what `around` makes of them. And `torch.func.grad` and its kin, which refuse
    to run inside of any, take them off for as long as they run. Nothing public does either (2.11 to 2.13): three
    functions of torch are replaced, for the whole process, by such that do what they did where no hooks are ours.
    """
    push, disable, enable = (getattr(_saved, name) for name in _SHARED)
    off = threading.local()

    def pushed(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
        top = saving_hooks()
        push(*(around((pack, unpack)) if top is not None and are_ours(top) else (pack, unpack)))

    def disabled(*args: Any, **kwargs: Any) -> None:
        top = saving_hooks()
        if top is not None and are_ours(top):
            pop_saving_hooks()
            off.hooks = top
        disable(*args, **kwargs)

    def enabled() -> None:
        enable()
        top, off.hooks = getattr(off, "hooks", None), None
        if top is not None:
            push(*top)

    for name, function in zip(_SHARED, (pushed, disabled, enabled), strict=True):
        setattr(_saved, name, function)


_SHARED = ("_push_saved_tensors_default_hooks", "_saved_tensors_hooks_disable", "_saved_tensors_hooks_enable")


def in_functional_call() -> bool:
    """Whether a `torch.func.functional_call` is under way in this thread, which nothing public tells (2.11 to 2.13)."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not _functional_call.__code__:
        frame = frame.f_back
    return frame is not None


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the present backward pass ends, unless it raises. No public name (2.11 to 2.13)."""
    engine = Variable._execution_engine
    engine.queue_callback(callback)


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """One mesh with the axes of all; they must come from one root mesh. Private since 2.10."""
    return DeviceMesh._concatenate(meshes)


def keeps_root_order(mesh: DeviceMesh) -> bool:
    """Whether the axes are in the order in which the mesh that they are parts of has them. torch raises KeyError where
    it plans how to redistribute over others (2.13). Private since 2.10; a public slice would do, but for all axes."""
    assert mesh.mesh_dim_names is not None, "parts of one mesh have names"
    try:
        mesh._get_slice_mesh_layout(mesh.mesh_dim_names)
    except KeyError:
        return False
    return True


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """All axes of `mesh` as one, called `name`. Private since 2.3."""
    return mesh._flatten(name)


def device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's device on a mesh, which knows the type of it only (2.11 to 2.13)."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


@contextlib.contextmanager
def imagined_ranks(number: int) -> Iterator[None]:
    """The default process group is of so many ranks, of which this process is the first and nobody the others:
    collectives return at once. torch has the backend for its own tests only (2.1 to 2.13)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=number, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def fake_tensors() -> contextlib.AbstractContextManager[Any]:
    """Within it tensors have a device and no memory, and operations are those of that device: on meta they may be
    others. torch.compile stands on it; nothing public names it (2.0 to 2.13)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def strided_shard(dim: int, split_factor: int) -> Placement:
    """`Shard(dim)` over an axis to the left of another one that already shards `dim` into `split_factor` parts."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def dtensor_of(kind: type[DTensorKind], local: torch.Tensor, spec: DTensorSpec, requires_grad: bool) -> DTensorKind:
    """A DTensor of a subclass around `local`, uncopied, without its `__init__`, which takes longer than the rest.

    `DTensor.__new__` takes these arguments from 2.4 to 2.13, but is not documented; nothing replaces it.
    """
    new: Callable[..., Any] = DTensor.__new__
    made: DTensorKind = new(kind, local, spec, requires_grad=requires_grad)
    return made


def spec_of(tensor: DTensor) -> DTensorSpec:
    """What a DTensor is, apart from its data. Private, like the class."""
    return tensor._spec


def local_tensors(tensors: Sequence[DTensor]) -> list[torch.Tensor]:
    """What `local_tensor` gives, for many."""
    return [tensor._local_tensor for tensor in tensors]


def specs_of(tensors: Sequence[DTensor]) -> list[DTensorSpec]:
    """What `spec_of` gives, for many."""
    return [tensor._spec for tensor in tensors]


def register_foreach_type(kind: type[torch.Tensor]) -> None:
    """Let `torch.optim` and `clip_grad_norm_` take tensors of exactly this type for their foreach and fused forms.

    DTensor enters itself into the same two lists, which have no public door (2.1 to 2.13).
    """
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for known in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        if kind not in known:
            known.append(kind)


def dispatches_itself(kind: type[DTensor]) -> None:
    """Let operations on tensors of exactly this subclass reach its own `__torch_dispatch__`, as they do since 2.12.

    2.11 takes them for plain DTensors before it asks, but for operations with a rule registered for the type. So each
    operation known by now gets one; one that is defined later meets DTensor, which raises for a placement it does not
    know. The public door, `torch.library.register_torch_dispatch`, takes a millisecond for each of 3000 operations.
    """
    if torch.__version__ >= "2.12":  # compared as versions are, not as text
        return
    from torch._library.simple_registry import singleton

    def ask(kind: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return kind.__torch_dispatch__(func, types, args, kwargs)

    for name in torch._C._dispatch_get_all_op_names():
        singleton.find(name).torch_dispatch_rules.register(kind, ask)


def hooked_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """`step` of an optimizer's class, run between the optimizer's step hooks and the global ones.

    `Optimizer.__init__` does so for the class it finds; a class made later has to ask. Torch's own wrapper also opens a
    range for profilers, which takes a third of a small step, so it is used only while one is on. None of the names is
    documented (2.11 to 2.13).
    """
    profiled: Any = torch.optim.Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        if torch._C._autograd._profiler_enabled():
            return profiled(*args, **kwargs)
        optimizer = args[0]
        for hook in (*_global_optimizer_pre_hooks.values(), *optimizer._optimizer_step_pre_hooks.values()):
            changed = hook(optimizer, args, kwargs)
            if changed is not None:
                if not (isinstance(changed, tuple) and len(changed) == 2):
                    raise RuntimeError(f"a step pre-hook returned {changed}; return None, or (args, kwargs) anew")
                args, kwargs = changed
        result = step(*args, **kwargs)
        for hook in (*optimizer._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()):
            hook(optimizer, args, kwargs)
        return result

    hooked.hooked = True  # type: ignore[attr-defined]  # or torch would hook it again
    return hooked


NO_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl
"""A `__torch_function__` that does nothing: results of a subclass with it are plain tensors. Private since 1.7."""


def gradients_of(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """The gradients of many tensors: asking each DTensor's `__torch_function__` first takes longer than reading. The
    guard has no public name (2.11 to 2.13)."""
    with torch._C.DisableTorchFunctionSubclass():
        return [tensor.grad for tensor in tensors]


def local_gradients(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What is inside the gradients of many tensors, without asking `__torch_function__`; all must be DTensors.

    Raises:
        AttributeError: a gradient is missing, or no DTensor.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return [tensor.grad._local_tensor for tensor in tensors]  # type: ignore[union-attr]


def asked_by_checkpointing(directly: bool = False) -> bool:
    """Whether the present call comes from `torch.distributed.checkpoint.state_dict` (`get_state_dict` and its kin); if
    `directly`, whether the caller of our caller is a function of that file.

    It tells instances of torch's FSDP which kind of state dict it wants, and nobody else (2.2 to 2.13).
    """
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            return True
        if directly or frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def answer_checkpointing(answers: dict[str, Callable[..., Any]]) -> None:
    """Have functions of `torch.distributed.checkpoint.state_dict`, by name, run as `answer(theirs, *args)` from now on.

    That file asks nobody what an optimizer's parameters are called but the model's `named_parameters()` and instances
    of torch's FSDP; none of its functions is public that could be told (2.2 to 2.13). It is imported: it asks us.
    """
    module = sys.modules["torch.distributed.checkpoint.state_dict"]
    for name, answer in answers.items():
        theirs = getattr(module, name)
        if not hasattr(theirs, "sherd_answers"):
            answering = functools.wraps(theirs)(functools.partial(answer, theirs))
            answering.sherd_answers = answer  # type: ignore[attr-defined]  # so that it is asked once
            setattr(module, name, answering)


def sharded_tensor_of_rows(whole: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """`unsharded`, which every rank of `group` has, as a `ShardedTensor` of rows, in memory of its own.

    DTensor replaces it; programs written for FSDP1 expect it. Its package has no public name (1.10 to 2.13).
    """
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
    from torch.distributed._shard.sharded_tensor.shard import Shard

    shards, described, first = [], [], 0
    for rank, rows in enumerate(whole.chunk(group.size())):
        where = f"rank:{dist.get_global_rank(group, rank)}/{whole.device}"
        offsets = [first] + [0] * (whole.dim() - 1)
        described.append(ShardMetadata(offsets, list(rows.shape), where))
        if rank == group.rank():
            shards.append(Shard(rows.clone(), described[-1]))
        first += len(rows)
    properties = TensorProperties(dtype=whole.dtype, layout=whole.layout, requires_grad=False)
    metadata = ShardedTensorMetadata(described, whole.shape, properties)
    return ShardedTensor._init_from_local_shards_and_global_metadata(shards, metadata, process_group=group)


def full_of_sharded_tensor(
    value: Any, device: torch.device, shards: Sequence[Any] | None = None
) -> torch.Tensor | None:
    """The whole of a `ShardedTensor`, on every rank of its group, all of which must ask; None for anything else.

    `device` is one on which the group has collectives; `shards` are this rank's, if they are not to be asked for.
    """
    if not is_sharded_tensor(value):
        return None
    group, metadata = value._process_group, value.metadata()
    whole = torch.empty(metadata.size, dtype=metadata.tensor_properties.dtype, device=device)
    held = value.local_shards() if shards is None else shards
    mine = {tuple(each.metadata.shard_offsets): each.tensor for each in held}
    for shard in metadata.shards_metadata:
        place = whole
        for dim, (start, size) in enumerate(zip(shard.shard_offsets, shard.shard_sizes, strict=True)):
            place = place.narrow(dim, start, size)
        sent = torch.empty(shard.shard_sizes, dtype=whole.dtype, device=device)
        if tuple(shard.shard_offsets) in mine:
            sent.copy_(mine[tuple(shard.shard_offsets)])
        dist.broadcast(sent, src=shard.placement.rank(), group=group)
        place.copy_(sent)
    return whole


def set_timeout(timeout: timedelta) -> None:
    """How long a collective waits for other ranks: of the default group from now on, and of groups made later that are
    given no timeout. A mesh makes its groups so, and gives them torch's 30 minutes (10 with NCCL) whatever the default
    group has; `_set_pg_timeout` and the two defaults have no public setter (2.11 to 2.13)."""
    distributed_c10d._set_pg_timeout(timeout)
    distributed_c10d.default_pg_timeout = timeout
    distributed_c10d.default_pg_nccl_timeout = timeout  # type: ignore[attr-defined]


def adopt_timeout(group: dist.ProcessGroup) -> None:
    """Let a gloo group that was given no timeout wait no longer than the default group does.

    Torch gives such a group, and those of a mesh are such, 30 minutes whatever `init_process_group` was told.
    `_set_default_timeout` has no public name (2.11 to 2.13).
    """
    world = dist.group.WORLD
    assert world is not None, "no group is made before the default one"
    try:
        ours, default = (backend_of(each, torch.device("cpu")) for each in (group, world))
    except RuntimeError:
        return  # the default group has nothing for a CPU
    if not all(isinstance(each, dist.ProcessGroupGloo) for each in (ours, default)):
        return
    if default.options._timeout < ours.options._timeout == dist.default_pg_timeout:
        ours._set_default_timeout(default.options._timeout)


def splitting_stage() -> Any:
    """The pipeline stage whose module is being called, if it is of torch's own kind, its schedule splits backward into
    a part for inputs and one for parameters, and it does not take the module for torch's FSDP; else None.

    For the second part such a stage looks for unsharded parameters where sherd shows shards. A stage that has an
    attribute `shows_whole_parameters` sees to that. A stage tells a module nothing of itself (2.11 to 2.13).
    """
    if (stages := sys.modules.get("torch.distributed.pipelining.stage")) is None:
        return None
    stage, frame = None, sys._getframe(1)
    while frame is not None:
        where = frame.f_globals.get("__name__")
        if stage is None and where == stages.__name__:
            stage = frame.f_locals.get("self")
            module = getattr(stage, "submod", None)
            if hasattr(stage, "shows_whole_parameters") or isinstance(module, stages.FSDPModule):
                return None
        elif stage is not None and where == "torch.distributed.pipelining.schedules":
            orders = getattr(frame.f_locals.get("self"), "pipeline_order_with_comms", None)
            if orders is not None:
                parts = {action.computation_type.name for order in orders.values() for action in order}
                return stage if "BACKWARD_WEIGHT" in parts else None
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def is_sharded_tensor(value: Any) -> bool:
    """Whether `value` is a `ShardedTensor`, of which there is none before its package is imported. The package has no
    public name (1.10 to 2.13)."""
    module = sys.modules.get("torch.distributed._shard.sharded_tensor")
    return module is not None and isinstance(value, module.ShardedTensor)


def is_replicated(module: torch.nn.Module) -> bool:
    """Whether torch's composable `replicate`, which is DDP, was applied to the module. The package has no public name,
    and what was applied is in a registry without one (2.0 to 2.13)."""
    contract = sys.modules.get("torch.distributed._composable.contract")
    return contract is not None and "replicate" in (contract._get_registry(module) or ())


def is_fsdp_of_torch(module: torch.nn.Module) -> bool:
    """Whether torch's own FSDP has `module`: it is a wrapper of its first, its second has exchanged the module's class,
    or one of the two looks after it from further out, and has said so to Dynamo.

    By the names of packages, none of which is imported; what they tell Dynamo has no public name (2.0 to 2.13).
    """
    if any(each.__module__.startswith("torch.distributed.fsdp.") for each in type(module).__mro__):
        return True
    return bool(module.__dict__.get("_is_fsdp_managed_module")) and _MANAGED not in module.__dict__


_MANAGED = "_sherd_managed"


def manage(module: torch.nn.Module) -> None:
    """Let Dynamo take the parameters of `module` as inputs of the graph, as it takes those of torch's FSDP, instead of
    guarding each object, which changes on every gather. Nothing public does this (2.0 to 2.13)."""
    module.__dict__.update({"_is_fsdp_managed_module": True, "_fsdp_use_orig_params": True, _MANAGED: True})


def say_fully_sharded(module: torch.nn.Module) -> None:
    """Let torch's composable `replicate` (DDP) leave `module` and all below it alone, as it leaves what torch's
    `fully_shard` was applied to: it asks a registry, which has no public name, nor has the package (2.0 to 2.13)."""
    from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem

    module.__dict__.setdefault(REGISTRY_KEY, {}).setdefault("fully_shard", RegistryItem())


def is_tensor_parallel(module: torch.nn.Module) -> bool:
    """Whether `parallelize_module` or `distribute_module` has distributed the module's own parameters; it says so in an
    attribute without a public name (2.3 to 2.13)."""
    return getattr(module, "_distribute_module_applied", False) is True


def attributes_of(parameter: torch.Tensor) -> dict[str, Any]:
    """Returns the attributes that a user has written on a Parameter (`weight.no_decay = True`).

    Not those of its class, torch.nn and Dynamo, which write there under names of their own (2.11 to 2.13); nor hooks
    and gradients.
    """
    written = {
        name: value for name, value in vars(parameter).items() if name != "_is_param" and not name.startswith("_dynamo")
    }
    own = vars(parameter.detach()) if written and type(parameter) is not torch.nn.Parameter else {}
    return {name: value for name, value in written.items() if name not in own}


def steps_in_backward(parameter: torch.Tensor) -> bool:
    """Whether `torch.distributed.optim._apply_optimizer_in_backward` gave `parameter` optimizers that are to step as
    soon as its gradient is there; they are in an attribute without a public name (1.13 to 2.13)."""
    return bool(getattr(parameter, "_in_backward_optimizers", ()))
