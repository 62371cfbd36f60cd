"""How do sums, norms, extrema and tests over a whole ragged tensor become one value that every rank knows?

Each rank reduces its run, one all-reduce over each axis that shards the tensor joins them; replicas know the same
already. The answer is a replicated DTensor. Runs without elements give the neutral value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from sherd._torch import local_tensor, spec_of
from sherd.comm.failures import named
from sherd.tensor.gather import counted_here, gather
from sherd.tensor.lists import by_kind
from sherd.tensor.operands import layouts_in, local_of, lone_value, unknown
from sherd.tensor.owned import on_owner
from sherd.tensor.placement import Layout, layout_of
from sherd.tensor.ragged import RaggedDTensor
from sherd.tensor.replicated import known
from sherd.tensor.table import Args, Kwargs, answers

Reduce = dist.ReduceOp


def joined(value: torch.Tensor, how: Any, layout: Layout) -> torch.Tensor:
    """`value` joined over all ranks that hold different elements, in place: one axis after the other."""
    for group in layout.groups:
        with named("a reduction of a RaggedDTensor", group):
            dist.all_reduce(value, op=how, group=group)
    return value


def wide(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type that the ranks' parts of a sum are kept in, wide enough to lose nothing more than one rank would."""
    if dtype.is_complex:
        return torch.complex128 if device.type != "mps" else torch.complex64
    if dtype.is_floating_point:
        return torch.float64 if device.type != "mps" else torch.float32
    return torch.int64


# Sums


