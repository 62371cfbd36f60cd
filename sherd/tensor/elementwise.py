"""Operations that treat each element by itself, done on this rank's run or chunk; and copies, fresh tensors and random
numbers, which bring other values into a run."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from sherd._torch import local_tensor, spec_of
from sherd.errors import PlacementError
from sherd.tensor.gather import piece_of
from sherd.tensor.operands import (
    WAYS_OUT,
    common_owner,
    layouts_in,
    local_of,
    lone_value,
    mixed,
    on_owner,
    piece_at,
    refuse_plain_out,
    unknown,
)
from sherd.tensor.own import OwnDTensor, places_at
from sherd.tensor.placement import Layout, layout_of
from sherd.tensor.places import Places
from sherd.tensor.ragged import RaggedDTensor, as_result
from sherd.tensor.sharded import by_torch
from sherd.tensor.table import (
    SHARDED,
    Args,
    Aten,
    Kwargs,
    Operation,
    answers,
    is_in_place,
    name_of,
    tensors_among,
    with_changed,
)

# Elementwise too, though torch does not tag them so.
ALSO_ELEMENTWISE = (
    "_conj", "_conj_physical", "_neg_view", "_pin_memory", "_to_copy", "alias", "conj", "detach", "detach_",
    "empty_like", "fill", "fill_", "full_like", "imag", "is_pinned", "lift_fresh", "masked_fill_", "ones_like",
    "pin_memory", "real", "record_stream", "resolve_conj", "resolve_neg", "where", "zero", "zero_", "zeros_like",
)  # fmt: skip


def elementwise(func: Aten, args: Args, kwargs: Kwargs, otherwise: Operation) -> object:
    """Compute on this rank's piece, if all operands lie alike or are one value. The result lies as they do. `otherwise`
    answers all else."""
    first = next((value for value in args if isinstance(value, OwnDTensor)), None)
    if first is None or (kwargs and any(True for _ in tensors_among(kwargs.values()))):
        return otherwise(func, args, kwargs)
    places = places_at(first)
    pieces: list[object] = []
    for value in args:
        piece = piece_at(value, places)
        if piece is None and value is not None:
            return otherwise(func, args, kwargs)
        pieces.append(piece)
    if not _keeps_order(places, kwargs) or (args[0] is not first and is_in_place(func)):
        return otherwise(func, args, kwargs)
    result = func(*pieces, **kwargs)
    return args[0] if result is pieces[0] else with_changed(result, torch.Tensor, first.around)


def _keeps_order(places: Places, kwargs: Kwargs) -> bool:
    """Returns True if the result's elements are in the order in which the places have them."""
    asked = kwargs.get("memory_format") or torch.preserve_format
    if places.strides is None:
        return asked in (torch.preserve_format, torch.contiguous_format)
    return asked is torch.preserve_format and not isinstance(places, Layout)


SHARDED.answers("pointwise", "copy_", *ALSO_ELEMENTWISE)(functools.partial(elementwise, otherwise=by_torch))


