"""Trains a small GPT on ranks with a simulated device each, by FSDP2 or by sherd, and the plain model on the CPU.

The plain model computes in another dtype by a cast of its parameters, so that both have the same arithmetic.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import sherd
from sherd.wrap import ModuleWrapPolicy
from tests.device import sim
from tests.gpu.training import Layer

WIDTH, TOKENS, VOCABULARY, NUM_BLOCKS, NUM_STEPS = 32, 12, 40, 3, 3
PREFETCH = sherd.PrefetchPolicy()


class GPT(nn.Module):
    def __init__(self, recompute: bool, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Layer(False if recompute else None, WIDTH) for _ in range(NUM_BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Setting:
    """How a model is sharded and trained. What a plain model has no notion of comes after `tied`."""

    dtype: torch.dtype | None = None
    micro_batches: int = 1
    max_norm: float | None = None
    adam: bool = False
    tied: bool = False
    system: str = "sherd"  # or "FSDP2", or "wrapper"
    placement: str = "Shard(0)"
    reduce_dtype: torch.dtype | None = None
    recompute: bool = False
    reshard: bool | int | None = None
    replicas: int = 1
    prefetch: sherd.PrefetchPolicy = PREFETCH
    transport: str = "auto"
    parts: bool = False  # every unit is cut into parts, as a large one is by default
    offload: bool = False
    pinned: bool = True
    use_orig_params: bool = True
    built_on: str = "sim"
    hook: bool = False  # an all-reduce hook on a stream of its own
    follows_event: bool = False  # gathers wait for the optimizer's event, not for all of compute
    sums_replicas_once: bool = False  # micro-batches are reduced over the shard axis, over the replicas only the last
    interrupted: bool = False  # a backward raises half-way, before the first step
    reduce_buffers: int | None = None  # so many reductions at a time; with several, compute owns what they send


@dataclass(frozen=True)
class Trained:
    """The losses of each step and micro-batch, the parameters, and where the host waited in the last step."""

    losses: list[list[Tensor]]
    params: dict[str, Tensor]
    waits: dict[str, int]


def batch(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 100 * micro + step)
    return torch.randint(VOCABULARY, (2, TOKENS + 1), generator=generator)


def loss_of(compute: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    return F.cross_entropy(compute(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def optimizer_of(model: nn.Module, setting: Setting) -> torch.optim.Optimizer:
    if setting.adam:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5, foreach=True)
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5, foreach=True)


def plain(setting: Setting, num_ranks: int) -> Trained:
    """Trains one process's model on the batches of all ranks."""
    same = Setting(setting.dtype, setting.micro_batches, setting.max_norm, setting.adam, setting.tied)
    return _plain(same, num_ranks)


@cache
def _plain(setting: Setting, num_ranks: int) -> Trained:
    torch.manual_seed(0)
    model = GPT(False, setting.tied)

    def compute(tokens: Tensor) -> Tensor:
        if setting.dtype is None:
            return model(tokens)
        cast = {name: each.to(setting.dtype) for name, each in model.named_parameters()}
        return torch.func.functional_call(model, cast, (tokens,))

    optimizer, losses = optimizer_of(model, setting), []
    for step in range(NUM_STEPS):
        found = []
        for micro in range(setting.micro_batches):
            for rank in range(num_ranks):
                loss = loss_of(compute, batch(step, micro, rank))
                (loss / (num_ranks * setting.micro_batches)).backward()
                found.append(loss.detach())
        if setting.max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), setting.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found)
    return Trained(losses, {name: each.detach() for name, each in model.named_parameters()}, {})


# On a rank


