"""Unsharded copies of a unit's parameters, which a user works with inside `unsharded`: in full precision, in new
memory.

    begin    gather the shard buffers, and the gradients' if asked for, into new memory, and show that on the modules
    end      write this rank's part of the copies back, if asked for, and show the shards again

The engine's own unsharded buffers are not involved: they are shown in forward and backward only, in the compute dtype.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement

from sherd._torch import local_tensor
from sherd.engine.moves.buffer_views import copy_out
from sherd.engine.run.runtime import Runtime
from sherd.engine.run.unit import Unit
from sherd.engine.state.group import Group, OptimizerParam
from sherd.engine.state.optimizers import watcher
from sherd.engine.state.parameter import ShardedParameter, as_sharded, record_of
from sherd.errors import PlacementError, PolicyError, StateError, WrapperStateError, WriteBackError
from sherd.policy import UnshardTerms
from sherd.tensor.ragged import as_dtensor, local_part


class UnshardedCopies:
    """Unsharded copies of one unit's parameters, for the user. Collective over the shard axis when it is made."""

    def __init__(self, unit: Unit, terms: UnshardTerms) -> None:
        self._terms = terms
        self._is_over = False
        self.unit = unit
        groups = [weights.group for weights in unit.weights]
        shown = self._is_shown
        copies = [_copies(group, _shard_buffer, shown, terms.offload_to_cpu) for group in groups]
        grads = [_copies(group, _gradients, shown, False) if terms.with_grads else None for group in groups]
        # On every rank, shown or not: they must agree on what is lent, or one refuses a forward that the others run.
        unit.lend(terms)
        if shown:
            for group, of_group, grads_of_group in zip(groups, copies, grads, strict=True):
                self._lend(group, of_group, grads_of_group)
        # Before the first forward nothing was computed that could be out of date.
        watched = unit.parameters if terms.writeback and Runtime.over(unit) is not None else []
        self._digests = {id(record): _digest(record.lent) for record in watched if record.lent is not None}

    @staticmethod
    def of(unit: Unit, shown: bool, on_host: bool) -> dict[ShardedParameter, torch.Tensor]:
        """Returns the unsharded parameters of `unit`, in new memory and outside autograd, none if they are not `shown`.

        Collective over the shard axis: one all-gather per group. Besides the result it takes the memory of one group.
        """
        copies: dict[ShardedParameter, torch.Tensor] = {}
        for group in (weights.group for weights in unit.weights):
            copies.update(zip(group.parameters, _copies(group, _shard_buffer, shown, on_host), strict=False))
        return copies

    @staticmethod
    def are_lent(unit: Unit, terms: UnshardTerms) -> bool:
        """Returns whether a context around this one lends copies of `unit` on terms that include `terms`. If none does,
        the unit is made ready to be lent.

        Raises:
            StateError: the outer context has fewer arguments set, or `require_lendable` raises it.
            PlacementError: as `require_lendable`.
        """
        if unit.lent is None:
            require_lendable(unit, terms)
            return False
        require_covers(unit, terms)
        return True

    @property
    def _is_shown(self) -> bool:
        return not self._terms.rank0_only or self.unit.mesh.shard_rank == 0

    def _lend(self, group: Group, copies: Sequence[torch.Tensor], grads: Sequence[torch.Tensor] | None) -> None:
        has_grad = {
            index
            for optimizer_param in group.optimizer_params
            if optimizer_param.parameter.grad is not None
            for index in optimizer_param.members
        }
        for index, (record, unsharded) in enumerate(zip(group.parameters, copies, strict=True)):
            parameter = nn.Parameter(unsharded, requires_grad=record.requires_grad)
            if grads is not None and index in has_grad:
                parameter.grad = grads[index]
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    functools.partial(_refuse_lost_gradient, weakref.ref(self), self.unit.name, record.name)
                )
            record.lend(parameter)

    @torch.no_grad()
    def end(self) -> None:
        """Show the shards again, and write changes back if that was asked for.

        Raises:
            PlacementError: a parameter or a gradient has another shape or kind than before. All others are written
                back.
        """
        runtime = Runtime.over(self.unit)
        if runtime is not None:
            runtime.reshard(self.unit)  # somebody may have gathered it meanwhile, without showing it
        taken = [(record, record.lent, record.take_back()) for record in self.unit.parameters]
        self._is_over = True
        self.unit.lend(None)
        _remember(taken)
        if self._terms.writeback and self._is_shown:
            self._write_back(taken)

    def _write_back(self, taken: Sequence[tuple[ShardedParameter, nn.Parameter | None, Sequence[object]]]) -> None:
        present: dict[int, torch.Tensor] = {}
        wrong: list[PlacementError] = []
        for record, lent, found in taken:
            try:
                present[id(record)] = _present(record, lent, found)
            except PlacementError as error:
                wrong.append(error)
        kept = [record for record, _, _ in taken if id(record) in present]
        changed = [record.optimizer_param for record in kept if self._keep(record, present[id(record)])]
        torch.autograd.graph.increment_version([each for each in changed if not each.is_inference()])
        self.unit.shards_written()
        if self._terms.with_grads:
            for weights in self.unit.weights:
                _keep_gradients(weights.group, present)
        if wrong:
            raise wrong[0]
        _keep_requires_grad(self.unit, present)

    def _keep(self, record: ShardedParameter, unsharded: torch.Tensor) -> bool:
        """Write this rank's part into the shard. Returns whether any rank's part has changed.

        All ranks must come to the same answer, since a change makes them give up a backward that is to come. So the
        unsharded tensor is compared, by its digest, which takes less memory than a copy.
        """
        record.local.copy_(_part_of(record, unsharded))
        before = self._digests.get(id(record))
        return before is not None and not torch.equal(before, _digest(unsharded))


