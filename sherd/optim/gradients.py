"""Gradients of matrices, and state in their layout; full gradients go to the ranks that compute their matrices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from sherd.engine import ShardedParameter
from sherd.errors import GradientError
from sherd.optim.exchange import work_of
from sherd.optim.matrix_plan import batch_of
from sherd.optim.owners import MatrixWork, owners_of
from sherd.tensor.placement import in_dtype
from sherd.tensor.ragged import as_dtensor, local_part
from sherd.tensor.relayout import laid_out, lies_as


def local_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    gradient = parameter.grad
    if gradient is None:
        return None
    local, own, name = local_part(gradient), tuple(local_part(parameter).shape), ShardedParameter.name_of(parameter)
    record = ShardedParameter.of(parameter)
    if record is not None and record.gradient_owner is not None:
        local = local_part(laid_as_gradient(gradient, record))
        own = record.gradient_cut.local_shape(record.mesh.piece)
    if local.is_sparse:
        raise GradientError(f"{name} has a sparse gradient; a function of full matrices takes dense ones")
    if tuple(local.shape) != own:
        raise GradientError(
            f"{name} has a gradient of {tuple(local.shape)} on this rank, and {own} are expected; "
            "leave gradients as backward places them"
        )
    return local.contiguous()  # it is sent as parts of a vector


def zeros_as_gradient(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns zeros in the layout of a parameter's reduced gradient, for state that is element-wise."""
    record = ShardedParameter.of(parameter)
    if record is None or record.gradient_owner is None:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    local = torch.zeros(record.gradient_cut.local_shape(record.mesh.piece), dtype=dtype, device=parameter.device)
    return as_dtensor(local, record.gradient_spec(dtype))


def laid_as_gradient(value: torch.Tensor, record: ShardedParameter) -> torch.Tensor:
    """Returns a tensor of a parameter's shape in the layout of the reduced gradient. All ranks must call it.

    State from a file, and gradients that a user made like the parameter, have another layout.
    """
    spec = in_dtype(record.shard_spec, value.dtype) if record.flat else record.gradient_spec(value.dtype)
    if isinstance(value, DTensor) and lies_as(value, spec):
        return value
    return laid_out(value, spec, record.resting.device)


def own_gradients(parameters: Sequence[tuple[torch.Tensor, int]]) -> None:
    """Let backward reduce the full gradient of each parameter to one rank, so that all ranks get equal work.

    This is for parameters that the user gave no placement, and whose shards do not consist of full matrices.

    Args:
        parameters: each with the rows of one of its matrices, 0 for all rows.
    """
    by_ranks: dict[tuple[tuple[int, ...], ...], list[tuple[ShardedParameter, float]]] = defaultdict(list)
    for parameter, rows in parameters:
        record = ShardedParameter.of(parameter)
        if record is not None and may_own_gradient(record) and record.shape.numel():
            number, height, width = batch_of(parameter, rows)
            are_complete_on_ranks = number % record.mesh.num_shards == 0 and height * number == record.shape[0]
            if number == 1 or not are_complete_on_ranks:  # else each rank steps the matrices in its shard
                copies = tuple(map(tuple, record.mesh.copies_of_shards()))
                by_ranks[copies].append((record, work_of((number, height, width))))
    for copies, records in by_ranks.items():
        ranks = range(len(copies))
        owners = owners_of([MatrixWork(flops, record.shape.numel(), ranks) for record, flops in records], len(ranks))
        by_unit: dict[int, dict[ShardedParameter, int]] = defaultdict(dict)
        for (record, _), owner in zip(records, owners, strict=True):
            by_unit[id(record.owner)][record] = owner
        for of_unit in by_unit.values():
            unit = next(iter(of_unit)).owner
            assert unit is not None, "a parameter that may own its gradient has a unit"
            unit.own_gradients(of_unit)


def may_own_gradient(record: ShardedParameter) -> bool:
    """Returns whether the full gradient of a parameter, placed by default, may be reduced to one rank."""
    mesh, unit = record.mesh, record.owner
    return (
        record.is_placed_by_default
        and record.gradient_owner is None
        and len(record.shape) != 3
        and record.unsharded_spec is None
        and record.requires_grad
        and mesh.shard_axis is not None
        and mesh.num_shards > 1
        and not (mesh.shards_replicas or mesh.keeps_unsharded)
        and not hasattr(record.resting, "fsdp_pre_all_gather")
        and unit is not None
        and not unit.gathers_as_one
    )
