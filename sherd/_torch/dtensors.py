"""Private names of DTensor (its spec, its local tensor, its constructor, its dispatch) and of DeviceMesh."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

DTensorKind = TypeVar("DTensorKind", bound=DTensor)


def dtensor_spec(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: torch.Size,
    dtype: torch.dtype,
    strides: tuple[int, ...] | None = None,
) -> DTensorSpec:
    """Returns the spec of a DTensor, which has all but the data. The default strides are contiguous.

    DTensorSpec and TensorMeta have no public constructor (2.11 to 2.15).
    """
    # DTensorSpec does not know a placement with an attribute `stands_for`: the spec is made with the placement that it
    # stands for, and then given the real one.
    known = tuple(getattr(placement, "stands_for", placement) for placement in placements)
    spec = DTensorSpec(mesh, known, tensor_meta=TensorMeta(shape, strides or _contiguous(shape), dtype))
    if known != placements:
        spec.placements = placements
    return spec


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    strides: list[int] = []
    stride = 1
    for size in reversed(shape):
        strides.insert(0, stride)
        stride *= max(size, 1)
    return tuple(strides)


new_dtensor: Callable[..., DTensor] = functools.partial(DTensor.__new__, requires_grad=False)
"""Returns a DTensor of a class, around a local tensor, with a spec: as `dtensor_of`, in C and outside autograd."""

dtensor: Callable[[torch.Tensor, DTensorSpec], DTensor] = functools.partial(new_dtensor, DTensor)
"""Returns a DTensor around a local tensor, uncopied and outside autograd; 20 times as fast as `DTensor.from_local`."""


def dtensor_of(
    tensor_class: type[DTensorKind], local: torch.Tensor, spec: DTensorSpec, requires_grad: bool
) -> DTensorKind:
    """Returns a DTensor of a subclass around `local`, uncopied. It skips `__init__`, which takes longer than the rest.

    `DTensor.__new__` takes these arguments from 2.4 to 2.15, but is not documented; nothing replaces it.
    """
    new: Callable[..., Any] = DTensor.__new__
    tensor: DTensorKind = new(tensor_class, local, spec, requires_grad=requires_grad)
    return tensor


local_tensor: Callable[[DTensor], torch.Tensor] = operator.attrgetter("_local_tensor")
"""Returns the very tensor inside a DTensor; `to_local()` would make a new view on each call."""


def local_gradients(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the local tensor of each gradient, past `__torch_function__`. All gradients must be DTensors.

    Raises:
        AttributeError: a gradient is missing, or no DTensor.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return [tensor.grad._local_tensor for tensor in tensors]  # type: ignore[union-attr]


def spec_of(tensor: DTensor) -> DTensorSpec:
    """Returns the spec of a DTensor; private, like its class."""
    return tensor._spec


def specs_of(tensors: Sequence[DTensor]) -> list[DTensorSpec]:
    """Returns the `spec_of` of each of `tensors`."""
    return [tensor._spec for tensor in tensors]


def replace_local_tensor(tensor: DTensor, local: torch.Tensor) -> None:
    """Give a DTensor other memory while it stays the same object, which the user's optimizer holds.

    `module.to()` and `load_state_dict(assign=True)` move shards out of their buffer. torch's own FSDP writes the same
    attribute; the public `swap_tensors` fails on tensors with hooks.
    """
    tensor._local_tensor = local


def replace_class(tensor: DTensor, tensor_class: type[DTensor], spec: DTensorSpec) -> None:
    """Make a DTensor an instance of a subclass, with `spec`, while it stays the same object.

    `torch.utils.swap_tensors` also writes the class, but takes another tensor's hooks and memory with it.
    """
    tensor.__class__ = tensor_class
    tensor._spec = spec


def swap_devices(tensor: DTensor, other: DTensor) -> None:
    """Give each of two DTensors the other's device, hooks and gradient; class, attributes and local tensors stay.

    The device of a DTensor is fixed when it is made. The public `torch.utils.swap_tensors` calls the same function, but
    swaps the attributes too, which all forms of a parameter share (2.3 to 2.15).

    Raises:
        RuntimeError: autograd has saved one of them.
    """
    torch._C._swap_tensor_impl(tensor, other)


def become_view(
    tensor: DTensor,
    func: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    local: torch.Tensor,
    spec: DTensorSpec,
) -> None:
    """Turn a DTensor, `args[0]`, into the result of the in-place view `func` (`squeeze_`), around `local`.

    No public call changes the shape of a DTensor; torch does it in this way (2.11 to 2.15).
    """
    from torch.utils._python_dispatch import return_and_correct_aliasing

    replace_local_tensor(tensor, local)
    tensor._spec = spec
    return_and_correct_aliasing(func, args, kwargs, tensor)


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Returns `Shard(dim)` over an axis to the left of one that already shards `dim` into `split_factor` parts.

    `_StridedShard` has no public name (2.11 to 2.15).
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def split_factor_of(placement: Placement) -> int | None:
    """Returns the split factor of a `strided_shard`; None for any other placement. Private class (2.11 to 2.15)."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return int(placement.split_factor) if isinstance(placement, _StridedShard) else None


def dispatches_itself(tensor_class: type[DTensor]) -> None:
    """Have operations on tensors of exactly this subclass reach its own `__torch_dispatch__`, as they do since 2.12.

    2.11 takes them for plain DTensors first, except for operations with a rule for the type. So each operation that
    exists now gets a rule. An operation defined later reaches DTensor, which raises for a placement it does not know.
    The public `torch.library.register_torch_dispatch` takes a millisecond for each of 3000 operations.
    """
    if torch.__version__ >= "2.12":  # compared as versions are, not as text
        return
    from torch._library.simple_registry import singleton

    def ask(
        tensor_class: type[DTensor],
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> object:
        return tensor_class.__torch_dispatch__(func, types, args, kwargs)

    for name in torch._C._dispatch_get_all_op_names():
        singleton.find(name).torch_dispatch_rules.register(tensor_class, ask)


# Meshes


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Returns one mesh with the axes of all `meshes`, which must come from one root mesh. Private since 2.10."""
    return DeviceMesh._concatenate(meshes)


def keeps_root_order(mesh: DeviceMesh) -> bool:
    """Returns whether the axes of `mesh` are in the order of its root mesh. Private since 2.10.

    With any other order torch raises KeyError where it plans a redistribution (2.13). A public slice says so too, but
    not for all axes at once.
    """
    assert mesh.mesh_dim_names is not None, "parts of one mesh have names"
    try:
        mesh._get_slice_mesh_layout(mesh.mesh_dim_names)
    except KeyError:
        return False
    return True


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Returns all axes of `mesh` as one, called `name`. Private since 2.3."""
    return mesh._flatten(name)


def device_of(mesh: DeviceMesh) -> torch.device:
    """Returns this rank's device on `mesh`, which knows only the type (2.11 to 2.15)."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
