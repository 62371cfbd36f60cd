"""Operations that treat each element by itself, done on this rank's run; and copies, fresh tensors and random numbers,
which bring other values into a run."""

from __future__ import annotations

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
    refuse_plain_out,
    unknown,
)
from sherd.tensor.own import OwnDTensor
from sherd.tensor.placement import Layout, layout_of
from sherd.tensor.ragged import RaggedDTensor, as_result
from sherd.tensor.table import Args, Aten, Kwargs, Operation, answers, is_in_place, name_of, tensors_among

# Elementwise too, though torch does not tag them so.
ALSO_ELEMENTWISE = (
    "_conj", "_conj_physical", "_neg_view", "_pin_memory", "_to_copy", "alias", "conj", "detach", "detach_",
    "empty_like", "fill", "fill_", "full_like", "imag", "is_pinned", "lift_fresh", "masked_fill_", "ones_like",
    "pin_memory", "real", "record_stream", "resolve_conj", "resolve_neg", "where", "zero", "zero_", "zeros_like",
)  # fmt: skip


@answers("pointwise", *ALSO_ELEMENTWISE)
def elementwise(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Compute on this rank's run. The result is laid out as the operands are."""
    runs = _runs_of_one_spec(args) if not kwargs or _all_numbers(kwargs) else None
    if runs is not None:
        return _as_given(func(*runs, **kwargs), args, kwargs, runs, layout_of(spec_of(args[0])), func)
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
    local_kwargs = {key: local_of(value, layout, func) for key, value in kwargs.items()}
    return _as_given(func(*local_args, **local_kwargs), args, kwargs, local_args, layout, func)


def _all_numbers(kwargs: Kwargs) -> bool:
    return all(isinstance(value, float | int) for value in kwargs.values())


def _runs_of_one_spec(args: Args) -> list[object] | None:
    """Returns the runs in the most common case: all tensors among the arguments have the very same spec. Else None."""
    first = args[0]
    if not isinstance(first, RaggedDTensor) or layout_of(spec_of(first)).strides:
        return None
    spec = spec_of(first)
    runs: list[object] = []
    for value in args:
        if isinstance(value, RaggedDTensor) and spec_of(value) is spec:
            runs.append(local_tensor(value))
        elif isinstance(value, torch.Tensor | list | tuple):
            return None
        else:
            runs.append(value)
    return runs


def _as_given(
    result: object, args: Args, kwargs: Kwargs, local_args: list[object], layout: Layout, func: Aten
) -> object:
    """Returns the result as a ragged tensor: the very argument, if the operation wrote into it."""
    if "out" in kwargs:
        return kwargs["out"]
    if isinstance(result, list | tuple):
        return type(result)(_as_given(value, (None,), {}, [None], layout, func) for value in result)
    if not isinstance(result, torch.Tensor):
        return result
    if result is local_args[0]:
        return args[0]
    if result.shape != layout.local_shape:
        raise unknown(func, layout, f"it made {tuple(result.shape)} of a piece of {layout.local_shape}")
    return as_result(result, layout)


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
        return elementwise(func, args, kwargs) if same_size else on_owner(func, args, kwargs)
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
