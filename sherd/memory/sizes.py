"""The sizes of a unit's buffers when they are allocated."""

from __future__ import annotations

from collections.abc import Sequence

from sherd.comm.collectives import UsersCollectives
from sherd.comm.transport import Transport
from sherd.engine.moves.gradients import Gradients
from sherd.engine.moves.selfgather import SelfGatheredWeights
from sherd.engine.moves.weights import Weights
from sherd.engine.run.unit import Unit
from sherd.engine.state.group import Group
from sherd.engine.state.parameter import ShardedParameter
from sherd.policy import UnitPolicy
from sherd.schedule.moments import GroupSizes, MemoryKind


def sizes_of(unit: Unit) -> list[GroupSizes]:
    """Returns the sizes of `unit`'s buffers when they are allocated. Makes the transport, as the first gather does."""
    return [_sizes(*of_group, unit.policy) for of_group in zip(unit.weights, unit.gradients, strict=True)]


def _sizes(weights: Weights | SelfGatheredWeights, gradients: Gradients, policy: UnitPolicy) -> GroupSizes:
    group = weights.group
    packing, trained, mesh = group.packing, trainable(group.parameters), group.mesh
    own = mesh.shard_transport
    sender: Transport = own if policy.all_gather is None else UsersCollectives(policy.all_gather, None)
    reducer: Transport = own if policy.reduce_scatter is None else UsersCollectives(policy.reduce_scatter, None)
    unsharded, rows, sent, part = _gathered_bytes(weights, sender, policy.reshard_after_forward)
    compute, reduce, flags = group.compute_dtype, group.reduce_dtype, group.num_flags
    summed = group.shard_numel + flags
    sums = [numel + flags * mesh.num_owners for numel in group.shard_sizes]
    is_sent_alone = not flags and packing.gathered_numel == packing.slots[0].cut.numel
    return GroupSizes(
        shards=_shard_bytes(group),
        unsharded=0 if mesh.keeps_unsharded else unsharded,
        kept=_kept_bytes(group, unsharded),
        rows=rows,
        sent=sent,
        part=part,
        arriving=tuple(each.shape.numel() * compute.itemsize for each in trained),
        borrows=gradients.arrivals.may_borrow and compute == reduce and is_sent_alone,
        gradient_rows=(packing.gathered_numel + packing.num_ranks * flags) * reduce.itemsize,
        reduced=(sums[mesh.shard_rank] + summed * mesh.shards_replicas) * reducer.sum_dtype(reduce).itemsize,
        gradients=summed * group.dtype.itemsize,
        scratch=reducer.scratch_bytes(sums, mesh.shard_rank, reduce.itemsize),
        is_all_trainable=len(trained) == len(group.parameters),
        lands=sender.shares_memory and not group.gathers_itself,
        collects_late=gradients.arrivals.collects_late,
    )


def _gathered_bytes(
    weights: Weights | SelfGatheredWeights, sender: Transport, reshard: bool | int | None
) -> tuple[int, int, int, int]:
    """Returns the bytes of the unsharded parameters, of the rows that they are copied out of, of the buffer that is
    sent, and of the part that is kept for a smaller mesh."""
    group, num_parts = weights.group, 0 if reshard is None or isinstance(reshard, bool) else reshard
    packing, itemsize = group.packing, group.compute_dtype.itemsize
    if isinstance(weights, SelfGatheredWeights):
        gathered = sum(tensor.nbytes for kind, tensor in weights.held() if kind is MemoryKind.UNSHARDED)
        return max(group.unsharded_bytes, gathered), 0, 0, weights.part_bytes(num_parts) if num_parts else 0
    rows = 0 if weights.fills_itself(sender) else packing.gathered_numel * itemsize
    sent = 0 if _is_sent_as_it_is(group) or group.mesh.shards_replicas else group.shard_numel * itemsize
    return group.unsharded_bytes, rows, sent, packing.unsharded_numel // num_parts * itemsize if num_parts else 0


def _is_sent_as_it_is(group: Group) -> bool:
    return group.compute_dtype == group.dtype and group.place.device == group.device


def _shard_bytes(group: Group) -> int:
    """Returns the bytes that are kept of the group between steps: its shards, with other replicas' pieces if there are
    any."""
    fetched = group.fetched
    if group.unsharded_memory is not None:
        return group.unsharded_memory.nbytes if group.is_one_piece else 0
    if fetched is None:
        return group.shard_buffer.nbytes
    return fetched.numel * group.compute_dtype.itemsize + (0 if _is_sent_as_it_is(group) else group.shard_buffer.nbytes)


def _kept_bytes(group: Group, unsharded: int) -> int:
    """Returns the bytes of unsharded parameters that are not given up."""
    if group.unsharded_memory is not None:
        return 0 if group.is_one_piece else group.unsharded_memory.nbytes
    return unsharded if group.mesh.keeps_unsharded else 0


def trainable(parameters: Sequence[ShardedParameter]) -> list[ShardedParameter]:
    return [each for each in parameters if each.requires_grad]
