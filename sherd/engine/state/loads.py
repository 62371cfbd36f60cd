"""Loads: the elements that each rank owns of uncut tensors, summed over all units whose model has not run yet.

The planner gives the next tensor to the rank that owns the fewest elements. Of units that are offloaded in part, the
next one is taken if those before it are fewer bytes than their share.
"""

from __future__ import annotations

import weakref

import torch.distributed as dist

from sherd.comm.mesh import DataMesh
from sherd.policy import OffloadPolicy

_loads: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, list[int]]] = weakref.WeakKeyDictionary()
"""The elements that each owner has, by shard group and number of owners (`DataMesh.num_pieces`)."""

EVEN = 1.1
"""Loads balance if the largest is at most so many times the mean."""


def forget_loads(mesh: DataMesh) -> None:
    """Choose the owners, and what is offloaded, of the next model over `mesh` as if it were the first."""
    _offloaded.pop(_any_group_of(mesh), None)
    if mesh.shard_group is not None:
        _loads.pop(mesh.shard_group, None)


def loads_balance(mesh: DataMesh) -> bool:
    """Returns whether the ranks own about equally much of the units whose model has not run yet."""
    loads = _loads.get(mesh.shard_group, {}).get(mesh.num_pieces, []) if mesh.shard_group is not None else []
    return sum(loads) > 0 and max(loads) * len(loads) <= EVEN * sum(loads)


def loads_of(mesh: DataMesh) -> list[int]:
    assert mesh.shard_group is not None, "parameters are cut over a shard axis"
    return _loads.setdefault(mesh.shard_group, {}).setdefault(mesh.num_pieces, [0] * mesh.num_pieces)


_offloaded: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[OffloadPolicy, tuple[int, int]]] = (
    weakref.WeakKeyDictionary()
)
"""The bytes of units that were offloaded, and of all units, by group and policy. Other meshes have other ranks, which
make and forget units at other moments."""


def _any_group_of(mesh: DataMesh) -> dist.ProcessGroup:
    group = mesh.replicate_group if mesh.shard_group is None else mesh.shard_group
    assert group is not None, "parameters are cut over a shard axis, or have copies"
    return group


def policy_of_next(policy: OffloadPolicy, nbytes: int, mesh: DataMesh) -> OffloadPolicy:
    """Returns the policy for the next unit made on `mesh`, of `nbytes`: none, if earlier units have its share."""
    if policy.share == 1.0:
        return policy
    offloaded = _offloaded.setdefault(_any_group_of(mesh), {})
    taken, total = offloaded.get(policy, (0, 0))
    total += nbytes
    is_next = taken + nbytes / 2 <= policy.share * total
    offloaded[policy] = taken + nbytes * is_next, total
    # What is not offloaded has masters too: with any share the values are the same.
    return policy if is_next else OffloadPolicy(masters=policy.masters and "device")
