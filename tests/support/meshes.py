"""Device meshes for tests, each made once for the function that a rank runs."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


def mesh_of(shape: tuple[int, ...] | None) -> DeviceMesh | None:
    """None for the default mesh; (replicas, ranks) for HSDP; (ranks,) for an explicit one. The same one when called
    again by the function that a rank runs."""
    if shape is None:
        return None
    known: dict[tuple[int, ...], _Mesh] = vars(_meshes).setdefault("by_shape", {})
    for ended in [each for each, mesh in known.items() if not mesh.is_alive()]:
        del known[ended]
    if shape not in known:
        # DTensor remembers earlier, equal meshes, whose groups ended with the test that made them.
        _clear_sharding_prop_cache()
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        known[shape] = _Mesh(mesh, mesh.get_all_groups())
    return known[shape].mesh


# Of each rank, be it a thread: what it does twice on one mesh DTensor works out once.
_meshes = threading.local()


@dataclass(frozen=True)
class _Mesh:
    """A mesh and its groups, which live until the end of the function that a rank runs."""

    mesh: DeviceMesh
    groups: list[dist.ProcessGroup]

    def is_alive(self) -> bool:
        return all(group in dist.distributed_c10d._world.pg_map for group in self.groups)