def _remember(taken: Sequence[tuple[ShardedParameter, nn.Parameter | None, Sequence[object]]]) -> None:
    """Know the Parameters that were shown, which are not any more: an optimizer may have been built from them."""
    lent_ones = [(record, lent) for record, lent, _ in taken]
    for record, each in [*lent_ones, *((record, each) for record, _, found in taken for each in found)]:
        if isinstance(each, nn.Parameter) and record_of(each) is None:
            record.claim(each)
    watcher.sharded_again()


def require_covers(unit: Unit, terms: UnshardTerms) -> None:
    """Raise `StateError` if a context asks for more (`terms`) than the context around it, which has lent `unit`."""
    assert unit.lent is not None, "a context around has lent it"
    missing = terms.missing_from(unit.lent)
    if missing:
        raise WrapperStateError(
            "Cannot manually unshard parameters when already unsharding parameters: a context around this one has "
            f"lent unit {unit.name} without {' and '.join(missing)}; ask for that in the outer context"
        )


def require_lendable(unit: Unit, terms: UnshardTerms) -> None:
    """Show the shards of `unit`, and take the values that a user has put in their place.

    Raises:
        StateError: the unit is in the middle of a forward or backward, has no data yet, or has gradients that wait for
            a reduction and were asked for.
        PlacementError: something of another shape was put in a shard's place.
    """
    runtime = Runtime.over(unit)
    try:
        if runtime is not None:
            runtime.show_shards(unit)
    except StateError:
        assert runtime is not None, "only a runtime refuses"
        raise WrapperStateError(
            "Cannot manually unshard parameters during forward/backward: it is the turn of "
            f"{runtime.root.name}, to which unit {unit.name} belongs; enter the unshard context before, or after"
        ) from None
    unit.notice_moved()
    unit.notice_replaced()
    if runtime is None:
        unit.rebind()
    if unit.shards.on_meta:
        raise StateError(
            f"parameters of unit {unit.name} are still on the meta device: {', '.join(unit.shards.on_meta[:8])}; give "
            "them memory and values (to_empty, reset_parameters, or a state dict) before an unshard context"
        )
    if terms.with_grads and unit.backward.has_unreduced:
        raise WrapperStateError(
            f"with_grads=True: unit {unit.name} has gradients that wait for a reduction (no_sync, or "
            "set_requires_gradient_sync(False)), so they are in no shard; run a backward that reduces first"
        )


# Gathering


def _shard_buffer(group: Group) -> torch.Tensor:
    return group.place.fetch(group.shard_buffer, group.device)


