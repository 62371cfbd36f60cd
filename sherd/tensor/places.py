"""Where the elements of a sharded tensor lie, as operations on it ask."""

from __future__ import annotations

from math import prod

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from sherd._torch import DTensorSpec, device_of, dtensor_spec
from sherd.layout.extent import Extent
from sherd.layout.placement import Shape


class Places:
    """The places of one tensor's pieces. Read once from a spec, and kept with it.

    shape: the shape of the unsharded tensor.
    strides: of a tensor whose elements are not in order (`channels_last`, a transposed view at one owner); else None.
    joined_axes: the mesh axes whose ranks hold different elements: reductions go over these.
    copied_axes: the mesh axes whose ranks hold the same elements.
    is_of_vectors: the tensor is a flat parameter over tensor parallelism.
    counted: the extents of this rank's run that a reduction counts here, for a flat parameter over tensor parallelism,
        of which other ranks count some elements; None if this rank counts all.
    """

    __slots__ = (
        "__weakref__", "by_dtype", "copied_axes", "counted", "for_torch", "is_of_vectors", "joined_axes", "mesh",
        "numel", "placements", "shape", "strides", "value_specs",
    )  # fmt: skip

    def __init__(
        self, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: Shape, strides: tuple[int, ...] | None
    ) -> None:
        self.mesh = mesh
        self.placements = placements
        self.shape = shape
        self.numel = prod(shape)
        self.strides = None if strides is None or strides == _in_order(shape) else strides
        many = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
        self.joined_axes = tuple(axis for axis in many if not placements[axis].is_replicate())
        self.copied_axes = tuple(axis for axis in many if placements[axis].is_replicate())
        self.is_of_vectors = False
        self.counted: tuple[Extent, ...] | None = None
        self.by_dtype: dict[torch.dtype, DTensorSpec] = {}
        self.for_torch: dict[torch.dtype, DTensorSpec] = {}
        self.value_specs: dict[tuple[torch.Size, torch.dtype], DTensorSpec] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> Places:
        return self

    @property
    def device(self) -> torch.device:
        """The device of results on ranks that had no part in them."""
        return device_of(self.mesh)

    @property
    def groups(self) -> tuple[ProcessGroup, ...]:
        """The process groups whose ranks hold different elements: to reduce over all of them is to reduce over the
        tensor."""
        return tuple(self.mesh.get_group(axis) for axis in self.joined_axes)

    def spec(self, dtype: torch.dtype) -> DTensorSpec:
        """Returns the spec of a tensor of `dtype` that lies here; the same object each time."""
        found = self.by_dtype.get(dtype)
        if found is None:
            found = self._new_spec(dtype)
            self.keep_with(found)
        return found

    def spec_for_torch(self, dtype: torch.dtype) -> DTensorSpec:
        """Returns the same without these places, for DTensors of torch: it hands specs on to results and to files."""
        found = self.for_torch.get(dtype)
        if found is None:
            found = self.for_torch[dtype] = self._new_spec(dtype)
        return found

    def _new_spec(self, dtype: torch.dtype) -> DTensorSpec:
        return dtensor_spec(self.mesh, self.placements, torch.Size(self.shape), dtype, self.strides)

    def keep_with(self, spec: DTensorSpec) -> None:
        """Keep these places with a spec that describes them: every operation on the tensor asks for them."""
        assert spec.tensor_meta is not None, "a DTensor's spec has it"
        self.by_dtype.setdefault(spec.tensor_meta.dtype, spec)
        spec.sherd_places = self

    def same_as(self, other: Places) -> bool:
        """Returns True if both tensors have the same elements on the same ranks."""
        return self is other or (
            self.placements == other.placements and self.shape == other.shape and self.mesh == other.mesh
        )

    def __str__(self) -> str:
        """Returns the placements, for error texts."""
        return str(self.placements)


def _in_order(shape: Shape) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
