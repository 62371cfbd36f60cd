"""Who competes: the ways to make a model data parallel, behind one interface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import sherd
import sherd.wrap

from .models import Model, Workload

Placement = Shard | sherd.Flat | sherd.Blocks | sherd.Owned


@dataclass(frozen=True, slots=True)
class System:
    """A name for the table's column, and how a plain model becomes data parallel over a mesh.

    `only_on`: the one kind of real group that it is measured on, "gloo" ranks on the CPU or an "accelerator".
    `finish`: what becomes of the optimizer over the model's parameters.
    """

    name: str
    distribute: Callable[[Model, DeviceMesh], nn.Module]
    only_on: str | None = None
    finish: Callable[[Optimizer], Optimizer] | None = None

    def told(self, mixed: bool, offload: bool) -> System:
        """Returns this system with float32 shards that compute in bfloat16, or with its shards in host memory."""
        return replace(self, distribute=replace(self.distribute, mixed=mixed, offload=offload))


def _ddp(model: Model, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, process_group=mesh.get_group())


@dataclass(frozen=True, slots=True)
class _Wrapper:
    """torch's `FullyShardedDataParallel` on the blocks and on the root, or ours, told the same; HSDP over two axes."""

    is_ours: bool
    use_orig_params: bool
    mixed: bool = False
    offload: bool = False

    def __call__(self, model: Model, mesh: DeviceMesh) -> nn.Module:
        units = set(model.blocks)
        library = sherd if self.is_ours else torch_fsdp
        policy = sherd.wrap.CustomPolicy if self.is_ours else CustomPolicy
        precision = library.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        hybrid = {"device_mesh": mesh, "sharding_strategy": library.ShardingStrategy.HYBRID_SHARD}
        return library.FullyShardedDataParallel(
            model,
            **(hybrid if mesh.ndim == 2 else {"process_group": mesh.get_group()}),
            auto_wrap_policy=policy(lambda module: module in units),
            device_id=device_of(mesh),
            use_orig_params=self.use_orig_params,
            mixed_precision=precision if self.mixed else None,
            cpu_offload=library.CPUOffload(offload_params=True) if self.offload else None,
        )


def _policies(library: Any, mixed: bool, offload: bool) -> dict[str, Any]:
    """Arguments of `fully_shard`, of torch or of sherd: both have the same names for them."""
    policies: dict[str, Any] = {}
    if mixed:
        policies["mp_policy"] = library.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if offload:
        policies["offload_policy"] = library.CPUOffloadPolicy()
    return policies


@dataclass(frozen=True, slots=True)
class _FSDP2:
    """torch's `fully_shard` on the blocks and on the root."""

    mixed: bool = False
    offload: bool = False

    def __call__(self, model: Model, mesh: DeviceMesh) -> nn.Module:
        policies = _policies(torch_fsdp, self.mixed, self.offload)
        for block in model.blocks:
            torch_fsdp.fully_shard(block, mesh=mesh, **policies)
        return torch_fsdp.fully_shard(model, mesh=mesh, **policies)


@dataclass(frozen=True, slots=True)
class _Sherd:
    """`sherd.fully_shard` on the blocks and on the root. It may be pickled, as all that goes to a rank."""

    placement: Placement | None = None
    transport: str = "auto"
    mixed: bool = False
    offload: bool = False

    def __call__(self, model: Model, mesh: DeviceMesh) -> nn.Module:
        chosen = {
            "placement": self.placement,
            "comm_policy": sherd.CommPolicy(transport=self.transport),
            **_policies(sherd, self.mixed, self.offload),
        }
        for block in model.blocks:
            sherd.fully_shard(block, mesh=mesh, **chosen)
        return sherd.fully_shard(model, mesh=mesh, **chosen)


@dataclass(frozen=True, slots=True)
class _Megatron:
    """Megatron-FSDP, which makes a mesh of all ranks by itself and keeps float32 copies of the parameters."""

    mixed: bool = False
    offload: bool = False

    def __call__(self, model: Model, mesh: DeviceMesh) -> nn.Module:
        from megatron_fsdp import fully_shard_model

        if self.offload:
            raise NotImplementedError("megatron_fsdp.fully_shard_model() has no argument for it")
        units = sorted({type(block) for block in model.blocks}, key=lambda kind: kind.__qualname__)
        return fully_shard_model(module=model, fsdp_unit_modules=units, zero_dp_strategy=3)


def _finish_megatron(optimizer: Optimizer) -> Optimizer:
    from megatron_fsdp import fully_shard_optimizer

    return fully_shard_optimizer(optimizer=optimizer)


def device_of(mesh: DeviceMesh) -> torch.device:
    """Returns the device of this rank, with its number where there are several."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


PLAIN = System("plain", lambda model, mesh: model)
DDP = System("DDP", _ddp)
FSDP1 = System("FSDP1", _Wrapper(is_ours=False, use_orig_params=True))
FSDP1_FLAT = System("FSDP1 flat", _Wrapper(is_ours=False, use_orig_params=False))
FSDP2 = System("FSDP2", _FSDP2())
SHERD = System("sherd", _Sherd())
SHERD_GLOO = System("sherd gloo", _Sherd(transport="gloo"), only_on="gloo")
SHERD_COALESCED = System("sherd coalesced", _Sherd(transport="coalesced"), only_on="accelerator")
FLAT = System("Flat", _Sherd(sherd.Flat()))
FLAT_GLOO = System("Flat gloo", _Sherd(sherd.Flat(), "gloo"), only_on="gloo")
FLAT_VIEW = System("Flat view", _Sherd(sherd.Flat()), finish=sherd.flatten_optimizer)
WRAPPER = System("wrapper", _Wrapper(is_ours=True, use_orig_params=True))
WRAPPER_FLAT = System("wrapper flat", _Wrapper(is_ours=True, use_orig_params=False))
WRAPPERS = (WRAPPER, WRAPPER_FLAT)
MEGATRON = System("Megatron", _Megatron(), finish=_finish_megatron)
"""Measured by `bench.device` alone, where the package is installed."""
ALL = (PLAIN, DDP, FSDP1, FSDP1_FLAT, FSDP2, SHERD, SHERD_COALESCED, SHERD_GLOO, FLAT, FLAT_GLOO, FLAT_VIEW, *WRAPPERS)


def sherd_system(name: str, placement: Placement) -> System:
    """Returns `fully_shard` with a placement."""
    return System(name, _Sherd(placement))


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
    is_fake = "fake" in dist.get_backend(mesh.get_group())
    kind = "fake" if is_fake else "gloo" if mesh.device_type == "cpu" else "accelerator"
    return [
        system
        for system in ALL
        if system is not FLAT_VIEW and not (is_fake and system is DDP) and system.only_on in (None, kind)
    ]


class Trainee:
    """One system's copy of a workload: its model on the mesh's device, and its optimizer."""

    def __init__(self, system: System, workload: Workload, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        self.workload = workload
        self.device = device_of(mesh)
        self.model = system.distribute(workload.build().to(self.device), mesh)
        self.optimizer: Optimizer = torch.optim.AdamW(groups_of(self.model), lr=3e-4, foreach=True)
        if system.finish is not None:
            self.optimizer = system.finish(self.optimizer)

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
