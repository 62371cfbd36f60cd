"""What is a value that every rank knows, and how is it computed with? As on one rank: no communication, no planning.

torch's own replicated DTensor would do, but looks up the placements of each new operation first: clipping by the norm
of 200 gradients takes 20 times as long the first time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from sherd._torch import dispatches_itself, dtensor, dtensor_of, dtensor_spec, local_tensor, not_traced, spec_of
from sherd.tensor.placement import Layout
from sherd.tensor.table import operation_for, tensors_among, with_changed


class ReplicatedDTensor(DTensor):
    """A replicated DTensor that was made by reducing ragged ones. It turns into torch's own when it meets one."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch declares it is not as it calls it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute with the values, unless other DTensors take part: then let those answer."""
        kwargs = kwargs or {}
        tensors = list(tensors_among((*args, *kwargs.values())))
        others = [each for each in tensors if not isinstance(each, ReplicatedDTensor)]
        if all(not isinstance(each, DTensor) and each.ndim == 0 for each in others):
            return _computed(func, args, kwargs, next(each for each in tensors if isinstance(each, ReplicatedDTensor)))
        if any(isinstance(each, DTensor) and type(each) is not DTensor for each in others):
            return operation_for(func)(func, args, kwargs)
        return func(*with_changed(args, ReplicatedDTensor, _stock), **with_changed(kwargs, ReplicatedDTensor, _stock))

    @staticmethod
    def __tensor_unflatten__(inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any) -> Any:
        raise not_traced("a value that sherd has reduced is not traced; what works on it runs as it is")


dispatches_itself(ReplicatedDTensor)


def _stock(value: ReplicatedDTensor) -> DTensor:
    return dtensor(local_tensor(value), spec_of(value))


def _computed(func: Any, args: Any, kwargs: Any, like: ReplicatedDTensor) -> Any:
    result = func(
        *with_changed(args, ReplicatedDTensor, local_tensor), **with_changed(kwargs, ReplicatedDTensor, local_tensor)
    )
    if "out" in kwargs:
        return kwargs["out"]
    if isinstance(result, torch.Tensor) and isinstance(args[0], ReplicatedDTensor) and result is local_tensor(args[0]):
        return args[0]
    return with_changed(result, torch.Tensor, lambda each: _known(each, like))


def _known(value: torch.Tensor, like: ReplicatedDTensor) -> ReplicatedDTensor:
    spec = spec_of(like)
    made = dtensor_spec(spec.mesh, spec.placements, value.shape, value.dtype, tuple(value.stride()))
    return dtensor_of(ReplicatedDTensor, value, made, False)


def known(value: torch.Tensor, layout: Layout) -> ReplicatedDTensor:
    """A value that all ranks of a mesh have, as a DTensor on it."""
    key = (value.shape, value.dtype)
    spec = layout.value_specs.get(key)
    if spec is None:
        mesh = layout.mesh
        spec = layout.value_specs[key] = dtensor_spec(mesh, (Replicate(),) * mesh.ndim, value.shape, value.dtype)
    return dtensor_of(ReplicatedDTensor, value, spec, False)
