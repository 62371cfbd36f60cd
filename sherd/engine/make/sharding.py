"""Sharding plans for the parameters of a new unit: how each is cut, and the DTensor layout of its shard.

All plans are made before anything is moved, so an error leaves the model as it was.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from sherd._torch import DTensorSpec, local_tensor, spec_of
from sherd.comm.mesh import DataMesh
from sherd.comm.streams import Streams
from sherd.engine.moves.selfgather import require_can_gather_itself
from sherd.engine.state.group import travels_alone
from sherd.engine.state.loads import loads_of
from sherd.engine.state.ownership import DiscoveredParameter
from sherd.errors import ModuleError, PlacementError, in_short
from sherd.layout.placement import Cut, Replicate, Shard
from sherd.layout.plan import Wanted, plan
from sherd.layout.runs import AnyPlacement, Owned, RunPlacement, Runs
from sherd.policy import MixedPrecisionPolicy
from sherd.tensor.spmd_types import SpmdTypes, spmd_types_of
from sherd.tensor.tensor_parallel import on_full_mesh, on_other_axes, own_spec


@dataclass(frozen=True, slots=True)
class ShardingRequest:
    """A user's request for one parameter: the rule by which to cut it, and the ranks to cut it over.

    The default placement, None, cuts dim 0, and keeps a copy of a scalar on every rank. With `owns_gradients` the full
    reduced gradient of a tensor with two dims or more goes to one rank. If `replicated_over` is given, `mesh` is one of
    the same ranks that cuts nothing, and the DTensor is replicated on the axes of `replicated_over`.
    """

    placement: AnyPlacement | None
    mesh: DataMesh
    owns_gradients: bool = False
    replicated_over: DataMesh | None = None

    @property
    def run_placement(self) -> RunPlacement | None:
        """The rule for runs, or None if the parameter is cut by itself, or there is no axis to cut over."""
        return self.placement if isinstance(self.placement, RunPlacement) and self.mesh.shard_axis is not None else None


@dataclass(frozen=True, slots=True)
class ShardingPlan:
    """The plan for one parameter: its mesh, its cut, the specs of both forms, the tensor to cut, its `param_dtype`."""

    mesh: DataMesh
    cut: Cut
    plan_id: int
    shard_spec: DTensorSpec
    unsharded_spec: DTensorSpec | None
    types: SpmdTypes | None
    data: torch.Tensor
    by_default: bool
    gradient_owner: int | None
    param_dtype: torch.dtype | None


def sharding_plans(
    parameters: Sequence[DiscoveredParameter],
    streams: Streams,
    request_of: Callable[[DiscoveredParameter], ShardingRequest],
    surrounds: bool,
    precision: MixedPrecisionPolicy,
) -> list[ShardingPlan]:
    """Returns the plans for one unit's `parameters`. `surrounds`: the unit has others inside.

    Raises:
        PolicyError: the `param_dtype_override_fn` of `precision` returned something else than it may.
        ModuleError: a parameter has no shape yet, or some are on the meta device, and others not.
        PlacementError: a parameter cannot be cut as asked, or is a DTensor that does not fit the mesh.
    """
    lazy = [each.name for each in parameters if isinstance(each.parameter, UninitializedParameter)]
    if lazy:
        raise ModuleError(
            f"{lazy[0]} has no shape yet, which a lazy module learns in its first forward; run the model once, on one "
            "batch, before it is sharded"
        )
    _require_memory(parameters)
    requests = [request_of(each) for each in parameters]
    types = [
        spmd_types_of(each.parameter, to.replicated_over or to.mesh, each.name)
        for each, to in zip(parameters, requests, strict=True)
    ]
    param_dtypes = [precision.param_dtype_of(each.name, each.parameter) for each in parameters]
    runs = _cut_into_runs(parameters, streams, requests, surrounds, param_dtypes)
    gradient_owners = _gradient_owners(parameters, requests, types)
    plans = []
    for index, (discovered, request) in enumerate(zip(parameters, requests, strict=True)):
        cut: Cut
        plan_id = 0
        parameter, name, mesh, data = discovered.parameter, discovered.name, request.mesh, _data(discovered)
        if index in runs:
            cut, plan_id = runs[index]
        else:
            placement = request.placement
            if placement is None or isinstance(placement, RunPlacement):
                placement = Shard(0) if data.shape else Replicate()
            cut = placement.cut(tuple(data.shape), mesh.num_shards, name, mesh.num_owners)
        require_can_gather_itself(name, data.data, cut, mesh)
        # A replicated parameter is a DTensor on the mesh of the unit's others, as torch's operations on both ask for.
        shown, cut_shown = mesh, cut
        if request.replicated_over is not None:
            shown, cut_shown = request.replicated_over, Replicate().cut(tuple(data.shape), 1, name)
        typed = types[index]
        unsharded = spec_of(parameter) if isinstance(parameter, DTensor) else None if typed is None else typed.spec
        if unsharded is not None:
            spec = (on_other_axes if shown.full is None else on_full_mesh)(unsharded, shown, cut_shown, name)
        else:
            _require_data_parallel(name, shown)
            spec = own_spec(shown, cut_shown, parameter.shape, parameter.dtype)
        by_default, owner = request.placement is None, gradient_owners.get(index)
        param_dtype = param_dtypes[index]
        plans.append(ShardingPlan(mesh, cut, plan_id, spec, unsharded, typed, data, by_default, owner, param_dtype))
    # Only of what will be sharded: after an error ranks may differ in how far they came.
    for sharding_plan, request in zip(plans, requests, strict=True):
        rule = request.run_placement
        owner = sharding_plan.cut.first if rule is not None and rule.owned else sharding_plan.gradient_owner
        if owner is not None:
            loads_of(sharding_plan.mesh)[owner] += sharding_plan.cut.numel
    return plans


def _gradient_owners(
    parameters: Sequence[DiscoveredParameter], requests: Sequence[ShardingRequest], types: Sequence[SpmdTypes | None]
) -> dict[int, int]:
    """Returns the owner of each parameter whose full gradient is reduced to one rank, by the parameter's index."""
    by_mesh: dict[DataMesh, list[int]] = {}
    for index, (discovered, request) in enumerate(zip(parameters, requests, strict=True)):
        if not request.owns_gradients or request.mesh.shard_axis is None or _data(discovered).dim() < 2:
            continue
        is_placed = types[index] is not None or isinstance(discovered.parameter, DTensor)
        if request.mesh.shards_replicas or request.mesh.keeps_unsharded or is_placed:
            raise PlacementError(
                f"{discovered.name}: gradients go to owners (gradient=Owned()) where parameters are sharded over one "
                "axis, are copied over others, and are no tensor-parallel DTensors; place the gradient as the parameter"
            )
        by_mesh.setdefault(request.mesh, []).append(index)
    owners: dict[int, int] = {}
    for mesh, members in by_mesh.items():
        wanted = [
            Wanted(tuple(parameters[index].parameter.shape), Owned(), parameters[index].name) for index in members
        ]
        cuts = plan(wanted, mesh.num_pieces, list(loads_of(mesh)))
        owners |= {index: cut.first for index, cut in zip(members, cuts, strict=True)}
    return owners


