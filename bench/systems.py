"""Who competes: five ways to make a model data parallel, behind one interface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.nn.parallel import DistributedDataParallel

import sherd

from .models import Model, Workload


@dataclass(frozen=True, slots=True)
class System:
    """A name for the table's column, and how a plain model becomes data parallel over a 1-D mesh."""

    name: str
    distribute: Callable[[Model, DeviceMesh], nn.Module]


def _ddp(model: Model, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, process_group=mesh.get_group())


def _fsdp1(model: Model, mesh: DeviceMesh) -> nn.Module:
    units = set(model.blocks)
    return FullyShardedDataParallel(
        model,
        process_group=mesh.get_group(),
        auto_wrap_policy=CustomPolicy(lambda module: module in units),
        device_id=_device_of(mesh),
        use_orig_params=True,
    )


def _fsdp2(model: Model, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks:
        torch_fully_shard(block, mesh=mesh)
    return torch_fully_shard(model, mesh=mesh)


def _sherd(model: Model, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks:
        sherd.fully_shard(block, mesh=mesh)
    return sherd.fully_shard(model, mesh=mesh)


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


PLAIN = System("plain", lambda model, mesh: model)
DDP = System("DDP", _ddp)
FSDP1 = System("FSDP1", _fsdp1)
FSDP2 = System("FSDP2", _fsdp2)
SHERD = System("sherd", _sherd)
ALL = (PLAIN, DDP, FSDP1, FSDP2, SHERD)


def contenders(mesh: DeviceMesh) -> list[System]:
    """All systems; without DDP on a fake group, whose all-reduce hands DDP's C++ no result to read."""
    is_fake = dist.get_backend(mesh.get_group()) == "fake"
    return [system for system in ALL if not (is_fake and system is DDP)]


class Trainee:
    """One system's copy of a workload: its model on the mesh's device, and its optimizer."""

    def __init__(self, system: System, workload: Workload, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        self.workload = workload
        self.device = _device_of(mesh)
        self.model = system.distribute(workload.build().to(self.device), mesh)
        self.optimizer = torch.optim.AdamW(groups_of(self.model), lr=3e-4, foreach=True)

    def batch(self, seed: int) -> tuple[Tensor, ...]:
        return tuple(tensor.to(self.device) for tensor in self.workload.batch(seed))

    def forward_backward(self, batch: tuple[Tensor, ...]) -> Tensor:
        """Leaves gradients behind; returns the detached loss."""
        loss: Tensor = self.model(*batch)
        loss.backward()
        return loss.detach()

    def step(self, batch: tuple[Tensor, ...]) -> Tensor:
        """Forward, backward, AdamW (foreach), gradients to None. No clipping; the loss is not read."""
        loss = self.forward_backward(batch)
        self.optimizer.step()
        self.drop_gradients()
        return loss

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)


def groups_of(model: nn.Module, size: int = 60) -> list[dict[str, Any]]:
    """All parameters, `size` to an optimizer group, in every system alike.

    DTensor plans a foreach operation in time quadratic in its tensors, once: 40 s for 1,500 of them. The
    blocks have 12 parameters each, so all groups of 60 look alike and share one plan.
    """
    parameters = list(model.parameters())
    return [{"params": parameters[i : i + size]} for i in range(0, len(parameters), size)]
