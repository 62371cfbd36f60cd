"""Every private or renamed torch name sherd relies on: what for, since when, what would replace it.

Nothing else in the package may import a name that torch does not promise (`tests/test_layers.py`); a contract test pins
each one here (`tests/test_torch_names.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

__all__ = [
    "DTensorSpec",
    "all_gather_single",
    "at_end_of_backward",
    "backend_of",
    "concatenate_meshes",
    "dtensor",
    "dtensor_spec",
    "dynamo_disabled",
    "flatten_mesh",
    "in_backward",
    "local_tensor",
    "reduce_scatter_single",
    "register_optimizer_step_post_hook",
    "register_optimizer_step_pre_hook",
    "replace_local_tensor",
    "storage_uses",
    "strided_shard",
    "symmetric_memory",
]

# torch 2.13 renamed the two single-tensor collectives and warns about the old names; 2.11 and 2.12 know only those.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def dtensor_spec(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, dtype: torch.dtype
) -> DTensorSpec:
    """What a DTensor is, apart from its data. DTensorSpec and TensorMeta have no public constructor (2.11 to 2.13)."""
    stride: list[int] = []
    run = 1
    for size in reversed(shape):
        stride.insert(0, run)
        run *= max(size, 1)
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, tuple(stride), dtype))


def dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor around `local`, uncopied and outside autograd; `DTensor.from_local` is public but 20 times slower."""
    return DTensor(local, spec, requires_grad=False)


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """The shard inside a DTensor, as the object it holds; `to_local()` would make a new view on each call."""
    return tensor._local_tensor


def replace_local_tensor(tensor: DTensor, local: torch.Tensor) -> None:
    """Give a DTensor other memory while it stays the same object, which the user's optimizer holds.

    The one private attribute that is written; torch's own FSDP does the same, and `swap_tensors` fails on tensors with
    hooks. Needed because `module.to()` and `load_state_dict(assign=True)` move shards out of their buffer.
    """
    tensor._local_tensor = local


def symmetric_memory() -> Any:
    """The module of symmetric memory (`empty`, `rendezvous`); private since 2.6, imported when asked for."""
    import torch.distributed._symmetric_memory as module

    return module


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend of `group` for `device`, whose allocator NCCL offers. `_get_backend` has no public name (2.11 to
    2.13)."""
    return group._get_backend(device)


def dynamo_disabled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, and what it calls, never traced by Dynamo."""
    disabled: Callable[..., Any] = torch.compiler.disable(function, recursive=True)
    return disabled


def storage_uses(storage: torch.UntypedStorage) -> int:
    """How many tensors and handles share a storage's memory. No public name (2.11 to 2.13)."""
    return torch._C._storage_Use_Count(storage._cdata)


def in_backward() -> bool:
    """Whether this thread is inside a backward pass; no public name (2.11 to 2.13)."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the present backward pass ends, unless it raises. No public name (2.11 to 2.13)."""
    engine = Variable._execution_engine
    engine.queue_callback(callback)


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """One mesh with the axes of all; they must come from one root mesh. Private since 2.10."""
    return DeviceMesh._concatenate(meshes)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """All axes of `mesh` as one, called `name`. Private since 2.3."""
    return mesh._flatten(name)


def strided_shard(dim: int, split_factor: int) -> Placement:
    """`Shard(dim)` over an axis to the left of another one that already shards `dim` into `split_factor` parts."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)
