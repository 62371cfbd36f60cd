"""Values that every rank knows: operations on them run as on one rank, without communication and planning.

torch's own replicated DTensor looks up the placements of each new operation first: clipping by the norm of 200
gradients takes 20 times as long the first time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch.distributed.tensor import DTensor, Replicate

from sherd._torch import (
    DTensorSpec,
    dispatches_itself,
    dtensor,
    dtensor_of,
    dtensor_spec,
    local_tensor,
    new_dtensor,
    not_traced,
    spec_of,
)
from sherd.tensor.placement import Places
from sherd.tensor.table import Args, Aten, Kwargs, tensors_among, with_changed


class ReplicatedDTensor(DTensor):
    """A replicated DTensor, the result of a reduction. Where it meets a DTensor of torch, it turns into one."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch declares it is not as it calls it
        cls, func: Aten, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        """Compute with the values, unless other DTensors take part: then they answer."""
        kwargs = kwargs or {}
        tensors = list(tensors_among((*args, *kwargs.values())))
        others = [tensor for tensor in tensors if not isinstance(tensor, ReplicatedDTensor)]
        if not any(tensor.ndim or isinstance(tensor, DTensor) for tensor in others):
            like = next(tensor for tensor in tensors if isinstance(tensor, ReplicatedDTensor))
            return _compute(func, args, kwargs, like)
        for other in others:
            if isinstance(other, DTensor) and type(other) is not DTensor:
                return other.__torch_dispatch__(func, types, args, kwargs)

        def stock(value: ReplicatedDTensor) -> DTensor:
            return dtensor(local_tensor(value), spec_of(value))

        stock_args, stock_kwargs = with_changed((args, kwargs), ReplicatedDTensor, stock)
        return func(*stock_args, **stock_kwargs)

    @staticmethod
    def __tensor_unflatten__(*args: object, **kwargs: object) -> NoReturn:
        raise not_traced("a value that sherd has reduced is not traced; what works on it runs as it is")


dispatches_itself(ReplicatedDTensor)


def _compute(func: Aten, args: Args, kwargs: Kwargs, like: ReplicatedDTensor) -> object:
    local_args, local_kwargs = with_changed((args, kwargs), ReplicatedDTensor, local_tensor)
    result = func(*local_args, **local_kwargs)
    if "out" in kwargs:
        return kwargs["out"]
    if result is local_args[0]:
        return args[0]
    mesh, placements = spec_of(like).mesh, spec_of(like).placements

    def replicated(value: torch.Tensor) -> ReplicatedDTensor:
        spec = dtensor_spec(mesh, placements, value.shape, value.dtype, tuple(value.stride()))
        return dtensor_of(ReplicatedDTensor, value, spec, False)

    return with_changed(result, torch.Tensor, replicated)


def known(value: torch.Tensor, layout: Places) -> ReplicatedDTensor:
    """Returns a value that all ranks of a mesh have, as a DTensor on that mesh."""
    return dtensor_of(ReplicatedDTensor, value, _spec_of_value(value, layout), False)


def known_scalars(values: Sequence[torch.Tensor], layout: Places) -> list[DTensor]:
    """Returns `known` of each value; all values are scalars."""
    specs = {dtype: _spec_of_value(torch.empty((), dtype=dtype), layout) for dtype in {value.dtype for value in values}}
    return [new_dtensor(ReplicatedDTensor, value, specs[value.dtype]) for value in values]


def _spec_of_value(value: torch.Tensor, layout: Places) -> DTensorSpec:
    key = (value.shape, value.dtype)
    spec = layout.value_specs.get(key)
    if spec is None:
        mesh = layout.mesh
        spec = layout.value_specs[key] = dtensor_spec(mesh, (Replicate(),) * mesh.ndim, value.shape, value.dtype)
    return spec