def train(setting: Setting, sabotage: Callable[[], contextlib.AbstractContextManager[None]] | None = None) -> Trained:
    """Trains this rank's model, with `sabotage()` about it if given."""
    torch.manual_seed(0)
    model: Any = GPT(setting.recompute, setting.tied).to(setting.built_on)
    model = sharded(model, setting, _mesh(setting))
    optimizer, rank = optimizer_of(model, setting), dist.get_rank()
    tokens = {
        (step, micro): batch(step, micro, rank).to("sim")
        for step in range(NUM_STEPS)
        for micro in range(setting.micro_batches)
    }
    losses, waits = [], Counter[str]()
    with sabotage() if sabotage is not None else contextlib.nullcontext():
        if setting.interrupted:
            _interrupted_step(model, optimizer, tokens[0, 0])
        for step in range(NUM_STEPS):
            settled = _noting_waits(waits) if step == NUM_STEPS - 1 else contextlib.nullcontext()
            with settled:
                of_step = [tokens[step, micro] for micro in range(setting.micro_batches)]
                losses.append(_step(model, optimizer, setting, of_step))
        torch.accelerator.synchronize()
    return Trained(losses, _whole(model, setting), dict(waits))


def _mesh(setting: Setting) -> DeviceMesh:
    size = dist.get_world_size()
    if setting.replicas == 1:
        return init_device_mesh("sim", (size,), mesh_dim_names=("shard",))
    return init_device_mesh("sim", (setting.replicas, size // setting.replicas), mesh_dim_names=("replicate", "shard"))


def _step(model: Any, optimizer: torch.optim.Optimizer, setting: Setting, tokens: list[Tensor]) -> list[Tensor]:
    found = []
    for micro, each in enumerate(tokens):
        with _gradients_stay(model, setting, micro + 1 < len(tokens)):
            loss = loss_of(model, each)
            (loss / len(tokens)).backward()
            found.append(loss.detach())
    if setting.max_norm is not None:
        _clip(model, setting)
    if setting.offload:
        _tell_of_the_host(model)
    optimizer.step()
    if setting.follows_event:
        model.set_post_optim_event(torch.accelerator.current_stream().record_event())
    optimizer.zero_grad()
    return found


def _tell_of_the_host(model: nn.Module) -> None:
    """Tells the device what the optimizer does to shards in host memory, which it does not see by itself."""
    for parameter in model.parameters():
        for tensor, tell in ((parameter.grad, sim.host_reads), (parameter.detach(), sim.host_writes)):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local is not None and local.numel():
                tell(local)


def _interrupted_step(model: Any, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    def interrupt(_: Tensor) -> None:
        raise InterruptedError

    handle = model.embed.register_forward_hook(
        lambda _module, _inputs, output: output.register_hook(interrupt) and None
    )
    with contextlib.suppress(InterruptedError):
        loss_of(model, tokens).backward()
    handle.remove()
    optimizer.zero_grad()


def _gradients_stay(model: Any, setting: Setting, stay: bool) -> contextlib.AbstractContextManager[Any]:
    if setting.system == "wrapper":
        return model.no_sync() if stay else contextlib.nullcontext()
    if setting.sums_replicas_once:
        model.set_requires_all_reduce(not stay)
    elif setting.micro_batches > 1:
        model.set_requires_gradient_sync(not stay)
    return contextlib.nullcontext()


def _clip(model: Any, setting: Setting) -> None:
    assert setting.max_norm is not None, "asked for"
    if setting.system == "wrapper":
        model.clip_grad_norm_(setting.max_norm)
    elif setting.system == "sherd":
        sherd.clip_grad_norm_(model.parameters(), setting.max_norm)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), setting.max_norm)


def sharded(model: GPT, setting: Setting, mesh: DeviceMesh) -> nn.Module:
    """Returns `model` in units: its blocks, and the rest."""
    if setting.system == "wrapper":
        return _wrapped(model, setting, mesh)
    package: Any = fsdp if setting.system == "FSDP2" else sherd
    offload = package.CPUOffloadPolicy(pin_memory=setting.pinned) if setting.offload else package.OffloadPolicy()
    precision = package.MixedPrecisionPolicy(param_dtype=setting.dtype, reduce_dtype=setting.reduce_dtype)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": precision, "offload_policy": offload}
    if setting.reshard is not None:
        options["reshard_after_forward"] = setting.reshard
    if package is sherd:
        options["prefetch_policy"] = setting.prefetch
        options["comm_policy"] = sherd.CommPolicy(setting.transport, part_bytes=1 if setting.parts else None)
        placements = {"Flat": sherd.Flat(), "Blocks": sherd.Blocks(8), "Owned": sherd.Owned()}
        options["placement"] = placements.get(setting.placement)
    for block in model.blocks:
        package.fully_shard(block, **options)
    package.fully_shard(model, **options)
    if setting.reduce_buffers is not None:
        model.set_reduce_scatter_max_input_buffers(setting.reduce_buffers)
    if setting.hook:
        stream = torch.Stream(device="sim")
        for unit in (*model.blocks, model):
            unit.set_all_reduce_hook(_double_and_halve, stream=stream)
    return model


def _double_and_halve(gradient: Tensor) -> None:
    """Does nothing, so slowly that whoever does not wait finds a doubled gradient."""
    gradient.mul_(2)
    sim.sleep(3000)
    gradient.div_(2)


def _wrapped(model: GPT, setting: Setting, mesh: DeviceMesh) -> nn.Module:
    return sherd.FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        sharding_strategy=sherd.ShardingStrategy.HYBRID_SHARD if setting.replicas > 1 else None,
        auto_wrap_policy=ModuleWrapPolicy({Layer}),
        mixed_precision=sherd.MixedPrecision(param_dtype=setting.dtype, reduce_dtype=setting.reduce_dtype),
        cpu_offload=sherd.CPUOffload(offload_params=setting.offload),
        device_id=torch.accelerator.current_device_index(),
        use_orig_params=setting.use_orig_params,
    )