def _require_data_parallel(name: str, mesh: DataMesh) -> None:
    """Raise `PlacementError` if `mesh` is a part of a mesh with other axes, on which only a DTensor can be placed."""
    if mesh.full is None or mesh.dims is None:
        return
    if mesh.full.ndim > len(mesh.dims.shard_names) + len(mesh.dims.replicate_names):
        raise PlacementError(
            f"{name}: dp_mesh_dims names axes of a larger mesh {mesh.full.mesh_dim_names}, so parameters must be "
            "DTensors on that mesh (distribute_module, parallelize_module), or typed by spmd_types; this one is plain"
        )


def _data(discovered: DiscoveredParameter) -> torch.Tensor:
    """Returns the tensor to cut: the parameter, or its local tensor under tensor parallelism."""
    return local_tensor(discovered.parameter) if isinstance(discovered.parameter, DTensor) else discovered.parameter


_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The memory formats other than the order of the dims, by their number of dims."""


def _warn_of_formats(parameters: Sequence[DiscoveredParameter]) -> None:
    """Warn, once in a process, that unsharded parameters do not keep `channels_last`."""
    tensors = {each.name: _data(each) for each in parameters}
    formatted = [
        name
        for name, data in tensors.items()
        if data.layout is torch.strided and data.ndim in _FORMATS and not data.is_contiguous()
        if data.is_contiguous(memory_format=_FORMATS[data.ndim])
    ]
    if formatted and not _warned:
        _warned.append(formatted[0])
        warnings.warn(
            f"{in_short(formatted, 4)}: sharded parameters have the order of their dims, in forward too, and not in "
            "channels_last. Convolutions go by their input: give the model inputs in channels_last",
            stacklevel=2,
        )


_warned: list[str] = []


def _require_memory(parameters: Sequence[DiscoveredParameter]) -> None:
    """Raise if a parameter has no memory to cut, or of one buffer's only some are on the meta device."""
    _warn_of_formats(parameters)
    by_buffer: dict[tuple[torch.dtype, bool], list[DiscoveredParameter]] = {}
    for each in parameters:
        data = _data(each)
        inner = [getattr(data, name) for name in getattr(data, "__tensor_flatten__", lambda: ((), None))()[0]]
        is_packed = inner and not any((data.shape, data.dtype) == (one.shape, one.dtype) for one in inner)
        is_quantized = data.is_quantized or (is_packed and not hasattr(data, "fsdp_pre_all_gather"))
        if data.layout is not torch.strided or data.is_nested or is_quantized:
            raise PlacementError(
                f"{each.name} is sparse, nested or quantized, which cannot be cut; make it dense, or name it in "
                "ignored_params (ignored_states)"
            )
        by_buffer.setdefault((each.parameter.dtype, each.parameter.requires_grad), []).append(each)
    for members in by_buffer.values():
        on_meta = [each.name for each in members if each.parameter.is_meta]
        others = [each.name for each in members if not each.parameter.is_meta]
        if on_meta and others:
            raise ModuleError(
                f"parameters of one unit are partly on the meta device: {in_short(on_meta, 4)} are, "
                f"{in_short(others, 4)} are not, and they are to share a buffer. Give the former memory and values "
                'before (to_empty(device="...") and reset_parameters() on their modules), or have all on the meta '
                "device, and fill them after fully_shard"
            )


