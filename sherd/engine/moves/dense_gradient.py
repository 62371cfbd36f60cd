"""Turns a gradient as autograd leaves it into the plain dense tensor that is reduced."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from sherd._torch import local_tensor
from sherd.comm.mesh import DataMesh
from sherd.engine.state.parameter import ShardedParameter
from sherd.errors import GradientError


def as_dense(gradient: torch.Tensor, record: ShardedParameter) -> torch.Tensor:
    """Returns the values of `gradient`, which autograd has accumulated for an unsharded parameter.

    Raises:
        GradientError: it is sparse.
    """
    if isinstance(gradient, DTensor):
        gradient = _local_gradient(gradient, record)
    if gradient.layout is not torch.strided:
        raise GradientError(
            f"{record.name}: its gradient is {gradient.layout}; only dense gradients are reduced, so build the "
            "embedding with sparse=False"
        )
    if type(gradient) is torch.Tensor:
        return gradient
    # A tensor subclass may have no memory of its own that could be sent, or several.
    with torch.no_grad():
        return torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


def _local_gradient(gradient: DTensor, record: ShardedParameter) -> torch.Tensor:
    """Under tensor parallelism: the gradient as the parameter is placed, data-parallel axes apart."""
    spec = record.unsharded_spec
    assert spec is not None, "only a DTensor parameter has a DTensor gradient"
    data_axes = _data_axes(record.mesh, spec.mesh.mesh_dim_names)
    wanted = [
        have if axis in data_axes else want
        for axis, (have, want) in enumerate(zip(gradient.placements, spec.placements, strict=True))
    ]
    return local_tensor(gradient.redistribute(placements=wanted))


def _data_axes(mesh: DataMesh, names: tuple[str, ...] | None) -> set[int]:
    """The axes called `names` of a larger mesh that are data parallel."""
    if mesh.dims is None or names is None:
        return set()
    return {names.index(name) for name in (*mesh.dims.shard_names, *mesh.dims.replicate_names) if name in names}
