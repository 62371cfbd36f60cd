"""The sizes of a unit's buffers while they are allocated."""

from __future__ import annotations

from operator import mul

import torch

from sherd.comm.collectives import UsersCollectives
from sherd.comm.transport import cut
from sherd.engine.moves.buffer_plan import BufferPlan, Fill
from sherd.engine.moves.weights import Weights
from sherd.engine.run.unit import Unit
from sherd.engine.state.group import Group
from sherd.policy import UnitPolicy
from sherd.schedule.moments import GroupSizes


def sizes_of(unit: Unit) -> list[GroupSizes]:
    """Returns the bytes of each group of `unit` on the device that computes. Makes transports, as a gather does."""
    return [_group_sizes(weights, unit.policy) for weights in unit.weights]


def _group_sizes(weights: Weights, policy: UnitPolicy) -> GroupSizes:
    group, plan = weights.group, weights.plan
    trained, mesh = group.trained, group.mesh
    sender, reducer = (
        own if user is None or mesh.only_sums else UsersCollectives(user, None)
        for own, user in ((mesh.shard_transport, policy.all_gather), (mesh.reduce_transport, policy.reduce_scatter))
    )
    fill = plan.fill_by(sender)
    compute, reduce, reshard = group.compute_dtype, group.reduce_dtype, policy.reshard_after_forward
    # Otherwise the shards are copied into this rank's part of the rows.
    is_copied_to_send = fill is Fill.FROM_RANKS and not plan.sends_shards_as_they_are and not mesh.shards_replicas
    # Bytes of unsharded parameters that are never freed, without those of the shards.
    kept = weights.unsharded_bytes if plan.frees_unsharded and policy.keeps_storage else 0
    if not (plan.frees_unsharded or plan.is_never_gathered):
        kept = group.unsharded_bytes if group.unsharded_memory is None else group.unsharded_memory.nbytes
    summed, sums = plan.reduced_by_piece[mesh.piece], plan.reduced_by_rank
    stores_at_once = group.is_offloaded and policy.all_reduce_hook is None and mesh.num_replicas == 1
    is_in_rows = stores_at_once and group.is_one_piece and plan.lane_owns_rows and plan.owned is None
    reduced = (sums[mesh.shard_rank] + summed * mesh.shards_replicas) * reducer.sum_dtype(reduce).itemsize
    scratch = reducer.scratch_bytes(sums, mesh.shard_rank, reduce.itemsize)
    if plan.owned is not None and mesh.in_order is not None:
        itemsize = mesh.in_order.reduction.sum_dtype(reduce).itemsize
        own = plan.owned[mesh.in_order.part] * itemsize
        reduced = sums[mesh.shard_rank] * itemsize if mesh.holds_copies else own
        scratch = mesh.in_order.scratch_bytes(plan.owned, reduce.itemsize) + own * mesh.holds_copies
        scratch += mesh.remembers * sum(plan.owned) * torch.bfloat16.itemsize  # rows that are rounded
    lengths = list(map(plan.codec.num_bytes, group.shard_sizes)) if plan.codec and fill is Fill.ENCODED else []
    encoded, own_encoded = sum(lengths), sum(lengths[mesh.shard_rank : mesh.shard_rank + 1])
    return GroupSizes(
        shards=_shard_bytes(group, plan) + own_encoded,
        unsharded=weights.unsharded_bytes if plan.frees_unsharded and not policy.keeps_storage else 0,
        kept=kept,
        is_renewed=plan.frees_unsharded,
        rows=weights.rows_bytes if fill in (Fill.FROM_ROWS, Fill.BY_SUBCLASS) else encoded,
        decoding=_decoding_bytes(group, plan, fill),
        sent=group.shard_numel * compute.itemsize if is_copied_to_send else 0,
        part=0 if reshard is None or isinstance(reshard, bool) or mesh.only_sums else weights.part_bytes(reshard),
        arriving=tuple(parameter.shape.numel() * compute.itemsize for parameter in trained),
        borrows=plan.borrows(compute),
        gradient_rows=sum(plan.reduced_by_piece) * reduce.itemsize,
        reduced=0 if is_in_rows else reduced,
        gradients=summed * group.grad_dtype.itemsize,
        scratch=scratch,
        is_all_trainable=len(trained) == len(group.parameters),
        lands=fill is Fill.FROM_RANKS,
        collects_late=plan.collects_late,
        lane_owns_rows=plan.lane_owns_rows,
        may_lack=policy.reduce_unused or group.num_flags > 0,
        is_offloaded=group.is_offloaded,
        stores_at_once=stores_at_once,
        lost=_lost_bytes(group, plan) if trained and mesh.remembers else 0,
    )


def _lost_bytes(group: Group, plan: BufferPlan) -> int:
    """Returns the bytes of what gradients lose along each axis, and on the way back from the replicas."""
    mesh, numels = group.mesh, [0, 0]
    over_shards, over_replicas = (each is not None and each.feedback for each in mesh.comm.reductions)
    if over_shards and mesh.num_shards > 1:
        numels[0] = sum(plan.reduced_by_rank)
    if over_replicas and mesh.num_replicas > 1:
        numel = plan.reduced_by_rank[mesh.shard_rank]
        numels[1] = numel + (0 if mesh.shards_replicas else cut(numel, mesh.num_replicas)[mesh.replica])
    dtypes = group.reduce_dtype, mesh.reduce_transport.sum_dtype(group.reduce_dtype)
    wide = [torch.promote_types(dtype, torch.float32).itemsize for dtype in dtypes]
    return 0 if mesh.comm.fake_reduce or group.reduce_dtype.is_complex else sum(map(mul, numels, wide))


def _decoding_bytes(group: Group, plan: BufferPlan, fill: Fill) -> int:
    if plan.codec is None or fill is not Fill.ENCODED:
        return 0
    from sherd.codecs import decoding_bytes  # of few policies, so loaded late

    if plan.may_be_rows:
        return decoding_bytes(plan.codec, group.shard_sizes, 0)
    largest = [max(group.shard_sizes)]  # one rank's part after the other
    return decoding_bytes(plan.codec, largest, group.compute_dtype.itemsize)


def _shard_bytes(group: Group, plan: BufferPlan) -> int:
    """Returns the bytes of the group between steps: its shards, and the parts of other replicas."""
    fetched = group.fetched
    if group.unsharded_memory is not None:
        return group.unsharded_memory.nbytes if group.is_one_piece else 0
    shards = 0 if group.is_offloaded or group.place.disk is not None else group.shard_bytes
    if fetched is None:
        return shards
    own = 0 if plan.sends_shards_as_they_are else shards
    return own + fetched.numel * group.compute_dtype.itemsize
