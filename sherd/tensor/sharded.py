"""Tensors in equal chunks, one on each rank: DTensors that compute on their chunks where no rank needs another's.

torch plans each operation on DTensors by all of its arguments. A list of 900 tensors, as optimizers step them, takes
14 seconds to plan the first time (torch issues 109477 and 134191); element by element there is nothing to plan.

All other operations are torch's own, and what torch leaves as one summand on each rank is joined at once: a number that
is read is that of the unsharded tensor. What torch refuses, or answers wrongly where a rank has no elements, every rank
computes with the unsharded tensors.
"""

from __future__ import annotations

import copy
import operator
import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, SupportsIndex

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from sherd._torch import (
    DTensorSpec,
    attributes_of,
    become_view,
    dispatches_itself,
    dtensor_of,
    dtensor_spec,
    give_attributes,
    local_tensor,
    register_foreach_type,
    replace_class,
    replace_local_tensor,
    spec_of,
)
from sherd.comm.failures import announced
from sherd.comm.streams import under_way, wait_for_copies_to, wait_for_steps
from sherd.errors import PlacementError, WriteBackError
from sherd.tensor.gather import part_given
from sherd.tensor.placement import Places, places_of
from sherd.tensor.replicated import ReadableDTensor, ReplicatedDTensor, known
from sherd.tensor.table import (
    RAGGED,
    SHARDED,
    Args,
    Aten,
    Kwargs,
    is_in_place,
    is_index,
    of_kind,
    tensors_among,
    with_changed,
)


