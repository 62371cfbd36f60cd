"""The sizes of a unit's buffers when they are allocated."""

from __future__ import annotations

from collections.abc import Sequence

from sherd.comm.collectives import UsersCollectives
from sherd.comm.transport import Transport
from sherd.engine.moves.buffer_plan import BufferPlan, Fill
from sherd.engine.moves.selfgather import SelfGatheredWeights
from sherd.engine.moves.weights import Weights
from sherd.engine.run.unit import Unit
from sherd.engine.state.group import Group
from sherd.engine.state.parameter import ShardedParameter
from sherd.policy import UnitPolicy
from sherd.schedule.moments import GroupSizes, MemoryKind


def sizes_of(unit: Unit) -> list[GroupSizes]:
    """Returns the sizes of `unit`'s buffers when they are allocated. Makes the transport, as the first gather does."""
    return [_sizes(weights, unit.policy) for weights in unit.weights]


def _sizes(weights: Weights | SelfGatheredWeights, policy: UnitPolicy) -> GroupSizes:
    group, plan = weights.group, weights.plan
    trained, mesh = trainable(group.parameters), group.mesh
    own = mesh.shard_transport
    sender: Transport = own if policy.all_gather is None else UsersCollectives(policy.all_gather, None)
    reducer: Transport = own if policy.reduce_scatter is None else UsersCollectives(policy.reduce_scatter, None)
    fill = plan.fill_by(sender)
    unsharded, rows, sent, part = _gathered_bytes(weights, fill, policy.reshard_after_forward)
    compute, reduce = group.compute_dtype, group.reduce_dtype
    summed, sums = plan.reduced_by_piece[mesh.piece], plan.reduced_by_rank
    return GroupSizes(
        shards=_shard_bytes(group, plan),
        unsharded=unsharded if plan.frees_unsharded else 0,
        kept=0 if plan.frees_unsharded else _kept_bytes(group, plan),
        rows=rows,
        sent=sent,
        part=part,
        arriving=tuple(each.shape.numel() * compute.itemsize for each in trained),
        borrows=plan.borrows(compute),
        gradient_rows=sum(plan.reduced_by_piece) * reduce.itemsize,
        reduced=(sums[mesh.shard_rank] + summed * mesh.shards_replicas) * reducer.sum_dtype(reduce).itemsize,
        gradients=summed * group.dtype.itemsize,
        scratch=reducer.scratch_bytes(sums, mesh.shard_rank, reduce.itemsize),
        is_all_trainable=len(trained) == len(group.parameters),
        lands=fill is Fill.FROM_RANKS,
        collects_late=plan.collects_late,
    )


def _gathered_bytes(
    weights: Weights | SelfGatheredWeights, fill: Fill, reshard: bool | int | None
) -> tuple[int, int, int, int]:
    """Returns the bytes of the unsharded parameters, of the rows that they are copied out of, of the buffer that is
    sent, and of the part that is kept for a smaller mesh."""
    group, num_parts = weights.group, 0 if reshard is None or isinstance(reshard, bool) else reshard
    packing, itemsize = group.packing, group.compute_dtype.itemsize
    if isinstance(weights, SelfGatheredWeights):
        gathered = sum(tensor.nbytes for kind, tensor in weights.held() if kind is MemoryKind.UNSHARDED)
        return max(group.unsharded_bytes, gathered), 0, 0, weights.part_bytes(num_parts) if num_parts else 0
    rows = packing.gathered_numel * itemsize if fill is Fill.FROM_ROWS else 0
    sent = 0 if weights.plan.sends_shards_as_they_are or group.mesh.shards_replicas else group.shard_numel * itemsize
    return group.unsharded_bytes, rows, sent, packing.unsharded_numel // num_parts * itemsize if num_parts else 0


def _shard_bytes(group: Group, plan: BufferPlan) -> int:
    """Returns the bytes that are kept of the group between steps: its shards, with other replicas' pieces if there are
    any."""
    fetched = group.fetched
    if group.unsharded_memory is not None:
        return group.unsharded_memory.nbytes if group.is_one_piece else 0
    if fetched is None:
        return group.shard_buffer.nbytes
    return fetched.numel * group.compute_dtype.itemsize + (
        0 if plan.sends_shards_as_they_are else group.shard_buffer.nbytes
    )


def _kept_bytes(group: Group, plan: BufferPlan) -> int:
    """Returns the bytes of unsharded parameters that are never freed, besides those of the shards."""
    if plan.is_never_gathered:
        return 0
    return group.unsharded_bytes if group.unsharded_memory is None else group.unsharded_memory.nbytes


def trainable(parameters: Sequence[ShardedParameter]) -> list[ShardedParameter]:
    return [each for each in parameters if each.requires_grad]
