"""From one layout to another: a tensor gathered, cut as a parameter is, cut into rows, or copied into another.

All ranks that hold parts must call the functions that gather, in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from sherd._torch import DTensorSpec, local_tensor, spec_of
from sherd.tensor.gather import gather_part
from sherd.tensor.placement import in_dtype, is_ragged, layout_of
from sherd.tensor.ragged import as_dtensor, distribute_ragged, local_part
from sherd.tensor.sharded import ShardedDTensor, as_torchs

Named = Mapping[str, torch.Tensor]


def around(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Returns a DTensor around `local`, uncopied, in the layout of `spec` and the dtype of `local`."""
    return as_dtensor(local, in_dtype(spec, local.dtype))


def lies_as(value: DTensor, spec: DTensorSpec) -> bool:
    """Returns True if the parts of `value` are where `spec` says."""
    return value.shape == spec.shape and value.placements == spec.placements and value.device_mesh == spec.mesh


def full_of(value: DTensor) -> torch.Tensor:
    local = local_tensor(value).detach()
    full: torch.Tensor = around(local.to(value.device_mesh.device_type), spec_of(value)).full_tensor()
    # On one rank, or replicated, the full tensor is the local one.
    return full.clone() if full.data_ptr() == local.data_ptr() else full


def on_mesh_device(value: DTensor) -> DTensor:
    """Returns `value` on the device of its mesh: collectives cannot gather a tensor that was offloaded to the host."""
    device_type = value.device_mesh.device_type
    local = local_tensor(value)
    return value if local.device.type == device_type else around(local.detach().to(device_type), spec_of(value))


def laid_out(value: torch.Tensor, spec: DTensorSpec, device: torch.device) -> DTensor:
    """Returns a copy of `value`, an unsharded tensor or a DTensor, in the layout of `spec` on `device`."""
    dtensor = value if isinstance(value, DTensor) else None
    if dtensor is not None and lies_as(dtensor, spec):
        local = local_tensor(dtensor).detach()
    else:
        full = value.detach() if dtensor is None else full_of(dtensor)
        own = in_dtype(spec, full.dtype)
        if is_ragged(own):
            local = local_tensor(distribute_ragged(full, own))
        else:
            local = local_tensor(distribute_tensor(full, own.mesh, own.placements, src_data_rank=None))
    return around(local.to(device, copy=True, memory_format=torch.contiguous_format), spec)


def as_rows(value: DTensor) -> DTensor:
    """Returns a DTensor of torch's own: a ragged tensor in equal chunks of dim 0, any other in its own layout."""
    if not is_ragged(spec_of(value)):
        return as_torchs(value) if isinstance(value, ShardedDTensor) else value
    axes, rows = layout_of(spec_of(value)).ragged, Shard(0) if value.dim() else Replicate()
    placements = [rows if axis in axes else placement for axis, placement in enumerate(value.placements)]
    return value.redistribute(placements=placements)


def gathered_vector(value: DTensor) -> torch.Tensor:
    """Returns the state of a flat parameter, gathered over the data-parallel axes, but not over tensor parallelism."""
    value = on_mesh_device(value)
    return gather_part(local_tensor(value), layout_of(spec_of(value)))


@torch.no_grad()
def put(targets: Named, values: Named) -> None:
    """Copy each of `values`, in any layout, into the tensor of the same name in `targets`."""
    for name, value in values.items():
        target, source = targets[name], value
        if isinstance(target, DTensor):
            if not (isinstance(value, DTensor) and lies_as(value, spec_of(target))):
                source = laid_out(value, spec_of(target), local_part(target).device)
        elif isinstance(value, DTensor):
            source = full_of(value)
        local_part(target).copy_(local_part(source))
