"""The treatment of parameters that are DTensors over other axes than the wrapper's (tensor parallelism).

    moment                        method                          what DTensorExtensions does
    a parameter is sharded        pre_flatten_transform           takes the part that the other axes leave to this rank
    it is unsharded again         post_unflatten_transform        makes a DTensor around that part, uncopied
    a state dict of rows is made  chunk_dtensor, chunk_tensor     cuts each part into rows, on all axes
    a sharded one is loaded       all_gather_dtensor              gathers the part over the wrapper's axes
                                  pre_load_state_dict_transform   finds the ShardedTensor of the part

Names, arguments and meanings are those of torch 2.13's `FSDPExtensions`. The engine itself shards DTensors; a
wrapper needs a subclass only to do more than that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from sherd._torch import DTensorSpec, dtensor, local_tensor, sharded_tensor_of_rows, spec_of
from sherd.comm.mesh import DataMesh
from sherd.errors import PlacementError, UnsupportedError
from sherd.layout import placement
from sherd.requirements import require_type
from sherd.tensor.gather import gather_part, shard_of
from sherd.tensor.placement import is_ragged, layout_of
from sherd.tensor.ragged import local_part
from sherd.tensor.relayout import around, lies_as
from sherd.tensor.tensor_parallel import on_other_axes, own_spec


class FSDPExtensions(ABC):
    """The methods that a wrapper calls for parameters that are DTensors: `FullyShardedDataParallel(extensions=...)`.

    Nested wrappers of an `auto_wrap_policy` share the object. All ranks call the methods in the same order.
    """

    @abstractmethod
    def pre_flatten_transform(self, tensor: torch.Tensor) -> tuple[torch.Tensor, object]:
        """Called for each parameter, before the parameter is sharded.

        Returns:
            The plain tensor to be sharded, of the shape of the DTensor's local tensor; and the extension with which
            `post_unflatten_transform` makes the parameter, or None if the parameter is sharded as it is.
        """

    @abstractmethod
    def post_unflatten_transform(self, tensor: torch.Tensor, param_extension: Any) -> torch.Tensor:
        """Returns the parameter made of `tensor`, the gathered form of what `pre_flatten_transform` returned.

        The parameter must have the memory of `tensor`, which the next gather refills. Called for each unsharded
        buffer, and for each state dict.
        """

    @abstractmethod
    def chunk_tensor(
        self,
        tensor: torch.Tensor,
        rank: int,
        world_size: int,
        num_devices_per_node: int,
        pg: dist.ProcessGroup,
        device: torch.device | None = None,
    ) -> object:
        """Returns the part of an unsharded parameter for `rank` of `pg`, in a state dict of the form `SHARDED_TENSOR`.

        `pg` has `world_size` ranks. `tensor` is a DTensor if the parameter is one.
        """

    @abstractmethod
    def chunk_dtensor(self, tensor: torch.Tensor, rank: int, device_mesh: DeviceMesh) -> torch.Tensor:
        """Returns the part of `rank` in a sharded state dict of the form `ROWS`.

        `device_mesh` is the wrapper's, `(shard,)` or `(replicate, shard)`; `rank` counts along the shard axis.
        """

    @abstractmethod
    def pre_load_state_dict_transform(self, tensor: Any) -> tuple[object, Sequence[Any]]:
        """Returns the `ShardedTensor` over the wrapper's ranks inside `tensor`, and the shards on this rank."""

    @abstractmethod
    def all_gather_dtensor(self, tensor: DTensor, parent_mesh: DeviceMesh | None) -> torch.Tensor:
        """Gather a DTensor, which is on all axes of `parent_mesh`, over the wrapper's axes.

        Called when a loaded DTensor has another layout than the parameter. Called for full state dicts only if a
        subclass overrides the method; otherwise one collective gathers the parameters of one unit.

        Returns:
            This rank's local tensor on the other axes.
        """


