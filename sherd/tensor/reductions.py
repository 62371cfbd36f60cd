"""Reductions of a ragged tensor to one value (sums, norms, extrema, tests), and norms of a tensor in chunks.

Each rank reduces its run; one all-reduce over each mesh axis that shards the tensor joins the ranks' values
(`sherd.tensor.reduction_table`). Replicas have the same value already. The answer is a replicated DTensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from sherd._torch import local_tensor, spec_of
from sherd.comm.mesh import sums_in_order
from sherd.tensor.elementwise import on_runs
from sherd.tensor.exact_sums import ExactSum
from sherd.tensor.gather import counted_here
from sherd.tensor.operands import layouts_in, local_of, lone_value, on_unsharded, unknown
from sherd.tensor.optimizers import by_kind
from sherd.tensor.placement import Layout, Places, layout_of
from sherd.tensor.reduction_table import (
    ALL,
    ANY,
    LARGEST,
    PRODUCT,
    SMALLEST,
    SUM,
    ReductionRow,
    local_norms,
    norm_of_order,
    sum_dtype,
)
from sherd.tensor.replicated import known, known_scalars
from sherd.tensor.sharded import OwnDTensor, ShardedDTensor, by_torch, places_at
from sherd.tensor.table import RAGGED, SHARDED, Args, Aten, Kwargs, answers

OfAll = Callable[[Aten, torch.Tensor, Layout, Kwargs], torch.Tensor]


def answers_for_all(*names: str) -> Callable[[OfAll], OfAll]:
    """Let a function reduce all elements: from this rank's run, the layout and the keywords to the value."""

    def enter(reduce: OfAll) -> OfAll:
        @answers(*names)
        def operation(func: Aten, args: Args, kwargs: Kwargs) -> object:
            tensor, *rest = args
            layout = layout_of(spec_of(tensor))
            options = dict(zip(("dim", "keepdim"), rest, strict=False)) | kwargs  # count_nonzero has no keepdim
            if options.get("out") is not None:
                raise unknown(func, layout, "out= of a reduction")
            dim = options.get("dim")
            if dim == [] and func.name() in ("aten::all.dims", "aten::any.dims"):
                return on_runs(func, args, kwargs)  # an empty list means no dim to these two, and all dims to others
            # max.dim and min.dim also return indices.
            if func.name() in ("aten::max.dim", "aten::min.dim") or not _covers(dim, layout):
                return on_unsharded(func, args, kwargs)  # a reduction over some dims gives more than one value
            _require_accepted(func, tensor, rest, kwargs)
            return _answer(reduce(func, local_tensor(tensor), layout, kwargs), layout, bool(options.get("keepdim")))

        return reduce

    return enter


def _covers(dim: int | Sequence[int] | None, layout: Places) -> bool:
    """Returns True if `dim` is all dims of a tensor, or None or empty, which stand for all."""
    ndim = len(layout.shape)
    dims = range(ndim) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    return {number % ndim if ndim else 0 for number in dims} >= set(range(ndim))


_accepted: set[tuple[Aten, int, torch.dtype, torch.device, str]] = set()


def _require_accepted(func: Aten, tensor: torch.Tensor, rest: Sequence[object], kwargs: Kwargs) -> None:
    """Raise torch's error for these arguments, also on ranks that have nothing to reduce.

    Otherwise those ranks would wait for the ranks that raise (test_what_torch_refuses_is_refused_on_all_ranks). Each
    operation is tried once, on a small tensor, since that takes up to 2 ms. On meta it may raise another error.
    """
    call = func, tensor.ndim, tensor.dtype, tensor.device, repr((rest, kwargs))
    if call not in _accepted:
        func(torch.ones((2,) * tensor.ndim, dtype=tensor.dtype, device=tensor.device), *rest, **kwargs)
        _accepted.add(call)


def _answer(value: torch.Tensor, layout: Places, keepdim: bool) -> DTensor:
    return known(value.reshape((1,) * len(layout.shape)) if keepdim else value, layout)


def _counted(local: torch.Tensor, layout: Places) -> torch.Tensor:
    """Returns this rank's run without the elements that another rank counts."""
    return local if layout.counted is None else torch.cat([local.reshape(-1)[:0], *counted_here(local, layout)])


# Sums


