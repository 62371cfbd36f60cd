"""What happens in an operation that needs the whole tensor, when one rank holds it? That rank does it.

    w (4, 6) owned by rank 1        w @ w.T (4, 4)        w.T (6, 4), a view
    rank 0 | (0, 6) |               | (0, 4) |            | (0, 4) |
    rank 1 | (4, 6) |               | (4, 4) |            | (6, 4) |

All ranks infer the result's shape on the meta device; so all raise, if one does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sherd._torch import become_view, dtensor_of, local_tensor, spec_of
from sherd.tensor.operands import layouts_in, lone_value, mixed, unknown
from sherd.tensor.placement import Layout, layout_of
from sherd.tensor.ragged import RaggedDTensor
from sherd.tensor.table import Args, Kwargs, answers, is_in_place, tensors_among, with_changed


def common_owner(layouts: Sequence[Layout]) -> int | None:
    """The rank that holds all of all these tensors, if one does."""
    first = layouts[0]
    if first.owner is None:
        return None
    same = all(each is first or (each.owner == first.owner and each.shares_ranks_with(first)) for each in layouts)
    return first.owner if same else None


@answers("other")
def on_owner(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Do it where all of the tensors are; elsewhere make empty pieces of what comes out.

    Raises:
        PlacementError: no rank holds all of them, or the result depends on their values in shape.
    """
    layouts = layouts_in(args, kwargs)
    layout = layouts[0]
    if common_owner(layouts) is None:
        raise _no_owner(func, args, kwargs, layouts)
    inferred = _inferred(func, args, kwargs, layout)
    result = inferred
    if layout.rank == layout.owner:
        full_args, full_kwargs = with_changed((args, kwargs), torch.Tensor, lambda each: _whole(each, layout, func))
        result = func(*full_args, **full_kwargs)
    if "out" in kwargs:
        return kwargs["out"]
    if torch.Tag.inplace_view in func.tags:
        placed = _placed(result, inferred, layout, func)
        become_view(args[0], func, args, kwargs, local_tensor(placed), spec_of(placed))
        return args[0]
    if is_in_place(func):
        return args[0]
    return _placed(result, inferred, layout, func)


def _inferred(func: Any, args: Args, kwargs: Kwargs, layout: Layout) -> Any:
    meta_args, meta_kwargs = with_changed((args, kwargs), torch.Tensor, lambda each: _shape_only(each, layout, func))
    try:
        return func(*meta_args, **meta_kwargs)
    except NotImplementedError as error:
        raise unknown(func, layout, "the shape of its result depends on the values") from error


def _no_owner(func: Any, args: Args, kwargs: Kwargs, layouts: list[Layout]) -> Exception:
    """The right error: two tensors that do not meet, or one that is in pieces."""
    first = layouts[0]
    for each in tensors_among((*args, *kwargs.values())):
        if isinstance(each, RaggedDTensor) and not layout_of(spec_of(each)).same_as(first):
            return mixed(func, first, each)
    return unknown(func, first)


def _shape_only(value: torch.Tensor, layout: Layout, func: Any) -> torch.Tensor:
    if isinstance(value, RaggedDTensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return _lone(value, layout, func).to("meta")


def _whole(value: torch.Tensor, layout: Layout, func: Any) -> torch.Tensor:
    if isinstance(value, RaggedDTensor):
        local = local_tensor(value)
        return local if local.shape == value.shape else local.view(value.shape)
    return _lone(value, layout, func)


def _lone(value: torch.Tensor, layout: Layout, func: Any) -> torch.Tensor:
    one = lone_value(value)
    if one is None:
        raise mixed(func, layout, value)
    return one


def _placed(result: Any, inferred: Any, layout: Layout, func: Any) -> Any:
    """What came out, as tensors of the same owner."""
    if isinstance(inferred, list | tuple):
        pairs = zip(result, inferred, strict=True)
        return type(inferred)([_placed(each, shape, layout, func) for each, shape in pairs])
    if not isinstance(inferred, torch.Tensor):
        raise unknown(func, layout, "it gives no tensor")
    at_owner = _layout_at_owner(inferred, layout)
    if layout.rank == layout.owner:
        local = result if inferred.ndim else result.reshape(1)
    else:
        local = torch.empty(at_owner.local_shape, dtype=inferred.dtype, device=layout.device)
    return dtensor_of(RaggedDTensor, local, at_owner.spec(inferred.dtype), False)


def _layout_at_owner(inferred: torch.Tensor, layout: Layout) -> Layout:
    """The layout of a result: whole, at the owner of what it was made of."""
    strides = None if inferred.is_contiguous() else tuple(inferred.stride())
    return layout.like(layout.owned_cut(tuple(inferred.shape)), strides)
