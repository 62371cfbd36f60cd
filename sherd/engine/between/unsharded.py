"""Unsharded copies of a unit's parameters, in full precision and in new memory, for a user inside `unsharded`.

    begin    gather the shard buffers, and gradients if asked for, into new memory, and show the copies on the modules
    end      write this rank's part of the copies back, if asked for, and show the shards again

The engine's own unsharded buffers are not involved: they are shown in forward and backward only, in the compute dtype.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement

from sherd._torch import local_tensor
from sherd.engine.between.gather import Gatherer, Line
from sherd.engine.run.runtime import Runtime
from sherd.engine.run.unit import Unit
from sherd.engine.state.group import Group
from sherd.engine.state.optimizers import watcher
from sherd.engine.state.parameter import ShardedParameter, as_sharded, record_of
from sherd.errors import PlacementError, PolicyError, StateError, WrapperStateError, WriteBackError, in_short
from sherd.policy import UnshardTerms
from sherd.tensor.gather import shard_of
from sherd.tensor.ragged import as_dtensor, local_part


class UnshardedCopies:
    """Unsharded copies of one unit's parameters. Making them is collective over the shard axis."""

    def __init__(self, unit: Unit, terms: UnshardTerms) -> None:
        self._terms = terms
        self._is_over = False
        self.unit = unit
        groups = [weights.group for weights in unit.weights]
        self._is_shown = shown = not terms.rank0_only or unit.mesh.shard_rank == 0
        # Ranks that are shown nothing gather, too, because an all-gather takes all of them.
        copies = [_copies(group, shown, terms.offload_to_cpu) for group in groups]
        grads = [_copies(group, shown, gradients=True) if terms.with_grads else None for group in groups]
        # On every rank, shown or not: otherwise one rank would refuse a forward that the others run.
        unit.lend(terms)
        if shown:
            for group, of_group, grads_of_group in zip(groups, copies, grads, strict=True):
                self._lend(group, of_group, grads_of_group)
        # Before the first forward nothing was computed from the values, so changes of them make nothing stale.
        watched = unit.parameters if terms.writeback and Runtime.over(unit) is not None else []
        self._digests = {id(record): _digest(record.lent) for record in watched if record.lent is not None}

    @staticmethod
    def of(unit: Unit, shown: bool, on_host: bool) -> dict[ShardedParameter, torch.Tensor]:
        """Returns the unsharded parameters of `unit`, in new memory and outside autograd; none if they are not `shown`.

        Collective over the shard axis: one all-gather per group. Takes the memory of the result, and of one group more.
        """
        copies: dict[ShardedParameter, torch.Tensor] = {}
        for group in (weights.group for weights in unit.weights):
            copies.update(zip(group.parameters, _copies(group, shown, on_host), strict=False))
        return copies

    @staticmethod
    def are_lent(unit: Unit, terms: UnshardTerms) -> bool:
        """Returns whether a context around this one lends copies of `unit`.

        If none does, shows the shards of the unit, and takes the values that a user put in their place.

        Raises:
            StateError: the outer context's terms do not include `terms`. Or the unit is in the middle of a forward or
                backward, or on the meta device. Or `terms` ask for gradients, and some wait for a reduction.
            PlacementError: a user put something of another shape in a shard's place.
        """
        if unit.lent is not None:
            missing = terms.missing_from(unit.lent)
            if missing:
                raise WrapperStateError(
                    "Cannot manually unshard parameters when already unsharding parameters: a context around this one "
                    f"has lent unit {unit.name} without {' and '.join(missing)}; ask for that in the outer context"
                )
            return True
        unit.await_update()
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
        on_meta = unit.shards.on_meta
        if on_meta:
            raise StateError(
                f"parameters of unit {unit.name} are still on the meta device: {', '.join(on_meta[:8])}; give them "
                "memory and values (to_empty, reset_parameters, or a state dict) before an unshard context"
            )
        if terms.with_grads and unit.backward.has_unreduced:
            raise WrapperStateError(
                f"with_grads=True: unit {unit.name} has gradients that wait for a reduction (no_sync, or "
                "set_requires_gradient_sync(False)), so they are in no shard; run a backward that reduces first"
            )
        return False

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
        """Show the shards again, and write changes back if the terms say so.

        Raises:
            PlacementError: a parameter or a gradient has another shape or kind than before. All others are written
                back.
        """
        runtime = Runtime.over(self.unit)
        if runtime is not None:
            runtime.reshard(self.unit)  # a user may have gathered it meanwhile, without showing it
        taken = [(record, record.lent, record.take_back()) for record in self.unit.parameters]
        self._is_over = True
        self.unit.lend(None)
        # An optimizer may have been built from the Parameters that were shown: their shards succeed them.
        lent_ones = [(record, lent) for record, lent, _ in taken]
        for record, each in [*lent_ones, *((record, each) for record, _, shown in taken for each in shown)]:
            if isinstance(each, nn.Parameter) and record_of(each) is None:
                record.claim(each)
        watcher.sharded_again()
        if self._terms.writeback and self._is_shown:
            self._write_back(taken)

    def _write_back(self, taken: Sequence[tuple[ShardedParameter, nn.Parameter | None, Sequence[object]]]) -> None:
        present: dict[int, torch.Tensor] = {}
        errors: list[PlacementError] = []
        for record, lent, shown in taken:
            try:
                present[id(record)] = _present(record, lent, shown)
            except PlacementError as error:
                errors.append(error)
        changed = []
        for record in (record for record, _, _ in taken if id(record) in present):
            unsharded = present[id(record)]
            record.write(record.part_of(local_part(unsharded).detach()))
            # A change on any rank makes all give up a backward that is to come. So the digest is of the unsharded
            # tensor; it takes less memory than a copy.
            before = self._digests.get(id(record))
            if before is not None and not torch.equal(before, _digest(unsharded)):
                changed.append(record.optimizer_param)
        torch.autograd.graph.increment_version([each for each in changed if not each.is_inference()])
        for weights in self.unit.weights:
            if weights.group.masters is not None:
                weights.group.masters.note()
        self.unit.shards_written()
        if self._terms.with_grads:
            for weights in self.unit.weights:
                _keep_gradients(weights.group, present)
        if errors:
            raise errors[0]
        _keep_requires_grad(self.unit, present)


