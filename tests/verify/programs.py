"""What the tests of `verify_equivalence` build and shard, and which mistakes are planted in it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import sherd
from sherd import EquivalenceReport, FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy
from tests.support.meshes import mesh_of
from tests.support.models import VOCABULARY, Net, next_token_loss
from tests.support.sharding import FRONTS, sharded

WIDTH, ROWS = 16, 8


class Stack(Net):
    """Blocks between a tied embedding and head, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__(tied=True, frozen=True, width=WIDTH)

    def units(self) -> list[nn.Module]:
        return [*self.blocks, self.norm, self]


class Unused(Stack):
    """And a parameter that forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))


class Counting(nn.Module):
    """With a batch norm, whose statistics are those of a part of the batch, and a buffer that forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.norm(self.up(x))

    def units(self) -> list[nn.Module]:
        return [self.up, self]


def words(steps: int = 3, rows: int = ROWS) -> list[Tensor]:
    return list(torch.randint(VOCABULARY, (steps, rows, 5), generator=torch.Generator().manual_seed(1)))


def noise(steps: int = 3, rows: int = ROWS) -> list[Tensor]:
    return list(torch.randn(steps, rows, WIDTH, generator=torch.Generator().manual_seed(2)))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def hybrid(model: Any) -> None:
    sharded(model, mesh=mesh_of((2, 2)))


def tensor_parallel(model: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    sharded(model, mesh=mesh["dp"])


BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
PURE_BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)

SHARDED: dict[str, Callable[[Any], nn.Module | None]] = {
    **{front: functools.partial(sharded, front=front) for front in FRONTS},
    "bfloat16": functools.partial(sharded, mp_policy=BFLOAT16),
    "pure bfloat16": functools.partial(sharded, mp_policy=PURE_BFLOAT16),
    "wrapper, bfloat16": functools.partial(
        sharded, front="wrapper", mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)
    ),
    "not at all": lambda model: FullyShardedDataParallel(
        model, sharding_strategy=sherd.ShardingStrategy.NO_SHARD, use_orig_params=True
    ),
}
ON_FOUR = {"hybrid": hybrid, "tensor parallel": tensor_parallel, "shard": sharded}


def verified(shard: str, build: Callable[[], nn.Module] = Stack, **options: Any) -> EquivalenceReport:
    """On a rank."""
    options = {"loss": next_token_loss, "optimizer": adamw, **options}
    return sherd.verify_equivalence(build, words(), shard={**SHARDED, **ON_FOUR}[shard], **options)


# Mistakes: each shards and then spoils something


def with_gradient_scaled(name: str, factor: float, **options: Any) -> Callable[[Any], None]:
    """The gradient of one parameter is multiplied."""

    def shard(model: Any) -> None:
        sharded(model, **options)
        model.get_parameter(name).register_post_accumulate_grad_hook(lambda param: param.grad.mul_(factor))

    return shard


def with_output_off(model: Any) -> None:
    """One element of a block's output is off by a thousandth, on rank 1."""
    sharded(model)
    if dist.get_rank() == 1:
        model.blocks[0].register_forward_hook(lambda module, args, output: _bumped(output))


def _bumped(output: Tensor) -> Tensor:
    factor = torch.ones_like(output)
    factor[2, 1, 7] = 1.001
    return output * factor


def with_drifting_replica(model: Any) -> None:
    """Ranks 2 and 3, the second replica, keep one gradient of their own."""
    hybrid(model)
    if dist.get_rank() >= 2:
        model.blocks[1].down.bias.register_post_accumulate_grad_hook(lambda shard: shard.grad.mul_(0.9))


def with_other_weights(model: Any) -> None:
    """Rank 1 has built other weights: every rank cuts its own."""
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.blocks[0].up.weight += 1e-6
    sharded(model)


def with_buffer_off(model: Any) -> None:
    """A running mean is off by a thousandth of its change."""
    sharded(model)
    before = model.norm.running_mean.clone()

    def bump(module: Any, args: Any, output: Any) -> None:
        module.running_mean = module.running_mean + (module.running_mean - before) * 1e-3

    model.norm.register_forward_hook(bump)


class Forgetful(torch.optim.SGD):
    """It leaves out `blocks.0.up.bias` in the second step."""

    calls = 0

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        gradients = [each.grad for each in self.param_groups[0]["params"]]
        skipped = self.param_groups[0]["params"][2]
        if self.calls == 2 and dist.get_world_size() > 1 and hasattr(skipped, "device_mesh"):
            skipped.grad = None
        super().step(closure)
        for each, gradient in zip(self.param_groups[0]["params"], gradients, strict=True):
            each.grad = gradient


def forgetful(parameters: Any) -> torch.optim.Optimizer:
    return Forgetful(parameters, lr=1e-5)
