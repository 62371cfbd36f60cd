"""What is a wrapper to do with parameters that are DTensors already, over axes that are not its own (tensor parallel)?

    moment                        asked                           what DTensorExtensions does
    a parameter is sharded        pre_flatten_transform           takes the part that the other axes leave to this rank
    it is whole again             post_unflatten_transform        makes a DTensor around that part, uncopied
    a state dict of rows is made  chunk_dtensor, chunk_tensor     cuts each part into rows, on all axes
    a sharded one is loaded       all_gather_dtensor              gathers the part over the wrapper's axes
                                  pre_load_state_dict_transform   finds the ShardedTensor of the part

Names, arguments and meanings are those of torch 2.13's `FSDPExtensions`. The engine itself knows how a DTensor is
sharded; a wrapper needs a subclass only to do more than that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from sherd._torch import DTensorSpec, local_tensor, sharded_tensor_of_rows, spec_of
from sherd.checkpoint.relayout import around, lies_as
from sherd.comm.mesh import DataMesh
from sherd.engine.state.tensor_parallel import beside, own_spec
from sherd.errors import PlacementError, PolicyTypeError, UnsupportedError
from sherd.layout import placement
from sherd.layout.placement import Cut
from sherd.tensor.gather import gather_part, shard_of
from sherd.tensor.placement import layout_of
from sherd.tensor.ragged import RaggedDTensor, local_part


class FSDPExtensions(ABC):
    """What a wrapper asks about parameters that are more than plain tensors: `FullyShardedDataParallel(...,
    extensions=...)`, nested wrappers of an `auto_wrap_policy` included. All ranks are asked in the same order."""

    @abstractmethod
    def pre_flatten_transform(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any | None]:
        """Asked for each parameter, before it is sharded.

        Returns:
            The plain tensor to be sharded, of the shape of the DTensor's local tensor, and what
            `post_unflatten_transform` needs to make the parameter of it. None there: the parameter is sharded as it is.
        """

    @abstractmethod
    def post_unflatten_transform(self, tensor: torch.Tensor, param_extension: Any) -> torch.Tensor:
        """Of `tensor`, all of what `pre_flatten_transform` returned, the parameter: with the same memory, as the next
        gather refills it. Asked when an unsharded buffer is made, and for each state dict."""

    @abstractmethod
    def chunk_tensor(
        self,
        tensor: torch.Tensor,
        rank: int,
        world_size: int,
        num_devices_per_node: int,
        pg: dist.ProcessGroup,
        device: torch.device | None = None,
    ) -> Any:
        """Of an unsharded parameter what `rank`, of the `world_size` in `pg`, has in a sharded state dict of the form
        `SHARDED_TENSOR`. `tensor` is a DTensor if the parameter was one."""

    @abstractmethod
    def chunk_dtensor(self, tensor: torch.Tensor, rank: int, device_mesh: DeviceMesh) -> torch.Tensor:
        """The same of the form `ROWS`. `device_mesh` is the wrapper's: `(shard,)` or `(replicate, shard)`, and `rank`
        counts along its shard axis."""

    @abstractmethod
    def pre_load_state_dict_transform(self, tensor: Any) -> tuple[Any, list[Any]]:
        """Of a `ShardedTensor` that is loaded: the one to load from, over the wrapper's ranks, and its shards on this
        rank."""

    @abstractmethod
    def all_gather_dtensor(self, tensor: DTensor, parent_mesh: DeviceMesh | None) -> torch.Tensor:
        """Of a DTensor over all axes, which are `parent_mesh`: gathered over the wrapper's, this rank's local tensor.

        Asked when one is loaded that lies otherwise than the parameter; and when a full state dict is made, if it is
        not that of `DTensorExtensions`: without it, those of one unit are gathered in one collective.
        """


class DTensorExtensions(FSDPExtensions):
    """What a wrapper does by itself: tensor-parallel parameters, on any number of axes beside its own.

    A subclass overrides what it wants to do otherwise, or to see.
    """

    def __init__(self) -> None:
        self._parallel_axes: set[str] = set()
        """The axes that parameters were found on: what is gathered is gathered over the others."""

    def pre_flatten_transform(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any | None]:
        """A DTensor's local tensor, and its spec; anything else as it is."""
        if not isinstance(tensor, DTensor):
            return tensor, None
        spec = spec_of(tensor)
        self._parallel_axes.update(spec.mesh.mesh_dim_names or ())
        return local_tensor(tensor), spec

    def post_unflatten_transform(self, tensor: torch.Tensor, param_extension: Any) -> torch.Tensor:
        """A DTensor around `tensor`, in its dtype."""
        return around(tensor, param_extension)

    def chunk_tensor(
        self,
        tensor: torch.Tensor,
        rank: int,
        world_size: int,
        num_devices_per_node: int,
        pg: dist.ProcessGroup,
        device: torch.device | None = None,
    ) -> Any:
        """A `ShardedTensor` of rows; a scalar as it is.

        Raises:
            UnsupportedError: it is a DTensor.
        """
        if isinstance(tensor, DTensor):
            raise UnsupportedError(
                f"a tensor-parallel parameter of shape {tuple(tensor.shape)} with {tensor.placements} cannot be a "
                "ShardedTensor, which knows one process group; take ShardedStateDictConfig(form=ShardedForm.ROWS) or "
                "RUNS, which give DTensors over all axes"
            )
        return sharded_tensor_of_rows(tensor, pg) if tensor.dim() else tensor

    def chunk_dtensor(self, tensor: torch.Tensor, rank: int, device_mesh: DeviceMesh) -> DTensor:
        """Rows, cut as `torch.chunk` does, as a DTensor of torch's own. On the axes of both, if it was a DTensor:
        `[_StridedShard(0, split_factor=2), Shard(0)]` for `Shard(0)` over tp of 2, on the mesh (dp, tp)."""
        mesh = DataMesh(device_mesh, device_mesh.ndim - 1, 0 if device_mesh.ndim > 1 else None)
        tensor = tensor.detach()
        plain = local_part(tensor)
        cut = _rows(tuple(plain.shape), mesh.num_shards)
        if isinstance(tensor, DTensor):
            spec = beside(spec_of(tensor), mesh, cut, "a parameter of a state dict")
        else:
            spec = own_spec(mesh, cut, tensor.shape, tensor.dtype)
        return around(shard_of(plain, cut, rank).clone(memory_format=torch.contiguous_format), spec)

    def pre_load_state_dict_transform(self, tensor: Any) -> tuple[Any, list[Any]]:
        """Of torch's nested ones the inner one: this rank's part under tensor parallelism."""
        shards = tensor.local_shards()
        if len(shards) == 1 and type(shards[0].tensor) is type(tensor):
            tensor = shards[0].tensor
            shards = tensor.local_shards()
        return tensor, shards

    def all_gather_dtensor(self, tensor: DTensor, parent_mesh: DeviceMesh | None) -> torch.Tensor:
        """What the axes of tensor parallelism leave to this rank.

        Raises:
            PlacementError: `tensor` is on another mesh than `parent_mesh`.
        """
        if parent_mesh is not None and tensor.device_mesh != parent_mesh:
            raise PlacementError(
                f"a DTensor on {tensor.device_mesh} is to be gathered within {parent_mesh}; give the mesh that it is on"
            )
        if isinstance(tensor, RaggedDTensor):
            return gather_part(local_tensor(tensor), layout_of(spec_of(tensor)))
        names = tensor.device_mesh.mesh_dim_names or ()
        # As torch has it, where nobody has told: the last axis.
        stay = self._parallel_axes & set(names) or set(names[-1:])
        wanted = [each if name in stay else Replicate() for name, each in zip(names, tensor.placements, strict=True)]
        return local_tensor(tensor.redistribute(placements=wanted))


