"""A tensor that is cut into runs, each on one rank: a DTensor that answers operations itself."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NoReturn, Protocol, SupportsIndex

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from sherd._torch import (
    DTensorSpec,
    answer_checkpointing,
    attributes_of,
    dispatches_itself,
    dtensor_of,
    give_attributes,
    local_tensor,
    not_traced,
    register_foreach_type,
    spec_of,
)
from sherd.comm.streams import under_way, wait_for_steps
from sherd.errors import PlacementError, WriteBackError
from sherd.layout.boxes import Box, boxes_of_run, whole
from sherd.layout.extent import Extent
from sherd.layout.runs import Runs
from sherd.tensor.gather import gather, gather_part, piece_of, shard_of
from sherd.tensor.placement import Layout, RaggedShard, has_ragged, is_ragged, layout_of
from sherd.tensor.sharded import OwnDTensor, places_at, sharded_dtensor
from sherd.tensor.table import RAGGED, Args, Aten, Kwargs
from sherd.tensor.vectors import VectorShard

Reading = Callable[[torch.Tensor, Layout], torch.Tensor]


class RaggedDTensor(OwnDTensor):
    """A tensor of which each rank of one or more mesh axes holds a run of elements (`sherd.layout.runs.Runs`).

    It is the ragged shard of veScale-FSDP and Megatron-FSDP, as a DTensor. Other axes may shard it on a dim too (tensor
    parallel): then each rank's part on those axes is cut into runs.

    Checkpoints, optimizers and gradient clipping take it for a DTensor: `shape` is the shape of the unsharded tensor,
    `to_local()` is this rank's run (1-D, or complete rows), `full_tensor()` gathers. Operations work element by
    element, or reduce to one value; others gather, and all ranks must call them. A second tensor with other places
    raises `PlacementError`.
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch declares it is not as it calls it
        cls, func: Aten, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        """Answer an operation, or raise `PlacementError` for one that has no answer."""
        if under_way:
            wait_for_steps()
        return RAGGED.operation_for(func)(func, args, kwargs or {})

    @property
    def cut(self) -> Runs:
        """The runs of all ranks, of the tensor or of this rank's part on other axes."""
        return layout_of(spec_of(self)).cut

    def around(self, local: torch.Tensor) -> RaggedDTensor:
        """Returns a tensor with the places of this one, around `local`, this rank's run of it, outside autograd."""
        return dtensor_of(RaggedDTensor, local, places_at(self).spec(local.dtype), False)

    def part_of(self, full: torch.Tensor) -> torch.Tensor:
        return piece_of(full, layout_of(spec_of(self)))

    def __repr__(self) -> str:  # type: ignore[override]
        shape = tuple(self.shape)
        return f"RaggedDTensor(shape={shape}, placements={self.placements}, local_tensor={local_tensor(self)})"

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Returns this rank's run, of shape `cut.local_shape(rank)`: the same memory. Gradients flow through it.

        Raises:
            PlacementError: gradients are asked to come back in another layout.
        """
        if grad_placements is not None and tuple(grad_placements) != self.placements:
            raise PlacementError(f"to_local(grad_placements={grad_placements}): gradients have the tensor's layout")
        wait_for_steps()
        if not torch.is_grad_enabled():
            return local_tensor(self)
        local: torch.Tensor = _Read.apply(self, *_AS_RUN)  # type: ignore[no-untyped-call]  # of torch
        return local

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Returns the unsharded tensor on every rank, in memory of its own. All ranks that hold shards must call it.

        Its gradient must be the same on all ranks; each rank keeps its run of it.

        Raises:
            PlacementError: `grad_placements` are anything but replicated.
        """
        if grad_placements is not None and not all(placement.is_replicate() for placement in grad_placements):
            raise PlacementError(
                f"full_tensor(grad_placements={grad_placements}) of a ragged tensor: only Replicate() is known; "
                "reduce the gradient before it comes back"
            )
        wait_for_steps()
        full: torch.Tensor = _Read.apply(self, *_AS_FULL)  # type: ignore[no-untyped-call]  # of torch
        return full

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """Returns the tensor as a DTensor of torch: replicated, in equal chunks, or `Partial("sum")` since torch 2.14.

        All ranks must call it.

        As in torch, `placements` may go on with `Replicate()` behind those for the axes of the mesh: a program for a
        2-D model says `(Replicate(), Replicate())` of every parameter, and those that are not tensor parallel are
        placed on the data-parallel axis alone.

        Raises:
            PlacementError: another mesh, a ragged placement (for `redistribute_to`), or a wrong number of placements.
        """
        wait_for_steps()
        mesh = self.device_mesh if device_mesh is None else device_mesh
        wanted = tuple(placements) if placements is not None else (Replicate(),) * mesh.ndim
        if all(each.is_replicate() for each in wanted[mesh.ndim :]):
            wanted = wanted[: mesh.ndim]
        if wanted == self.placements and mesh == self.device_mesh:
            return self
        if mesh != self.device_mesh or len(wanted) != mesh.ndim or has_ragged(wanted):
            raise PlacementError(
                f"redistribute(placements={wanted}) of a tensor with {self.placements} on {self.device_mesh}: give one "
                "Replicate() or Shard(dim) per axis of the same mesh; for another ragged layout use "
                "sherd.tensor.ragged.redistribute_to(tensor, cut)"
            )
        layout = layout_of(spec_of(self))
        # torch has no placement for the vectors of a flat parameter.
        reading, gathered_as = (
            (_AS_FULL, (Replicate(),) * mesh.ndim) if layout.is_of_vectors else (_AS_PART, layout.part_placements)
        )
        part: torch.Tensor = _Read.apply(self, *reading)  # type: ignore[no-untyped-call]  # of torch
        part = part if forward_dtype is None else part.to(forward_dtype)
        strides = torch.empty(self.shape, device="meta").stride()
        gathered: DTensor = DTensor.from_local(
            part, mesh, gathered_as, run_check=False, shape=self.shape, stride=strides
        )
        if any(each.is_partial() for each in wanted):  # torch makes summands of chunks, since 2.14, and not of copies
            chunks = [
                Shard(0) if to.is_partial() and now.is_replicate() else now
                for to, now in zip(wanted, gathered_as, strict=True)
            ]
            gathered = gathered.redistribute(mesh, chunks)
        return gathered.redistribute(mesh, wanted)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        self.warn_of_pickle()
        spec = spec_of(self)
        local, shape = local_tensor(self).detach(), tuple(spec.shape)
        args = local, spec.mesh, spec.placements, self.requires_grad, isinstance(self, nn.Parameter), shape
        attributes = attributes_of(self)
        return unpickled, (*args, attributes) if attributes else args

    # torch's distributed checkpoints write and read the run as boxes. So the file is like any other: it loads under
    # another layout, on another number of ranks, or unsharded.

    def __create_write_items__(self, fqn: str, object: torch.Tensor) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(local_tensor(self))
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
            for box, _ in boxes_here(layout_of(spec_of(self)))
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Returns the box that begins at `index.offset`, a view of this rank's run."""
        layout = layout_of(spec_of(self))
        for box, start in boxes_here(layout):
            if index.offset is None or box.offsets == tuple(index.offset):
                return local_tensor(self).detach().view(-1)[start : start + box.numel].view(box.sizes)
        raise ValueError(f"{index.fqn}: rank {layout.rank} holds no box of the tensor at {index.offset}")

    @staticmethod
    def __tensor_unflatten__(*args: object, **kwargs: object) -> NoReturn:
        raise not_traced("a tensor that sherd cuts into runs is not traced; what works on it runs as it is")