@answers("pointwise", *ALSO_ELEMENTWISE)
def on_runs(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Compute on this rank's run, or at an owner; bring what is at another owner."""
    return elementwise(func, args, kwargs, _on_runs)


def _on_runs(func: Aten, args: Args, kwargs: Kwargs) -> object:
    layouts = layouts_in(args, kwargs)
    layout = layouts[0]
    if any(other.strides or not layout.same_as(other) for other in layouts) and common_owner(layouts) is not None:
        return on_owner(func, args, kwargs)
    if "out" in kwargs:
        refuse_plain_out(func, kwargs, layout)
    if is_in_place(func) and not isinstance(args[0], RaggedDTensor):
        raise mixed(func, layout, args[0])
    if kwargs.get("memory_format") not in (None, torch.preserve_format):
        # `model.to(memory_format=torch.channels_last)`: a run is of consecutive elements, in the order of the dims.
        kwargs = {**kwargs, "memory_format": torch.contiguous_format}
    local_args = [local_of(value, layout, func) for value in args]
    result = func(*local_args, **{key: local_of(value, layout, func) for key, value in kwargs.items()})
    if "out" in kwargs:
        return kwargs["out"]
    if result is local_args[0]:
        return args[0]
    return with_changed(result, torch.Tensor, lambda made: as_result(made, layout))


@answers("set_")
def given_other_memory(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Refused, at an owner too: gathers read the memory that the tensor has."""
    raise unknown(func, layouts_in(args, kwargs)[0], "a run keeps its memory; write into it, tensor.data = value")


@answers("view", "_unsafe_view", "expand", "reshape")
def same_view(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Returns the tensor for a view in its own shape, or as another dtype of the same size. Others need an owner."""
    tensor = args[0]
    (layout, *_) = layouts_in(args, kwargs)
    if func.name() == "aten::view.dtype":
        same_size = args[1].itemsize == tensor.dtype.itemsize
        return on_runs(func, args, kwargs) if same_size else on_owner(func, args, kwargs)
    if tuple(args[1]) in (tuple(tensor.shape), (-1,) * (tensor.ndim == 1)):
        local = local_tensor(tensor)
        return as_result(local.view_as(local), layout)
    return on_owner(func, args, kwargs)


@answers("index_put_")
def filled_where(func: Aten, args: Args, kwargs: Kwargs, otherwise: Operation = on_owner) -> object:
    """`tensor[mask] = number`, for a mask that lies as the tensor does; `otherwise` answers other indices."""
    tensor, indices, value, *accumulate = args
    one, index = lone_value(value), indices[0] if len(indices) == 1 else None
    if one is None or index is None or any(accumulate):
        return otherwise(func, args, kwargs)
    if isinstance(index, OwnDTensor) and index.dtype == torch.bool:
        return tensor.masked_fill_(index, one.to(tensor.dtype).reshape(()))
    if tensor.shape == (1,) and not isinstance(index, DTensor):
        # A scalar, and its mask as torch gives it: the index 0, or none. It is the same on all ranks.
        return tensor.fill_(one.reshape(())) if index.numel() else tensor
    return otherwise(func, args, kwargs)


SHARDED.answers("index_put_")(functools.partial(filled_where, otherwise=by_torch))


# Other values


@answers("copy_")
def copy_into(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Copy a tensor of the same layout, or this rank's run of a tensor that every rank holds unsharded, or one value.

    A DTensor of torch, which `load_state_dict` may bring, is gathered for it.
    """
    target, source, *rest = args
    if not isinstance(target, RaggedDTensor):
        raise PlacementError(f"{name_of(func)}: a ragged tensor cannot be copied into a tensor that is not; {WAYS_OUT}")
    layout = layout_of(spec_of(target))
    source_layouts = layouts_in((source,), {})
    if source_layouts and common_owner([layout, *source_layouts]) is not None:
        return on_owner(func, args, kwargs)
    run = local_of(source, layout, func) if source_layouts else lone_value(source)
    if run is None:
        is_dtensor = isinstance(source, DTensor)
        if tuple(source.shape) != layout.shape or (is_dtensor and source.device_mesh != layout.mesh):
            raise mixed(func, layout, source)
        run = piece_of(source.full_tensor() if is_dtensor else source, layout)
    func(local_tensor(target), run, *rest, **kwargs)
    return target


@answers("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros")
def fresh(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Returns a tensor of the same shape in the same layout. One of another shape needs an owner."""
    tensor, size, *rest = args
    (layout, *_) = layouts_in(args, kwargs)
    if tuple(size) != layout.shape or layout.strides:
        return on_owner(func, args, kwargs)
    local = local_tensor(tensor)
    if "strided" in func.name():
        rest = [torch.empty(local.shape, device="meta").stride(), *rest[1:]]
    return as_result(func(local, layout.local_shape, *rest, **kwargs), layout)


@answers("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_")
def random_in_place(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Fill the run with the numbers that the unsharded tensor would get: each rank draws them all and keeps its run.

    So ranks that share a seed get what one process would. Replicas get the numbers of the first.
    """
    tensor, *rest = args
    _draw(func, tensor, tensor, rest, kwargs)
    return tensor


@answers("bernoulli", "rand_like", "randint_like", "randn_like")
def random_like(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Returns the run of the numbers that an unsharded tensor of this shape would get."""
    tensor, *rest = args
    dtype = kwargs.get("dtype") or tensor.dtype
    made = as_result(torch.empty_like(local_tensor(tensor), dtype=dtype), layout_of(spec_of(tensor)))
    _draw(func, made, tensor, rest, kwargs)
    return made


def _draw(func: Aten, target: RaggedDTensor, like: RaggedDTensor, rest: Sequence[object], kwargs: Kwargs) -> None:
    layout = layout_of(spec_of(target))
    if any(True for _ in tensors_among(rest)):
        raise PlacementError(f"{name_of(func)} with a tensor of probabilities is not known here; {WAYS_OUT}")
    if func.name() == "aten::bernoulli":
        raise PlacementError(f"{name_of(func)} reads probabilities element by element; {WAYS_OUT}")
    local = local_tensor(target)
    drawn = func(torch.empty(layout.shape, dtype=like.dtype, device=local.device), *rest, **kwargs)
    local.copy_(piece_of(drawn, layout))
    for axis in layout.copied_axes:
        dist.broadcast(local, group=layout.mesh.get_group(axis), group_src=0)
