"""Operations that treat each element by itself, done on this rank's run or chunk.

Copies, fresh tensors and random numbers are here too: they bring other values into a run.
"""

from __future__ import annotations

import functools
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from sherd._torch import dtensor_spec, local_tensor, spec_of
from sherd.errors import PlacementError
from sherd.layout.placement import Shape
from sherd.layout.runs import Runs
from sherd.tensor.gather import piece_of
from sherd.tensor.operands import (
    broadcasts,
    layouts_in,
    local_of,
    lone_value,
    mixed,
    on_unsharded,
    part_at,
    refuse_plain_out,
    unknown,
)
from sherd.tensor.placement import Layout, layout_of
from sherd.tensor.ragged import RaggedDTensor, as_result
from sherd.tensor.replicated import known
from sherd.tensor.sharded import OwnDTensor, by_torch, full_value_of, places_at, sharded_dtensor
from sherd.tensor.table import (
    SHARDED,
    Args,
    Aten,
    Kwargs,
    Operation,
    answers,
    is_in_place,
    is_index,
    name_of,
    of_kind,
    tensors_among,
    with_changed,
)

# Elementwise operations that torch does not tag as pointwise.
ALSO_ELEMENTWISE = (
    "_conj", "_conj_physical", "_neg_view", "_pin_memory", "_to_copy", "conj", "detach_",
    "empty_like", "fill", "fill_", "full_like", "imag", "is_pinned", "lift_fresh", "masked_fill_", "ones_like",
    "pin_memory", "real", "record_stream", "resolve_conj", "resolve_neg", "where", "zero", "zero_", "zeros_like",
)  # fmt: skip


def elementwise(func: Aten, args: Args, kwargs: Kwargs, otherwise: Operation) -> object:
    """Compute on this rank's shard, if all operands have the same places or are one value. Else `otherwise` answers.

    A plain mask is the same on all ranks, and so is what is copied into a shard: each rank takes its part.
    """
    first = next((value for value in args if isinstance(value, OwnDTensor)), None)
    if first is None or (kwargs and any(value is not first for value in tensors_among(kwargs.values()))):
        return otherwise(func, args, kwargs)
    places = places_at(first)
    shards: list[object] = []
    for value in args:
        shard = part_at(value, places)
        is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        if shard is None and (is_index(value) or (is_plain and func.name() == "aten::copy_")):
            shard = first.part_of(value.expand(first.shape)) if broadcasts(value.shape, first.shape) else None
        if shard is None and value is not None:
            return otherwise(func, args, kwargs)
        shards.append(shard)
    memory_format = kwargs.get("memory_format") or torch.preserve_format
    if places.strides is None:
        keeps_order = memory_format in (torch.preserve_format, torch.contiguous_format)
    else:
        keeps_order = memory_format is torch.preserve_format
    # In place on a tensor that is not sharded, this rank's shard alone would be written.
    if not keeps_order or (args[0] is not first and is_in_place(func)):
        return otherwise(func, args, kwargs)
    result = func(*shards, **with_changed(kwargs, DTensor, local_tensor))
    if "out" in kwargs:
        return first
    return args[0] if result is shards[0] else with_changed(result, torch.Tensor, first.around)