dispatches_itself(RaggedDTensor)
register_foreach_type(RaggedDTensor)


def boxes_here(layout: Layout) -> list[tuple[Box, int]]:
    """Returns the boxes of the unsharded tensor that make up this rank's run, and where each begins in the run."""
    cut = layout.cut
    boxes = boxes_of_run(cut.shape, cut.piece(layout.rank))
    if not layout.numel and layout.rank == cut.first:
        # An empty box of one rank, so that a tensor without elements is in the checkpoint: a load would miss it.
        boxes = (whole(cut.shape),)
    starts = accumulate((box.numel for box in boxes), initial=0)
    return [
        (Box(tuple(map(sum, zip(layout.offsets, box.offsets, strict=True))), box.sizes), start)
        for box, start in zip(boxes, starts, strict=False)
    ]


class _Context(Protocol):
    spec: DTensorSpec
    in_backward: Reading


class _Read(torch.autograd.Function):
    """Reads a ragged tensor by `read`. `in_backward` returns this rank's run of the gradient."""

    @staticmethod
    def forward(ctx: _Context, tensor: RaggedDTensor, read: Reading, in_backward: Reading) -> torch.Tensor:
        ctx.spec, ctx.in_backward = spec_of(tensor), in_backward
        return read(local_tensor(tensor), layout_of(ctx.spec))

    @staticmethod
    def backward(ctx: _Context, grad: torch.Tensor) -> tuple[RaggedDTensor, None, None]:
        layout = layout_of(ctx.spec)
        return as_result(ctx.in_backward(grad, layout), layout), None, None