@contextlib.contextmanager
def _noting_waits(waits: Counter[str]) -> Iterator[None]:
    def note(cause: str) -> None:
        waits[f"{cause}: {_caller()}"] += 1

    sim.on_host_wait(note)
    try:
        yield
    finally:
        sim.on_host_wait(None)


def _caller() -> str:
    """Returns the innermost line of sherd or of FSDP2 under way, else of this file; "?" on a thread of autograd's."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        file = frame.f_code.co_filename
        if "/sherd/" in file or "_fully_shard" in file or file == __file__:
            return f"{'/'.join(file.split('/')[-2:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def _whole(model: Any, setting: Setting) -> dict[str, Tensor]:
    if setting.system == "FSDP2":
        return {name: each.full_tensor().detach().cpu() for name, each in model.named_parameters()}
    with sherd.unsharded(model, writeback=False):
        return {name: each.detach().to("cpu", copy=True) for name, each in model.named_parameters()}


# Comparing


def difference(ranks: list[Trained], setting: Setting) -> str:
    """Returns what differs most from the plain model on the CPU, "" if nothing does beyond rounding."""
    expected, num_ranks = plain(setting, len(ranks)), len(ranks)
    tolerance = 3e-2 if setting.dtype is not None else 2e-4
    worst = [
        (_distance(found, expected.losses[step][micro * num_ranks + rank]), f"loss of step {step} on rank {rank}")
        for rank, trained in enumerate(ranks)
        for step, losses in enumerate(trained.losses)
        for micro, found in enumerate(losses)
    ]
    for rank, trained in enumerate(ranks):
        assert trained.params.keys() == expected.params.keys()
        worst += [
            (_distance(trained.params[name], each), f"{name} on rank {rank}") for name, each in expected.params.items()
        ]
    distance, what = max(worst)
    return f"{what} differs by {distance:.1e}" if distance > tolerance else ""


def _distance(found: Tensor, expected: Tensor) -> float:
    """Returns the largest difference, relative to the largest number; infinity where something is not finite."""
    distance = ((found - expected).abs().max() / expected.abs().max()).item()
    return distance if distance == distance else float("inf")
