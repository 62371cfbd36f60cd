"""`replicate`: every rank keeps unsharded parameters, gradients are all-reduced (DDP), with the methods of a sharded
module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict, overload

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from sherd.api.fully_shard import fully_shard
from sherd.api.module import FSDPModule
from sherd.errors import PolicyError
from sherd.policy import CommPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy, OnTouch, Unmanaged

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Options(TypedDict, total=False):
    """The arguments of `replicate`, for the type checker."""

    mesh: DeviceMesh | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    ignored_params: set[nn.Parameter] | None
    dp_mesh_dims: DataParallelMeshDims | None
    comm_policy: CommPolicy
    unmanaged: Unmanaged
    on_touch: OnTouch


@overload
def replicate(module: nn.Module, **options: Unpack[Options]) -> FSDPModule: ...


@overload
def replicate(module: list[nn.Module], **options: Unpack[Options]) -> list[FSDPModule]: ...


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

    It is `fully_shard(..., placements="ddp")`, data parallelism as in DDP (Li et al., "PyTorch Distributed: Experiences
    on Accelerating Data Parallel Training", VLDB 2020). The unit computes with the memory that the optimizer steps,
    unless `mp_policy` asks for another dtype; its gradients are reduced together, behind the backward of units before
    it. Call it on blocks first and on the model last, for overlap. All copies must start equal: it does not broadcast.

    Args:
        module: a module, or a list of modules that make one unit.
        mesh: the ranks; of a mesh with two axes, all of them. None: all ranks of the default process group.
        mp_policy: as for `fully_shard`, and so are the others.
        offload_policy: where the copies rest.
        ignored_params: parameters that are left alone, their gradients too.
        dp_mesh_dims: which axes of a larger `mesh` are data parallel.
        comm_policy: how bytes travel. Beyond torch.
        unmanaged: as for `fully_shard`. Beyond torch.
        on_touch: likewise.

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