_AS_RUN: tuple[Reading, Reading] = lambda local, layout: local.view_as(local), lambda grad, layout: grad
_AS_PART: tuple[Reading, Reading] = (gather_part, lambda grad, layout: shard_of(grad, layout.cut, layout.rank).clone())
_AS_FULL: tuple[Reading, Reading] = gather, lambda grad, layout: piece_of(grad, layout).clone()


def as_result(local: torch.Tensor, layout: Layout) -> RaggedDTensor:
    """Returns a result on this rank's run as a ragged tensor in `layout`."""
    return dtensor_of(RaggedDTensor, local, layout.spec(local.dtype), False)


def unpickled(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    requires_grad: bool,
    is_parameter: bool,
    shape: tuple[int, ...],
    attributes: dict[str, object] | None = None,
) -> RaggedDTensor:
    """Returns the tensor that `__reduce_ex__` took apart, on a mesh of the same shape. Pickles call this by name."""
    tensor: Any = ragged_dtensor(local, Layout(mesh, placements, shape).spec(local.dtype))
    # A Parameter keeps the class of its data.
    tensor = nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)
    give_attributes(tensor, attributes or {})
    return tensor  # type: ignore[no-any-return]


# `torch.load` makes only what is named here, unless it is told to trust the file.
torch.serialization.add_safe_globals([RaggedDTensor, RaggedShard, Runs, VectorShard, Extent, unpickled])


def ragged_dtensor(local: torch.Tensor, spec: DTensorSpec) -> RaggedDTensor:
    """Returns a ragged tensor around `local`, uncopied and outside autograd.

    Args:
        local: this rank's run, of shape `cut.local_shape(rank)`.
        spec: made by `sherd.tensor.placement.ragged_spec`.

    Raises:
        PlacementError: the placements are not those of a ragged tensor on this mesh.
    """
    layout = layout_of(spec)
    assert tuple(local.shape) == layout.local_shape, f"rank holds {tuple(local.shape)}, not {layout.local_shape}"
    return dtensor_of(RaggedDTensor, local, spec, False)


def as_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Returns a DTensor around `local`, uncopied and outside autograd: ragged if the spec is, else in equal chunks."""
    return ragged_dtensor(local, spec) if is_ragged(spec) else sharded_dtensor(local, spec)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor on the host; it lives as long as the view."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous(), "its memory is contiguous and on the host"
    # Not by numpy, which torch works without, and which has no bfloat16 or float8.
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.of = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part, uncopied: the local tensor of a DTensor, any other tensor itself."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def storages_of(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """Yields the storages with this rank's part: those of the inner tensors for a subclass made of others."""
    local = local_part(tensor)
    if hasattr(local, "__tensor_flatten__"):
        for name in local.__tensor_flatten__()[0]:
            yield from storages_of(getattr(local, name))
    else:
        yield local.untyped_storage()


def own_view(part: torch.Tensor) -> torch.Tensor:
    """Returns `part`, uncopied, as a tensor at the beginning of a storage of its own.

    A file with a view would hold its neighbours in the buffer, too, and torch cannot save a DTensor whose local tensor
    has an offset.
    """
    if part.is_meta or type(part) is not torch.Tensor:
        return part
    if part.numel() == 0:
        return torch.empty_like(part)
    # As bytes, so that any dtype is possible. Through the capsule, for `Tensor.__dlpack_device__` does not know devices
    # that other packages add to torch.
    return from_dlpack(to_dlpack(part.view(torch.uint8))).view(part.dtype)


