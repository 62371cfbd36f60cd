"""The bytes of units' buffers: the storages that units hold now, and the sizes of buffers when they are allocated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor

from sherd._torch import local_tensor
from sherd.comm.collectives import UsersCollectives
from sherd.comm.transport import Transport
from sherd.engine.moves.buffer_plan import BufferPlan, Fill
from sherd.engine.moves.weights import Weights
from sherd.engine.run.unit import Unit
from sherd.engine.state.group import Group
from sherd.engine.state.parameter import ShardedParameter, record_of
from sherd.policy import UnitPolicy
from sherd.schedule.moments import GroupSizes, MemoryKind

Held = dict[int, tuple[MemoryKind, int]]
"""Storages that are allocated, by address: the kind of memory, and its bytes."""


def held_by(unit: Unit) -> Held:
    """Returns the allocated storages of `unit`. A storage of both weights and gradients counts for the weights."""
    return together(held_for_gradients(unit), *held_by_groups(unit))


def held_by_groups(unit: Unit) -> list[Held]:
    """Returns the allocated storages of each group's weights."""
    return [alive(weights.held(), unit.mesh.device) for weights in unit.weights]


def held_for_gradients(unit: Unit) -> Held:
    """Returns the allocated storages of gradients, those of the optimizer's parameters among them."""
    of_groups = [each for gradients in unit.gradients for each in gradients.held()]
    params = unit.shards.optimizer_params
    of_params = [(MemoryKind.GRADIENTS, param.grad) for param in params if param.grad is not None]
    return alive(of_groups + of_params, unit.mesh.device)


def together(*parts: Held) -> Held:
    """Returns the union of `parts`; the last part that has an address says its kind."""
    return {address: storage for part in parts for address, storage in part.items()}


def alive(tensors: Iterable[tuple[MemoryKind, torch.Tensor]], device: torch.device) -> Held:
    """Returns the storages of `tensors` that are allocated on `device`, without those that rest elsewhere (offload)."""
    held: Held = {}
    for kind, tensor in tensors:
        for storage in _storages(tensor):
            if storage.nbytes() and storage.device.type == device.type:
                held.setdefault(storage.data_ptr(), (kind, storage.nbytes()))
    return held


def _storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """Yields the storages with the elements of `tensor`: those of the inner tensors for a subclass made of others."""
    if tensor.is_meta:
        return
    if isinstance(tensor, DTensor):
        yield from _storages(local_tensor(tensor))
    elif hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _storages(getattr(tensor, name))
    else:
        yield tensor.untyped_storage()


def bytes_of(held: Held) -> dict[MemoryKind, int]:
    """Returns the bytes of each kind."""
    sums: Counter[MemoryKind] = Counter()
    for kind, nbytes in held.values():
        sums[kind] += nbytes
    return dict(sums)


def total(held: Held) -> int:
    """Returns the bytes of all storages."""
    return sum(nbytes for _, nbytes in held.values())


def held_by_optimizer(state: Mapping[torch.Tensor, object], device: torch.device) -> dict[int | None, Held]:
    """Returns the storages of an optimizer's tensors on `device`, by the id of the unit that owns their parameter.

    State of parameters that no unit owns is under None. A storage counts once.
    """
    by_owner: dict[int | None, Held] = {}
    seen: set[int] = set()
    for parameter, values in state.items():
        record = record_of(parameter)
        owner = None if record is None or record.owner is None else record.owner.id
        tensors = values.values() if isinstance(values, dict) else ()
        held = alive(((MemoryKind.OPTIMIZER, each) for each in tensors if isinstance(each, torch.Tensor)), device)
        by_owner.setdefault(owner, {}).update((address, each) for address, each in held.items() if address not in seen)
        seen.update(held)
    return by_owner


def staging_bytes(units: Iterable[Unit]) -> int:
    """Returns the bytes that the units' transports share with other ranks, also for other models."""
    meshes = dict.fromkeys(mesh for unit in units for mesh in unit.meshes)
    transports = {id(each): each for mesh in meshes for each in (mesh.shard_transport, mesh.replicate_transport)}
    return sum(each.nbytes for each in transports.values())


# Sizes when allocated


def sizes_of(unit: Unit) -> list[GroupSizes]:
    """Returns the sizes of the buffers of `unit`'s groups. Makes the transport, as the first gather does."""
    return [group_sizes(weights, unit.policy) for weights in unit.weights]


def group_sizes(weights: Weights, policy: UnitPolicy) -> GroupSizes:
    """Returns the bytes of the group's buffers in the memory of the device that computes."""
    group, plan = weights.group, weights.plan
    trained, mesh = trainable(group.parameters), group.mesh
    own = mesh.shard_transport
    sender: Transport = own if policy.all_gather is None else UsersCollectives(policy.all_gather, None)
    reducer: Transport = own if policy.reduce_scatter is None else UsersCollectives(policy.reduce_scatter, None)
    fill = plan.fill_by(sender)
    compute, reduce, reshard = group.compute_dtype, group.reduce_dtype, policy.reshard_after_forward
    # With other ways to fill, the copy is this rank's part of the rows.
    is_copied_to_send = fill is Fill.FROM_RANKS and not plan.sends_shards_as_they_are and not mesh.shards_replicas
    summed, sums = plan.reduced_by_piece[mesh.piece], plan.reduced_by_rank
    memory, kept = group.unsharded_memory, 0
    if not plan.frees_unsharded and not plan.is_never_gathered:
        kept = group.unsharded_bytes if memory is None else memory.nbytes
    return GroupSizes(
        shards=_shard_bytes(group, plan),
        unsharded=weights.unsharded_bytes if plan.frees_unsharded else 0,
        kept=kept,
        rows=group.packing.gathered_numel * compute.itemsize if fill is Fill.FROM_ROWS else 0,
        sent=group.shard_numel * compute.itemsize if is_copied_to_send else 0,
        part=0 if reshard is None or isinstance(reshard, bool) else weights.part_bytes(reshard),
        arriving=tuple(each.shape.numel() * compute.itemsize for each in trained),
        borrows=plan.borrows(compute),
        gradient_rows=sum(plan.reduced_by_piece) * reduce.itemsize,
        reduced=(sums[mesh.shard_rank] + summed * mesh.shards_replicas) * reducer.sum_dtype(reduce).itemsize,
        gradients=summed * group.dtype.itemsize,
        scratch=reducer.scratch_bytes(sums, mesh.shard_rank, reduce.itemsize),
        is_all_trainable=len(trained) == len(group.parameters),
        lands=fill is Fill.FROM_RANKS,
        collects_late=plan.collects_late,
        lane_owns_rows=plan.lane_owns_rows,
        is_offloaded=group.is_offloaded,
        stores_at_once=group.is_offloaded and policy.all_reduce_hook is None and mesh.num_replicas == 1,
    )


def _shard_bytes(group: Group, plan: BufferPlan) -> int:
    """Returns the bytes of the group between steps: its shards, with the pieces of other replicas if there are any."""
    fetched = group.fetched
    if group.unsharded_memory is not None:
        return group.unsharded_memory.nbytes if group.is_one_piece else 0
    shards = 0 if group.is_offloaded else group.shard_buffer.nbytes
    if fetched is None:
        return shards
    own = 0 if plan.sends_shards_as_they_are else shards
    return own + fetched.numel * group.compute_dtype.itemsize


def trainable(parameters: Sequence[ShardedParameter]) -> list[ShardedParameter]:
    """Returns the parameters that get gradients."""
    return [each for each in parameters if each.requires_grad]
