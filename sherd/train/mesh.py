"""The device mesh of a run, and this rank's place on it."""

from __future__ import annotations

from torch.distributed.device_mesh import init_device_mesh

from sherd.train.axes import Axes


class RankGrid:
    """The ranks of a run on their axes, and this rank's place. All ranks make it together.

    Attributes:
        data: the mesh that parameters are sharded over: dp, and with replicas replicate and dp.
        tp: the mesh that matrices are cut over; None if there is none.
    """

    def __init__(self, axes: Axes, device_type: str) -> None:
        self.axes, self.device_type = axes, device_type
        # An axis of one rank is left out: it would be a process group to make, and an axis of every DTensor.
        sizes = {name: size for name, size in vars(axes).items() if size > 1 or name == "dp"}
        mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        self.data = mesh["replicate", "dp"] if axes.replicate > 1 else mesh["dp"]
        self.tp = mesh["tp"] if axes.tp > 1 else None

    @property
    def data_rank(self) -> int:
        """Which share of the samples this rank reads, 0 to `axes.num_data`."""
        place = self.data.get_coordinate()
        assert place is not None, "every rank is in the mesh"
        return place[0] if len(place) == 1 else place[0] * self.axes.dp + place[1]