@answers_for_all("sum", "mean", "prod")
def summed(func: Aten, local: torch.Tensor, layout: Layout, kwargs: Kwargs) -> torch.Tensor:
    local = _counted(local, layout)
    name = func.name().removeprefix("aten::").partition(".")[0]
    natural = local.dtype if local.dtype.is_floating_point or local.dtype.is_complex else torch.int64
    dtype = kwargs.get("dtype") or natural
    row = PRODUCT if name == "prod" else SUM
    full = row.over(row.fold(local.to(dtype), dtype=sum_dtype(dtype, local.device)), layout.groups)
    if name == "mean":
        numel = layout.numel
        if layout.is_of_vectors:  # its size is that of the vectors, which have some elements more than once
            numel = int(SUM.over(torch.tensor(local.numel(), device=local.device), layout.groups).item())
        full = full / numel if numel else full * math.nan
    return full.to(dtype)


@answers_for_all("count_nonzero")
def counted_nonzero(func: Aten, local: torch.Tensor, layout: Layout, kwargs: Kwargs) -> torch.Tensor:
    return SUM.over(torch.count_nonzero(_counted(local, layout)), layout.groups)


# Extrema and tests


@answers_for_all("max", "min", "amax", "amin")
def extreme(func: Aten, local: torch.Tensor, layout: Layout, kwargs: Kwargs) -> torch.Tensor:
    if not layout.numel:
        raise IndexError(f"{func.name()}: a tensor of shape {layout.shape} has no largest or smallest element")
    return _extreme(local, LARGEST if "max" in func.name() else SMALLEST, layout)


def _extreme(local: torch.Tensor, row: ReductionRow, layout: Places) -> torch.Tensor:
    if local.is_complex():  # torch raises only on ranks that have elements
        raise NotImplementedError(f"{local.dtype} numbers have no largest or smallest; compare their abs()")
    dtype = sum_dtype(local.dtype, local.device)
    value = row.fold(local).to(dtype) if local.numel() else row.nothing(dtype, local.device)
    return row.over(value, layout.groups).to(local.dtype)


@SHARDED.answers("_foreach_max")
@RAGGED.answers("_foreach_max")
def maxima_of_list(func: Aten, args: Args, kwargs: Kwargs) -> object:
    def of_shards(func: Aten, args: Args, kwargs: Kwargs) -> list[DTensor]:
        shards = zip(map(local_tensor, args[0]), map(places_at, args[0]), strict=True)
        return [known(_extreme(local, LARGEST, places), places) for local, places in shards]

    return by_kind(of_shards, func, args, kwargs)


@answers_for_all("all", "any")
def tested(func: Aten, local: torch.Tensor, layout: Layout, kwargs: Kwargs) -> torch.Tensor:
    row, value = (ANY, local.any()) if func.name().startswith("aten::any") else (ALL, local.all())
    return row.over(value.to(torch.int32), layout.groups).to(torch.uint8 if local.dtype == torch.uint8 else torch.bool)


@answers("equal", "allclose")
def same_values(func: Aten, args: Args, kwargs: Kwargs) -> bool:
    """Answer `torch.equal` and `torch.allclose` alike on all ranks."""
    layout, *others = layouts_in(args, {})
    if not all(map(layout.same_as, others)):  # a rank's runs of the tensors are not of the same elements
        return bool(func(*(each.full_tensor() for each in args[:2]), *args[2:], **kwargs))
    answer = func(*(local_of(value, layout, func) for value in args), **kwargs)
    return bool(ALL.over(torch.tensor(int(answer), dtype=torch.int32, device=layout.device), layout.groups).item())


# Norms


