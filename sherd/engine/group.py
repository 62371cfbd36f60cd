"""The parameters of a unit that share dtypes and trainability, and the one rest buffer their shards are views of.

What differs between two parameters of a unit (mixed dtypes, frozen layers) puts them into two groups; a group needs no
rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.utils.dlpack import from_dlpack

from sherd._torch import DTensorSpec, dtensor_spec, replace_local_tensor
from sherd.comm.mesh import DataMesh
from sherd.comm.streams import Streams
from sherd.comm.transport import Sizes
from sherd.engine.offload import RestingPlace
from sherd.engine.parameter import ShardedParameter
from sherd.layout.packing import Packing, pack
from sherd.layout.runs import Runs
from sherd.policy import MixedPrecisionPolicy

ALONE_BYTES = 4 << 20
"""Whole tensors of at least this size have a group of their own, on devices without streams."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What the parameters of one group have in common. `gathers_itself`: a tensor subclass with its own all-gather.

    `lot` is None for tensors cut by themselves, else the plan that cut them: those of two plans do not fit one line.
    """

    dtype: torch.dtype
    trainable: bool
    gathers_itself: bool
    lot: int | None


def kind_of(parameter: ShardedParameter) -> Kind:
    """The group that `parameter` belongs to."""
    local = parameter.local
    lot = parameter.lot if isinstance(parameter.cut, Runs) else None
    return Kind(local.dtype, parameter.shard.requires_grad, hasattr(local, "fsdp_pre_all_gather"), lot)


class Tensorlike(Protocol):
    """A parameter, or the record of one."""

    shape: torch.Size
    dtype: torch.dtype


def travels_alone(parameter: Tensorlike, streams: Streams) -> bool:
    """Whether a tensor had better have a group to itself: a large one, on a device without streams.

    Alone it is gathered straight into place and reduced from where autograd left its gradient: no copies, for the price
    of one more collective. With streams the gather could not run ahead of compute then (`weights.py`).
    """
    return streams.in_host_order and parameter.shape.numel() * parameter.dtype.itemsize >= ALONE_BYTES


class Group:
    """Parameters that are gathered in one all-gather and reduced in one reduce-scatter.

    `rest` is 1-D, `packing.rest_numels[rank]` elements: this rank's shards. Each shard's local tensor is a view of it,
    so that the optimizer writes what the next all-gather sends. `seats` are the extents and shapes of these views,
    `sizes` the lengths of all ranks' rest buffers.
    """

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        mesh: DataMesh,
        precision: MixedPrecisionPolicy,
        place: RestingPlace,
    ) -> None:
        self.parameters = tuple(parameters)
        self.mesh = mesh
        self.place = place
        self.packing: Packing = pack([each.cut for each in self.parameters], mesh.num_shards)
        self.sizes = Sizes(self.packing.rest_numels)
        held = [slot.held(mesh.shard_rank) for slot in self.packing.slots]
        self.seats = tuple(
            (extent, slot.cut.local_shape(mesh.shard_rank))
            for extent, slot in zip(held, self.packing.slots, strict=True)
        )
        self.dtype = self.parameters[0].local.dtype
        floating = self.dtype.is_floating_point
        self.compute_dtype = precision.param_dtype if floating and precision.param_dtype is not None else self.dtype
        self.reduce_dtype = precision.reduce_dtype if precision.reduce_dtype is not None else self.compute_dtype
        self.device = mesh.device
        self.gathers_itself = kind_of(self.parameters[0]).gathers_itself
        self.rest = self._keep_shard() if self.gathers_itself else self._gather_shards_into_one_buffer()

    @property
    def name(self) -> str:
        """For messages: the first parameter, and how many more there are."""
        more = len(self.parameters) - 1
        return self.parameters[0].name + (f" (and {more} more)" if more else "")

    @property
    def whole_bytes(self) -> int:
        """Bytes of the gathered parameters."""
        return self.packing.whole_numel * self.compute_dtype.itemsize

    @property
    def is_meta(self) -> bool:
        """Whether the shards have no data yet."""
        return self.rest.is_meta

    @property
    def is_seated(self) -> bool:
        """Whether every shard is still the view of the rest buffer that it was made as."""
        if self.gathers_itself:
            return self.parameters[0].local is self.rest
        return all(
            self._is_at(parameter.local, extent.start)
            for parameter, (extent, _) in zip(self.parameters, self.seats, strict=True)
        )

    def _is_at(self, local: torch.Tensor, start: int) -> bool:
        if local.device != self.rest.device or local.dtype != self.dtype:
            return False
        return local.is_meta or local.numel() == 0 or local.data_ptr() == self._address(start)

    def _address(self, start: int) -> int:
        return self.rest.data_ptr() + start * self.dtype.itemsize

    def _gather_shards_into_one_buffer(self) -> torch.Tensor:
        """Copy the shards' local tensors into a new rest buffer, and make them views of it."""
        device = self.parameters[0].local.device
        rest = self.place.empty(self.rest_numel, self.dtype, device)
        for parameter, (extent, shape) in zip(self.parameters, self.seats, strict=True):
            seat = own_view(rest[extent.start : extent.stop]).view(shape)
            if not rest.is_meta:
                seat.copy_(parameter.local)
            assert isinstance(parameter.shard, DTensor), "a shard is a DTensor"
            replace_local_tensor(parameter.shard, seat)
            parameter.claim(parameter.shard)
        return rest

    def _keep_shard(self) -> torch.Tensor:
        """A tensor subclass that gathers itself keeps its own memory; the user's full tensor must not live on in it."""
        (parameter,) = self.parameters
        local = parameter.local
        if not local.is_meta:
            local = local.to(self.place.device, copy=True)
        assert isinstance(parameter.shard, DTensor), "a shard is a DTensor"
        replace_local_tensor(parameter.shard, local)
        parameter.claim(parameter.shard)
        return local

    @property
    def rest_numel(self) -> int:
        """Elements of this rank's rest buffer."""
        return self.packing.rest_numels[self.mesh.shard_rank]

    @property
    def num_flags(self) -> int:
        """How many flags travel with the gradients: one for each tensor, none for one that is alone."""
        return len(self.parameters) if len(self.parameters) > 1 else 0

    def grad_specs(self) -> list[DTensorSpec]:
        """What each shard's gradient is as a DTensor: the shard's own layout, in the group's dtype."""
        specs = []
        for parameter in self.parameters:
            old = parameter.shard_spec
            specs.append(
                old if parameter.dtype == self.dtype else dtensor_spec(old.mesh, old.placements, old.shape, self.dtype)
            )
        return specs


def own_view(part: torch.Tensor) -> torch.Tensor:
    """The same memory, as a tensor that begins where its storage does: a shard that is saved takes no neighbours along.

    (Nor can torch save a DTensor whose local tensor has an offset.) Through DLPack, as bytes, so that any dtype goes.
    """
    if part.is_meta or type(part) is not torch.Tensor:
        return part
    if part.numel() == 0:
        return torch.empty_like(part)
    return from_dlpack(part.view(torch.uint8)).view(part.dtype)
