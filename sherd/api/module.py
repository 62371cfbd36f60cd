"""`FSDPModule`: the methods that a module has once it is a unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import nn
from torch.optim import Optimizer

from sherd._torch import in_backward, keep_loaded_state
from sherd.comm.collectives import GroupMemoryAllGather, GroupMemoryReduceScatter, SymmetricAllGather
from sherd.comm.mesh import DataMesh
from sherd.engine import BoundForward, Runtime, ShardedParameter, Unit, watcher
from sherd.errors import ModuleError, PolicyError, PolicyTypeError, StateError
from sherd.optim.torch_muon import serve_torch_muon
from sherd.policy import AllGather, ReduceScatter
from sherd.requirements import require_bool, require_factor, require_int, require_type

serve_torch_muon()


def _complete(optimizer: Optimizer) -> None:
    from sherd.checkpoint.saving import complete_owned  # loaded with the first state: few programs ask torch for one

    complete_owned(optimizer)


watcher.complete_with(_complete)


def _in_chunks(
    optimizer: Optimizer, plain: Callable[..., object], step: Callable[..., object]
) -> Callable[..., object]:
    units = [unit for ref in watcher.adopt(optimizer) if isinstance(unit := ref(), Unit)]
    units = [unit for unit in units if unit.place.brings_state or unit.place.masters is not None]
    groups = [weights.group for unit in units for weights in unit.weights if weights.group.is_brought]
    if not groups:
        return step
    from sherd.optim.offloaded import step_in_chunks  # loaded with the first such step

    return step_in_chunks(optimizer, groups, step)


watcher.inside_of_steps(_in_chunks)


def _kept(parameter: torch.Tensor, value: torch.Tensor, key: object) -> torch.Tensor | None:
    record = ShardedParameter.of(parameter)
    owner = None if record is None else record.owner
    if record is None or owner is None or key == "step":
        return None
    if record.masters is None and not owner.place.brings_state:
        return None
    from sherd.optim.loaded import as_kept  # loaded with the first such state

    return as_kept(parameter, value)


keep_loaded_state(_kept)


class UnshardHandle:
    """An all-gather started by `FSDPModule.unshard(async_op=True)`."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Wait for the unsharded parameters and show them on the module.

        Does nothing after a forward that has waited, or a `reshard()` that gave up the gather.
        """
        unit, self._unit = self._unit, None
        runtime = None if unit is None else Runtime.over(unit)
        if unit is not None and runtime is not None:
            runtime.finish_unshard(unit)


class GradientReductionHandle:
    """A reduction started by `FSDPModule.finalize_backward(async_op=True)`."""

    def __init__(self, runtime: Runtime | None, reduction: object) -> None:
        self._runtime, self._reduction = runtime, reduction

    def wait(self) -> None:
        """Wait until the shards have their gradients. A second call does nothing.

        Raises:
            StateError: `reset_iter_state()` has given the reduction up.
        """
        if self._runtime is not None:
            self._runtime.finish_reductions(self._reduction)
            self._runtime = None


if TYPE_CHECKING:
    _Module = nn.Module
else:
    _Module = object  # the user's own class, which follows among the bases, is an nn.Module


class FSDPModule(_Module):
    """The base class that `fully_shard` puts in front of a module's class. It is not constructed by hand.

    A setter replaces one field of the unit's policy, from the next forward or backward on. A setter with `recurse`
    changes every unit at and below the module.
    """

    # Gather and free by hand

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gather this unit's parameters; units below it stay as they are.

        Args:
            async_op: return a handle at once; the unit's next forward waits for it too.

        Returns:
            The handle if `async_op`, else None, with the unsharded parameters shown on the module.
        """
        unit = self._sherd_own_unit
        self._sherd_own_runtime.unshard(unit, wait=not async_op)
        return UnshardHandle(unit) if async_op else None

    def reshard(self) -> None:
        """Free this unit's unsharded parameters and show the shards; units below it stay as they are."""
        unit = self._sherd_own_unit
        runtime = Runtime.over(unit)
        if runtime is not None:
            runtime.reshard(unit)

    def reset_iter_state(self) -> None:
        """Give up a step whose forward or backward raised: modules show shards, and all gradients are dropped.

        Accumulation over several batches starts over. Without this call the root's next forward gives up what is in
        flight, and shards keep the gradients that they have.

        Raises:
            StateError: the unit is not the root.
        """
        unit, runtime = self._sherd_own_unit, self._sherd_own_runtime
        if runtime.root is not unit:
            raise StateError(f"reset_iter_state: {unit.name} is not the root; call it on {runtime.root.name}")
        runtime.reset()
        for each in runtime.units:
            each.zero_grad(set_to_none=True, module_ids={id(module) for module in each.modules})

    # Gradients

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward is the last before the step. Until then, reductions may stay in flight."""
        require_bool("set_is_last_backward({})", is_last_backward)
        self._sherd_own_runtime.expect_last_backward(is_last_backward)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether `finalize_backward` ends the backwards of a step, and not the last backward itself.

        `set_is_last_backward` has no effect then.

        Raises:
            StateError: the unit is not the root, or a backward has begun that is not finalized.
        """
        require_bool("set_manual_backward_finalization({})", enabled)
        unit = self._sherd_own_unit
        runtime = Runtime.over(unit)
        if runtime is not None and runtime.root is not unit:
            raise StateError(
                f"set_manual_backward_finalization: {unit.name} is not the root; call it on {runtime.root.name}"
            )
        if enabled is not unit.policy.finalizes_by_hand and (
            in_backward() or (runtime is not None and runtime.by_hand not in (None, enabled))
        ):
            raise StateError(
                f"set_manual_backward_finalization({enabled}) after a backward of {unit.name} has begun; call it "
                "before the backward, or after finalize_backward() or reset_iter_state()"
            )
        unit.change(finalizes_by_hand=enabled)

    @overload
    def finalize_backward(self, *, async_op: Literal[False] = False) -> None: ...

    @overload
    def finalize_backward(self, *, async_op: Literal[True]) -> GradientReductionHandle: ...

    @overload
    def finalize_backward(self, *, async_op: bool) -> GradientReductionHandle | None: ...

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """End the backwards of a step: reduce gradients that none of them has reduced, and free parameters.

        For several backwards, call `set_requires_gradient_sync(False)` before them and with True after them. Does
        nothing before the first forward.

        Args:
            async_op: return a handle at once. Call `wait()` on it before you read gradients or run a forward.

        Returns:
            The handle if `async_op`, else None, with all gradients on the shards.

        Raises:
            StateError: the unit is not the root, or `set_manual_backward_finalization(True)` was not called; a backward
                is under way; a handle is not waited for; or gradients are not to be summed over replicas.
        """
        unit = self._sherd_own_unit
        runtime = Runtime.over(unit)
        if runtime is None:
            return GradientReductionHandle(None, None) if async_op else None
        if runtime.root is not unit:
            raise StateError(f"finalize_backward: {unit.name} is not the root; call it on {runtime.root.name}")
        reduction = runtime.finalize_backward(wait=not async_op)
        return GradientReductionHandle(runtime, reduction) if async_op else None

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backward reduces gradients, or else adds up unsharded gradients, in the reduce dtype."""
        require_bool("set_requires_gradient_sync({})", requires_gradient_sync)
        self._sherd_change(
            recurse, reduce_gradients=requires_gradient_sync, all_reduce_gradients=requires_gradient_sync
        )

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward sums over the replicate axis, or else adds up gradients as shards."""
        require_bool("set_requires_all_reduce({})", requires_all_reduce)
        self._sherd_change(recurse, all_reduce_gradients=requires_all_reduce)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients by `factor`, instead of by the number of data-parallel ranks."""
        require_factor("set_gradient_divide_factor({})", factor)
        self._sherd_change(False, divide_factor=float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Call `set_gradient_divide_factor`; this is the older name."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Do nothing; torch has this setter. sherd always sums, and scales gradients before they are sent."""
        require_bool("set_force_sum_reduction_for_comms({})", enable)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Set whether parameters without a gradient on this rank are reduced as zeros; other ranks may have one."""
        require_bool("set_reduce_scatter_unused_params({})", reduce_scatter_unused_params)
        self._sherd_change(recurse, reduce_unused=reduce_scatter_unused_params)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set how many units' gradients may be in reduction at once, for overlap. The largest of all units holds."""
        require_int("set_reduce_scatter_max_input_buffers({})", max_input_buffers, 1)
        self._sherd_change(recurse, reduce_buffers=max_input_buffers)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Reduce-scatter on a second process group, concurrently with all-gathers. Collective over the shard axis."""
        require_bool("set_separate_reduce_scatter_group({})", enable)
        for unit in self._sherd_units(recurse):
            for mesh in unit.meshes if enable else ():
                if mesh.shard_group is not None:
                    mesh.reduction_group()
            unit.change(separate_reduce_group=enable)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None) -> None:
        """Call `hook(reduced)` on this unit's reduced gradients, on `stream` if given.

        `reduced` is 1-D, in the gradients' dtype, and has this rank's shards of the group.

        Raises:
            PolicyError: the unit has several groups, for each of which the hook would run; or `stream` is given on a
                mesh with replicas.
            PolicyTypeError: `hook` cannot be called.
        """
        if not callable(hook):
            raise PolicyTypeError(f"set_all_reduce_hook({hook!r}): expected a function of one tensor")
        unit = self._sherd_own_unit
        _require_single_kind(unit, "set_all_reduce_hook")
        if stream is not None and unit.mesh.num_replicas > 1:
            raise PolicyError(
                f"set_all_reduce_hook: unit {unit.name} is replicated, its all-reduce has its own stream; pass none"
            )
        unit.change(all_reduce_hook=hook, all_reduce_hook_stream=stream)

    # Parameters

    def set_reshard_after_forward(self, reshard_after_forward: bool | int, recurse: bool = True) -> None:
        """Set whether parameters are freed after forward, as `fully_shard(reshard_after_forward=...)` does."""
        value = checked_reshard(reshard_after_forward)
        if value is None:
            raise PolicyTypeError("set_reshard_after_forward(None): expected a bool or an int")
        for unit in self._sherd_units(recurse):
            for mesh in unit.meshes:
                if mesh is unit.mesh or not mesh.only_sums:
                    require_divides(value, mesh)
        self._sherd_change(recurse, reshard_after_forward=value)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether unsharded parameters are freed after backward, or else kept for the next forward."""
        require_bool("set_reshard_after_backward({})", reshard_after_backward)
        self._sherd_change(recurse, reshard_after_backward=reshard_after_backward)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Set whether `reshard` keeps the memory of unsharded parameters, so that their addresses stay the same.

        A captured CUDA graph needs the same addresses. All unsharded parameters are then in memory together.
        """
        require_bool("set_keep_unsharded_storage({})", keep)
        self._sherd_change(recurse, keeps_storage=keep)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether this unit's backward needs the parameters, which the backward of an embedding does not."""
        require_bool("set_unshard_in_backward({})", unshard_in_backward)
        self._sherd_change(False, unshard_in_backward=unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """All-gather `modules` behind this unit's forward, in this order, instead of the order learnt."""
        self._sherd_change(False, forward_prefetch=_unit_ids(modules))

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """All-gather `modules` behind this unit's backward, in this order, instead of the order learnt."""
        self._sherd_change(False, backward_prefetch=_unit_ids(modules))

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the next forward's all-gathers wait only for `event`, recorded after the optimizer step."""
        self._sherd_own_runtime.gathers_follow(event)

    # Collectives

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gather this unit's parameters with `comm`. Raises `PolicyError` if the unit has several groups."""
        _require_custom(self._sherd_own_unit, "set_custom_all_gather", comm, AllGather)
        self._sherd_change(False, all_gather=comm)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce this unit's gradients with `comm`. Raises `PolicyError` if the unit has several groups."""
        _require_custom(self._sherd_own_unit, "set_custom_reduce_scatter", comm, ReduceScatter)
        self._sherd_change(False, reduce_scatter=comm)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Run this unit's collectives on memory of the process group's allocator, if there is one (NCCL)."""
        method = "set_allocate_memory_from_process_group_for_comm"
        require_bool(f"{method}({{}})", enable)
        unit = self._sherd_own_unit
        _require_own_comms(unit, method)
        group, device = unit.mesh.shard_group, unit.mesh.device
        if not enable or group is None:
            unit.change(all_gather=None, reduce_scatter=None)
            return
        _require_even(unit, method)
        unit.change(
            all_gather=GroupMemoryAllGather(group, device), reduce_scatter=GroupMemoryReduceScatter(group, device)
        )

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Run this unit's all-gathers on symmetric memory. Raises `PolicyError` on devices other than CUDA."""
        unit = self._sherd_own_unit
        _require_own_comms(unit, "set_symm_mem_for_comm")
        # The only backend is NCCL, which needs CUDA devices.
        if unit.mesh.device.type != "cuda" or unit.mesh.shard_group is None:
            raise PolicyError(
                f"set_symm_mem_for_comm: symmetric memory needs a CUDA mesh with a shard axis, unit {unit.name} is on "
                f"{unit.mesh.device}; leave it out"
            )
        _require_even(unit, "set_symm_mem_for_comm")
        unit.change(all_gather=SymmetricAllGather(unit.mesh.shard_group, backend))

    # nn.Module's own, on shards

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Like nn.Module's, on the shards, also while unsharded parameters are shown (kept, or left by an error)."""
        modules = {id(each) for each in self.modules()}
        for unit in self._sherd_units(recurse=True):
            unit.zero_grad(set_to_none, modules)
        super().zero_grad(set_to_none)

    def _apply(self, *args: object, **kwargs: object) -> object:
        """Like nn.Module's, on the shards, which are then copied into one buffer again."""
        unit = self._sherd_own_unit
        unit.show_shards()
        with unit.gradients_kept():
            result = super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
            unit.rebind()
        unit.shards_written()
        return result

    # Inside

    @property
    def _sherd_own_unit(self) -> Unit:
        unit = Unit.of(self)
        assert unit is not None, "an FSDPModule has a unit from its making on"
        return unit

    @property
    def _sherd_own_runtime(self) -> Runtime:
        """Returns the runtime of the module's unit; if there is none yet, the module becomes a root."""
        return Runtime.of(self._sherd_own_unit, self)

    def _sherd_units(self, recurse: bool) -> list[Unit]:
        return Unit.below(self) if recurse else [self._sherd_own_unit]

    def _sherd_change(self, recurse: bool, **fields: object) -> None:
        for unit in self._sherd_units(recurse):
            unit.change(**fields)

    def _sherd_run_as_forward(self, name: str, method: Callable[..., object]) -> None:
        """Put a method that runs as a forward in the place of the module's own `method`, called `name`."""
        self.__dict__[name] = BoundForward(self._sherd_own_unit, self, method)


def require_module(expectation: str, module: object) -> None:
    """Raise `PolicyTypeError` if `module` is no module. `expectation` begins the error: "function expects a module"."""
    if not isinstance(module, nn.Module):
        raise PolicyTypeError(f"{expectation}, got a {type(module).__name__}")


def sharded_units(caller: str, model: nn.Module) -> list[Unit]:
    """Returns the units at and below `model`. Raises `ModuleError` if there is none."""
    units = Unit.below(model) if isinstance(model, nn.Module) else []
    if not units:
        raise ModuleError(f"{caller}: nothing below {type(model).__name__} is sharded; call fully_shard first")
    return units


def optimizers_in(caller: str, given: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """Returns the optimizers in `given`, one or several. Raises `PolicyTypeError` for other types."""
    optimizers = [given] if isinstance(given, Optimizer) else list(given)
    for optimizer in optimizers:
        require_type(f"{caller}(optimizer=...): expected an optimizer, or several", optimizer, Optimizer)
    return optimizers


def _require_custom(unit: Unit, method: str, comm: object, kind: type) -> None:
    """Raise if `comm` is no `kind`, or the unit's groups and shards do not suit a custom collective."""
    if not isinstance(comm, kind):
        raise PolicyTypeError(f"{method}({comm!r}): expected a sherd.{kind.__name__}")
    _require_single_kind(unit, method, but_sums=True)
    _require_even(unit, method)


def _require_single_kind(unit: Unit, method: str, but_sums: bool = False) -> None:
    """Raise if the unit's groups differ in more than plans; `but_sums`: groups that no custom collective sees may."""
    if unit.shards.num_kinds(but_sums) > 1:
        groups = "; ".join(weights.group.name for weights in unit.weights)
        raise PolicyError(
            f"{method}: unit {unit.name} has parameters that differ in dtype, requires_grad or mesh ({groups}), so "
            "it is not clear for which of them the custom collective is meant; shard them as separate units"
        )


def _require_even(unit: Unit, method: str) -> None:
    for group in (weights.group for weights in unit.weights):
        if not group.packing.is_even:
            raise PolicyError(
                f"{method}: the ranks hold parts of unequal length of {group.name} (Blocks or Owned), and a "
                "custom collective is given equal ones; shard the unit as Flat() or Shard(0)"
            )


def _require_own_comms(unit: Unit, method: str) -> None:
    own = (GroupMemoryAllGather, GroupMemoryReduceScatter, SymmetricAllGather)
    for comm in (unit.policy.all_gather, unit.policy.reduce_scatter):
        if comm is not None and not isinstance(comm, own):
            raise PolicyError(
                f"{method}: unit {unit.name} has a custom collective, {type(comm).__name__}, which chooses its "
                "memory itself; pass that one a different allocator"
            )


def checked_reshard(value: object) -> bool | int | None:
    """Returns `value`, an argument `reshard_after_forward`. Raises `PolicyTypeError` for other types."""
    if value is None or isinstance(value, int):
        return value
    raise PolicyTypeError(
        f"reshard_after_forward={value!r}: expected a bool, or an int that divides the ranks of the shard axis"
    )


def require_divides(reshard: bool | int | None, mesh: DataMesh) -> None:
    """Raise `PolicyError` if groups of `reshard` ranks do not divide the shard axis of `mesh`."""
    if reshard is None or isinstance(reshard, bool):
        return
    if mesh.keeps_unsharded:
        raise PolicyError(
            f"reshard_after_forward={reshard}: by its placements every rank keeps unsharded parameters; leave it out, "
            "or shard them (zero3, hsdp, hfsdp)"
        )
    num_shards = mesh.num_shards
    if reshard < 1 or num_shards % reshard:
        raise PolicyError(
            f"reshard_after_forward={reshard}: parameters are sharded over {num_shards} ranks, and {reshard} does not "
            f"divide that; use one of {[n for n in range(1, num_shards + 1) if num_shards % n == 0]}, True or False"
        )


def _unit_ids(modules: Sequence[FSDPModule]) -> tuple[int, ...]:
    if not isinstance(modules, Sequence):
        raise PolicyTypeError(f"expected a list of modules that fully_shard was called on, got {modules!r}")
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise PolicyError(f"expected modules that fully_shard was called on, got a {type(module).__name__}")
    return tuple(module._sherd_own_unit.id for module in modules)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Run `module.method_name(...)` as a forward: parameters are unsharded inside, and freed as the policy says.

    Does nothing on a module that is not sharded.

    Raises:
        ModuleError: there is no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method) or isinstance(method, nn.Module):
        raise ModuleError(f"{type(module).__name__} has no method {method_name!r} to register")
    if not isinstance(method, BoundForward):
        module._sherd_run_as_forward(method_name, method)


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Share communication streams between models, such as pipeline stages. In sherd all models of a device share them.

    Raises:
        PolicyError: a module is not sharded.
    """
    _unit_ids(modules)