class OwnDTensor(ReadableDTensor):
    """The base of this library's shards: values that are assigned to `.data` go into the tensor's memory.

    torch's own `.data = other` replaces the shell around the local tensor, but not the local tensor: values are lost.
    """

    @property
    def data(self) -> torch.Tensor:
        """The tensor outside autograd.

        It can be set to a DTensor of the same shape, an unsharded tensor, or this rank's part: the values are copied
        into the tensor's own memory, in its own dtype. If a DTensor has other placements, all ranks must set `data`.

        Raises:
            WriteBackError: `data` is set to a tensor of another shape.
        """
        # torch's `data` has a version counter of its own, which would not tell that this tensor was written to.
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        local = local_tensor(self)
        if isinstance(value, DTensor):
            value = local_tensor(value) if self.lies_as(value) else value.full_tensor()
        part = part_given(value, tuple(self.shape), local, self.part_of)
        if part is None:
            raise WriteBackError(
                f".data = a tensor of shape {tuple(value.shape)}: this one is {tuple(self.shape)}, of which this rank "
                f"holds {local.numel()} elements; give the full tensor or this rank's part"
            )
        with torch.no_grad():
            local.copy_(part)
            torch.autograd.graph.increment_version(self)

    def lies_as(self, other: DTensor) -> bool:
        """Returns True if both tensors have the same elements on the same ranks."""
        return places_at(self).same_as(places_of(spec_of(other)))

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnDTensor:
        # As torch copies a Parameter, without its gradient; other tensors have it copied.
        if id(self) in memo:
            known: OwnDTensor = memo[id(self)]
            return known
        if not self.is_leaf:
            raise PlacementError("only leaves of the autograd graph can be deep-copied; detach() the tensor first")
        wait_for_copies_to(local_tensor(self))
        copied: Any = self.around(local_tensor(self).detach().clone())
        if isinstance(self, nn.Parameter):
            copied = nn.Parameter(copied, self.requires_grad)  # of the class of its data
        else:
            copied.requires_grad_(self.requires_grad).grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = copied
        give_attributes(copied, copy.deepcopy(vars(self), memo))
        return copied  # type: ignore[no-any-return]

    def warn_of_pickle(self) -> None:
        """Warn that a pickle holds this rank's part, under the shape of the unsharded tensor, once that is there."""
        wait_for_copies_to(local_tensor(self))
        if self.device_mesh.size() > 1:
            warnings.warn(
                "a sharded tensor is pickled, as by torch.save: this rank's part alone is written, which loads on as "
                "many ranks, from a file of each. For full tensors take get_model_state_dict(model, "
                "options=StateDictOptions(full_state_dict=True)), for checkpoints sherd.save",
                stacklevel=3,
            )

    @abstractmethod
    def around(self, local: torch.Tensor) -> OwnDTensor:
        """Returns a tensor with the places of this one, around `local`, this rank's part of it, outside autograd."""

    @abstractmethod
    def part_of(self, full: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of an unsharded tensor of this shape."""


places_at: Callable[[OwnDTensor], Places] = operator.attrgetter("_spec.sherd_places")
"""Returns the places of a tensor's shards; tensors with equal places share the object."""


class ShardedDTensor(OwnDTensor):
    """A DTensor with `Shard(dim)` or `Replicate()` on each mesh axis.

    Only its type tells it from a DTensor of torch, and `pickle` writes it as one. Elementwise operations, lists of them
    (`torch._foreach_*`, fused optimizers) and norms compute on this rank's chunk; results of the same shape are of this
    class. All other operations give what torch's DTensor gives, without `Partial`: sums are joined at once.
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch declares it is not as it calls it
        cls, func: Aten, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if under_way:
            wait_for_steps()
        return SHARDED.operation_for(func)(func, args, kwargs or {})

    def around(self, local: torch.Tensor) -> ShardedDTensor:
        """Returns a tensor with the places of this one, around `local`, this rank's chunk of it, outside autograd."""
        return dtensor_of(ShardedDTensor, local, places_at(self).spec(local.dtype), False)

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        """Returns the tensor with other placements, as torch does; float8, which gloo cannot send, as bytes.

        All ranks must call it.
        """
        with self._announced(placements):
            if not _is_sent_as_bytes(self):
                return super().redistribute(device_mesh, placements, **options)
            sent = self.around(local_tensor(self).view(torch.uint8)).redistribute(device_mesh, placements, **options)
            spec = dtensor_spec(sent.device_mesh, sent.placements, sent.shape, self.dtype, sent.stride())
            return dtensor_of(DTensor, local_tensor(sent).view(self.dtype), spec, False)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """As torch's."""
        wait_for_steps()
        local: torch.Tensor = super().to_local(grad_placements=grad_placements)
        return local

    def full_tensor(self, **options: Any) -> torch.Tensor:
        """As torch's; all ranks must call it."""
        with self._announced(None):
            return super().full_tensor(**options)

    def _announced(self, placements: Sequence[Placement] | None) -> AbstractContextManager[None]:
        wait_for_steps()
        axes = [axis for axis, each in enumerate(self.placements) if not each.is_replicate()]
        if not axes or tuple(placements or ()) == self.placements:
            return nullcontext()
        what = f"gathers a tensor of {'x'.join(map(str, self.shape))} {self.dtype}"
        return announced([self.device_mesh.get_group(axis) for axis in axes], what)

    def part_of(self, full: torch.Tensor) -> torch.Tensor:
        return _chunk_of(full.detach(), self)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        self.warn_of_pickle()
        stock: torch.Tensor = as_torchs(self)
        if isinstance(self, nn.Parameter):
            stock = nn.Parameter(stock, self.requires_grad)
        else:
            stock.requires_grad_(self.requires_grad)
        give_attributes(stock, attributes_of(self))
        pickled: str | tuple[object, ...] = stock.__reduce_ex__(protocol)
        return pickled

    @staticmethod
    def __tensor_unflatten__(*parts: object) -> DTensor:
        stock: DTensor = DTensor.__tensor_unflatten__(*parts)
        spec = places_of(spec_of(stock)).spec(stock.dtype)
        return dtensor_of(ShardedDTensor, local_tensor(stock), spec, stock.requires_grad)


dispatches_itself(ShardedDTensor)
register_foreach_type(ShardedDTensor)


def _chunk_of(full: torch.Tensor, tensor: DTensor) -> torch.Tensor:
    """Returns this rank's chunk of the values `full` in the layout of `tensor`."""
    replicated = DTensor.from_local(full, tensor.device_mesh, run_check=False)
    return local_tensor(replicated.redistribute(placements=tensor.placements))


def _is_sent_as_bytes(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1


def sharded_dtensor(local: torch.Tensor, spec: DTensorSpec) -> ShardedDTensor:
    """Returns a tensor around `local`, this rank's chunk, uncopied and outside autograd."""
    return dtensor_of(ShardedDTensor, local, places_of(spec).spec(local.dtype), False)


def rest_on(tensor: DTensor, local: torch.Tensor) -> None:
    """Make `local` the memory of `tensor`, which stays the same object."""
    replace_local_tensor(tensor, local)
    if type(tensor) is DTensor:  # torch's own, which a user loads or swaps in
        replace_class(tensor, ShardedDTensor, places_of(spec_of(tensor)).spec(local.dtype))


def as_torchs(tensor: ShardedDTensor) -> DTensor:
    """Returns a DTensor of torch around the same chunk, outside autograd."""
    local = local_tensor(tensor)
    return dtensor_of(DTensor, local, places_at(tensor).spec_for_torch(local.dtype), False)


class CopiedView(ReadableDTensor):
    """A view of a sharded tensor that has elements of other ranks, such as `weight[i]` of rows.

    torch's DTensor gives a copy, and a write into that copy is lost without a word. A write into this view goes into
    the tensor too.
    """

    viewed: OwnDTensor | CopiedView
    look: Callable[[torch.Tensor], torch.Tensor]
    """Returns the view of an unsharded tensor."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch declares it is not as it calls it
        cls, func: Aten, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        others = tensors_among((*args, *(kwargs or {}).values()))
        meets_plain = any(not isinstance(each, DTensor) and each.numel() > 1 for each in others)
        change = _copy if meets_plain and not is_in_place(func) else _ours_of_copy  # torch refuses what is mixed
        own_args, own_kwargs = with_changed((args, kwargs or {}), CopiedView, change)
        result = func(*own_args, **own_kwargs)
        if not is_in_place(func):
            return _views_of(args[0], func, args, kwargs or {}, result) if func.is_view else result
        if isinstance(args[0], CopiedView):
            args[0].write_back()
        return args[0]

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        pickled: str | tuple[object, ...] = _copy(self).__reduce_ex__(protocol)
        return pickled

    def __deepcopy__(self, memo: dict[int, object]) -> DTensor:
        return copy.deepcopy(_copy(self), memo)

    def write_back(self) -> None:
        """Copy the elements into the viewed tensor. All ranks of the mesh must call it."""
        viewed = self.viewed
        full = full_value_of(viewed)
        self.look(full).copy_(_copy(self).full_tensor())
        if isinstance(viewed, OwnDTensor):
            local_tensor(viewed).copy_(viewed.part_of(full))
        else:
            local_tensor(viewed).copy_(_chunk_of(full, viewed))
        torch.autograd.graph.increment_version(viewed)
        if isinstance(viewed, CopiedView):
            viewed.write_back()


dispatches_itself(CopiedView)


def _copy(view: DTensor) -> DTensor:
    return dtensor_of(DTensor, local_tensor(view), spec_of(view), False)


def _ours_of_copy(view: DTensor) -> DTensor:
    return as_ours(_copy(view))


def _views_of(viewed: OwnDTensor | CopiedView, func: Aten, args: Args, kwargs: Kwargs, result: Any) -> object:
    """Returns the result of a view operation: DTensors with memory of their own as `CopiedView`, others as ours."""
    memory = local_tensor(viewed).untyped_storage().data_ptr()
    several = isinstance(result, list | tuple)

    def look(index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def of(full: torch.Tensor) -> torch.Tensor:
            views = func(full, *args[1:], **kwargs)
            view: torch.Tensor = views[index] if several else views
            return view

        return of

    views: list[DTensor] = []
    for index, each in enumerate(result if several else [result]):
        local, spec = local_tensor(each), spec_of(each)
        if isinstance(viewed, CopiedView) or local.untyped_storage().data_ptr() != memory:
            copied: CopiedView = dtensor_of(CopiedView, local, spec, False)
            copied.viewed, copied.look = viewed, look(index)
            views.append(copied)
        else:
            views.append(sharded_dtensor(local, spec))
    return type(result)(views) if several else views[0]


@SHARDED.answers("other", "equal")  # torch tags `equal` as pointwise, though its answer is of all chunks
def by_torch(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Returns what torch's DTensor gives for the operation; `on_full_values` answers where torch is wrong."""
    if _is_beyond_torch(func, args, kwargs):
        return on_full_values(func, args, kwargs)
    own_args, own_kwargs = with_changed((args, kwargs), ShardedDTensor, as_torchs)
    try:
        result = func(*own_args, **own_kwargs)
    except (NotImplementedError, RuntimeError) as error:
        # torch refuses by shapes and placements, so all ranks are here if one is.
        refuses = any(words in str(error) for words in ("Sharding propagation failed", "not supported with DTensor"))
        if not (refuses or isinstance(error, NotImplementedError)) or func.name().startswith("aten::set_"):
            raise
        if torch.Tag.inplace_view not in func.tags:
            return on_full_values(func, args, kwargs)
        name, _, overload = func.name().removeprefix("aten::").partition(".")  # `t_`, of which torch knows `t` alone
        result = getattr(getattr(torch.ops.aten, name[:-1]), overload or "default")(*own_args)
        own_args = (result, *own_args[1:])
    if _is_mean_of_means(result, args):  # mse_loss, for example
        return on_full_values(func, args, kwargs)
    if "out" in kwargs:
        return kwargs["out"]
    if torch.Tag.inplace_view in func.tags:
        local = local_tensor(own_args[0])
        become_view(args[0], func, args, kwargs, local, places_of(spec_of(own_args[0])).spec(local.dtype))
        return args[0]
    if is_in_place(func) and isinstance(args[0], torch.Tensor):
        return args[0]
    if func.is_view and isinstance(args[0], ShardedDTensor):
        return _views_of(args[0], func, args, kwargs, result)
    ours = next(of_kind((*args, *kwargs.values()), ShardedDTensor), None)
    return result if ours is None else with_changed(result, DTensor, as_ours)


def _is_beyond_torch(func: Aten, args: Args, kwargs: Kwargs) -> bool:
    """Returns True for operations of which torch's DTensor raises on some ranks only, or writes into a copy."""
    others = list(tensors_among((*args[1:], *kwargs.values())))
    # Ranks look up tokens of their own in a weight that forward trains: torch refuses to mix these.
    is_trained = torch.is_grad_enabled() and any(each.requires_grad for each in tensors_among(args))
    if (any(map(is_index, others)) and not is_trained) or isinstance(kwargs.get("out"), OwnDTensor):
        return True
    chooses = any(not (each.is_floating_point() or each.is_complex()) for each in others)
    if chooses and torch.Tag.pointwise not in func.tags and (is_in_place(func) or func.name() == "aten::index.Tensor"):
        return True
    if any(map(_is_sent_as_bytes, of_kind(args, ShardedDTensor))):
        return True
    first = args[0] if args else None
    reduces = torch.Tag.reduction in func.tags and isinstance(first, ShardedDTensor)
    return reduces and any(0 in sizes for sizes in places_of(spec_of(args[0])).chunk_sizes)


def _is_mean_of_means(result: object, args: Args) -> bool:
    """Returns True if torch takes the mean of the chunks' means, though chunks are not equally long."""
    averages = (
        getattr(placement, "reduce_op", "") == "avg"
        for each in of_kind([result], DTensor)
        for placement in each.placements
    )
    own = map(places_at, of_kind(args, ShardedDTensor))
    return any(averages) and any(len(sizes) > 1 for places in own for sizes in places.chunk_sizes)


def on_full_values(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Compute with the unsharded tensors, on every rank. All ranks of the mesh must call it."""
    own: OwnDTensor = next(of_kind((*args, *kwargs.values()), OwnDTensor))  # type: ignore[type-abstract]
    places = places_at(own)
    full_args, full_kwargs = with_changed((args, kwargs), DTensor, full_value_of)
    result = func(*full_args, **full_kwargs)
    target, written = (kwargs["out"], full_kwargs["out"]) if "out" in kwargs else (args[0], full_args[0])
    if isinstance(target, OwnDTensor) and ("out" in kwargs or is_in_place(func)):
        local_tensor(target).copy_(target.part_of(written))
        return target
    answers = with_changed(result, torch.Tensor, lambda full: known(full.contiguous(), places))
    return _views_of(own, func, args, kwargs, answers) if func.is_view else answers


def full_value_of(tensor: DTensor) -> torch.Tensor:
    outside: Any = tensor.detach()  # operations are answered below autograd
    full: torch.Tensor = outside.full_tensor()
    return full.clone() if full.data_ptr() == local_tensor(tensor).data_ptr() else full


def as_ours(result: DTensor) -> DTensor:
    """Returns a result of torch as a tensor of ours, in the same memory; what is `Partial` is joined first."""
    # Not loaded by `fully_shard` alone: tests/test_storeys.py.
    from sherd.tensor.reduction_table import LARGEST, SMALLEST, sum_dtype

    local = local_tensor(result)
    if type(result) is not DTensor or type(local) is not torch.Tensor:  # the latter is traced, or a float8 tensor
        return result
    for axis, placement in enumerate(result.placements):
        # The rows know nan, of which the MAX of some backends loses sight.
        row = {"max": LARGEST, "min": SMALLEST}.get(getattr(placement, "reduce_op", ""))
        if row is not None:
            values = local_tensor(result).to(sum_dtype(result.dtype, local.device))
            joined = row.over(values, [result.device_mesh.get_group(axis)]).to(result.dtype)
            placements = (*result.placements[:axis], Replicate(), *result.placements[axis + 1 :])
            spec = dtensor_spec(result.device_mesh, placements, result.shape, result.dtype, result.stride())
            result = dtensor_of(DTensor, joined, spec, False)
    if any(each.is_partial() for each in result.placements):
        result = result.redistribute(
            placements=[Replicate() if each.is_partial() else each for each in result.placements]
        )
    if all(each.is_replicate() for each in result.placements):
        return dtensor_of(ReplicatedDTensor, local_tensor(result), spec_of(result), False)
    return sharded_dtensor(local_tensor(result), spec_of(result))


@SHARDED.answers("_local_scalar_dense")
@RAGGED.answers("_local_scalar_dense")
def item(func: Aten, args: Args, kwargs: Kwargs) -> object:
    return full_value_of(args[0]).item()
