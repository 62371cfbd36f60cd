"""From one layout to another: a tensor of optimizer state gathered, cut as a parameter is, or cut into rows.

All ranks that hold parts must call the functions that gather, in the same order.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from sherd._torch import DTensorSpec, dtensor_spec, local_tensor, spec_of
from sherd.tensor.gather import gather_part
from sherd.tensor.placement import RaggedShard, is_ragged, layout_of
from sherd.tensor.ragged import as_dtensor, distribute_ragged


def around(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor around `local`, uncopied, that lies as `spec` says, in the dtype of `local`."""
    return as_dtensor(local, _of_dtype(spec, local.dtype))


def _of_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    assert spec.tensor_meta is not None, "a DTensor's spec has it"
    if spec.tensor_meta.dtype == dtype:
        return spec
    return dtensor_spec(spec.mesh, spec.placements, spec.shape, dtype)


def lies_as(value: object, spec: DTensorSpec | None) -> bool:
    """Whether `value` is a DTensor whose parts are where `spec` says."""
    if spec is None or not isinstance(value, DTensor):
        return False
    return value.shape == spec.shape and value.placements == spec.placements and value.device_mesh == spec.mesh


def full_of(value: torch.Tensor) -> torch.Tensor:
    """A copy of `value` in memory of its own. A DTensor is gathered on the device of its mesh."""
    if not isinstance(value, DTensor):
        return value.detach().clone()
    local, detached = local_tensor(value), on_mesh_device(value).detach()
    assert isinstance(detached, DTensor), "a detached DTensor is one"
    full: torch.Tensor = detached.full_tensor()
    return full.clone() if full.data_ptr() == local.data_ptr() else full


def on_mesh_device(value: DTensor) -> DTensor:
    """`value` on its mesh's device, since collectives cannot gather what was offloaded to the host."""
    kind = value.device_mesh.device_type
    local = local_tensor(value)
    return value if local.device.type == kind else around(local.detach().to(kind), spec_of(value))


def laid_out(value: torch.Tensor, spec: DTensorSpec, device: torch.device) -> DTensor:
    """A copy of `value` that lies as `spec` says, on `device`. `value` is an unsharded tensor or any DTensor."""
    if isinstance(value, DTensor) and lies_as(value, spec):
        local = local_tensor(value).detach()
    else:
        full = full_of(value) if isinstance(value, DTensor) else value.detach()
        own = _of_dtype(spec, full.dtype)
        if is_ragged(own):
            local = local_tensor(distribute_ragged(full, own))
        else:
            local = local_tensor(distribute_tensor(full, own.mesh, own.placements, src_data_rank=None))
    return around(local.to(device, copy=True, memory_format=torch.contiguous_format), spec)


def as_rows(value: DTensor) -> DTensor:
    """A ragged tensor as a DTensor of torch's own, cut into equal chunks of dim 0. Any other DTensor as it is."""
    placements = tuple(Shard(0) if isinstance(each, RaggedShard) else each for each in value.placements)
    return value if placements == value.placements or not value.dim() else value.redistribute(placements=placements)


def gathered_vector(value: DTensor) -> torch.Tensor:
    """The state of a flat parameter, gathered over the data-parallel ranks. Under tensor parallelism it is the vector
    of this rank of the other axes."""
    value = on_mesh_device(value)
    return gather_part(local_tensor(value), layout_of(spec_of(value)))
