"""A tensor in equal chunks, one on each rank: a DTensor that works on its chunks itself where no rank needs another's.

torch plans each operation on DTensors by all of its arguments. A list of 900 tensors, as optimizers step them, takes
14 seconds to plan the first time (torch issues 109477 and 134191); element by element there is nothing to plan. All
other operations are torch's own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sherd._torch import (
    DTensorSpec,
    attributes_of,
    become_view,
    dispatches_itself,
    dtensor_of,
    give_attributes,
    local_tensor,
    register_foreach_type,
    replace_class,
    replace_local_tensor,
    spec_of,
)
from sherd.tensor.own import OwnDTensor, places_at
from sherd.tensor.placement import places_of
from sherd.tensor.table import SHARDED, Args, Aten, Kwargs, is_in_place, with_changed


class ShardedDTensor(OwnDTensor):
    """A DTensor with `Shard(dim)` or `Replicate()` on each mesh axis. `type(x) is DTensor` is all that tells it from
    torch's own, and `pickle` writes it as one.

    Elementwise operations, lists of them (`torch._foreach_*`, fused optimizers) and norms work on this rank's chunk;
    results of the same shape are of this class. All others give what torch's DTensor gives.
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch declares it is not as it calls it
        cls, func: Aten, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        """Answer an operation on the chunks, or have torch answer it."""
        return SHARDED.operation_for(func)(func, args, kwargs or {})

    def around(self, local: torch.Tensor) -> ShardedDTensor:
        """Returns a tensor that lies as this one, around `local`, this rank's chunk of it, outside autograd."""
        return dtensor_of(ShardedDTensor, local, places_at(self).spec(local.dtype), False)

    def _piece_of(self, full: torch.Tensor) -> torch.Tensor:
        whole = DTensor.from_local(full, self.device_mesh, run_check=False)
        return local_tensor(whole.redistribute(placements=self.placements))

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        made: torch.Tensor = as_torchs(self)
        if isinstance(self, nn.Parameter):
            made = nn.Parameter(made, self.requires_grad)
        else:
            made.requires_grad_(self.requires_grad)
        give_attributes(made, attributes_of(self))
        written: str | tuple[object, ...] = made.__reduce_ex__(protocol)
        return written

    @staticmethod
    def __tensor_unflatten__(*parts: object) -> DTensor:
        made: DTensor = DTensor.__tensor_unflatten__(*parts)
        spec = places_of(spec_of(made)).spec(made.dtype)
        return dtensor_of(ShardedDTensor, local_tensor(made), spec, made.requires_grad)


dispatches_itself(ShardedDTensor)
register_foreach_type(ShardedDTensor)


def sharded_dtensor(local: torch.Tensor, spec: DTensorSpec) -> ShardedDTensor:
    """Returns a tensor around `local`, this rank's chunk, uncopied and outside autograd."""
    return dtensor_of(ShardedDTensor, local, places_of(spec).spec(local.dtype), False)


def rest_on(tensor: DTensor, local: torch.Tensor) -> None:
    """Make `local` the memory of `tensor`, which stays the same object. One of torch's own, that a user has loaded or
    swapped in, becomes a `ShardedDTensor`."""
    replace_local_tensor(tensor, local)
    if type(tensor) is DTensor:
        replace_class(tensor, ShardedDTensor, places_of(spec_of(tensor)).spec(local.dtype))


def as_torchs(tensor: ShardedDTensor) -> DTensor:
    """Returns a DTensor of torch around the same chunk, outside autograd."""
    local = local_tensor(tensor)
    return dtensor_of(DTensor, local, places_at(tensor).spec_for_torch(local.dtype), False)


class CopiedView(DTensor):
    """A view of a sharded tensor whose elements are on other ranks, such as `weight[i]` of rows. Torch's DTensor gives
    a copy, and loses what is written into it without a word; writes into this one go into the tensor too.
    """

    viewed: ShardedDTensor | CopiedView
    look: Callable[[torch.Tensor], torch.Tensor]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch declares it is not as it calls it
        cls, func: Aten, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        """Have torch answer an operation, and hand on what it wrote."""
        own_args, own_kwargs = with_changed((args, kwargs or {}), CopiedView, _copy)
        result = func(*own_args, **own_kwargs)
        if not is_in_place(func):
            return _views_of(args[0], func, args, kwargs or {}, result) if func.is_view else result
        if isinstance(args[0], CopiedView):
            args[0].write_back()
        return args[0]

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        written: str | tuple[object, ...] = _copy(self).__reduce_ex__(protocol)
        return written

    def __deepcopy__(self, memo: dict[int, object]) -> DTensor:
        return copy.deepcopy(_copy(self), memo)

    def write_back(self) -> None:
        """Copy the elements into the tensor that this is a view of. All ranks of its mesh must call it."""
        viewed = self.viewed
        whole = (_copy(viewed) if isinstance(viewed, CopiedView) else as_torchs(viewed)).full_tensor()
        self.look(whole).copy_(_copy(self).full_tensor())
        replicated = DTensor.from_local(whole, self.device_mesh, run_check=False)
        local_tensor(viewed).copy_(local_tensor(replicated.redistribute(placements=viewed.placements)))
        torch.autograd.graph.increment_version(viewed)
        if isinstance(viewed, CopiedView):
            viewed.write_back()


dispatches_itself(CopiedView)


def _copy(view: DTensor) -> DTensor:
    return dtensor_of(DTensor, local_tensor(view), spec_of(view), False)


def _views_of(viewed: ShardedDTensor | CopiedView, func: Aten, args: Args, kwargs: Kwargs, result: Any) -> object:
    """Returns the result of a view with each DTensor in memory of its own made a `CopiedView`, and others ours."""
    memory = local_tensor(viewed).untyped_storage().data_ptr()
    several = isinstance(result, list | tuple)

    def look(index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def of(whole: torch.Tensor) -> torch.Tensor:
            found = func(whole, *args[1:], **kwargs)
            chosen: torch.Tensor = found[index] if several else found
            return chosen

        return of

    made = []
    for index, each in enumerate(result if several else [result]):
        local, spec = local_tensor(each), spec_of(each)
        if isinstance(viewed, CopiedView) or local.untyped_storage().data_ptr() != memory:
            each = dtensor_of(CopiedView, local, spec, False)
            each.viewed, each.look = viewed, look(index)
        else:
            each = sharded_dtensor(local, spec)
        made.append(each)
    return type(result)(made) if several else made[0]


@SHARDED.answers("other")
def by_torch(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Returns what torch's DTensor gives for the operation."""
    own_args, own_kwargs = with_changed((args, kwargs), ShardedDTensor, as_torchs)
    result = func(*own_args, **own_kwargs)
    if "out" in kwargs:
        return kwargs["out"]
    if torch.Tag.inplace_view in func.tags:
        local = local_tensor(own_args[0])
        become_view(args[0], func, args, kwargs, local, places_of(spec_of(own_args[0])).spec(local.dtype))
        return args[0]
    if is_in_place(func) and isinstance(args[0], torch.Tensor):
        return args[0]
    return _views_of(args[0], func, args, kwargs, result) if func.is_view else result