@SHARDED.answers("linalg_vector_norm", "norm")
@answers("linalg_vector_norm", "norm")
def norm(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Returns the p-norm of all elements.

    torch's norm of a DTensor is reduced by its first reader, and `item()` reads one rank's part of an infinity norm.
    """
    tensor, *rest = args
    places = places_at(tensor)
    options = dict(zip(("ord", "dim", "keepdim", "dtype"), rest, strict=False)) | kwargs
    if func.name() == "aten::norm.ScalarOpt_dtype":
        options = {"ord": rest[0], "dtype": rest[1] if len(rest) > 1 else kwargs["dtype"]}
    if options.get("out") is not None or not _covers(options.get("dim") or None, places):
        if isinstance(tensor, ShardedDTensor):
            return by_torch(func, args, kwargs)
        if options.get("out") is not None:
            raise unknown(func, layout_of(spec_of(tensor)), "out= of a reduction")
        return on_unsharded(func, args, kwargs)
    power = options.get("ord", options.get("p"))
    _require_accepted(func, tensor, rest, kwargs)
    (value,) = norms([tensor], 2.0 if power is None else float(power), options.get("dtype"), places)
    return _answer(value, places, bool(options.get("keepdim")))


@SHARDED.answers("_foreach_norm")
@RAGGED.answers("_foreach_norm")
def norms_of_list(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Returns the p-norm of each tensor. Tensors sharded over the same mesh axes share one all-reduce per axis."""

    def of_shards(func: Aten, args: Args, kwargs: Kwargs) -> list[DTensor]:
        tensors, *rest = args
        options = dict(zip(("ord", "dtype"), rest, strict=False)) | kwargs
        answers: dict[int, DTensor] = {}
        for layout, indices in _by_axes(tensors).items():
            together = tensors if len(indices) == len(tensors) else [tensors[index] for index in indices]
            values = norms(together, float(options.get("ord", 2)), options.get("dtype"), layout)
            answers.update(zip(indices, known_scalars(values, layout), strict=True))
        return [answers[index] for index in range(len(tensors))]

    return by_kind(of_shards, func, args, kwargs)


def _by_axes(tensors: Sequence[OwnDTensor]) -> dict[Places, list[int]]:
    """Returns the indices of tensors that are sharded over the same mesh axes, by the places of the first of them."""
    places = list(map(places_at, tensors))
    by_axes: dict[tuple[DeviceMesh, tuple[int, ...]], Places] = {}
    leaders = {each: by_axes.setdefault((each.mesh, each.joined_axes), each) for each in dict.fromkeys(places)}
    indices: dict[Places, list[int]] = {leader: [] for leader in by_axes.values()}
    for index, each in enumerate(places):
        indices[leaders[each]].append(index)
    return indices


def norms(tensors: Sequence[OwnDTensor], power: float, dtype: torch.dtype | None, layout: Places) -> list[torch.Tensor]:
    """Returns the p-norm of each tensor in `dtype` (None: its own); all are sharded over the same axes as `layout`."""
    locals_ = list(map(local_tensor, tensors))
    if any(places.is_of_vectors for places in set(map(places_at, tensors))):
        locals_ = [_counted(local, places_at(each)) for local, each in zip(locals_, tensors, strict=True)]
    for given in {local.dtype for local in locals_}:
        taken = dtype or given
        if not (taken.is_floating_point or taken.is_complex):
            # It raises, which it does below only on ranks that have elements.
            torch.linalg.vector_norm(torch.ones(1, dtype=given), dtype=dtype)
    locals_ = locals_ if dtype is None else [local.to(dtype) for local in locals_]
    if power in (1.0, 2.0) and sums_in_order(layout.mesh):
        return _exact_norms(locals_, int(power), layout)
    dtypes = {local.dtype for local in locals_}
    row = norm_of_order(power)
    if len(dtypes) == 1 and all(local.numel() for local in locals_):
        local_parts = local_norms(locals_, power, foreach=True)
    else:
        local_parts = [
            local_norms([local], power, foreach=False)[0]
            if local.numel()
            else row.nothing(local.dtype.to_real(), local.device)
            for local in locals_
        ]
    joint = row.over(torch.stack(local_parts).to(sum_dtype(torch.float32, locals_[0].device)), layout.groups)
    if len(dtypes) == 1:
        return list(joint.to(dtypes.pop().to_real()).unbind())
    return [value.to(local.dtype.to_real()) for value, local in zip(joint.unbind(), locals_, strict=True)]


def _exact_norms(locals_: Sequence[torch.Tensor], power: int, layout: Places) -> list[torch.Tensor]:
    device = locals_[0].device
    largest = [each.abs().amax() if each.numel() else torch.zeros((), device=device) for each in locals_]
    exact = ExactSum(LARGEST.over(torch.stack([each.double() for each in largest]), layout.groups) ** power)
    parts = torch.stack([exact.parts([each], power, index) for index, each in enumerate(locals_)])
    values = exact.total(SUM.over(parts, layout.groups)) ** (1 / power)
    return [value.to(local.dtype.to_real()) for value, local in zip(values.unbind(), locals_, strict=True)]


# Gradient scaling


@SHARDED.answers("_amp_foreach_non_finite_check_and_unscale_")
@RAGGED.answers("_amp_foreach_non_finite_check_and_unscale_")
def unscaled(func: Aten, args: Args, kwargs: Kwargs) -> None:
    """Unscale this rank's shards; `found_inf` is set on all ranks if one rank sets it."""

    def on_shards(func: Aten, args: Args, kwargs: Kwargs) -> None:
        shards, found_inf, inverse = args
        for layout, indices in _by_axes(shards).items():
            found_here = torch.zeros_like(found_inf)
            func([local_tensor(shards[index]) for index in indices], found_here, inverse)
            torch.maximum(found_inf, ANY.over(found_here, layout.groups), out=found_inf)

    grads, *numbers = args
    plain = [number if one is None else one for number in numbers for one in [lone_value(number)]]
    by_kind(on_shards, func, (grads, *plain), kwargs)
