"""What does a whole state dict need beside itself? The peak of `state_dict()`: full, on rank 0 only, in host memory."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh

import sherd

from .models import Model, num_bytes
from .peak import live_bytes
from .ranks import Conditions, on_ranks
from .steps import workloads
from .systems import FSDP1, FSDP1_FLAT, WRAPPERS, Trainee
from .table import Aim, Figure, Row, row_of_counts

COMPARED = (FSDP1, FSDP1_FLAT, *WRAPPERS)


def measure(conditions: Conditions) -> Figure:
    """A row per workload, in units of the bytes of its largest unit; the largest of the ranks."""
    ranks = on_ranks(conditions, bytes_beside, conditions.quick)
    return Figure([row_of_ranks(title, [rank[title] for rank in ranks]) for title in ranks[0]], {"bytes": ranks})


def row_of_ranks(title: str, ranks: list[dict[str, float]]) -> Row:
    """`ranks`: per rank and system, bytes at the peak beside the result, in units of the largest unit."""
    most = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
    aims = [Aim(1.0, of=system.name) for system in WRAPPERS]
    remark = "beside what was there before, and the result"
    return row_of_counts(f"{title}: peak of a full state_dict, to rank 0's host", "largest unit", most, aims, remark)


def bytes_beside(mesh: DeviceMesh, quick: bool) -> dict[str, dict[str, float]]:
    """On a rank: per workload and system."""
    found = {}
    for workload in workloads(quick):
        unit = bytes_of_largest_unit(workload.build())
        found[workload.title] = {
            system.name: peak_beside_result(Trainee(system, workload, mesh)) / unit for system in COMPARED
        }
    return found


def bytes_of_largest_unit(model: Model) -> int:
    """Of a block, or of what is in none of them."""
    blocks = [num_bytes(block) for block in model.blocks]
    return max(*blocks, num_bytes(model) - sum(blocks))


def peak_beside_result(trainee: Trainee) -> float:
    """Bytes on the trainee's device at the peak of a state dict, less those before it and those of the result.

    The median of three, after a forward, a backward and a first state dict, which make and show all that lasts.
    """
    trainee.forward_backward(trainee.batch(0))
    trainee.drop_gradients()
    beside = []
    with live_bytes(trainee.device) as live:
        full_state_dict(trainee)
        for _ in range(3):
            gc.collect()
            live.forget_peak()
            before = live.peak
            result = full_state_dict(trainee)
            beside.append(live.peak - before - bytes_on(trainee.device, result.values()))
            del result
    return median(beside)


def full_state_dict(trainee: Trainee) -> dict[str, Any]:
    """Whole tensors in host memory on rank 0, nothing on the others; through the wrapper's own context.

    FSDP1 is not asked for `offload_to_cpu` where it is on the host already: it then reads what it has freed.
    """
    model: Any = trainee.model
    is_ours = isinstance(model, sherd.FullyShardedDataParallel)
    api: Any = sherd if is_ours else fsdp
    config = api.FullStateDictConfig(rank0_only=True, offload_to_cpu=is_ours or trainee.device.type != "cpu")
    with type(model).state_dict_type(model, api.StateDictType.FULL_STATE_DICT, config):
        return cast("dict[str, Any]", model.state_dict())


def bytes_on(device: torch.device, values: Iterable[Any]) -> int:
    """Of the tensors' storages, each counted once."""
    storages = [value.untyped_storage() for value in values if isinstance(value, Tensor)]
    return sum({each._cdata: each.nbytes() for each in storages if each.device.type == device.type}.values())
