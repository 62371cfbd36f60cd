"""Loads: the elements that each rank owns of uncut tensors, summed over all units whose model has not run yet.

The planner gives the next tensor to the rank that owns the fewest elements.
"""

from __future__ import annotations

import weakref

import torch.distributed as dist

from sherd.comm.mesh import DataMesh

_loads: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, list[int]]] = weakref.WeakKeyDictionary()
"""The elements that each owner has, by shard group and number of owners (`DataMesh.num_pieces`)."""

EVEN = 1.1
"""Loads balance if the largest is at most so many times the mean."""


def forget_loads(mesh: DataMesh) -> None:
    """Choose the owners of the next model over `mesh` as if it were the first."""
    if mesh.shard_group is not None:
        _loads.pop(mesh.shard_group, None)


def loads_balance(mesh: DataMesh) -> bool:
    """Returns whether the ranks own about equally much of the units whose model has not run yet."""
    loads = _loads.get(mesh.shard_group, {}).get(mesh.num_pieces, []) if mesh.shard_group is not None else []
    return sum(loads) > 0 and max(loads) * len(loads) <= EVEN * sum(loads)


def loads_of(mesh: DataMesh) -> list[int]:
    assert mesh.shard_group is not None, "parameters are cut over a shard axis"
    return _loads.setdefault(mesh.shard_group, {}).setdefault(mesh.num_pieces, [0] * mesh.num_pieces)