# Gathering


def _gradients(group: Group) -> torch.Tensor:
    """Returns a shard buffer of gradients, with zeros for parameters that have none."""
    shard_buffer = torch.zeros(group.shard_numel, dtype=group.dtype, device=group.device)
    for optimizer_param in group.optimizer_params:
        gradient, extent, record = optimizer_param.parameter.grad, optimizer_param.extent, optimizer_param.record
        if isinstance(gradient, DTensor):
            own = (
                record.part_of(gradient.full_tensor()) if record.gradient_owner is not None else local_tensor(gradient)
            )
            shard_buffer[extent.start : extent.stop].copy_(own.reshape(-1))
    return shard_buffer


@torch.no_grad()
def _copies(group: Group, shown: bool, on_host: bool = False, gradients: bool = False) -> list[torch.Tensor]:
    """Returns unsharded copies of a group's tensors, or of their gradients; none if they are not `shown`.

    Collective over the shard axis.
    """
    copies = []
    if group.gathers_itself:  # DTensor knows how to put a tensor subclass together
        for record in group.parameters:
            tensor = record.shard.grad if gradients else record.shard.detach()
            full = torch.zeros(record.shape) if tensor is None else as_sharded(tensor).full_tensor()
            copies.append(full.cpu() if on_host else full)
        return copies
    line = Line(group.parameters, group.dtype, _gradients(group) if gradients else None)
    names = in_short([each.name for each in group.parameters], 4)
    gathering = Gatherer().gathering([line], f"gathers {names} to show them")
    gathering.start()
    gathering.wait()
    if not shown:
        return []
    gathering.copy_out()
    for index, record in enumerate(group.parameters):
        # Each in memory of its own: a user may keep one copy, and would keep the memory of all.
        part = line.part(index)
        copies.append(record.as_unsharded(part.to("cpu", copy=True) if on_host else part.clone()))
    return copies