def distribute_ragged(full: torch.Tensor, spec: DTensorSpec) -> RaggedDTensor:
    """Returns a ragged tensor with the values of `full`, an unsharded tensor that every rank holds.

    It communicates nothing. The run is a view of `full` if the part that is cut is contiguous.

    Raises:
        PlacementError: `full` has another shape than the spec says.
    """
    layout = layout_of(spec)
    if tuple(full.shape) != layout.shape:
        raise PlacementError(
            f"a tensor of shape {tuple(full.shape)} was given for one of shape {layout.shape}; every rank gives "
            "the full tensor"
        )
    return as_result(piece_of(full.detach(), layout), layout)


def redistribute_to(tensor: DTensor, to: Runs | DTensorSpec) -> RaggedDTensor:
    """Returns a DTensor, ragged or torch's own, cut into runs with memory of their own. All ranks must call it.

    Args:
        tensor: the tensor to cut.
        to: the cut, over the last axis of the tensor's mesh, with copies on the others; or the spec of a ragged tensor
            on the same mesh.

    Raises:
        PlacementError: `to` is for another shape, mesh, or number of ranks.
    """
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    if isinstance(to, Runs):
        if to.shape != shape:
            raise PlacementError(f"a cut of shape {to.shape} was given for a tensor of shape {shape}")
        layout = Layout(mesh, (*(Replicate(),) * (mesh.ndim - 1), RaggedShard(to)), shape)
    else:
        layout = layout_of(to)
        if layout.shape != shape or layout.mesh != mesh:
            raise PlacementError(
                f"a spec for a tensor of shape {layout.shape} on {layout.mesh} was given for one of shape {shape} on "
                f"{mesh}"
            )
    with torch.no_grad():
        full = tensor.full_tensor()
    return as_result(piece_of(full, layout).clone(), layout)


def _distributed(theirs: Callable[..., None], state: dict[str, object], keys: list[str], *more: object) -> None:
    """Take this rank's runs out of tensors of a full state that rank 0 sends to all. torch's function takes the rest.

    `state` has a pair under each of `keys`, the DTensor and the full tensor.

    Raises:
        WriteBackError: a tensor has another shape, on all ranks. With torch's function some ranks take rows of other
            ranks, and others wait.
    """
    for key in keys:
        into, full = pair if isinstance(pair := state.get(key), tuple) else (None, None)
        if not isinstance(into, DTensor):
            continue
        if into.shape != full.shape:
            raise WriteBackError(
                f"{key}: rank 0 sends a tensor of shape {tuple(full.shape)}, and that of the model or optimizer has "
                f"shape {tuple(into.shape)}; load what was saved of a model with the same shapes"
            )
        if isinstance(into, RaggedDTensor):
            state[key] = distribute_ragged(full, spec_of(into)).clone() if into.is_meta else into.copy_(full)
    theirs(state, keys, *more)


def _broadcast(
    theirs: Callable[..., None], full: dict[str, object], local: object, keys: list[str], *more: object
) -> None:
    """Send tensors of a full state without gaps.

    Under torch 2.11 `full_tensor()` of unequal chunks is a view of padded memory, and a broadcast sends the padding.
    """
    sent = {key: value.contiguous() if isinstance(value := full[key], torch.Tensor) else value for key in keys}
    theirs(sent, local, keys, *more)


def _distributed_there(theirs: Callable[..., DTensor], tensor: torch.Tensor, *more: object) -> DTensor:
    """Distribute a tensor in the memory that it is in, for state that rests on the host: torch's is on the mesh's."""
    made = theirs(tensor, *more)
    is_there = local_tensor(made).device.type == tensor.device.type
    return made if is_there else as_dtensor(local_tensor(made).to(tensor.device), spec_of(made))


answer_checkpointing(
    {"_distribute_tensors": _distributed, "_broadcast_tensors": _broadcast, "distribute_tensor": _distributed_there}
)