def _cut_into_runs(
    parameters: Sequence[DiscoveredParameter],
    streams: Streams,
    requests: Sequence[ShardingRequest],
    surrounds: bool,
    param_dtypes: Sequence[torch.dtype | None],
) -> dict[int, tuple[Runs, int]]:
    """Returns the cut and the number of the plan of each parameter that is cut into runs, by the parameter's index."""
    plan_ids: dict[tuple[DataMesh, object, bool, bool, int | None], list[int]] = {}
    wanted: dict[int, Wanted] = {}
    for index, (discovered, request) in enumerate(zip(parameters, requests, strict=True)):
        placement, mesh = request.run_placement, request.mesh
        if placement is not None:
            data = _data(discovered)
            if hasattr(data.data, "fsdp_pre_all_gather") and not placement.by_rows(tuple(data.shape)):
                raise PlacementError(
                    f"{discovered.name}: a {type(data.data).__name__} gathers itself and is cut between rows only, "
                    f"not as {placement}; let shard_placement_fn return Shard(0) or Blocks(rows) for it"
                )
            wanted[index] = Wanted(tuple(data.shape), placement, discovered.name)
            # A tensor that travels alone is cut evenly by itself. Where owners balance, all tensors share a plan.
            alone = index if travels_alone(data, streams, surrounds) and not placement.together else None
            dtypes = data.dtype, param_dtypes[index]
            plan_id = mesh, dtypes, discovered.parameter.requires_grad, placement.owned, alone
            plan_ids.setdefault(plan_id, []).append(index)
    cuts: dict[int, tuple[Runs, int]] = {}
    by_mesh: dict[DataMesh, list[int]] = {}
    for number, ((mesh, _, _, owned, _), members) in enumerate(plan_ids.items()):
        # A copy: the loads themselves change when all plans are made, and an error before that leaves them.
        loads = by_mesh.setdefault(mesh, list(loads_of(mesh))) if owned else None
        for index, cut in zip(members, plan([wanted[each] for each in members], mesh.num_pieces, loads), strict=True):
            cuts[index] = cut, number
            if loads is not None:
                loads[cut.first] += cut.numel
    return cuts
