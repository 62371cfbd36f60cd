"""The device mesh of a run, and this rank's place on each of its axes."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sherd._torch import concatenate_meshes, flatten_mesh
from sherd.train.axes import Axes

__all__ = ["RankGrid"]


class RankGrid:
    """The ranks of a run on their axes, and this rank's place. All ranks make it together.

    Attributes:
        data: what parameters are sharded over: dp and cp as one axis; with replicate, that axis and this one.
        experts: the same for experts, of which each rank of ep has others: the axes of `data` but ep.
        expert_cut: what experts are cut or copied over before: ep and tp; None if there is neither.
        tp, cp, ep, pp: 1-D meshes; None where the axis has one rank.
    """

    def __init__(self, axes: Axes, device_type: str) -> None:
        self.axes = axes
        sizes = {"pp": axes.pp, "replicate": axes.replicate, "dp": axes.dp // axes.ep}
        sizes |= {"ep": axes.ep, "cp": axes.cp, "tp": axes.tp}
        # An axis of one rank is left out: it would be a process group to make, and an axis of every DTensor.
        self._sizes = {name: size for name, size in sizes.items() if size > 1 or name == "dp"}
        self.mesh = init_device_mesh(device_type, tuple(self._sizes.values()), mesh_dim_names=tuple(self._sizes))
        self.data = self._sharding("data", ("dp", "ep", "cp"))
        self.experts = self._sharding("experts", ("dp", "cp"))
        cut = tuple(name for name in ("ep", "tp") if name in self._sizes)
        self.expert_cut = self.mesh[cut] if cut else None
        self.tp, self.cp, self.ep, self.pp = map(self._axis, ("tp", "cp", "ep", "pp"))

    @property
    def device_type(self) -> str:
        """Of all ranks."""
        return self.mesh.device_type

    @property
    def data_rank(self) -> int:
        """Which share of the samples this rank reads, 0 to `axes.num_data`."""
        place = 0
        for name in ("replicate", "dp", "ep"):
            place = place * self._sizes.get(name, 1) + self._place(name)
        return place

    @property
    def stage(self) -> int:
        """Which part of the layers this rank has, 0 to `axes.pp`."""
        return self._place("pp")

    @property
    def stage_groups(self) -> list[dist.ProcessGroup]:
        """The group of ranks that have this rank's part of everything but the layers, if there are several."""
        return [] if self.pp is None else [self.pp.get_group()]

    @property
    def context_rank(self) -> int:
        """Which part of a sample's tokens this rank reads, 0 to `axes.cp`."""
        return self._place("cp")

    def _axis(self, name: str) -> DeviceMesh | None:
        return self.mesh[name] if name in self._sizes else None

    def _place(self, name: str) -> int:
        return self.mesh.get_local_rank(name) if name in self._sizes else 0

    def _sharding(self, name: str, axes: tuple[str, ...]) -> DeviceMesh:
        """These axes as one, behind the replicate axis."""
        there = tuple(each for each in axes if each in self._sizes)
        shard = self.mesh[there[0]] if len(there) == 1 else flatten_mesh(self.mesh[there], name)
        replicate = self._axis("replicate")
        return shard if replicate is None else concatenate_meshes([replicate, shard])
