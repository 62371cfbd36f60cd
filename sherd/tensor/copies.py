"""What do operations do that bring other values into a ragged tensor: copies, fresh tensors, random numbers?"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from sherd._torch import local_tensor, spec_of
from sherd.errors import PlacementError
from sherd.tensor.elementwise import wrapped
from sherd.tensor.gather import piece_of
from sherd.tensor.operands import WAYS_OUT, layouts_in, local_of, lone_value, mixed
from sherd.tensor.owned import common_owner, on_owner
from sherd.tensor.placement import Layout, layout_of
from sherd.tensor.ragged import RaggedDTensor
from sherd.tensor.table import Args, Kwargs, answers, name_of


@answers("copy_")
def copy_into(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Copy what has the same layout, or this rank's run of a tensor that every rank holds whole, or one value."""
    target, source, *rest = args
    if not isinstance(target, RaggedDTensor):
        raise PlacementError(f"{name_of(func)}: a ragged tensor cannot be copied into a tensor that is not; {WAYS_OUT}")
    layout = layout_of(spec_of(target))
    if isinstance(source, RaggedDTensor) and common_owner(layouts_in(args, {})) is not None:
        return on_owner(func, args, kwargs)
    func(local_tensor(target), _run_of(source, layout, func), *rest, **kwargs)
    return target


def _run_of(source: torch.Tensor, layout: Layout, func: Any) -> torch.Tensor:
    """This rank's run of what is copied; a DTensor of torch, which `load_state_dict` may bring, is gathered for it."""
    one = lone_value(source)
    if one is not None:
        return one
    if isinstance(source, RaggedDTensor):
        run: torch.Tensor = local_of(source, layout, func)
        return run
    if tuple(source.shape) != layout.shape:
        raise mixed(func, layout, source)
    if isinstance(source, DTensor) and source.device_mesh != layout.mesh:
        raise mixed(func, layout, source)
    return piece_of(source.full_tensor() if isinstance(source, DTensor) else source, layout)


@answers("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros")
def fresh(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A tensor of the same shape in the same layout; one of another shape only at an owner."""
    tensor, size, *rest = args
    (layout, *_) = layouts_in(args, kwargs)
    if tuple(size) != layout.shape or layout.strides:
        return on_owner(func, args, kwargs)
    local = local_tensor(tensor)
    if "strided" in func.name():
        rest = [torch.empty(local.shape, device="meta").stride(), *rest[1:]]
    return wrapped(func(local, layout.local_shape, *rest, **kwargs), layout)


@answers("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_")
def random_in_place(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The numbers that the whole tensor would get: each rank draws them all and keeps its run.

    So ranks that share a seed get what one process would. Replicas get the numbers of the first.
    """
    tensor, *rest = args
    _draw(func, tensor, tensor, rest, kwargs)
    return tensor


@answers("bernoulli", "rand_like", "randint_like", "randn_like")
def random_like(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The run of the numbers that a whole tensor of this shape would get."""
    tensor, *rest = args
    layout = layout_of(spec_of(tensor))
    dtype = kwargs.get("dtype") or tensor.dtype
    made = wrapped(torch.empty_like(local_tensor(tensor), dtype=dtype), layout)
    _draw(func, made, tensor, rest, kwargs)
    return made


def _draw(func: Any, target: RaggedDTensor, like: RaggedDTensor, rest: list[Any], kwargs: Kwargs) -> None:
    layout = layout_of(spec_of(target))
    if any(isinstance(each, torch.Tensor) for each in rest):
        raise PlacementError(f"{name_of(func)} with a tensor of probabilities is not known here; {WAYS_OUT}")
    if func.name() == "aten::bernoulli":
        raise PlacementError(f"{name_of(func)} reads probabilities element by element; {WAYS_OUT}")
    local = local_tensor(target)
    full = torch.empty(layout.shape, dtype=like.dtype, device=local.device)
    drawn = func(full, *rest, **kwargs)
    local.copy_(piece_of(drawn, layout))
    for axis in layout.copied_axes:
        dist.broadcast(local, group=layout.mesh.get_group(axis), group_src=0)
