"""Which tensors may meet in one operation, and what does this rank compute with of each?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from sherd._torch import local_tensor, spec_of
from sherd.errors import PlacementError
from sherd.tensor.gather import gather, piece_of
from sherd.tensor.placement import Layout, is_ragged, layout_of
from sherd.tensor.ragged import RaggedDTensor
from sherd.tensor.replicated import ReplicatedDTensor
from sherd.tensor.table import name_of, tensors_among

WAYS_OUT = (
    "use .full_tensor() or .redistribute(placements=[Replicate()]) on every rank to work with the whole tensor, or "
    ".to_local() to work with this rank's piece"
)


def layouts_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Layout]:
    """The layouts of the ragged tensors among the arguments, in order."""
    found = []
    for each in tensors_among((*args, *kwargs.values())):
        if isinstance(each, RaggedDTensor):
            found.append(layout_of(spec_of(each)))
    return found


def local_of(value: Any, layout: Layout, func: Any) -> Any:
    """What this rank computes with in place of `value`: its run of a ragged tensor, a lone value as it is.

    A tensor of the same shape that is whole at another owner is brought here: all ranks must take part.

    Raises:
        PlacementError: the elements of `value` are not where those of `layout` are, or are in pieces elsewhere.
    """
    if isinstance(value, RaggedDTensor):
        other = layout_of(spec_of(value))
        if layout.same_as(other):
            return local_tensor(value)
        if not at_two_owners(layout, other):
            raise mixed(func, layout, value)
        return piece_of(gather(local_tensor(value), other), layout)
    if not isinstance(value, torch.Tensor):
        return value
    one = lone_value(value)
    if isinstance(value, ReplicatedDTensor) and one is None and value.shape == layout.shape:
        return piece_of(local_tensor(value), layout)
    if one is None or not _broadcasts(value.shape, layout.shape):
        raise mixed(func, layout, value)
    return one.reshape(1) if not layout.shape else one


def at_two_owners(layout: Layout, other: Layout) -> bool:
    """Whether two tensors of one shape are whole at one rank each, of the same ranks: a student's and a teacher's. One
    of them then goes to the other's owner, in which all these ranks take part."""
    owned = layout.owner is not None and other.owner is not None and not (layout.strides or other.strides)
    return owned and layout.shape == other.shape and layout.shares_ranks_with(other)


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    ends = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(size in (1, wanted) for size, wanted in ends)


def lone_value(value: torch.Tensor) -> torch.Tensor | None:
    """The one value of a scalar, or of a replicated DTensor that is an expanded scalar; None for other tensors.

    It keeps a dimension if the tensor had one, so that dtypes are promoted as torch would.
    """
    if isinstance(value, DTensor):
        if isinstance(value, RaggedDTensor) or not all(isinstance(each, Replicate) for each in value.placements):
            return None
        local = local_tensor(value)
        is_one = local.numel() == 1 or (local.numel() and all(stride == 0 for stride in local.stride()))
        return (local[(0,) * local.ndim].reshape(1) if local.ndim else local) if is_one else None
    return value if value.ndim == 0 else None


def mixed(func: Any, layout: Layout, value: torch.Tensor) -> PlacementError:
    """The error for a tensor that does not lie where the first ragged one does."""
    if isinstance(value, DTensor) and is_ragged(spec_of(value)):
        what = f"one of shape {tuple(value.shape)} cut as {value.placements} over {value.device_mesh}"
        remedy = "redistribute one of them (sherd.tensor.ragged.redistribute_to)"
    elif isinstance(value, DTensor):
        what = f"a DTensor of shape {tuple(value.shape)} with {value.placements}"
        remedy = "cut it likewise first (sherd.tensor.ragged.redistribute_to)"
    else:
        what = f"a plain tensor of shape {tuple(value.shape)}"
        remedy = "cut it likewise first (sherd.tensor.ragged.distribute_ragged); plain scalars may mix"
    return PlacementError(
        f"{name_of(func)}: a ragged tensor of shape {layout.shape} ({layout}) met {what}, whose elements are on "
        f"other ranks; {remedy}, or {WAYS_OUT}"
    )


def unknown(func: Any, layout: Layout, why: str = "") -> PlacementError:
    """The error for an operation that runs of elements cannot answer."""
    owner = "with placement Owned() each tensor has one owner, which can do any operation"
    if len(layout.splits) and layout.owner is None:
        owner = f"{owner}, if no other axis of {layout.mesh} shards it"
    return PlacementError(
        f"{name_of(func)} is not known for a tensor of shape {layout.shape} that is cut as {layout}"
        f"{f' ({why})' if why else ''}; {WAYS_OUT}; {owner}"
    )