class DTensorExtensions(FSDPExtensions):
    """The default treatment of tensor-parallel parameters, on any number of axes in addition to the wrapper's.

    A subclass overrides the methods that it changes or observes.
    """

    def __init__(self) -> None:
        self._parallel_axes: set[str] = set()
        """The axes of tensor-parallel parameters. Tensors are gathered over the other axes."""

    def pre_flatten_transform(self, tensor: torch.Tensor) -> tuple[torch.Tensor, object]:
        """Returns a DTensor's local tensor and its spec; any other tensor as it is, and None."""
        if not isinstance(tensor, DTensor):
            return tensor, None
        spec = spec_of(tensor)
        self._parallel_axes.update(spec.mesh.mesh_dim_names or ())
        return local_tensor(tensor), spec

    def post_unflatten_transform(self, tensor: torch.Tensor, param_extension: Any) -> torch.Tensor:
        """Returns a DTensor around `tensor`, in the tensor's dtype."""
        return around(tensor, param_extension)

    def chunk_tensor(
        self,
        tensor: torch.Tensor,
        rank: int,
        world_size: int,
        num_devices_per_node: int,
        pg: dist.ProcessGroup,
        device: torch.device | None = None,
    ) -> object:
        """Returns a `ShardedTensor` of rows; a scalar as it is.

        Raises:
            UnsupportedError: `tensor` is a DTensor.
        """
        if isinstance(tensor, DTensor):
            raise UnsupportedError(
                f"a tensor-parallel parameter of shape {tuple(tensor.shape)} with {tensor.placements} cannot be a "
                "ShardedTensor, which knows one process group; take ShardedStateDictConfig(form=ShardedForm.ROWS) or "
                "RUNS, which give DTensors over all axes"
            )
        return sharded_tensor_of_rows(tensor, pg) if tensor.dim() else tensor

    def chunk_dtensor(self, tensor: torch.Tensor, rank: int, device_mesh: DeviceMesh) -> DTensor:
        """Returns rows, cut as `torch.chunk` does, as a stock DTensor; for a DTensor, on the axes of both meshes.

        Example: `[_StridedShard(0, split_factor=2), Shard(0)]` for `Shard(0)` over tp of 2, on the mesh (dp, tp).
        """
        mesh = DataMesh(device_mesh, device_mesh.ndim - 1, 0 if device_mesh.ndim > 1 else None)
        tensor = tensor.detach()
        plain, name = local_part(tensor), "a parameter of a state dict"
        rule = placement.Shard(0) if plain.dim() else placement.Replicate()
        cut = rule.cut(tuple(plain.shape), mesh.num_shards, name)
        if isinstance(tensor, DTensor):
            spec = on_other_axes(spec_of(tensor), mesh, cut, name)
        else:
            spec = own_spec(mesh, cut, tensor.shape, tensor.dtype)
        return dtensor(shard_of(plain, cut, rank).clone(memory_format=torch.contiguous_format), spec)

    def pre_load_state_dict_transform(self, tensor: Any) -> tuple[object, Sequence[Any]]:
        """Returns the inner of two nested tensors, a part under tensor parallelism, and its shards on this rank."""
        shards = tensor.local_shards()
        if len(shards) == 1 and type(shards[0].tensor) is type(tensor):
            tensor = shards[0].tensor
            shards = tensor.local_shards()
        return tensor, shards

    def all_gather_dtensor(self, tensor: DTensor, parent_mesh: DeviceMesh | None) -> torch.Tensor:
        """Returns this rank's part on the axes of tensor parallelism.

        Raises:
            PlacementError: `tensor` is on another mesh than `parent_mesh`.
        """
        if parent_mesh is not None and tensor.device_mesh != parent_mesh:
            raise PlacementError(
                f"a DTensor on {tensor.device_mesh} is to be gathered within {parent_mesh}; give the mesh that it is on"
            )
        if is_ragged(spec_of(tensor)):
            return gather_part(local_tensor(tensor), layout_of(spec_of(tensor)))
        names = tensor.device_mesh.mesh_dim_names or ()
        # As in torch, the last axis stays if no parameter has said which axes are tensor parallel.
        stay = self._parallel_axes & set(names) or set(names[-1:])
        wanted = [each if name in stay else Replicate() for name, each in zip(names, tensor.placements, strict=True)]
        return local_tensor(tensor.redistribute(placements=wanted))


def extensions_given(given: FSDPExtensions | None) -> FSDPExtensions:
    """Returns the user's extensions, or `DTensorExtensions`.

    Raises:
        PolicyTypeError: `given` is no instance of `FSDPExtensions`.
    """
    if given is None:
        return DTensorExtensions()
    expectation = "expected an instance of a subclass of sherd's FSDPExtensions"
    require_type(f"FullyShardedDataParallel(extensions={given!r}): {expectation}", given, FSDPExtensions)
    return given


def flattened(extensions: FSDPExtensions, parameter: torch.Tensor, name: str) -> object:
    """Call `pre_flatten_transform` for `parameter`, and copy the tensor that is to be sharded into its memory.

    Returns:
        What `post_unflatten_transform` needs; None if the parameter is sharded as it is.

    Raises:
        PlacementError: the tensor to be sharded has another shape, or is not plain.
        UnsupportedError: an extension for a parameter that is no DTensor.
    """
    plain, extension = extensions.pre_flatten_transform(parameter)
    if extension is None:
        return None
    method = f"{type(extensions).__name__}.pre_flatten_transform"
    if not isinstance(parameter, DTensor):
        raise UnsupportedError(
            f"{name}: {method} returned an extension for a {type(parameter.data).__name__}; only "
            "a DTensor is taken apart and restored: distribute it first, or return (tensor, None)"
        )
    local = local_tensor(parameter)
    if isinstance(plain, DTensor) or plain.shape != local.shape:
        raise PlacementError(
            f"{name}: {method} returned a {type(plain).__name__} of shape {tuple(plain.shape)}; "
            f"it must be a plain tensor of the local shape, {tuple(local.shape)}"
        )
    if plain is not local:
        with torch.no_grad():
            local.copy_(plain)
    return extension


def restored(
    extensions: FSDPExtensions, extension: object, whole: DTensorSpec, name: str, plain: torch.Tensor
) -> torch.Tensor:
    """Returns the parameter that the user's extensions make around `plain`, with the spec `whole`.

    Raises:
        PlacementError: the parameter has another layout or other memory.
    """

    def is_around_plain(local: torch.Tensor) -> bool:
        same_memory = local.untyped_storage().data_ptr() == plain.untyped_storage().data_ptr()
        return same_memory and local.shape == plain.shape

    parameter = extensions.post_unflatten_transform(plain, extension)
    is_right = isinstance(parameter, DTensor) and lies_as(parameter, whole)
    if not is_right or not is_around_plain(local_part(parameter)):
        raise PlacementError(
            f"{name}: {type(extensions).__name__}.post_unflatten_transform returned a {type(parameter).__name__} of "
            f"shape {tuple(parameter.shape)}; it must make a DTensor with {whole.placements} on {whole.mesh} of the "
            "memory it was given, without a copy, as the next gather refills that"
        )
    return parameter


def has_own(extensions: FSDPExtensions, method: str) -> bool:
    """Returns whether `extensions` override `method` of `DTensorExtensions`."""
    return getattr(type(extensions), method) is not getattr(DTensorExtensions, method)
