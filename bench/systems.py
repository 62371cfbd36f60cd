"""Who competes: the ways to make a model data parallel, behind one interface."""

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
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import sherd
import sherd.wrap

from .models import Model, Workload


@dataclass(frozen=True, slots=True)
class System:
    """A name for the table's column, and how a plain model becomes data parallel over a 1-D mesh.

    `backend`: the only one that it is measured on, beside what is taken there by itself. `flat_view`: its optimizer
    steps runs of the shards' buffers, not the shards.
    """

    name: str
    distribute: Callable[[Model, DeviceMesh], nn.Module]
    backend: str | None = None
    flat_view: bool = False


def _ddp(model: Model, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, process_group=mesh.get_group())


@dataclass(frozen=True, slots=True)
class _Wrapper:
    """torch's `FullyShardedDataParallel` on the blocks and on the root, or ours, told the same."""

    is_ours: bool
    use_orig_params: bool

    def __call__(self, model: Model, mesh: DeviceMesh) -> nn.Module:
        units = set(model.blocks)
        wrap = sherd.FullyShardedDataParallel if self.is_ours else FullyShardedDataParallel
        policy = sherd.wrap.CustomPolicy if self.is_ours else CustomPolicy
        return wrap(
            model,
            process_group=mesh.get_group(),
            auto_wrap_policy=policy(lambda module: module in units),
            device_id=_device_of(mesh),
            use_orig_params=self.use_orig_params,
        )


def _fsdp2(model: Model, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks:
        torch_fully_shard(block, mesh=mesh)
    return torch_fully_shard(model, mesh=mesh)


@dataclass(frozen=True, slots=True)
class _Sherd:
    """`sherd.fully_shard` on the blocks and on the root. It may be pickled, as all that goes to a rank."""

    placement: sherd.Flat | None = None
    transport: str = "auto"

    def __call__(self, model: Model, mesh: DeviceMesh) -> nn.Module:
        chosen = {"placement": self.placement, "comm_policy": sherd.CommPolicy(transport=self.transport)}
        for block in model.blocks:
            sherd.fully_shard(block, mesh=mesh, **chosen)
        return sherd.fully_shard(model, mesh=mesh, **chosen)


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


PLAIN = System("plain", lambda model, mesh: model)
DDP = System("DDP", _ddp)
FSDP1 = System("FSDP1", _Wrapper(is_ours=False, use_orig_params=True))
FSDP1_FLAT = System("FSDP1 flat", _Wrapper(is_ours=False, use_orig_params=False))
FSDP2 = System("FSDP2", _fsdp2)
SHERD = System("sherd", _Sherd())
SHERD_GLOO = System("sherd gloo", _Sherd(transport="gloo"), backend="gloo")
SHERD_COALESCED = System("sherd coalesced", _Sherd(transport="coalesced"), backend="nccl")
FLAT = System("Flat", _Sherd(sherd.Flat()))
FLAT_GLOO = System("Flat gloo", _Sherd(sherd.Flat(), "gloo"), backend="gloo")
FLAT_VIEW = System("Flat view", _Sherd(sherd.Flat()), flat_view=True)
WRAPPER = System("wrapper", _Wrapper(is_ours=True, use_orig_params=True))
WRAPPER_FLAT = System("wrapper flat", _Wrapper(is_ours=True, use_orig_params=False))
WRAPPERS = (WRAPPER, WRAPPER_FLAT)
ALL = (PLAIN, DDP, FSDP1, FSDP1_FLAT, FSDP2, SHERD, SHERD_COALESCED, SHERD_GLOO, FLAT, FLAT_GLOO, FLAT_VIEW, *WRAPPERS)

LEGEND = (
    "sherd: `Shard(0)`, the default; Flat: `placement=Flat()`; both over the transport that is chosen by itself (for "
    "gloo ranks of one host: shared memory); gloo: over gloo; coalesced: tensor by tensor, in place; view: with "
    "`flatten_optimizer`; others step each shard; "
    "wrapper: our `FullyShardedDataParallel` with `use_orig_params=True`, beside FSDP1; flat: both with `False`"
)


def contenders(mesh: DeviceMesh) -> list[System]:
    """All systems that this group can serve, with the same optimizer each.

    Without DDP on a fake group, whose all-reduce hands DDP's C++ no result to read.
    """
    backend = dist.get_backend(mesh.get_group())
    return [
        system
        for system in ALL
        if not system.flat_view and not (backend == "fake" and system is DDP) and system.backend in (None, backend)
    ]


class Trainee:
    """One system's copy of a workload: its model on the mesh's device, and its optimizer."""

    def __init__(self, system: System, workload: Workload, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        self.workload = workload
        self.device = _device_of(mesh)
        self.model = system.distribute(workload.build().to(self.device), mesh)
        self.optimizer = torch.optim.AdamW(groups_of(self.model), lr=3e-4, foreach=True)
        if system.flat_view:
            sherd.flatten_optimizer(self.optimizer)

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
    """All parameters, `size` to an optimizer group, in every system alike; those on one mesh together.

    DTensor plans a foreach operation in time quadratic in its tensors, once: 40 s for 1,500 of them. The
    blocks have 12 parameters each, so all groups of 60 look alike and share one plan.
    """
    by_mesh: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        by_mesh.setdefault(mesh, []).append(parameter)
    return [{"params": members[i : i + size]} for members in by_mesh.values() for i in range(0, len(members), size)]
