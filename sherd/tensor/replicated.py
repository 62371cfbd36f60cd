"""Values that every rank knows: operations on them run as on one rank, without communication and planning.

torch's own replicated DTensor looks up the placements of each new operation first: clipping by the norm of 200
gradients takes 20 times as long the first time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn, SupportsIndex

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from sherd._torch import (
    DTensorSpec,
    become_view,
    dispatches_itself,
    dtensor,
    dtensor_of,
    dtensor_spec,
    local_tensor,
    new_dtensor,
    not_traced,
    spec_of,
)
from sherd.comm.failures import named
from sherd.tensor.placement import Places
from sherd.tensor.table import Args, Aten, Kwargs, is_in_place, of_kind, tensors_among, with_changed


class ReadableDTensor(DTensor):
    """The base of this library's DTensors: numbers that are read of one are those of the unsharded tensor."""

    def __format__(self, format_spec: str) -> str:
        return object.__format__(self, format_spec) if self.ndim else format(self.item(), format_spec)

    def tolist(self) -> Any:
        """Returns the elements of the unsharded tensor as nested lists. All ranks that hold parts must call it."""
        return self.full_tensor().tolist()


class ReplicatedDTensor(ReadableDTensor):
    """A replicated DTensor, the result of a reduction. Where it meets a DTensor of torch, it turns into one."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch declares it is not as it calls it
        cls, func: Aten, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        """Compute with the values, unless other DTensors take part: then they answer."""
        kwargs = kwargs or {}
        tensors = list(tensors_among((*args, *kwargs.values())))
        others = [tensor for tensor in tensors if not isinstance(tensor, ReplicatedDTensor)]
        if next(of_kind(others, DTensor), None) is None:
            like = next(of_kind(tensors, ReplicatedDTensor))
            # What may be of this rank alone stays plain, such as its loss plus a penalty over all parameters
            # (test_a_penalty_over_shards_is_added_to_a_plain_loss).
            is_plain = any(tensor.requires_grad or tensor.numel() > 1 for tensor in others)
            for tensor in of_kind(tensors, ReplicatedDTensor):
                if is_plain and tensor.requires_grad:
                    tensor.register_hook(partial(_averaged, like=like))  # type: ignore[no-untyped-call]  # of torch
            return _compute(func, args, kwargs, like, is_plain)
        for other in others:
            if isinstance(other, DTensor) and type(other) is not DTensor:
                return other.__torch_dispatch__(func, types, args, kwargs)

        def stock(value: ReplicatedDTensor) -> DTensor:
            return dtensor(local_tensor(value), spec_of(value))

        stock_args, stock_kwargs = with_changed((args, kwargs), ReplicatedDTensor, stock)
        return func(*stock_args, **stock_kwargs)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        stock = dtensor(local_tensor(self), spec_of(self)).requires_grad_(self.requires_grad)
        pickled: str | tuple[object, ...] = stock.__reduce_ex__(protocol)
        return pickled

    @staticmethod
    def __tensor_unflatten__(*args: object, **kwargs: object) -> NoReturn:
        raise not_traced("a value that sherd has reduced is not traced; what works on it runs as it is")


dispatches_itself(ReplicatedDTensor)


def _compute(func: Aten, args: Args, kwargs: Kwargs, like: ReplicatedDTensor, is_plain: bool) -> object:
    local_args, local_kwargs = with_changed((args, kwargs), ReplicatedDTensor, local_tensor)
    result = func(*local_args, **local_kwargs)
    if is_plain and not is_in_place(func):
        return result
    if "out" in kwargs:
        return kwargs["out"]
    if torch.Tag.inplace_view in func.tags:
        become_view(args[0], func, args, kwargs, result, spec_of(_replicated(result, like)))
    if result is local_args[0]:
        return args[0]
    return with_changed(result, torch.Tensor, partial(_replicated, like=like))


def _averaged(gradient: torch.Tensor, like: ReplicatedDTensor) -> DTensor:
    """Returns the mean of the gradients that the ranks' own losses have for a value that all of them know."""
    if isinstance(gradient, DTensor):
        return gradient
    mesh, mean = spec_of(like).mesh, gradient.contiguous() / spec_of(like).mesh.size()
    for axis in range(mesh.ndim):
        with named("the gradient of a value that all ranks know", mesh.get_group(axis)):
            dist.all_reduce(mean, group=mesh.get_group(axis))
    return _replicated(mean, like)


def _replicated(value: torch.Tensor, like: ReplicatedDTensor) -> DTensor:
    """Returns a value that all ranks have, on the mesh of `like`."""
    spec = dtensor_spec(spec_of(like).mesh, spec_of(like).placements, value.shape, value.dtype, tuple(value.stride()))
    return dtensor_of(ReplicatedDTensor, value, spec, False)


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
