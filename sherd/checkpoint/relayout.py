"""From one layout to another: a tensor of optimizer state gathered, cut as a parameter is, or cut into rows.

All ranks that hold parts must call the functions that gather, in the same order.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from sherd._torch import DTensorSpec, dtensor_spec, local_tensor, spec_of
from sherd.tensor.gather import gather_part
from sherd.tensor.placement import is_ragged, layout_of
from sherd.tensor.ragged import as_dtensor, distribute_ragged


def around(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Returns a DTensor around `local`, uncopied, that lies as `spec` says, in the dtype of `local`."""
    return as_dtensor(local, _of_dtype(spec, local.dtype))


def _of_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    assert spec.tensor_meta is not None, "a DTensor's spec has it"
    if spec.tensor_meta.dtype == dtype:
        return spec
    return dtensor_spec(spec.mesh, spec.placements, spec.shape, dtype)


def lies_as(value: DTensor, spec: DTensorSpec) -> bool:
    """Returns True if the parts of `value` are where `spec` says."""
    return value.shape == spec.shape and value.placements == spec.placements and value.device_mesh == spec.mesh


def full_of(value: DTensor) -> torch.Tensor:
    """Returns the unsharded tensor in memory of its own, gathered on the device of the mesh."""
    local = local_tensor(value).detach()
    full: torch.Tensor = around(local.to(value.device_mesh.device_type), spec_of(value)).full_tensor()
    return full.clone() if full.data_ptr() == local.data_ptr() else full


def on_mesh_device(value: DTensor) -> DTensor:
    """Returns `value` on its mesh's device, since collectives cannot gather what was offloaded to the host."""
    kind = value.device_mesh.device_type
    local = local_tensor(value)
    return value if local.device.type == kind else around(local.detach().to(kind), spec_of(value))


def laid_out(value: torch.Tensor, spec: DTensorSpec, device: torch.device) -> DTensor:
    """Returns a copy of `value` that lies as `spec` says, on `device`. `value` is an unsharded tensor or a DTensor."""
    dtensor = value if isinstance(value, DTensor) else None
    if dtensor is not None and lies_as(dtensor, spec):
        local = local_tensor(dtensor).detach()
    else:
        full = value.detach() if dtensor is None else full_of(dtensor)
        own = _of_dtype(spec, full.dtype)
        if is_ragged(own):
            local = local_tensor(distribute_ragged(full, own))
        else:
            local = local_tensor(distribute_tensor(full, own.mesh, own.placements, src_data_rank=None))
    return around(local.to(device, copy=True, memory_format=torch.contiguous_format), spec)


def as_rows(value: DTensor) -> DTensor:
    """Returns a ragged tensor as a DTensor of torch's own, cut into equal chunks of dim 0; other DTensors as they
    are."""
    if not value.dim() or not is_ragged(spec_of(value)):
        return value
    axes = layout_of(spec_of(value)).ragged
    rows = [Shard(0) if axis in axes else placement for axis, placement in enumerate(value.placements)]
    return value.redistribute(placements=rows)


def gathered_vector(value: DTensor) -> torch.Tensor:
    """Returns the state of a flat parameter, gathered over the data-parallel ranks. Under tensor parallelism it is the
    vector of this rank of the other axes."""
    value = on_mesh_device(value)
    return gather_part(local_tensor(value), layout_of(spec_of(value)))
