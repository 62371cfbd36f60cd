"""The operands of one operation: what this rank computes with, or the unsharded tensors, with which every rank does.

Tensors whose elements are on the same ranks may meet, element by element. An operation that needs other elements is
done by every rank with the unsharded tensors, as for equal chunks (`on_full_values`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from sherd._torch import local_tensor, spec_of
from sherd.errors import PlacementError
from sherd.tensor.gather import gather, piece_of
from sherd.tensor.placement import Layout, Places, is_ragged, layout_of, places_of
from sherd.tensor.ragged import RaggedDTensor
from sherd.tensor.replicated import ReplicatedDTensor
from sherd.tensor.sharded import on_full_values
from sherd.tensor.table import (
    Args,
    Aten,
    Kwargs,
    answers,
    is_index,
    is_list_of_tensors,
    name_of,
    of_kind,
    tensors_among,
)

WAYS_OUT = (
    "use .full_tensor() or .redistribute(placements=[Replicate()]) on every rank to work with the full tensor, or "
    ".to_local() to work with this rank's part"
)


def layouts_in(args: Args, kwargs: Kwargs) -> list[Layout]:
    """Returns the layouts of the ragged tensors among the arguments, in order."""
    return [layout_of(spec_of(tensor)) for tensor in of_kind((*args, *kwargs.values()), RaggedDTensor)]


def local_of(value: object, layout: Layout, func: Aten) -> object:
    """Returns this rank's operand for `value`: the run of a ragged tensor, a lone value itself.

    A tensor of the same shape at another owner is brought to the owner in `layout`; all ranks must take part.

    Raises:
        PlacementError: the elements of `value` are on other ranks than those of `layout`.
    """
    if not isinstance(value, torch.Tensor):
        return value
    part = part_at(value, layout)
    if part is not None:
        return part
    if isinstance(value, RaggedDTensor):
        other = layout_of(spec_of(value))
        owned = layout.owner is not None and other.owner is not None
        if owned and layout.shape == other.shape and layout.shares_ranks_with(other):
            # Two owners, of a student's and a teacher's tensor: one tensor goes to the owner of the other.
            return piece_of(gather(local_tensor(value), other), layout)
        if value.dtype == torch.bool and broadcasts(value.shape, layout.shape):  # a mask, as of rows
            return piece_of(gather(local_tensor(value), other).expand(layout.shape), layout)
    elif isinstance(value, ReplicatedDTensor) and broadcasts(value.shape, layout.shape):
        return piece_of(local_tensor(value).expand(layout.shape), layout)
    raise mixed(func, layout, value)


def part_at(value: object, places: Places) -> object:
    """Returns this rank's operand for `value`: the shard of a tensor with these places, or the value of a scalar.

    A value that is no tensor is its own operand. None: the elements are elsewhere.
    """
    if isinstance(value, DTensor) and places.same_as(places_of(spec_of(value))):
        return local_tensor(value)
    if isinstance(value, torch.Tensor):
        one = lone_value(value)
        if one is None or not broadcasts(value.shape, places.shape):
            return None
        return one.reshape(1) if isinstance(places, Layout) and not places.shape else one  # a scalar's run has a dim
    return None if is_list_of_tensors(value) else value


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Returns True if a tensor of `shape` broadcasts to one of shape `to`."""
    ends = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(size in (1, wanted) for size, wanted in ends)


def lone_value(value: object) -> torch.Tensor | None:
    """Returns the value of a scalar, or of a replicated DTensor that is an expanded scalar; None for anything else."""
    if not isinstance(value, DTensor):
        return value if isinstance(value, torch.Tensor) and value.ndim == 0 else None
    if not all(placement.is_replicate() for placement in value.placements):
        return None
    local = local_tensor(value)
    if not local.ndim:
        return local
    is_one = local.numel() == 1 or (local.numel() and not any(local.stride()))
    # The value has a dim, as the tensor has, so that torch promotes dtypes in the same way.
    return local[(0,) * local.ndim].reshape(1) if is_one else None


def mixed(func: Aten, layout: Layout, value: torch.Tensor) -> PlacementError:
    if isinstance(value, DTensor) and is_ragged(spec_of(value)):
        other = f"one of shape {tuple(value.shape)} cut as {value.placements} over {value.device_mesh}"
        remedy = "redistribute one of them (sherd.tensor.ragged.redistribute_to)"
    elif isinstance(value, DTensor):
        other = f"a DTensor of shape {tuple(value.shape)} with {value.placements}"
        remedy = "cut it in the same way first (sherd.tensor.ragged.redistribute_to)"
        if all(each.is_replicate() for each in value.placements):  # what an optimizer of matrices has reduced
            remedy = f"give an optimizer of full matrices placement Owned(), or {remedy}"
        if layout.owner is not None and layout.shape == tuple(value.shape):
            remedy = (
                "a full gradient (gradient=Owned(), and what sherd.Muon makes of placements by default) is stepped by "
                f"sherd.Muon or sherd.MatrixOptimizer; for another optimizer shard with placement=Shard(0); or {remedy}"
            )
    else:
        other = f"a plain tensor of shape {tuple(value.shape)}"
        remedy = "cut it in the same way first (sherd.tensor.ragged.distribute_ragged); plain scalars may mix"
    return PlacementError(
        f"{name_of(func)}: a ragged tensor of shape {layout.shape} ({layout}) met {other}, whose elements are on "
        f"other ranks; {remedy}, or {WAYS_OUT}"
    )


def unknown(func: Aten, layout: Layout, why: str) -> PlacementError:
    return PlacementError(
        f"{name_of(func)} is not done on a tensor of shape {layout.shape} that is cut as {layout} ({why}); {WAYS_OUT}"
    )


def refuse_plain_out(func: Aten, kwargs: Kwargs, layout: Layout) -> None:
    """Raise if `out` is a plain tensor, into which ranks without elements would write nothing, or another shape."""
    for out in tensors_among([kwargs.get("out")]):
        if not layouts_in((out,), {}):
            raise mixed(func, layout, out)


def common_owner(layouts: Sequence[Layout]) -> int | None:
    """Returns the rank that holds all these tensors unsharded, if one does."""
    first = layouts[0]
    if first.owner is None:
        return None
    same = all(other is first or (other.owner == first.owner and other.shares_ranks_with(first)) for other in layouts)
    return first.owner if same else None


@answers("other")
def on_unsharded(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Compute with the unsharded tensors, on every rank. All ranks of the mesh must call it.

    Raises:
        PlacementError: a plain tensor takes part that is neither a number nor mask or indices, or these choose from a
            tensor that is trained; the `out` is plain; or the tensor itself is to get another shape.
    """
    layout, others = layouts_in(args, kwargs)[0], list(tensors_among((*args, *kwargs.values())))
    refuse_plain_out(func, kwargs, layout)
    if torch.Tag.inplace_view in func.tags:
        raise unknown(func, layout, "it gives the tensor itself another shape; use the view that is no in-place one")
    if any(map(is_index, others)):
        if torch.is_grad_enabled() and any(each.requires_grad for each in others):
            raise unknown(func, layout, "ranks may look up rows of their own in a tensor that is trained")
    elif plain := [each for each in others if not hasattr(each, "placements") and lone_value(each) is None]:
        raise mixed(func, layout, plain[0])
    return on_full_values(func, args, kwargs)