def extensions_given(given: FSDPExtensions | None) -> FSDPExtensions:
    """What a wrapper asks: what the user has given, or `DTensorExtensions`.

    Raises:
        PolicyTypeError: something else was given.
    """
    if given is None:
        return DTensorExtensions()
    if not isinstance(given, FSDPExtensions):
        raise PolicyTypeError(
            f"FullyShardedDataParallel(extensions={given!r}): expected an instance of a subclass of sherd's "
            f"FSDPExtensions, got a {type(given).__module__}.{type(given).__name__}"
        )
    return given


def flattened(extensions: FSDPExtensions, parameter: torch.Tensor, name: str) -> Any | None:
    """Ask what of `parameter` is sharded, and put that into its place; what restores it, None for one that stays.

    Raises:
        PlacementError: what is to be sharded has another shape, or is not plain.
        UnsupportedError: a parameter that is no DTensor is to be restored.
    """
    plain, extension = extensions.pre_flatten_transform(parameter)
    if extension is None:
        return None
    kind = type(extensions).__name__
    if not isinstance(parameter, DTensor):
        raise UnsupportedError(
            f"{name}: {kind}.pre_flatten_transform returned an extension for a {type(parameter.data).__name__}; only "
            "a DTensor is taken apart and restored: distribute it first, or return (tensor, None)"
        )
    local = local_tensor(parameter)
    if isinstance(plain, DTensor) or plain.shape != local.shape:
        raise PlacementError(
            f"{name}: {kind}.pre_flatten_transform returned a {type(plain).__name__} of shape {tuple(plain.shape)}; "
            f"it must be a plain tensor of the local shape, {tuple(local.shape)}"
        )
    if plain is not local:
        with torch.no_grad():
            local.copy_(plain)
    return extension


def restored(
    extensions: FSDPExtensions, extension: Any, whole: DTensorSpec, name: str, plain: torch.Tensor
) -> torch.Tensor:
    """The parameter that lies as `unsharded` says, around `plain`, as the user's extensions make it.

    Raises:
        PlacementError: it lies otherwise, or in other memory.
    """
    made = extensions.post_unflatten_transform(plain, extension)
    if not isinstance(made, DTensor) or not lies_as(made, whole) or not _same_memory(local_tensor(made), plain):
        raise PlacementError(
            f"{name}: {type(extensions).__name__}.post_unflatten_transform returned a {type(made).__name__} of shape "
            f"{tuple(made.shape)}; it must make a DTensor with {whole.placements} on {whole.mesh} of the memory it was "
            "given, without a copy, as the next gather refills that"
        )
    return made


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() and one.shape == other.shape


def has_own(extensions: FSDPExtensions, method: str) -> bool:
    """Whether `method` is another one than that of `DTensorExtensions`."""
    return getattr(type(extensions), method) is not getattr(DTensorExtensions, method)


def _rows(shape: tuple[int, ...], num_ranks: int) -> Cut:
    name = "a parameter of a state dict"
    return (
        placement.Shard(0).cut(shape, num_ranks, name) if shape else placement.Replicate().cut(shape, num_ranks, name)
    )
