"""Where shards rest between two uses, and how they are fetched: from host memory, and from the other replicas.

With an optimizer that steps on the host, weights may still rest on the device: as a copy of the shard in compute's
dtype, which is fetched once after the shard was written.

A shard may be divided among replicas. Each replica steps its own part, and fetches the others before a gather:

    replica 0   optimizer steps | a a |           fetches      | a a | b b |    and sends all of it
    replica 1   optimizer steps       | b b |                  | a a | b b |    along the shard axis

Parts are fetched once after they were written, not for each gather: a step of several micro-batches fetches them once.
If the copy of the shard has the dtype and the device of the parts, the rank's own part is a view of the copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from sherd.comm.mesh import DataMesh
from sherd.comm.transport import Sizes
from sherd.layout.extent import Extent
from sherd.policy import Disk, OffloadPolicy, Place

FETCHED_NUMEL = 1 << 18
"""Elements that are copied to the device at a time, to be cast on it."""


@dataclass(frozen=True, slots=True)
class RestingPlace:
    """The memory of shard buffers and shard gradients, and the places of what belongs to them.

    Attributes:
        pinned: host memory is page-locked.
        is_elsewhere: shards rest in another memory than that of the device that computes.
        keeps_copies: the device keeps a copy of them, in compute's dtype.
        disk: where shards rest in files, which are mapped to host memory; None: they do not.
        state: where the optimizer's state rests.
        masters: where the low bits of float32 masters rest; None: there are no masters.
    """

    device: torch.device
    pinned: bool = False
    is_elsewhere: bool = False
    keeps_copies: bool = False
    disk: Disk | None = None
    state: Place = "device"
    masters: Place | None = None

    @classmethod
    def under(cls, policy: OffloadPolicy, mesh_device: torch.device) -> RestingPlace:
        """Returns the place for `policy`. On a CPU mesh the device's memory is that of the host."""
        has_two = mesh_device.type != "cpu"
        steps_on_host = policy.step_place == "host"
        return cls(
            torch.device("cpu") if steps_on_host else mesh_device,
            policy.pin_memory and has_two,
            steps_on_host and has_two,
            steps_on_host and has_two and policy.parameters == "device",
            policy.parameters if isinstance(policy.parameters, Disk) else None,
            policy.state_place,
            policy.masters,
        )

    @property
    def parameters(self) -> Place:
        """Where the weights rest that are gathered, as `OffloadPolicy` names it."""
        return self.disk or ("host" if self.is_elsewhere and not self.keeps_copies else "device")

    @property
    def disks(self) -> list[Disk]:
        """Those on which any of this rests."""
        return [each for each in (self.state, self.masters, self.disk) if isinstance(each, Disk)]

    @property
    def brings_state(self) -> bool:
        """True if the optimizer's state does not rest in the memory where the optimizer steps."""
        return isinstance(self.state, Disk) or (self.state == "host" and self.device.type != "cpu")

    def empty(self, numel: int, dtype: torch.dtype, now_on: torch.device, name: str = "") -> torch.Tensor:
        """Returns a zeroed buffer at the resting place, or a meta one if the parameters are `now_on` meta.

        Raises:
            ScratchError: the disk has no space for it; the message calls it `name`.
        """
        if self.disk is not None and now_on.type != "meta":
            from sherd.on_disk import vectors_on  # seldom needed, so loaded late: tests/test_storeys.py

            return vectors_on(self.disk).empty(name, numel, dtype)
        return self.zeros(numel, dtype, now_on if now_on.type == "meta" else self.device)

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=device, pin_memory=self.pinned and device.type == "cpu")

    def copy_of(self, shard: torch.Tensor) -> torch.Tensor:
        """Returns a contiguous copy of `shard` at the resting place. The copy of a meta tensor is meta."""
        if hasattr(shard, "fsdp_pre_all_gather") and shard.device == self.device:
            # As FSDP2 copies: a clone of torchao's NF4 is quantized again.
            copied = shard.new_zeros(shard.shape)
            if type(copied) is type(shard):
                copied.copy_(shard)
                return copied
        if shard.is_meta or shard.device == self.device:
            return shard.clone(memory_format=torch.contiguous_format)
        return shard.to(self.device, memory_format=torch.contiguous_format)

    def store(self, reduced: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a reduced gradient in it, ordered on the current stream. Pinned: the host does not wait."""
        stored = torch.empty(reduced.shape, dtype=reduced.dtype, device=self.device, pin_memory=self.pinned)
        return stored.copy_(reduced, non_blocking=True)


def fetch_into(target: torch.Tensor, shard: torch.Tensor) -> None:
    """Copy `shard`, 1-D, in any dtype and on any device, into `target`. The copy is ordered on the current stream."""
    if shard.device == target.device or shard.dtype == target.dtype:
        target.copy_(shard, non_blocking=True)
        return
    # A shard in host memory is cast on the device, a part at a time. torch's own copy would cast it on the host, and
    # make the host wait.
    for piece, place in zip(shard.split(FETCHED_NUMEL), target.split(FETCHED_NUMEL), strict=True):
        place.copy_(piece.to(target.device, non_blocking=True))


class FetchedShard:
    """The full shard, 1-D, of which this rank, or every replica, owns a part of one of the `sizes`.

    There is one copy per dtype asked for.
    """

    def __init__(self, sizes: Sizes, mesh: DataMesh) -> None:
        self.sizes = sizes
        self._mesh = mesh
        at = mesh.replica if mesh.shards_replicas else 0
        self._own = Extent(sum(sizes[:at]), sizes[at])
        self._copies: dict[torch.dtype, torch.Tensor] = {}
        self._versions: dict[torch.dtype, int] = {}

    @property
    def numel(self) -> int:
        return sum(self.sizes)

    def holding(self, shard: torch.Tensor) -> torch.Tensor:
        """Keep `shard`, `[numel]`, as a copy. Returns this rank's part of it."""
        self._copies[shard.dtype] = shard
        return self.own_part(shard)

    def own_part(self, shard: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of `shard`, a view."""
        return shard[self._own.start : self._own.stop]

    def around(self, piece: torch.Tensor, dtype: torch.dtype, version: int) -> torch.Tensor:
        """Returns the shard in `dtype`, given this rank's part. Collective over the replicas if `version` is new."""
        shard = self._copies.get(dtype)
        if shard is None:
            with torch.inference_mode(False):  # a tensor made inside could not be written in training
                shard = self._copies[dtype] = torch.empty(self.numel, dtype=dtype, device=self._mesh.device)
        if self._versions.get(dtype) != version:
            own = self.own_part(shard)
            # The rank's part may be a view of this copy already (`holding`).
            if own.data_ptr() != piece.data_ptr():
                fetch_into(own, piece)
            # All replicas come here together, because all ranks note writes together (`Group.mark_shards_written`).
            if self._mesh.shards_replicas:
                self._mesh.fetch_transport.all_gather(shard, own, self.sizes, False)
            self._versions[dtype] = version
        return shard

    def has_piece(self, piece: torch.Tensor) -> bool:
        """Returns whether `piece`, this rank's own, is a view of a copy."""
        shard = self._copies.get(piece.dtype)
        return shard is not None and self.own_part(shard).data_ptr() == piece.data_ptr()

    def held(self) -> Iterable[torch.Tensor]:
        return self._copies.values()