def _refuse_lost_gradient(lender: weakref.ref[UnshardedCopies], unit: str, name: str, lent: torch.Tensor) -> None:
    """Raise `StateError` for a gradient of a copy that is not kept after the context.

    In a context without `writeback` the user may look at gradients.
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
    """Returns a checksum that depends on the order of elements, in O(sqrt(numel)) memory. It is the same on all ranks.

    It holds the row sums and column sums of the bytes, seen as a square int64 matrix.
    """
    tensor = local_part(unsharded.detach()).reshape(-1)
    if type(tensor) is not torch.Tensor:
        return torch.empty(0)  # of a tensor that gathers itself only the subclass knows the bytes
    # A clone begins where an int64 may begin; a part of a larger storage need not, and torch refuses the view.
    raw = (tensor.clone() if tensor.storage_offset() else tensor).view(torch.uint8)
    even = raw.numel() // 8 * 8
    words = raw[:even].view(torch.int64)
    side = math.isqrt(words.numel())
    square = words[: side * side].view(side, side)
    return torch.cat([square.sum(0), square.sum(1), words[side * side :], raw[even:].to(torch.int64)])


# Writing back


def _present(record: ShardedParameter, lent: nn.Parameter | None, shown: Sequence[object]) -> torch.Tensor:
    """Returns the parameter's tensor at the end: the lent copy, or what a user put in its place on a module.

    Raises:
        PlacementError: it is no tensor of the same shape and kind, or tied places were given different values.
    """
    replaced = list({id(each): each for each in shown if each is not lent}.values())
    unsharded = replaced[0] if replaced else lent
    if not all(_same(unsharded, each) for each in replaced[1:]):
        raise PlacementError(
            f"{record.name} is tied: it hangs on {len(shown)} places, which were given {len(replaced)} different "
            "tensors in an unshard context; give them one"
        )
    shape = record.shape if record.shown_spec is None else record.shard.shape
    if not isinstance(unsharded, torch.Tensor) or unsharded.shape != shape:
        given = tuple(unsharded.shape) if isinstance(unsharded, torch.Tensor) else unsharded
        raise WriteBackError(
            f"Cannot writeback when the parameter shape changes: {record.name} was {tuple(shape)} when it "
            f"was lent, and is {given} at the end of the unshard context; change its values, not its shape, or leave "
            "with writeback=False"
        )
    if _placements_of(unsharded) != (None if record.shown_spec is None else record.shown_spec.placements):
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


def _keep_requires_grad(unit: Unit, present: dict[int, torch.Tensor]) -> None:
    """Freeze and thaw optimizer parameters as a user did their copies.

    Raises:
        PolicyError: only some members of a flat parameter, which is trained or frozen as one, were changed.
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
    """Give each optimizer parameter this rank's part of its members' unsharded gradients; None if no member has one."""
    for optimizer_param in group.gradients:
        records = {index: group.parameters[index] for index in sorted(optimizer_param.members)}
        if not all(id(record) in present for record in records.values()):
            continue  # a member has another shape, which is an error
        gradients = {index: present[id(record)].grad for index, record in records.items()}
        if all(gradient is None for gradient in gradients.values()):
            optimizer_param.parameter.grad = None
            continue
        local = torch.zeros(optimizer_param.shape, dtype=group.grad_dtype, device=group.shard_buffer.device)
        flat = local.view(-1)
        for index, gradient in gradients.items():
            slot, piece = group.gradient_packing.slots[index], group.mesh.piece
            extent = slot.held(piece).shifted(-optimizer_param.extent.start)
            if gradient is not None and extent.numel:
                own = shard_of(local_part(gradient).detach(), slot.cut, piece)
                flat[extent.start : extent.stop].copy_(own.reshape(-1))
        optimizer_param.parameter.grad = as_dtensor(local, optimizer_param.record.gradient_spec(local.dtype))