def _gradients(group: Group) -> torch.Tensor:
    """Returns a shard buffer of gradients, with zeros for parameters that have none."""
    shard_buffer = torch.zeros(group.shard_numel, dtype=group.dtype, device=group.device)
    for optimizer_param in group.optimizer_params:
        gradient = optimizer_param.parameter.grad
        if isinstance(gradient, DTensor):
            shard_buffer[optimizer_param.extent.start : optimizer_param.extent.stop].copy_(
                local_tensor(gradient).reshape(-1)
            )
    return shard_buffer


@torch.no_grad()
def _copies(
    group: Group, shard_buffer_of: Callable[[Group], torch.Tensor], shown: bool, on_host: bool
) -> list[torch.Tensor]:
    """Returns unsharded copies of a group's tensors, none if they are not `shown`. All ranks of the shard axis must
    call it."""
    if group.gathers_itself:
        return _gathered_by_torch(group, shard_buffer_of is _shard_buffer, on_host)
    packing, source = group.packing, shard_buffer_of(group)
    rows = group.all_pieces(source)
    if not shown:
        return []
    unsharded = rows
    if not packing.direct or packing.unsharded_numel > packing.gathered_numel:
        unsharded = torch.empty(packing.unsharded_numel, dtype=source.dtype, device=source.device)
        copy_out(packing, unsharded)(rows)
    copies = []
    for record, slot in zip(group.parameters, packing.slots, strict=True):
        part = unsharded[slot.unsharded.start : slot.unsharded.start + slot.cut.numel].view(slot.cut.shape)
        # Memory of its own: a user may keep one, and would keep all.
        part = part.to("cpu", copy=True) if on_host else part.clone()
        copies.append(record.as_unsharded(part))
    return copies


def _gathered_by_torch(group: Group, values: bool, on_host: bool) -> list[torch.Tensor]:
    """Returns copies of a tensor subclass with its own all-gather, which DTensor knows how to put together."""
    copies = []
    for record in group.parameters:
        tensor = record.shard.detach() if values else record.shard.grad
        unsharded = torch.zeros(record.shape) if tensor is None else as_sharded(tensor).full_tensor()
        copies.append(unsharded.cpu() if on_host else unsharded)
    return copies


def _refuse_lost_gradient(lender: weakref.ref[UnshardedCopies], unit: str, name: str, lent: torch.Tensor) -> None:
    """Raise `StateError` for a gradient of a copy that is given up at the end of the context, or was given up already.

    A context without `writeback`, for looking only, may have gradients to look at.
    """
    copies = lender()
    if copies is None or copies._is_over:
        raise WrapperStateError(
            f"a backward has reached {name} of unit {unit} as it was lent by an unshard context (unsharded, "
            "summon_full_params) that is over, so its gradient would be lost; call backward inside, with "
            "with_grads=True, or compute this part of the loss in the model's forward"
        )
    if copies._terms.writeback and not copies._terms.with_grads:
        raise WrapperStateError(
            f"a backward has reached {name} of unit {unit}, which an unshard context (unsharded, summon_full_params) "
            "lends, so its gradient would be lost with the context; enter it with with_grads=True to keep gradients, "
            "or with writeback=False to look at them"
        )


@torch.no_grad()
def _digest(unsharded: torch.Tensor) -> torch.Tensor:
    """Returns a checksum that depends on the order of elements: the row sums and column sums of the bytes, seen as a
    square int64 matrix. It is the same on all ranks and takes O(sqrt(numel)) memory.
    """
    tensor = local_part(unsharded.detach()).reshape(-1)
    if type(tensor) is not torch.Tensor:
        return torch.empty(0)  # one that gathers itself has bytes of its own
    raw = (tensor.clone() if tensor.storage_offset() else tensor).view(torch.uint8)
    even = raw.numel() // 8 * 8
    words = raw[:even].view(torch.int64)
    side = math.isqrt(words.numel())
    square = words[: side * side].view(side, side)
    return torch.cat([square.sum(0), square.sum(1), words[side * side :], raw[even:].to(torch.int64)])


# Writing back


