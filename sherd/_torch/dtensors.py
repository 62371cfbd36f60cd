"""Private names of DTensor: its spec, its local tensor, its constructor, its dispatch."""

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
    """Returns the description of a DTensor: all of it but the data. The default strides are contiguous ones.

    DTensorSpec and TensorMeta have no public constructor (2.11 to 2.13). A placement with an attribute `stands_for` is
    one that DTensorSpec does not know: the spec is made with the placement it stands for, and then told the real one.
    """
    known = tuple(getattr(placement, "stands_for", placement) for placement in placements)
    spec = DTensorSpec(mesh, known, tensor_meta=TensorMeta(shape, strides or _contiguous(shape), dtype))
    if known != placements:
        spec.placements = placements
    return spec


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    strides: list[int] = []
    run = 1
    for size in reversed(shape):
        strides.insert(0, run)
        run *= max(size, 1)
    return tuple(strides)


new_dtensor: Callable[..., DTensor] = functools.partial(DTensor.__new__, requires_grad=False)
"""Returns a DTensor of a class, around a local tensor, of a spec: as `dtensor_of`, in C and outside autograd."""

dtensor: Callable[[torch.Tensor, DTensorSpec], DTensor] = functools.partial(new_dtensor, DTensor)
"""Returns a DTensor around a local tensor, uncopied and outside autograd. The public `DTensor.from_local` is 20 times
slower."""


def dtensor_of(kind: type[DTensorKind], local: torch.Tensor, spec: DTensorSpec, requires_grad: bool) -> DTensorKind:
    """Returns a DTensor of a subclass around `local`, uncopied. It skips `__init__`, which takes longer than the rest.

    `DTensor.__new__` takes these arguments from 2.4 to 2.13, but is not documented; nothing replaces it.
    """
    new: Callable[..., Any] = DTensor.__new__
    made: DTensorKind = new(kind, local, spec, requires_grad=requires_grad)
    return made


local_tensor: Callable[[DTensor], torch.Tensor] = operator.attrgetter("_local_tensor")
"""Returns the shard inside a DTensor, the very object it holds; `to_local()` would make a new view on each call."""


def local_gradients(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the local tensor of each gradient, without asking `__torch_function__`. All must be DTensors.

    Raises:
        AttributeError: a gradient is missing, or no DTensor.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return [tensor.grad._local_tensor for tensor in tensors]  # type: ignore[union-attr]


def spec_of(tensor: DTensor) -> DTensorSpec:
    """Returns the description of a DTensor: all of it but the data. Private, like the class."""
    return tensor._spec


def specs_of(tensors: Sequence[DTensor]) -> list[DTensorSpec]:
    """Returns the `spec_of` of each of `tensors`."""
    return [tensor._spec for tensor in tensors]


def replace_local_tensor(tensor: DTensor, local: torch.Tensor) -> None:
    """Give a DTensor other memory while it stays the same object, which the user's optimizer holds.

    torch's own FSDP writes the same attribute, and `swap_tensors` fails on tensors with hooks. Needed because
    `module.to()` and `load_state_dict(assign=True)` move shards out of their buffer.
    """
    tensor._local_tensor = local


def replace_class(tensor: DTensor, kind: type[DTensor], spec: DTensorSpec) -> None:
    """Make a DTensor one of a subclass, described by `spec`, while it stays the same object. `torch.utils.swap_tensors`
    writes the class likewise, but takes another tensor's hooks and memory with it."""
    tensor.__class__ = kind
    tensor._spec = spec


def swap_devices(tensor: DTensor, other: DTensor) -> None:
    """Give each of two DTensors the other's device, hooks and gradient; class, attributes and local tensors stay.

    A wrapper's device is fixed when it is made. The public `torch.utils.swap_tensors` swaps the attributes too, which
    all forms of a parameter share, and calls the same function (2.3 to 2.13).

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

    No public call changes the shape of a wrapper; DTensor does it likewise (2.11 to 2.13).
    """
    from torch.utils._python_dispatch import return_and_correct_aliasing

    replace_local_tensor(tensor, local)
    tensor._spec = spec
    return_and_correct_aliasing(func, args, kwargs, tensor)


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Returns `Shard(dim)` over an axis to the left of one that already shards `dim` into `split_factor` parts.

    `_StridedShard` has no public name (2.11 to 2.13).
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def split_factor_of(placement: Placement) -> int | None:
    """Returns into how many parts axes to the right have sharded the dim before, for a strided shard; None for any
    other placement. The class has no public name (2.11 to 2.13)."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return int(placement.split_factor) if isinstance(placement, _StridedShard) else None


def dispatches_itself(kind: type[DTensor]) -> None:
    """Have operations on tensors of exactly this subclass reach its own `__torch_dispatch__`, as they do since 2.12.

    2.11 takes them for plain DTensors before it asks, except for operations with a rule registered for the type. So
    each operation known by now gets a rule. One that is defined later meets DTensor, which raises for a placement it
    does not know. The public `torch.library.register_torch_dispatch` takes a millisecond for each of 3000 operations.
    """
    if torch.__version__ >= "2.12":  # compared as versions are, not as text
        return
    from torch._library.simple_registry import singleton

    def ask(
        kind: type[DTensor],
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> object:
        return kind.__torch_dispatch__(func, types, args, kwargs)

    for name in torch._C._dispatch_get_all_op_names():
        singleton.find(name).torch_dispatch_rules.register(kind, ask)