@answers("sum", "mean", "prod")
def summed(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """sum, mean or prod over all elements."""
    asked = _read(func, args, kwargs, ("dim", "keepdim"))
    if asked is None:
        return on_owner(func, args, kwargs)
    local, layout, keepdim = asked
    local = _counted(local, layout)
    kind = func.name().removeprefix("aten::").partition(".")[0]
    natural = local.dtype if local.dtype.is_floating_point or local.dtype.is_complex else torch.int64
    dtype = kwargs.get("dtype") or natural
    if kind == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise RuntimeError(f"mean(): expected a floating point or complex dtype, found {dtype}")
    part = local.to(dtype)
    wider = wide(dtype, local.device)
    full = (
        joined(torch.prod(part, dtype=wider), Reduce.PRODUCT, layout) if kind == "prod" else _sum(part, wider, layout)
    )
    if kind == "mean":
        numel = _numel(local, layout)
        full = full / numel if numel else full * math.nan
    return _answer(full.to(dtype), layout, keepdim)


def _sum(part: torch.Tensor, dtype: torch.dtype, layout: Layout) -> torch.Tensor:
    return joined(torch.sum(part, dtype=dtype), Reduce.SUM, layout)


@answers("count_nonzero")
def counted(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """How many elements are not zero."""
    asked = _read(func, args, kwargs, ("dim",))
    if asked is None:
        return on_owner(func, args, kwargs)
    local, layout, _ = asked
    return _answer(joined(torch.count_nonzero(_counted(local, layout)), Reduce.SUM, layout), layout, False)


def _counted(local: torch.Tensor, layout: Layout) -> torch.Tensor:
    """This rank's run, without what another rank counts."""
    if layout.counted is None:
        return local
    parts = counted_here(local, layout)
    return torch.cat(parts) if parts else local.reshape(-1)[:0]


def _numel(counted: torch.Tensor, layout: Layout) -> int:
    """How many elements all ranks count, of which this one does `counted`."""
    if not layout.is_of_vectors:
        return layout.numel
    return int(joined(torch.tensor(counted.numel(), device=counted.device), Reduce.SUM, layout).item())


# Extrema and tests


@answers("max", "min", "amax", "amin")
def extreme(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The largest or smallest element; nan if there is one."""
    if func.name() in ("aten::max.dim", "aten::min.dim"):
        return on_owner(func, args, kwargs)
    asked = _read(func, args, kwargs, ("dim", "keepdim"))
    if asked is None:
        return on_owner(func, args, kwargs)
    local, layout, keepdim = asked
    if not layout.numel:
        raise IndexError(f"{func.name()}: a tensor of shape {layout.shape} has no largest or smallest element")
    largest = "max" in func.name()
    value = _extreme(local, largest, layout)
    return _answer(value, layout, keepdim)


def _extreme(local: torch.Tensor, largest: bool, layout: Layout) -> torch.Tensor:
    """One all-reduce of (value, is there a nan): what a maximum makes of nan differs between backends."""
    dtype = local.dtype
    wider = wide(dtype, local.device)
    lowest = -math.inf if dtype.is_floating_point else torch.iinfo(torch.int64).min + 1
    pair = torch.empty(2, dtype=wider, device=local.device)
    pair[0], pair[1] = lowest, 0
    if local.numel():
        found = (local.amax() if largest else local.amin()).to(wider)
        is_nan = torch.isnan(found)
        pair[0] = torch.where(is_nan, pair[0], found if largest else -found)
        pair[1] = is_nan.to(wider)
    joined(pair, Reduce.MAX, layout)
    value = pair[0] if largest else -pair[0]
    return torch.where(pair[1] > 0, math.nan, value).to(dtype) if dtype.is_floating_point else value.to(dtype)


@answers("all", "any")
def tested(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Whether all elements, or any, are true."""
    asked = _read(func, args, kwargs, ("dim", "keepdim"))
    if asked is None:
        return on_owner(func, args, kwargs)
    local, layout, keepdim = asked
    is_any = func.name().startswith("aten::any")
    flag = (local.any() if is_any else local.all()).to(torch.int32)
    true = joined(flag, Reduce.MAX if is_any else Reduce.MIN, layout).bool()
    return _answer(true.to(torch.uint8) if local.dtype == torch.uint8 else true, layout, keepdim)


@answers("equal")
def same_values(func: Any, args: Args, kwargs: Kwargs) -> bool:
    """`torch.equal`: on all ranks the same answer."""
    return _agreed(func(*_locals(func, args)), func, args)


@answers("allclose")
def close_values(func: Any, args: Args, kwargs: Kwargs) -> bool:
    """`torch.allclose`: on all ranks the same answer."""
    return _agreed(torch.allclose(*_locals(func, args), **kwargs), func, args)


def _locals(func: Any, args: Args) -> list[Any]:
    layout = layouts_in(args, {})[0]
    return [local_of(each, layout, func) for each in args]


def _agreed(here: bool, func: Any, args: Args) -> bool:
    layout = layouts_in(args, {})[0]
    return bool(joined(torch.tensor(int(here), dtype=torch.int32, device=layout.device), Reduce.MIN, layout).item())


@answers("_local_scalar_dense")
def item(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The value of a tensor of one element, on every rank."""
    (tensor,) = args
    return gather(local_tensor(tensor), layout_of(spec_of(tensor))).item()


# Norms


@answers("linalg_vector_norm", "norm")
def norm(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The p-norm over all elements."""
    tensor, *rest = args
    is_norm = func.name().startswith("aten::norm")
    given = dict(zip(("ord", "dim", "keepdim", "dtype"), rest, strict=False)) | kwargs
    if func.name() == "aten::norm.ScalarOpt_dtype":
        given = {"ord": rest[0], "dtype": rest[1] if len(rest) > 1 else kwargs["dtype"]}
    layout = layout_of(spec_of(tensor))
    power = given.get("ord", given.get("p"))
    power = 2.0 if power is None else float(power)
    if not _covers(given.get("dim") or None, layout) or (is_norm and given.get("out") is not None):
        return on_owner(func, args, kwargs)
    local = _counted(local_tensor(tensor), layout)
    (value,) = norms([local if given.get("dtype") is None else local.to(given["dtype"])], power, layout)
    return _answer(value, layout, bool(given.get("keepdim")))


@answers("_foreach_norm")
def norms_of_list(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The p-norm of each; one all-reduce per mesh axis for those that are sharded over the same ones."""
    return by_kind(_norms_of_runs, func, args, kwargs)


def _norms_of_runs(func: Any, args: Args, kwargs: Kwargs) -> list[DTensor]:
    tensors, *rest = args
    given = dict(zip(("ord", "dtype"), rest, strict=False)) | kwargs
    dtype = given.get("dtype")
    values: list[Any] = [None] * len(tensors)
    for layout, indices in _by_group(tensors).items():
        locals_ = [_counted(local_tensor(each), layout_of(spec_of(each))) for each in (tensors[i] for i in indices)]
        found = norms(
            [each if dtype is None else each.to(dtype) for each in locals_], float(given.get("ord", 2)), layout
        )
        for index, value in zip(indices, found, strict=True):
            values[index] = known(value, layout)
    return values


@answers("_foreach_max")
def maxima_of_list(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The largest element of each."""

    def of_runs(func: Any, args: Args, kwargs: Kwargs) -> list[DTensor]:
        layouts = [layout_of(spec_of(each)) for each in args[0]]
        return [
            known(_extreme(local_tensor(each), True, layout), layout)
            for each, layout in zip(args[0], layouts, strict=True)
        ]

    return by_kind(of_runs, func, args, kwargs)


def _by_group(tensors: Sequence[RaggedDTensor]) -> dict[Layout, list[int]]:
    """Which tensors are sharded over the same mesh axes, by the layout of the first of them."""
    leaders: dict[tuple[Any, tuple[int, ...]], Layout] = {}
    found: dict[Layout, list[int]] = {}
    for index, each in enumerate(tensors):
        layout = layout_of(spec_of(each))
        leader = leaders.setdefault((layout.mesh, layout.joined_axes), layout)
        found.setdefault(leader, []).append(index)
    return found


def norms(locals_: Sequence[torch.Tensor], power: float, layout: Layout) -> list[torch.Tensor]:
    """The p-norm of each tensor, of which `locals_` are this rank's runs; one all-reduce per axis."""
    dtype = wide(torch.float32, locals_[0].device)
    joint = torch.stack(list(_norms_here(locals_, power))).to(dtype)
    if power == math.inf:
        joint = _with_nan(joint, Reduce.MAX, layout)
    elif power == -math.inf:
        joint = _with_nan(joint, Reduce.MIN, layout)
    elif power == 0:
        joint = joined(joint, Reduce.SUM, layout)
    else:
        joint = joined(joint**power, Reduce.SUM, layout) ** (1 / power)
    results: list[Any] = [None] * len(locals_)
    for kind in {each.dtype.to_real() for each in locals_}:
        for index, value in enumerate(joint.to(kind).unbind()):
            if locals_[index].dtype.to_real() is kind:
                results[index] = value
    return results


def _norms_here(locals_: Sequence[torch.Tensor], power: float) -> Sequence[torch.Tensor]:
    """The norms of this rank's runs; those of halves in a wider type, as they are yet to be added."""
    if len({each.dtype for each in locals_}) == 1 and all(each.numel() for each in locals_):
        dtype = torch.float32 if locals_[0].dtype in _HALVES else None
        found: Sequence[torch.Tensor] = torch._foreach_norm(list(locals_), power, dtype=dtype)
        return found
    return [_norm_here(each, power) for each in locals_]


_HALVES = (torch.bfloat16, torch.float16)


def _norm_here(local: torch.Tensor, power: float) -> torch.Tensor:
    if local.numel():
        dtype = torch.float32 if local.dtype in _HALVES else None
        found: torch.Tensor = torch.linalg.vector_norm(local, power, dtype=dtype)
        return found
    neutral = math.inf if power < 0 else 0.0
    return torch.full((), neutral, dtype=local.dtype.to_real(), device=local.device)


def _with_nan(values: torch.Tensor, how: Any, layout: Layout) -> torch.Tensor:
    """Largest or smallest of each, nan where a rank has nan."""
    is_nan = joined(torch.isnan(values).to(values.dtype), Reduce.MAX, layout)
    filled = torch.where(torch.isnan(values), torch.zeros_like(values), values)
    full: torch.Tensor = torch.where(is_nan > 0, math.nan, joined(filled, how, layout))
    return full


# Gradient scaling


@answers("_amp_foreach_non_finite_check_and_unscale_")
def unscaled(func: Any, args: Args, kwargs: Kwargs) -> None:
    """Unscale this rank's runs; `found_inf` is set on all ranks when it is on one."""
    grads, found_inf, inverse_scale = args

    def on_runs(func: Any, args: Args, kwargs: Kwargs) -> None:
        runs, found, inverse = args
        for layout, indices in _by_group(runs).items():
            found_here = torch.zeros_like(found)
            func([local_tensor(runs[index]) for index in indices], found_here, inverse)
            torch.maximum(found, joined(found_here, Reduce.MAX, layout), out=found)

    found, inverse = _plain(found_inf), _plain(inverse_scale)
    by_kind(on_runs, func, (grads, found, inverse), kwargs)


def _plain(value: torch.Tensor) -> torch.Tensor:
    one = lone_value(value)
    return value if one is None else one


# What was asked for


def _read(func: Any, args: Args, kwargs: Kwargs, names: Sequence[str]) -> tuple[torch.Tensor, Layout, bool] | None:
    """This rank's run, its layout and `keepdim`; None when not all elements are reduced to one."""
    tensor, *rest = args
    layout = layout_of(spec_of(tensor))
    given = dict(zip(names, rest, strict=False)) | kwargs
    if given.get("out") is not None:
        raise unknown(func, layout, "out= of a reduction")
    dim = given.get("dim")
    dims = None if dim is None or dim == [] else [dim] if isinstance(dim, int) else list(dim)
    if not _covers(dims, layout):
        return None
    return local_tensor(tensor), layout, bool(given.get("keepdim"))


def _covers(dims: Sequence[int] | None, layout: Layout) -> bool:
    ndim = len(layout.shape)
    return dims is None or {dim % ndim if ndim else 0 for dim in dims} >= set(range(ndim))


def _answer(value: torch.Tensor, layout: Layout, keepdim: bool) -> DTensor:
    return known(value.reshape((1,) * len(layout.shape)) if keepdim else value, layout)
