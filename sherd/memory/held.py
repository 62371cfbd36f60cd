"""The storages that units hold now, by kind of memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import torch

from sherd.engine import ShardedParameter, Unit
from sherd.schedule.moments import MemoryKind
from sherd.tensor.ragged import storages_of

Held = dict[int, tuple[MemoryKind, int]]
"""Storages that are allocated, by address: the kind of memory, and its bytes."""


def held_by(unit: Unit) -> Held:
    """Returns the allocated storages of `unit`. A storage of both weights and gradients counts for the weights."""
    return together(held_for_gradients(unit), *held_by_groups(unit))


def held_by_groups(unit: Unit) -> list[Held]:
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
    storages: Held = {}
    for kind, tensor in tensors:
        for storage in storages_of(tensor):
            if storage.nbytes() and storage.device.type == device.type:
                storages.setdefault(storage.data_ptr(), (kind, storage.nbytes()))
    return storages


def bytes_of(held: Held) -> dict[MemoryKind, int]:
    sums: Counter[MemoryKind] = Counter()
    for kind, nbytes in held.values():
        sums[kind] += nbytes
    return dict(sums)


def total(held: Held) -> int:
    return sum(nbytes for _, nbytes in held.values())


def held_by_optimizer(state: Mapping[torch.Tensor, object], device: torch.device) -> dict[int | None, Held]:
    """Returns the storages of an optimizer's tensors by the id of the parameter's unit, None for no unit."""
    by_owner: dict[int | None, Held] = {}
    seen: set[int] = set()
    for parameter, values in state.items():
        record = ShardedParameter.of(parameter)
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
