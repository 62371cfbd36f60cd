"""How does one piece of state get from one layout into another: whole, as a parameter lies, or along a flat parameter?

All ranks that hold parts must call what gathers, in the same order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from sherd._torch import DTensorSpec, dtensor_spec, local_tensor, spec_of
from sherd.checkpoint.catalog import Member, NamedState
from sherd.engine.state.group import own_view
from sherd.tensor.gather import gather_part
from sherd.tensor.optimizers import COUNTS
from sherd.tensor.placement import RaggedShard, is_ragged, layout_of
from sherd.tensor.ragged import as_dtensor, distribute_ragged, local_part


def around(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor around `local`, uncopied, that lies as `spec` says; in the dtype that `local` has."""
    return as_dtensor(local, _of_dtype(spec, local.dtype))


def _of_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    assert spec.tensor_meta is not None, "a DTensor's spec has it"
    if spec.tensor_meta.dtype == dtype:
        return spec
    return dtensor_spec(spec.mesh, spec.placements, spec.shape, dtype)


def lies_as(value: Any, spec: DTensorSpec | None) -> bool:
    """Whether `value` is a DTensor whose parts are where `spec` says."""
    if spec is None or not isinstance(value, DTensor):
        return False
    return value.shape == spec.shape and value.placements == spec.placements and value.device_mesh == spec.mesh


def is_of_scalar(key: str, value: torch.Tensor, shape: torch.Size) -> bool:
    """Whether a tensor without dimensions belongs to the one element of a scalar, and does not count steps: of that
    only the name tells."""
    return not value.dim() and not shape and key not in COUNTS


def local_shape(owned: NamedState) -> torch.Size:
    """The shape of what this rank has of what an optimizer owns."""
    return local_part(owned.parameter).shape


def full_of(value: torch.Tensor) -> torch.Tensor:
    """All of a DTensor, gathered on the device of its mesh, in memory of its own; of a plain tensor a copy."""
    if not isinstance(value, DTensor):
        return value.detach().clone()
    local, value = local_tensor(value).detach(), on_mesh_device(value)
    detached: Any = value.detach()
    full: torch.Tensor = detached.full_tensor()
    return full.clone() if full.data_ptr() == local.data_ptr() else full


def on_mesh_device(value: DTensor) -> DTensor:
    """`value`, from the host if it was offloaded: collectives are for the mesh's own device."""
    kind = value.device_mesh.device_type
    local = local_tensor(value)
    return value if local.device.type == kind else around(local.detach().to(kind), spec_of(value))


def laid_out(value: torch.Tensor, spec: DTensorSpec, device: torch.device) -> DTensor:
    """A copy of `value`, whole or any DTensor, of which each rank has what `spec` says, on `device`; in memory of its
    own."""
    if lies_as(value, spec):
        assert isinstance(value, DTensor), "nothing else lies over ranks"
        local = local_tensor(value).detach()
    else:
        full = full_of(value) if isinstance(value, DTensor) else value.detach()
        local = _part_of(full, _of_dtype(spec, full.dtype))
    return around(local.to(device, copy=True, memory_format=torch.contiguous_format), spec)


def as_rows(value: DTensor) -> DTensor:
    """A ragged tensor as a DTensor of torch's own, in equal chunks of dim 0; any other as it is."""
    placements = tuple(Shard(0) if isinstance(each, RaggedShard) else each for each in value.placements)
    return value if placements == value.placements or not value.dim() else value.redistribute(placements=placements)


def _part_of(full: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    if is_ragged(spec):
        return local_tensor(distribute_ragged(full, spec))
    return local_tensor(distribute_tensor(full, spec.mesh, spec.placements, src_data_rank=None))


def part_in(vector: torch.Tensor, member: Member) -> DTensor:
    """What a member has of a flat parameter's state, of which `vector` is this rank's part: uncopied."""
    assert member.spec is not None and member.extent is not None, "it is part of a flat parameter"
    part = own_view(vector.detach()[member.extent.start : member.extent.stop])
    return around(part, member.spec)


def vector_gathered(value: DTensor) -> torch.Tensor:
    """The state of a flat parameter of all data-parallel ranks; under tensor parallelism of this rank's vector."""
    value = on_mesh_device(value)
    return gather_part(local_tensor(value), layout_of(spec_of(value)))


def cut_out(vector: torch.Tensor, member: Member) -> torch.Tensor:
    """What a member has of that, as a copy in its own shape; under tensor parallelism gathered over its axes."""
    assert member.start is not None and member.part is not None, "it is part of a flat parameter"
    part = vector[member.start : member.start + member.part.numel()].view(member.part)
    return part.clone() if member.full is None else full_of(around(part, member.full))


def vector_of(parts: dict[str, DTensor], owned: NamedState) -> DTensor:
    """The state of a flat parameter, made of what its members, by name, have. What aligns them is zero."""
    assert owned.spec is not None, "a flat parameter lies over ranks"
    first = local_tensor(next(iter(parts.values())))
    vector = torch.zeros(local_shape(owned), dtype=first.dtype, device=first.device)
    for member in owned.members:
        part = parts.get(member.name)
        if part is not None and member.extent is not None:
            vector[member.extent.start : member.extent.stop].copy_(local_tensor(part).reshape(-1))
    return around(vector, owned.spec)
