"""Optimizer state in few bits, as those of torchao and bitsandbytes: its tensors are saved, and put together again.

    in the optimizer    exp_avg: a tensor subclass with codes, one for each element or two, and a scale for each block
    in a checkpoint     exp_avg.codes, exp_avg.scale: vectors, cut between the ranks where the parameter is cut

The optimizer itself says which of its tensors are in blocks (`_new_buffer`), and what is in them (`_subclass_zeros`).
bitsandbytes keeps them apart: `state1` of the parameter's shape, `absmax1` with a scale for each block, and `qmap1`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.optim import Optimizer

from sherd._torch import DTensorSpec
from sherd.checkpoint.catalog import Catalog, OptimizerEntry, StateDict
from sherd.checkpoint.loading import Awaited
from sherd.errors import OptimStateError
from sherd.layout.extent import chunks
from sherd.layout.runs import Runs
from sherd.tensor.optimizers import InBlocks, block_size, has_blocks, in_blocks, of_bitsandbytes
from sherd.tensor.placement import is_ragged, layout_of, ragged_spec
from sherd.tensor.ragged import local_part
from sherd.tensor.relayout import around
from sherd.tensor.state_kind import State, StateKind, state_kind

ONE = torch.empty(1, device="meta")
"""The scale of a block of bitsandbytes', float32."""

UNSIGNED = ("exp_avg_sq", "max_exp_avg_sq")


def apart(catalog: Catalog, optimizer: Optimizer) -> StateDict | None:
    """Returns the state dict of `optimizer` with the tensors in its blocks; None if it keeps no blocks.

    Raises:
        OptimStateError: ranks hold parts of a block. On all ranks.
    """
    if not in_blocks(optimizer):
        return None
    complete: StateDict = Optimizer.state_dict(optimizer)  # bitsandbytes' own hides the blocks
    for saved, group in zip(complete["param_groups"], catalog.groups_of(optimizer), strict=True):
        for number, entry in zip(saved["params"], group, strict=True):
            if (state := complete["state"].get(number)) is not None:
                complete["state"][number] = _apart(entry, state, optimizer)
    return complete


def _apart(entry: OptimizerEntry, state: State, optimizer: InBlocks) -> State:
    runs = _runs_of_blocks(entry, optimizer)
    if runs is None:
        return state
    if of_bitsandbytes(optimizer):
        return state | _tables_apart(entry, state, optimizer, runs)
    separate: State = {}
    for key, value in state.items():
        if state_kind(key, value, entry.parameter.shape) is not StateKind.ELEMENTS:
            separate[key] = value
            continue
        local, kinds = local_part(value), _tensors_of_one_block(optimizer, entry)
        for name, of_block in kinds.items():
            # A rank without elements has an empty tensor, which is in no blocks.
            part = getattr(local, name).flatten() if local.numel() else of_block.new_empty(0)
            spec = _spec(entry.spec, runs, optimizer.block_size, of_block)
            separate[f"{key}.{name}"] = part if spec is None else around(part, spec)
    return separate


def _tables_apart(entry: OptimizerEntry, state: State, optimizer: Any, runs: Runs) -> State:
    """Returns the codes, scales and table of each state that bitsandbytes keeps, also on a rank without elements."""
    if not optimizer.name2qmap:
        optimizer.fill_qmap()
    separate: State = {}
    for number in (each[-1] for each in state if each in ("state1", "state2")):
        scale = state.get(f"absmax{number}", torch.empty(0))
        spec = _spec(entry.spec, runs, block_size(optimizer), ONE)
        codes = local_part(state[f"state{number}"]).to(torch.uint8)
        separate[f"state{number}"] = codes if entry.spec is None else around(codes, entry.spec)
        separate[f"absmax{number}"] = scale if spec is None else around(scale, spec)
        separate[f"qmap{number}"] = optimizer.name2qmap["dynamic" if number == "1" else "udynamic"]
    return separate


def _own_scale(entry: OptimizerEntry, optimizer: Any, scale: Awaited, spec: DTensorSpec | None) -> torch.Tensor:
    runs = _runs_of_blocks(entry, optimizer)
    return local_part(scale.take(None if runs is None else _spec(spec, runs, block_size(optimizer), ONE)))


def together(entry: OptimizerEntry, state: State, optimizer: Optimizer) -> State:
    """Returns a loaded state of a parameter, whose blocks' tensors are awaited, with one awaited tensor for them."""
    if of_bitsandbytes(optimizer):
        own, shape = partial(_own_scale, entry, optimizer), entry.parameter.shape
        scales = {key: value for key, value in state.items() if key.startswith("absmax")}
        return state | {key: Awaited(shape, partial(own, each)) for key, each in scales.items()}
    keys = [key.removesuffix(".codes") for key in state if key.endswith(".codes")]
    if not keys:
        return state
    if not in_blocks(optimizer):
        raise OptimStateError(
            f"{entry.names[0]}: its state {', '.join(keys)} is in blocks of few bits, which {type(optimizer).__name__} "
            "does not take; build the optimizer that was saved, or load the model alone"
        )
    whole = {key: value for key, value in state.items() if "." not in key}
    return whole | {key: Awaited(entry.parameter.shape, _taken(entry, state, key, optimizer)) for key in keys}