@SHARDED.answers("detach", "alias")
@answers("detach", "alias")
def outside_autograd(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Returns a tensor around the same local one, so that its version tells of writes to `tensor.data.to_local()`."""
    local = local_tensor(args[0])
    return args[0].around(local if type(local) is torch.Tensor else func(local))


SHARDED.answers("pointwise", *ALSO_ELEMENTWISE)(functools.partial(elementwise, otherwise=by_torch))


@answers("pointwise", *ALSO_ELEMENTWISE)
def on_runs(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Compute on this rank's run; tensors of other owners are brought to it."""
    return elementwise(func, args, kwargs, _on_runs)


def _on_runs(func: Aten, args: Args, kwargs: Kwargs) -> object:
    layouts = layouts_in(args, kwargs)
    layout = layouts[0]
    if "out" in kwargs:
        refuse_plain_out(func, kwargs, layout)
    if is_in_place(func) and not isinstance(args[0], RaggedDTensor):
        raise mixed(func, layout, args[0])
    if kwargs.get("memory_format") not in (None, torch.preserve_format):
        # `model.to(memory_format=torch.channels_last)`: a run has consecutive elements, in the order of the dims.
        kwargs = {**kwargs, "memory_format": torch.contiguous_format}
    local_args = [local_of(value, layout, func) for value in args]
    result = func(*local_args, **{key: local_of(value, layout, func) for key, value in kwargs.items()})
    if "out" in kwargs:
        return kwargs["out"]
    if result is local_args[0]:
        return args[0]
    return with_changed(result, torch.Tensor, lambda local: as_result(local, layout))


@answers("set_")
def given_other_memory(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Refuse other memory: gathers read the tensor's own."""
    raise unknown(func, layouts_in(args, kwargs)[0], "a run keeps its memory; write into it, tensor.data = value")


@answers("view", "_unsafe_view", "expand", "reshape", "squeeze", "unsqueeze")
def same_view(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Returns a view of all elements in their order, or as another dtype of the same size."""
    tensor = args[0]
    (layout, *_) = layouts_in(args, kwargs)
    if func.name() == "aten::view.dtype":
        same_size = args[1].itemsize == tensor.dtype.itemsize
        return on_runs(func, args, kwargs) if same_size else on_unsharded(func, args, kwargs)
    local = local_tensor(tensor)
    shape = tuple(func(torch.empty(layout.shape, device="meta"), *args[1:], **kwargs).shape)
    if shape == layout.shape:
        return as_result(local.view_as(local), layout)
    has_no_runs = layout.owner is not None or layout.cut.shape != layout.shape
    if has_no_runs or prod(shape) != layout.numel:
        return on_unsharded(func, args, kwargs)
    cut = Runs(shape, layout.cut.num_ranks, layout.cut.first, layout.cut.ends)
    return _recut(local, layout, cut, shape)


@SHARDED.answers("resize_")
def resized(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Returns the tensor if it has the wanted size already, as with the `out` of a function that fills it."""
    return args[0] if tuple(args[1]) == tuple(args[0].shape) else by_torch(func, args, kwargs)


@answers("index_put_")
def filled_where(func: Aten, args: Args, kwargs: Kwargs, otherwise: Operation = on_unsharded) -> object:
    """Set `tensor[mask] = number`, for a mask with the tensor's places; `otherwise` answers other indices."""
    tensor, indices, value, *accumulate = args
    one, index = lone_value(value), indices[0] if len(indices) == 1 else None
    if one is None or index is None or any(accumulate):
        return otherwise(func, args, kwargs)
    if isinstance(tensor, OwnDTensor) and index.dtype == torch.bool and index.ndim <= tensor.ndim:
        if index.shape != tensor.shape:  # a mask of the first dims: of rows
            index = (full_value_of(index) if isinstance(index, DTensor) else index).reshape(
                *index.shape, *(1,) * (tensor.ndim - index.ndim)
            )
        return tensor.masked_fill_(index, one.to(tensor.dtype).reshape(()))
    if _is_of_a_scalar(tensor, index):
        return tensor.fill_(one.reshape(())) if index.numel() else tensor
    return otherwise(func, args, kwargs)


@answers("index_fill_")
def filled_at(func: Aten, args: Args, kwargs: Kwargs, otherwise: Operation = on_unsharded) -> object:
    """Set the places of an index to a number. torch 2.15 sets a scalar by its mask this way."""
    tensor, _, index, value = args
    if _is_of_a_scalar(tensor, index):
        return tensor.fill_(value) if index.numel() else tensor
    return otherwise(func, args, kwargs)


def _is_of_a_scalar(tensor: torch.Tensor, index: torch.Tensor) -> bool:
    """Returns whether `index` is the mask of a scalar, as torch makes it: the index 0, or none, on all ranks."""
    return tensor.shape == (1,) and not isinstance(index, DTensor)


SHARDED.answers("index_put_")(functools.partial(filled_where, otherwise=by_torch))
SHARDED.answers("index_fill_")(functools.partial(filled_at, otherwise=by_torch))


# Complex tensors as pairs of real numbers and back, as optimizers of torch step complex parameters
#
# z (4,) complex, in runs       as pairs (4, 2)
# rank 0 | z0 z1 z2 |           | re0 im0 re1 im1 re2 im2 |
# rank 1 | z3 |                 | re3 im3 |


@answers("view_as_real")
def as_pairs(func: Aten, args: Args, kwargs: Kwargs) -> object:
    layout = layout_of(spec_of(args[0]))
    cut = layout.cut
    at_owner = layout.owner is not None
    pairs = Runs((*cut.shape, 2), cut.num_ranks, cut.first, tuple(2 * end for end in cut.ends), cut.by_rows or at_owner)
    return _recut(func(local_tensor(args[0])), layout, pairs, (*layout.shape, 2))


@answers("view_as_complex")
def as_complex(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Returns a view of this rank's run, of half as many elements.

    Raises:
        PlacementError: a pair is cut in two.
    """
    layout = layout_of(spec_of(args[0]))
    cut = layout.cut
    if not cut.shape or cut.shape[-1] != 2 or layout.shape[-1] != 2:
        return on_unsharded(func, args, kwargs)
    if any(end % 2 for end in cut.ends):
        raise unknown(func, layout, "a pair of numbers is on two ranks")
    shape = cut.shape[:-1]
    numbers = Runs(shape, cut.num_ranks, cut.first, tuple(end // 2 for end in cut.ends), cut.by_rows and bool(shape))
    return _recut(func(local_tensor(args[0]).view(-1, 2)), layout, numbers, layout.shape[:-1])


def _recut(local: torch.Tensor, layout: Layout, cut: Runs, shape: Shape) -> RaggedDTensor:
    """Returns `local` as a tensor of `shape` with another cut; on the other mesh axes it keeps the placements."""
    recut = layout.recut(cut, shape, layout.placements)
    return as_result(local.view(recut.local_shape), recut)


@SHARDED.answers("view_as_real")
def chunk_as_pairs(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Returns a view of this rank's chunk."""
    # torch replicates a tensor that is sharded on its last dim, as a vector is, and makes pairs of the copy: Adam would
    # step the copy, and train nothing.
    tensor = args[0]
    local, spec = func(local_tensor(tensor)), spec_of(tensor)
    shape, strides = torch.Size((*tensor.shape, 2)), (*(2 * stride for stride in spec.stride), 1)
    return sharded_dtensor(local, dtensor_spec(spec.mesh, spec.placements, shape, local.dtype, strides))


# Other values


@answers("copy_")
def copy_into(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Copy a tensor of the same layout, this rank's run of a tensor that every rank holds unsharded, or one value."""
    target, source, *rest = args
    if not isinstance(target, RaggedDTensor):
        return _into_other(func, args, kwargs)
    layout = layout_of(spec_of(target))
    source_layouts = layouts_in((source,), {})
    run = local_of(source, layout, func) if source_layouts else lone_value(source)
    if run is None:
        is_dtensor = isinstance(source, DTensor)
        if tuple(source.shape) != layout.shape or (is_dtensor and source.device_mesh != layout.mesh):
            raise mixed(func, layout, source)
        # `load_state_dict` may bring a DTensor of torch, which is gathered.
        run = piece_of(source.full_tensor() if is_dtensor else source, layout)
    func(local_tensor(target), run, *rest, **kwargs)
    return target


@SHARDED.answers("copy_")
def copy_into_chunk(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Copy a tensor of the same places, this rank's chunk of one that every rank holds unsharded, or one value."""
    return (
        elementwise(func, args, kwargs, by_torch) if isinstance(args[0], DTensor) else _into_other(func, args, kwargs)
    )


def _into_other(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Copy a sharded tensor into a plain one, as `load_state_dict` of a plain model does, if this rank holds it all."""
    target, source, *rest = args
    if source.device_mesh.size() > 1 or isinstance(target, DTensor):
        raise PlacementError(
            f"{name_of(func)}: a tensor sharded over ranks cannot be copied into one that is not; take .full_tensor() "
            "of it on every rank, or a full state dict: state_dict() of the wrapper itself, not of a module in it, or "
            "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))"
        )
    return func(target, full_value_of(source), *rest, **kwargs)


@answers("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros")
def fresh(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Returns a tensor of the same shape in the same layout; one of another shape on every rank."""
    tensor, size, *rest = args
    (layout, *_) = layouts_in(args, kwargs)
    local = local_tensor(tensor)
    if tuple(size) != layout.shape:
        return known(func(local, size, *rest, **kwargs), layout)
    if "strided" in func.name():
        rest = [torch.empty(local.shape, device="meta").stride(), *rest[1:]]
    return as_result(func(local, layout.local_shape, *rest, **kwargs), layout)


FILLERS = ("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_")


@answers(*FILLERS, "bernoulli", "rand_like", "randint_like", "randn_like")
@SHARDED.answers("random")
def drawn(func: Aten, args: Args, kwargs: Kwargs) -> object:
    """Draw the numbers of the unsharded tensor on every rank, and keep this rank's shard.

    So ranks that share a seed get the numbers of a single process, and their generators stay alike. (torch's DTensor
    draws the same numbers for every chunk on a CPU.) Replicas get the numbers of the first replica.
    """
    own: OwnDTensor = next(of_kind((*args, *kwargs.values()), OwnDTensor))  # type: ignore[type-abstract]
    places, name = places_at(own), func.name().removeprefix("aten::").partition(".")[0]
    target = kwargs.get("out", args[0] if is_in_place(func) else None)

    def operand(value: DTensor) -> torch.Tensor:
        if value is kwargs.get("out") or (value is args[0] and (name in FILLERS or name.endswith("_like"))):
            device = local_tensor(value).device  # only its form counts
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return full_value_of(value)

    def kept(full: torch.Tensor) -> torch.Tensor:
        if full.shape != own.shape:
            return known(full, places)
        local = own.part_of(full).clone()
        for axis in () if local.is_meta else places.copied_axes:
            dist.broadcast(local, group=places.mesh.get_group(axis), group_src=0)
        return own.around(local)

    full_args, full_kwargs = with_changed((args, kwargs), DTensor, operand)
    result = with_changed(func(*full_args, **full_kwargs), torch.Tensor, kept)
    return result if target is None else target.copy_(result)