def _present(record: ShardedParameter, lent: nn.Parameter | None, found: Sequence[object]) -> torch.Tensor:
    """Returns the tensor that the modules show in the end: the lent copy, or one that a user has put on some place.

    Raises:
        PlacementError: it is no tensor of that shape and kind, or tied places were given different values.
    """
    replaced = list({id(each): each for each in found if each is not lent}.values())
    unsharded = replaced[0] if replaced else lent
    if not all(_same(unsharded, each) for each in replaced[1:]):
        raise PlacementError(
            f"{record.name} is tied: it hangs on {len(found)} places, which were given {len(replaced)} different "
            "tensors in an unshard context; give them one"
        )
    if not isinstance(unsharded, torch.Tensor) or unsharded.shape != record.shard.shape:
        shown = tuple(unsharded.shape) if isinstance(unsharded, torch.Tensor) else unsharded
        raise WriteBackError(
            f"Cannot writeback when the parameter shape changes: {record.name} was {tuple(record.shard.shape)} when it "
            f"was lent, and is {shown} at the end of the unshard context; change its values, not its shape, or leave "
            "with writeback=False"
        )
    if _placements_of(unsharded) != (None if record.unsharded_spec is None else record.unsharded_spec.placements):
        raise PlacementError(
            f"{record.name} was lent as {_kind_of(lent)} and is {_kind_of(unsharded)} at the end of the unshard "
            "context; replace it by a tensor of the same kind, or change its values in place"
        )
    return unsharded


def _same(one: object, other: object) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return one.shape == other.shape and torch.equal(local_part(one), local_part(other))


def _placements_of(tensor: torch.Tensor | None) -> tuple[Placement, ...] | None:
    return tensor.placements if isinstance(tensor, DTensor) else None


def _kind_of(tensor: torch.Tensor | None) -> str:
    placements = _placements_of(tensor)
    return "a plain tensor" if placements is None else f"a DTensor with {placements}"


def _part_of(record: ShardedParameter, unsharded: torch.Tensor) -> torch.Tensor:
    return record.part_of(local_part(unsharded).detach())


def _keep_requires_grad(unit: Unit, present: dict[int, torch.Tensor]) -> None:
    """Keep parameters frozen or trainable as they were made inside.

    Raises:
        PolicyError: only some members of a flat parameter, which is trained as a whole, were changed.
    """
    pairs = ((weights.group, each) for weights in unit.weights for each in weights.group.optimizer_params)
    for group, optimizer_param in pairs:
        wanted = {present[id(group.parameters[index])].requires_grad for index in optimizer_param.members}
        if len(wanted) > 1:
            raise PolicyError(
                f"Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`: some parameters of "
                f"unit {unit.name} were frozen in an unshard context, not all; pass use_orig_params=True"
            )
        if wanted != {optimizer_param.parameter.requires_grad}:
            optimizer_param.parameter.requires_grad_(wanted.pop())


def _keep_gradients(group: Group, present: dict[int, torch.Tensor]) -> None:
    """Give each optimizer parameter this rank's part of the gradients of its members."""
    for optimizer_param in group.optimizer_params:
        records = {index: group.parameters[index] for index in sorted(optimizer_param.members)}
        if all(id(record) in present for record in records.values()):  # else one is of another shape, which is raised
            gradients = {index: present[id(record)].grad for index, record in records.items()}
            if group.grad_dtype != group.dtype:
                optimizer_param.expect_gradients_in(group.grad_dtype)
            optimizer_param.parameter.grad = _joined_gradient(group, optimizer_param, gradients)


def _joined_gradient(
    group: Group, optimizer_param: OptimizerParam, gradients: dict[int, torch.Tensor | None]
) -> DTensor | None:
    """Returns this rank's part of the members' unsharded `gradients` as one gradient, or None if no member has one."""
    if all(gradient is None for gradient in gradients.values()):
        return None
    local = torch.zeros(optimizer_param.shape, dtype=group.grad_dtype, device=group.shard_buffer.device)
    flat = local.view(-1)
    for index, gradient in gradients.items():
        held = group.packing.slots[index].held(group.mesh.piece)
        if gradient is not None and held.numel:
            start = held.start - optimizer_param.extent.start
            flat[start : start + held.numel].copy_(_part_of(group.parameters[index], gradient).reshape(-1))
    return as_dtensor(local, optimizer_param.gradient_spec(local.dtype))
