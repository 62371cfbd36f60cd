"""A user's communication hook in the place of a unit's reduction, in the form that DDP and FSDP1 share.

    rows that are sent     | gradient | padding | flags |     one part a rank
    what the hook sees     | gradient |    0    |             in memory of its own, which it may write

The flags say which parameters have a gradient on other ranks and none on this one. A hook would scale or compress the
flags like gradients, so that a collective of their own sums them.

The form of hooks is that of DDP (Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
VLDB 2020).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from sherd.api.module import FSDPModule
from sherd.engine import Group, Unit
from sherd.errors import PolicyError, PolicyTypeError, WrapperStateError
from sherd.policy import ReduceScatter

Hook = Callable[..., object]


class _Hooked(ReduceScatter):
    """A reduce-scatter by `hook(state, gradient, shard)`; over one rank, `in_place`, by `hook(state, gradient)`."""

    def __init__(self, unit: Unit, state: object, hook: Hook, in_place: bool) -> None:
        self._unit = weakref.ref(unit)  # weak, as the unit's policy holds this object
        self._state = state
        self._hook = hook
        self._in_place = in_place

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup | None,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        reduced = _reduced_group(self._unit)
        numel = reduced.shard_numel
        # The hook gets a copy: the rows are used again, or are autograd's own gradient, which others may still read.
        parts = input_tensor.view(reduced.packing.num_ranks, -1)[:, :numel].clone()
        for rank, part in enumerate(parts):
            _clear_gaps(reduced, rank, part)
        if self._in_place:
            shard = parts.view(-1)
            self._hook(self._state, shard)
        else:
            shard = output_tensor.new_empty(numel)
            self._hook(self._state, parts.view(-1), shard)
        output_tensor[:numel].copy_(shard)
        output_tensor[numel:].copy_(input_tensor[numel : output_tensor.numel()])
        _add_flags(output_tensor[numel:], group)
        return None


def _all_reduce(unit: Unit, state: object, hook: Hook) -> Callable[[torch.Tensor], None]:
    unit_ref = weakref.ref(unit)

    def run(sums: torch.Tensor) -> None:
        reduced = _reduced_group(unit_ref)
        numel = reduced.shard_numel
        gradient = sums[:numel]
        _clear_gaps(reduced, 0, gradient)
        hook(state, gradient)
        # A hook that computes in another dtype gives the tensor other memory, by `gradient.data = ...`.
        if gradient.data_ptr() != sums.data_ptr():
            sums[:numel].copy_(gradient)
        _add_flags(sums[numel:], reduced.mesh.replicate_group)

    return run


def _reduced_group(unit_ref: weakref.ref[Unit]) -> Group:
    """Returns the one group of the unit that has gradients."""
    unit = unit_ref()
    assert unit is not None, "the unit's gradients are being reduced"
    groups = (gradients.group for gradients in unit.gradients)
    (trained,) = (group for group in groups if any(parameter.requires_grad for parameter in group.parameters))
    return trained


def _clear_gaps(group: Group, rank: int, part: torch.Tensor) -> None:
    """Set padding to 0: the memory is not initialised, and a hook that takes a norm would count the padding."""
    for gap in group.packing.gaps_of(rank):
        part[gap.start : gap.stop].zero_()


def _add_flags(flags: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    if flags.numel() and group is not None and group.size() > 1:
        dist.all_reduce(flags, group=group)


def register(modules: Sequence[FSDPModule], state: object, hook: Hook, in_place: Sequence[bool]) -> None:
    """Reduce and divide the gradients of the wrappers `modules` with `hook`.

    `in_place` says for each module whether the hook takes the gradient alone.

    Raises:
        PolicyTypeError: `hook` cannot be called.
        WrapperStateError: a unit has a hook already (an AssertionError, as in FSDP1).
        PolicyError: a unit both shards and replicates, or has parameters of several dtypes.
    """
    if not callable(hook):
        raise PolicyTypeError(f"The communication hook must be callable but got {hook!r}")
    units = [module._sherd_own_unit for module in modules]
    for unit in units:
        if unit.policy.reduce_scatter is not None or unit.policy.all_reduce is not None:
            raise WrapperStateError(
                f"A communication hook is already registered for unit {unit.name}; register one, once"
            )
        if unit.mesh.num_replicas > 1 and (unit.mesh.num_shards > 1 or unit.mesh.shards_replicas):
            raise PolicyError(
                f"Communication hook is not supported for hybrid strategies: unit {unit.name} is cut into "
                f"{unit.mesh.num_pieces} over {unit.mesh.num_shards} x {unit.mesh.num_replicas} ranks; use "
                "set_all_reduce_hook"
            )
        dtypes = {parameter.resting.dtype for parameter in unit.parameters if parameter.requires_grad}
        if len(dtypes) > 1:
            raise PolicyError(
                f"register_comm_hook: unit {unit.name} has parameters of {len(dtypes)} dtypes "
                f"({', '.join(sorted(map(str, dtypes)))}), which are reduced apart; wrap them apart, so that each "
                "hooked unit has one"
            )
    for unit, copies in zip(units, in_place, strict=True):
        if unit.mesh.num_replicas > 1:
            unit.change(all_reduce=_all_reduce(unit, state, hook), divide_factor=1.0)
        else:
            unit.change(reduce_scatter=_Hooked(unit, state, hook, copies), divide_factor=1.0)
