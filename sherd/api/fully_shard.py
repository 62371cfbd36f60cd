"""`fully_shard`: make a module, or several, into one unit. The composable front end; signature and meaning as torch
2.13's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, overload

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard as ShardSpec

from sherd.api.module import FSDPModule, checked_reshard, swap_class
from sherd.comm.mesh import data_mesh
from sherd.engine.forms import AnyPlacement
from sherd.engine.making import make_unit
from sherd.engine.ownership import Found, belongings
from sherd.engine.seal import unit_of
from sherd.engine.unit import Unit
from sherd.errors import ModuleError, PlacementError, PolicyTypeError
from sherd.layout.placement import Shard
from sherd.layout.runs import RunPlacement
from sherd.policy import (
    CommPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    PrefetchPolicy,
    UnitPolicy,
)
from sherd.wrap import is_container

ShardPlacementFn = Callable[[nn.Parameter], "ShardSpec | RunPlacement | None"]


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    prefetch_policy: PrefetchPolicy = ...,
    placement: ShardSpec | RunPlacement | None = ...,
    comm_policy: CommPolicy = ...,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    prefetch_policy: PrefetchPolicy = ...,
    placement: ShardSpec | RunPlacement | None = ...,
    comm_policy: CommPolicy = ...,
) -> list[FSDPModule]: ...


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
) -> Any:
    """Shard the parameters below `module` over the data-parallel ranks, all-gather them just before use, free them
    right after.

    Each call makes one unit of all parameters below `module` that no earlier call took: call it on the blocks first and
    on the model last. The module keeps its object and its attributes; its class becomes a subclass of `FSDPModule` and
    of its own, and its parameters become DTensors, which the optimizer is to be built from. An optimizer built before
    is adopted at its first step.

    Args:
        module: a module, or a list of modules to be gathered and freed as one unit.
        mesh: a 1-D mesh shards; a 2-D mesh `(replicate, shard)` with names shards over its second axis and
            replicates over its first (HSDP). None: all ranks of the default process group.
        reshard_after_forward: True frees the whole parameters after forward and gathers them again for backward;
            False keeps them; an int k keeps this rank's part of a group of k neighbouring ranks, so that the backward's
            gather is among k. None: False for the root, True for others.
        shard_placement_fn: given a parameter, how to cut it: torch's `Shard(dim)`, on any dim, even or not; `Flat()`,
            `Blocks(rows)` or `Whole()` (beyond torch); or None for `placement`.
        mp_policy: dtypes of compute, of reduction and of outputs.
        offload_policy: where shards rest; `CPUOffloadPolicy()` keeps them, and the optimizer's state, in host memory.
        ignored_params: parameters that stay as they are, on every rank, neither sharded nor reduced.
        dp_mesh_dims: `mesh` is a larger mesh, and these of its named axes are the data-parallel ones; parameters that
            are DTensors on it keep their placement on the other axes.
        prefetch_policy: how far gathers run ahead, in units and in bytes; the root's holds for the model. Beyond torch.
        placement: how this unit's parameters are cut; None means `Shard(0)`, and a copy on every rank for scalars.
            Under `Flat`, `Blocks` and `Whole` whole parameters are views of what was gathered, so nothing is copied,
            and shards are `RaggedDTensor`s. Beyond torch.
        comm_policy: how bytes travel. Beyond torch.

    Returns:
        `module`, changed in place.

    Raises:
        ModuleError: a container without forward, or a module that is sharded already.
        MeshError: a mesh with other than 1 or 2 axes, or without the names asked for.
        PlacementError: a parameter that cannot be cut as asked.
        PolicyError: an int `reshard_after_forward` that does not divide the shard axis. `PolicyTypeError` for other
            types.
        OwnershipError: a parameter of another unit under another mesh.
    """
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    _check_modules(modules)
    _check_types(
        mesh=(mesh, DeviceMesh | None),
        shard_placement_fn=(shard_placement_fn, Callable | None),
        mp_policy=(mp_policy, MixedPrecisionPolicy),
        offload_policy=(offload_policy, OffloadPolicy),
        ignored_params=(ignored_params, Collection | None),
        dp_mesh_dims=(dp_mesh_dims, DataParallelMeshDims | None),
        prefetch_policy=(prefetch_policy, PrefetchPolicy),
        comm_policy=(comm_policy, CommPolicy),
    )
    if placement is not None and not _is_placement(placement):
        raise PolicyTypeError(f"fully_shard(placement={placement!r}): {_EXPECTED}, or None for Shard(0)")
    data = data_mesh(mesh, dp_mesh_dims, comm_policy)
    if reshard_after_forward is not None:
        reshard_after_forward = checked_reshard(reshard_after_forward, data.num_shards)
    make_unit(
        modules,
        belongings(modules, ignored_params or (), lambda each: unit_of(each) is not None),
        data,
        functools.partial(_placement, placement, shard_placement_fn),
        mp_policy,
        offload_policy,
        UnitPolicy(reshard_after_forward=reshard_after_forward, prefetch=prefetch_policy),
    )
    for each in modules:
        swap_class(each)
    return module


def state(module: nn.Module) -> Unit | None:
    """The unit that `module` belongs to as one of its own modules; None if `fully_shard` was not called on it."""
    return unit_of(module)


fully_shard.state = state  # type: ignore[attr-defined]


def _check_modules(modules: Sequence[Any]) -> None:
    if not modules:
        raise ModuleError("fully_shard got an empty list of modules")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise PolicyTypeError(f"fully_shard expects a module or a list of modules, got a {type(module).__name__}")
        if is_container(module):
            raise ModuleError(
                f"fully_shard got a {type(module).__name__}, which has no forward to gather parameters for; call it "
                "on the modules inside, or pass them as a list to make one unit of them"
            )
        if unit_of(module) is not None:
            raise ModuleError(
                f"{unit_of(module)} is sharded already; fully_shard takes each module once "
                "(set_reshard_after_forward "
                "and the other setters change a unit later)"
            )
    if len({id(module) for module in modules}) < len(modules):
        raise ModuleError("fully_shard got a list that holds a module twice")


def _check_types(**arguments: tuple[Any, Any]) -> None:
    for name, (value, kind) in arguments.items():
        if not isinstance(value, kind):
            wanted = getattr(kind, "__name__", str(kind))
            raise PolicyTypeError(
                f"fully_shard({name}=...): expected {wanted}, got a {type(value).__module__}.{type(value).__name__}"
            )


def _placement(
    default: ShardSpec | RunPlacement | None, chosen_by: ShardPlacementFn | None, found: Found
) -> AnyPlacement | None:
    """How the user wants one parameter cut; None for the default."""
    asked = None if chosen_by is None else chosen_by(found.parameter)
    if asked is None:
        asked = default
    if asked is not None and not _is_placement(asked):
        raise PlacementError(
            f"{found.name}: shard_placement_fn returned {asked!r}; {_EXPECTED}, or None for the unit's"
        )
    if isinstance(asked, ShardSpec):
        # A unit's own placement holds for its scalars as far as it can: they have no dim to cut.
        return Shard(asked.dim) if found.parameter.dim() or chosen_by is not None else None
    return asked


_EXPECTED = "expected a torch.distributed.tensor.Shard, or sherd's Flat(), Blocks(rows) or Whole()"


def _is_placement(value: Any) -> bool:
    # The class itself has all that makes a placement, but is none: `placement=Flat`.
    return isinstance(value, ShardSpec | RunPlacement) and not isinstance(value, type)
