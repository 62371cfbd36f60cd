"""What do operations do that treat each element by itself? The same, on this rank's run."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from sherd._torch import dtensor_of, local_tensor, spec_of
from sherd.tensor.operands import layouts_in, local_of, lone_value, mixed, unknown
from sherd.tensor.owned import common_owner, on_owner
from sherd.tensor.placement import Layout, layout_of
from sherd.tensor.ragged import RaggedDTensor
from sherd.tensor.table import Args, Kwargs, answers, is_in_place

# Elementwise too, though torch does not tag them so.
_ALSO = (
    "_conj", "_conj_physical", "_neg_view", "_pin_memory", "_to_copy", "alias", "conj", "detach", "detach_",
    "empty_like", "fill", "fill_", "full_like", "imag", "is_pinned", "lift_fresh", "masked_fill_", "ones_like",
    "pin_memory", "real", "record_stream", "resolve_conj", "resolve_neg", "where", "zero", "zero_", "zeros_like",
)  # fmt: skip


@answers("pointwise", *_ALSO)
def elementwise(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Do it on this rank's run; what comes out is laid out as what went in."""
    runs = _runs_of_one_spec(args) if not kwargs or _all_numbers(kwargs) else None
    if runs is not None:
        return _as_given(func(*runs, **kwargs), args, kwargs, runs, layout_of(spec_of(args[0])), func)
    layouts = layouts_in(args, kwargs)
    layout = layouts[0]
    if any(each.strides or not layout.same_as(each) for each in layouts) and common_owner(layouts) is not None:
        return on_owner(func, args, kwargs)
    if is_in_place(func) and not isinstance(args[0], RaggedDTensor):
        raise mixed(func, layout, args[0])
    local_args = [local_of(each, layout, func) for each in args]
    local_kwargs = {key: local_of(each, layout, func) for key, each in _in_order(kwargs).items()}
    result = func(*local_args, **local_kwargs)
    return _as_given(result, args, kwargs, local_args, layout, func)


def _all_numbers(kwargs: Kwargs) -> bool:
    return all(isinstance(each, float | int) for each in kwargs.values())


def _runs_of_one_spec(args: Args) -> list[Any] | None:
    """The runs, in the most common case: all tensors among the arguments have the very same spec. Else None."""
    first = args[0]
    if not isinstance(first, RaggedDTensor) or layout_of(spec_of(first)).strides:
        return None
    spec = spec_of(first)
    runs: list[Any] = []
    for each in args:
        if isinstance(each, RaggedDTensor) and spec_of(each) is spec:
            runs.append(local_tensor(each))
        elif isinstance(each, torch.Tensor | list | tuple):
            return None
        else:
            runs.append(each)
    return runs


def _as_given(result: Any, args: Args, kwargs: Kwargs, local_args: list[Any], layout: Layout, func: Any) -> Any:
    """The result as a ragged tensor: the very argument, if that was written to."""
    if "out" in kwargs:
        return kwargs["out"]
    if isinstance(result, list | tuple):
        return type(result)(_as_given(each, (None,), {}, [None], layout, func) for each in result)
    if not isinstance(result, torch.Tensor):
        return result
    if result is local_args[0]:
        return args[0]
    if result.shape != layout.local_shape:
        raise unknown(func, layout, f"it made {tuple(result.shape)} of a piece of {layout.local_shape}")
    return wrapped(result, layout)


def wrapped(local: torch.Tensor, layout: Layout) -> RaggedDTensor:
    """A result on this rank's run as a ragged tensor."""
    return dtensor_of(RaggedDTensor, local, layout.spec(local.dtype), False)


def _in_order(kwargs: Kwargs) -> Kwargs:
    """`kwargs` without another order of the elements in memory (`model.to(memory_format=torch.channels_last)`): a run
    is of consecutive elements, in the order of the dims."""
    if kwargs.get("memory_format") in (None, torch.preserve_format):
        return kwargs
    return {**kwargs, "memory_format": torch.contiguous_format}


@answers("set_")
def given_other_memory(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Refused: at an owner too, for what is gathered is the memory that it has."""
    raise unknown(func, layouts_in(args, kwargs)[0], "a run keeps its memory; write into it, tensor.data = value")


@answers("view", "_unsafe_view", "expand", "reshape")
def same_view(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A view in the tensor's own shape is the tensor; others need an owner."""
    tensor = args[0]
    (layout, *_) = layouts_in(args, kwargs)
    if isinstance(tensor, RaggedDTensor) and tuple(args[1]) in (tuple(tensor.shape), (-1,) * (tensor.ndim == 1)):
        local = local_tensor(tensor)
        return wrapped(local.view_as(local), layout)
    return on_owner(func, args, kwargs)


@answers("index_put_")
def filled_where(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`tensor[mask] = number`, for a mask that lies as the tensor does; other indices need an owner."""
    tensor, indices, value, *accumulate = args
    one, index = lone_value(value), indices[0] if len(indices) == 1 else None
    if one is None or index is None or any(accumulate):
        return on_owner(func, args, kwargs)
    if isinstance(index, RaggedDTensor) and index.dtype == torch.bool:
        number = one.to(tensor.dtype).reshape(())
        return elementwise(torch.ops.aten.masked_fill_.Tensor, (tensor, index, number), {})
    if tensor.shape == (1,) and not isinstance(index, DTensor):
        # A scalar, and its mask as torch gives it: the index 0, or none. It is the same on all ranks.
        return elementwise(torch.ops.aten.fill_.Tensor, (tensor, one.reshape(())), {}) if index.numel() else tensor
    return on_owner(func, args, kwargs)
