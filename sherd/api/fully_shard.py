"""`fully_shard` and `replicate`, the composable front end: one call makes a module, or several, into one unit.

Signatures and meanings are those of torch 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypedDict, overload

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard as ShardSpec

from sherd._torch import REDUCES_IN_GRAD_DTYPE
from sherd.api.module import FSDPModule, checked_reshard, require_divides, require_module
from sherd.api.placements import ANSWERS, EXPECTED, OnMesh, Placements, is_cut, levels_and_cut, rule_of, unit_policy
from sherd.api.swap_class import swap_class
from sherd.comm.mesh import DataMesh, arranged, data_mesh, uncut
from sherd.engine import DiscoveredParameter, ParameterOwnership, ShardingRequest, Unit, make_unit
from sherd.errors import MeshError, ModuleError, PlacementError, PolicyError, PolicyTypeError
from sherd.layout.placement import Shard
from sherd.layout.runs import RunPlacement
from sherd.policy import (
    CommPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    OnTouch,
    PrefetchPolicy,
    Unmanaged,
)
from sherd.requirements import require_int, require_type
from sherd.wrap import is_container

if TYPE_CHECKING:
    from typing_extensions import Unpack

ShardPlacementFn = Callable[[nn.Parameter], "ShardSpec | RunPlacement | Replicate | OnMesh | None"]


class ReplicateOptions(TypedDict, total=False):
    """The arguments of `replicate`, for the type checker."""

    mesh: DeviceMesh | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    ignored_params: set[nn.Parameter] | None
    dp_mesh_dims: DataParallelMeshDims | None
    comm_policy: CommPolicy
    unmanaged: Unmanaged
    on_touch: OnTouch


class Options(ReplicateOptions, total=False):
    """The arguments of `fully_shard`, for the type checker."""

    reshard_after_forward: bool | int | None
    shard_placement_fn: ShardPlacementFn | None
    prefetch_policy: PrefetchPolicy
    placement: ShardSpec | RunPlacement | None
    placements: Placements | str | None
    replicate_below: int | None


@overload
def fully_shard(module: nn.Module, **options: Unpack[Options]) -> FSDPModule: ...


@overload
def fully_shard(module: list[nn.Module], **options: Unpack[Options]) -> list[FSDPModule]: ...


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    prefetch_policy: PrefetchPolicy = PrefetchPolicy(),
    placement: ShardSpec | RunPlacement | None = None,
    comm_policy: CommPolicy = CommPolicy(),
    placements: Placements | str | None = None,
    replicate_below: int | None = None,
    unmanaged: Unmanaged = "error",
    on_touch: OnTouch = "error",
) -> nn.Module | Sequence[nn.Module]:
    """Shard the parameters below `module` over the data-parallel ranks, all-gather them for use, and free them after.

    This is ZeRO-3 (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC
    2020); over a 2-D mesh it is HSDP (Zhao et al., "PyTorch FSDP", VLDB 2023).

    Each call makes one unit of all parameters below `module` that no earlier call took, so call it on the blocks first
    and on the model last. The module keeps its object and its attributes; its class becomes a subclass of `FSDPModule`
    and of the module's own class, and its parameters become DTensors, from which the optimizer is built. An optimizer
    that was built before `fully_shard` is adopted at its first step.

    Args:
        module: a module, or a list of modules to be gathered and freed as one unit.
        mesh: a 1-D mesh shards; a 2-D mesh `(replicate, shard)` with names shards over its second axis and
            replicates over its first (HSDP). None: all ranks of the default process group.
        reshard_after_forward: True frees the unsharded parameters after forward and gathers them again for backward;
            False keeps them; an int k keeps this rank's part of a group of k neighbouring ranks, so that the gather of
            backward is among k ranks. None: False for the root, True for other units.
        shard_placement_fn: a function from a parameter to its placement: torch's `Shard(dim)`, on any dim, even or not;
            `Flat()`, `Blocks(rows)` or `Owned()` (beyond torch); torch's `Replicate()`, for a parameter that every rank
            keeps unsharded (beyond torch); `OnMesh(...)`, for another mesh (beyond torch); or None for `placement`.
        mp_policy: dtypes of compute, of reduction and of outputs. A parameter's own `grad_dtype`, set before the first
            forward, is that of its gradient.
        offload_policy: where shards are kept; with `CPUOffloadPolicy()` they and the optimizer's state are in host
            memory.
        ignored_params: parameters that stay as they are, on every rank, neither sharded nor reduced.
        dp_mesh_dims: the data-parallel axes, by name, of a larger `mesh`; parameters that are DTensors on `mesh` keep
            their placement on the other axes.
        prefetch_policy: how far gathers run ahead, in units and in bytes; the root's holds for the model. Beyond torch.
        placement: how this unit's parameters are cut; None means `Shard(0)`, and a copy on every rank for scalars.
            Under `Flat`, `Blocks` and `Owned` unsharded parameters are views of the gathered buffer, so nothing is
            copied, and shards are `RaggedDTensor`s. Beyond torch.
        comm_policy: how bytes travel. Beyond torch.
        placements: which of parameters, gradients and optimizer state are sharded over each axis of the mesh, as
            `Placements(...)` or by name, cut as `placement`: "ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp" and
            others (`Placements.preset`). None: "zero3" over one axis, "hsdp" over two. Beyond torch.
        replicate_below: parameters of fewer bytes, such as norms and biases, are placed `Replicate()` if
            `shard_placement_fn` returns None for them: never gathered, and their gradients all-reduced together. None:
            all are sharded. Beyond torch.
        unmanaged: the treatment of trainable parameters that are added below the model later, without
            `sherd.refresh`: "error" raises before they are trained, "replicate" takes rank 0's values and averages
            gradients over all ranks, "ignore" leaves them to the program. The root's holds for the model. Beyond torch.
        on_touch: the treatment of a call of a module inside the unit, outside the unit's forward, while the unit is
            sharded (`model.embed(tokens)`): "error" raises, "unshard" runs the call as a forward of the unit, "ignore"
            leaves it to torch. Beyond torch.

    Returns:
        `module`, changed in place.

    Raises:
        ModuleError: a container without forward, or a module that is sharded already.
        MeshError: a mesh with other than 1 or 2 axes, or without the names asked for, or fewer axes than `placements`.
        PlacementError: a parameter that cannot be cut as asked.
        PolicyError: an int `reshard_after_forward` that does not divide the shard axis, or one for parameters that
            `placements` says are not sharded. `PolicyTypeError` for other types.
        OwnershipError: a parameter of another unit under another mesh.
    """
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    _check_modules(modules)
    for name, value, kind in (
        ("mesh", mesh, DeviceMesh | None),
        ("shard_placement_fn", shard_placement_fn, Callable | None),
        ("mp_policy", mp_policy, MixedPrecisionPolicy),
        ("offload_policy", offload_policy, OffloadPolicy),
        ("ignored_params", ignored_params, Collection | None),
        ("dp_mesh_dims", dp_mesh_dims, DataParallelMeshDims | None),
        ("prefetch_policy", prefetch_policy, PrefetchPolicy),
        ("comm_policy", comm_policy, CommPolicy),
        ("placements", placements, Placements | str | None),
    ):
        require_type(f"fully_shard({name}=...): expected {getattr(kind, '__name__', str(kind))}", value, kind)
    if placement is not None and not is_cut(placement):
        raise PolicyTypeError(f"fully_shard(placement={placement!r}): {EXPECTED}, or None for Shard(0)")
    levels, cut = levels_and_cut(placements, placement)
    own_mesh = data_mesh(mesh, dp_mesh_dims, comm_policy)
    if levels is not None:
        own_mesh = arranged(own_mesh, levels)
    request_of = _ShardingRequests(
        own_mesh,
        cut,
        shard_placement_fn,
        checked_reshard(reshard_after_forward),
        isinstance(placements, Placements) and placements.owns_gradients,
        replicate_below,
    )
    policy = unit_policy(levels, reshard_after_forward, prefetch_policy)
    make_unit(
        modules,
        ParameterOwnership.below(modules, ignored_params or ()),
        own_mesh,
        request_of,
        _as_of_this_torch(mp_policy),
        offload_policy,
        replace(policy, unmanaged=unmanaged, on_touch=on_touch),
    )
    for one_module in modules:
        swap_class(one_module)
    return module


def _as_of_this_torch(precision: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """Returns `precision`, with the `reduce_dtype` that torch before 2.15 takes if none is given.

    A policy with `param_dtype_override_fn`, which only 2.15 has, has the same meaning.
    """
    if REDUCES_IN_GRAD_DTYPE or precision.reduce_dtype is not None or precision.param_dtype_override_fn is not None:
        return precision
    return replace(precision, reduce_dtype=precision.param_dtype)


def state(module: nn.Module) -> Unit | None:
    """Returns the unit that `fully_shard(module)` made; None if `fully_shard` was not called on `module`."""
    return Unit.of(module)


fully_shard.state = state  # type: ignore[attr-defined]


@overload
def replicate(module: nn.Module, **options: Unpack[ReplicateOptions]) -> FSDPModule: ...


@overload
def replicate(module: list[nn.Module], **options: Unpack[ReplicateOptions]) -> list[FSDPModule]: ...


def replicate(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    comm_policy: CommPolicy = CommPolicy(),
    unmanaged: Unmanaged = "error",
    on_touch: OnTouch = "error",
) -> nn.Module | Sequence[nn.Module]:
    """Keep a copy of the parameters below `module` on every rank and all-reduce their gradients in backward.

    `replicate` is `fully_shard(..., placements="ddp")`, data parallelism as in DDP (Li et al., "PyTorch Distributed:
    Experiences on Accelerating Data Parallel Training", VLDB 2020). The unit computes with the memory that the
    optimizer steps, unless `mp_policy` asks for another dtype; one reduction of the unit's gradients overlaps with the
    backward of other units. Call it on blocks first and on the model last, for overlap. All copies must start equal:
    `replicate` does not broadcast.

    Args:
        module: a module, or a list of modules that make one unit.
        mesh: the ranks; of a mesh with two axes, all ranks. None: all ranks of the default process group.
        mp_policy: as for `fully_shard`.
        offload_policy: where the copies are kept.
        ignored_params: parameters that stay as they are, and whose gradients are not reduced.
        dp_mesh_dims: which axes of a larger `mesh` are data parallel.
        comm_policy: how bytes travel. Beyond torch.
        unmanaged: as for `fully_shard`. Beyond torch.
        on_touch: as for `fully_shard`. Beyond torch.

    Returns:
        `module`, changed in place: an `FSDPModule`.

    Raises:
        PolicyError: `dp_mesh_dims` names axes to shard over.
        ModuleError, MeshError, PlacementError, OwnershipError: as `fully_shard`.
    """
    if dp_mesh_dims is not None and dp_mesh_dims.shard_names:
        raise PolicyError(
            f"replicate(dp_mesh_dims=...): shard names axes {dp_mesh_dims.shard_names}, and replicate shards nothing; "
            "name them in DataParallelMeshDims(replicate=...), or call fully_shard"
        )
    return fully_shard(
        module,
        mesh=mesh,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        ignored_params=ignored_params,
        dp_mesh_dims=dp_mesh_dims,
        comm_policy=comm_policy,
        placements="ddp",
        unmanaged=unmanaged,
        on_touch=on_touch,
    )


def _check_modules(modules: Sequence[nn.Module]) -> None:
    if not modules:
        raise ModuleError("fully_shard got an empty list of modules")
    for module in modules:
        require_module("fully_shard expects a module or a list of modules", module)
        if is_container(module):
            raise ModuleError(
                f"fully_shard got a {type(module).__name__}, which has no forward to gather parameters for; call it "
                "on the modules inside, or pass them as a list to make one unit of them"
            )
        if Unit.of(module) is not None:
            raise ModuleError(
                f"{Unit.of(module)} is sharded already; fully_shard takes each module once "
                "(set_reshard_after_forward "
                "and the other setters change a unit later)"
            )
    if len({id(module) for module in modules}) < len(modules):
        raise ModuleError("fully_shard got a list that holds a module twice")


class _ShardingRequests:
    """The function from a parameter of a unit to its `ShardingRequest`. Checks every mesh once."""

    def __init__(
        self,
        mesh: DataMesh,
        default: ShardSpec | RunPlacement | None,
        placement_fn: ShardPlacementFn | None,
        reshard_after_forward: bool | int | None,
        owns_gradients: bool,
        replicate_below: int | None,
    ) -> None:
        if replicate_below is not None:
            require_int("fully_shard(replicate_below={})", replicate_below, 0)
        require_divides(reshard_after_forward, mesh)
        self._mesh = mesh
        self._default, self._placement_fn, self._reshard = default, placement_fn, reshard_after_forward
        self._owns_gradients, self._replicate_below = owns_gradients, replicate_below or 0
        self._copies: dict[DataMesh, DataMesh] = {}
        self._meshes: dict[tuple[int, DataParallelMeshDims | None], DataMesh] = {}

    def __call__(self, found: DiscoveredParameter) -> ShardingRequest:
        placement = None if self._placement_fn is None else self._placement_fn(found.parameter)
        mesh = self._mesh
        if (info := getattr(placement, "mesh_info", None)) is not None:  # torch's ShardPlacementResult
            placement = OnMesh.of_torchs(placement, info)
        if isinstance(placement, OnMesh):
            mesh, placement = self._checked_mesh(placement, found.name), placement.placement
        elif placement is None and found.parameter.nbytes < self._replicate_below:
            placement = Replicate()
        if isinstance(placement, Replicate):
            if mesh not in self._copies:
                self._copies[mesh] = uncut(mesh)
            return ShardingRequest(None, self._copies[mesh], replicated_over=mesh)
        if placement is None:
            return ShardingRequest(rule_of(self._default, found.parameter), mesh, self._owns_gradients)
        if not is_cut(placement):
            raise PlacementError(
                f"{found.name}: shard_placement_fn returned {placement!r}; {ANSWERS}, one of them OnMesh(...), or "
                "None for the unit's"
            )
        return ShardingRequest(Shard(placement.dim) if isinstance(placement, ShardSpec) else placement, mesh)

    def _checked_mesh(self, asked: OnMesh, name: str) -> DataMesh:
        key = id(asked.mesh), asked.dp_mesh_dims
        if key not in self._meshes:
            mesh = data_mesh(asked.mesh, asked.dp_mesh_dims, self._mesh.comm)
            unit_ranks, ranks = (set(each.mesh.mesh.flatten().tolist()) for each in (self._mesh, mesh))
            if not ranks <= unit_ranks:
                raise MeshError(
                    f"{name}: its mesh {mesh.mesh} has ranks {sorted(ranks - unit_ranks)} that the unit's, "
                    f"{self._mesh.mesh}, does not have; a parameter is shared by some of the ranks that share its unit"
                )
            require_divides(self._reshard, mesh)
            self._meshes[key] = mesh
        return self._meshes[key]