def _taken(
    entry: OptimizerEntry, state: State, key: str, optimizer: InBlocks
) -> Callable[[DTensorSpec | None], torch.Tensor]:
    def take(spec: DTensorSpec | None) -> torch.Tensor:
        runs, kinds = _runs_of_blocks(entry, optimizer), _tensors_of_one_block(optimizer, entry)
        is_signed, like = key not in UNSIGNED, local_part(entry.parameter).detach()
        if runs is None:  # this layout keeps full precision
            target = optimizer._subclass_zeros(torch.empty(entry.parameter.shape), is_signed, optimizer.block_size)
        else:
            target = optimizer._new_buffer(like, is_signed)
        for name, of_block in kinds.items():
            wanted = None if runs is None else _spec(spec, runs, optimizer.block_size, of_block)
            part, place = local_part(state[f"{key}.{name}"].take(wanted)), getattr(target, name, None)
            if place is not None:  # else this rank has no elements
                place.copy_(part.view(place.shape))
        if runs is None:
            full: torch.Tensor = target.dequantize()
            return full
        return target if spec is None else around(target, spec)

    return take


def _tensors_of_one_block(optimizer: InBlocks, entry: OptimizerEntry) -> dict[str, torch.Tensor]:
    """Returns the tensors that one block consists of, by name."""
    like = torch.empty(optimizer.block_size, dtype=entry.parameter.dtype)
    block = optimizer._subclass_zeros(like, True, optimizer.block_size)
    return {name: getattr(block, name) for name in ("codes", "scale")}


def _runs_of_blocks(entry: OptimizerEntry, optimizer: InBlocks) -> Runs | None:
    """Returns how the parameter is cut between its blocks; None if its state is in full precision on all ranks.

    Raises:
        OptimStateError: the state of some ranks is in blocks, and blocks are cut.
    """
    block, shape, spec = block_size(optimizer), tuple(entry.parameter.shape), entry.spec
    runs = Runs(shape, 1, 0, (math.prod(shape),)) if spec is None else _runs_of(spec)
    sizes = [math.prod(entry.local_shape)] if runs is None else map(runs.local_numel, range(runs.num_ranks))
    have_blocks = [has_blocks(optimizer, entry.parameter, numel) for numel in sizes if numel]
    if not any(have_blocks):
        return None
    if entry.span is not None:
        raise OptimStateError(
            f"{entry.names[0]}: its state of {type(optimizer).__name__} is in blocks over one flat parameter, "
            "which are not saved by name; wrap with use_orig_params=True"
        )
    if runs is None or not all(have_blocks) or any(end % block and end != runs.numel for end in runs.ends):
        rows = block // math.gcd(block, math.prod(shape[1:]))
        raise OptimStateError(
            f"{entry.names[0]}: its state of {type(optimizer).__name__} is in blocks of {block} elements, and some "
            f"ranks hold parts of a block, or keep full precision; shard it with placement=Blocks({rows}), or Owned()"
        )
    return runs


def _runs_of(spec: DTensorSpec) -> Runs | None:
    """Returns the runs of the flattened tensor that the ranks hold; None if their parts are no runs."""
    if is_ragged(spec):
        layout = layout_of(spec)
        return None if layout.splits else layout.cut
    axes = [axis for axis, each in enumerate(spec.placements) if not each.is_replicate()]
    if not axes:
        return Runs(tuple(spec.shape), 1, 0, (math.prod(spec.shape),))
    if len(axes) > 1 or spec.placements[axes[0]] != Shard(0):
        return None
    inner, num_ranks = math.prod(spec.shape[1:]), spec.mesh.size(axes[0])
    ends = accumulate(chunk.numel * inner for chunk in chunks(spec.shape[0], num_ranks))
    return Runs(tuple(spec.shape), num_ranks, 0, tuple(ends))


def _spec(spec: DTensorSpec | None, runs: Runs, block: int, of_block: torch.Tensor) -> DTensorSpec | None:
    """Returns the layout of a vector with `of_block` for each block; None for a plain tensor."""
    axes = [] if spec is None else [axis for axis, each in enumerate(spec.placements) if not each.is_replicate()]
    if spec is None or not axes:
        return None
    if is_ragged(spec):
        axes = list(reversed(layout_of(spec).axes))
    each = of_block.numel()
    shape = (-(-runs.numel // block) * each,)
    cut = Runs(shape, runs.num_ranks, runs.first, tuple(-(-end // block) * each for end in runs.ends))
    return ragged_spec(spec.mesh, [Replicate()] * spec.mesh.ndim, shape, of_block.dtype, cut, axes)
