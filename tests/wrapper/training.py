"""Training under `FullyShardedDataParallel`, and what of it is compared with plain training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sherd.fsdp1.arguments import CPUOffload, MixedPrecision, ShardingStrategy
from sherd.fsdp1.wrapper import FullyShardedDataParallel
from sherd.wrap import ModuleWrapPolicy
from tests.support.comparing import Named, plain_name, whole_grads, whole_params
from tests.support.models import Block, Specimen, build
from tests.support.sharding import replace
from tests.support.training import Recipe, Run, assert_same_run, make_optimizer, train_plain

FULL_SHARD = ShardingStrategy.FULL_SHARD
SHARD_GRAD_OP = ShardingStrategy.SHARD_GRAD_OP
NO_SHARD = ShardingStrategy.NO_SHARD
HYBRID_SHARD = ShardingStrategy.HYBRID_SHARD
HYBRID_SHARD_ZERO2 = ShardingStrategy._HYBRID_SHARD_ZERO2

OFFLOAD = CPUOffload(offload_params=True)
BFLOAT16 = MixedPrecision(param_dtype=torch.bfloat16)
BFLOAT16_REDUCED_IN_FLOAT32 = MixedPrecision(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True
)


BOTH_KINDS = pytest.mark.parametrize("orig", [True, False], ids=["orig", "flat"])
"""A test is run with original parameters, and with flat ones."""


def wrap_units(
    model: Specimen, with_: Callable[..., nn.Module] = FullyShardedDataParallel, **options: Any
) -> nn.Module:
    """Wrap every unit of `model` by hand, bottom up, each with `options`; lists of modules one by one."""
    for unit in model.units():
        for module in unit if isinstance(unit, list) else [unit]:
            if module is not model:
                replace(model, module, with_(module, **options))
    return with_(model, **options)


def wrap_blocks(model: nn.Module, **options: Any) -> Any:
    """Wrap every `Block`, and `model`."""
    return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


def steps_wrapped(model: Any, recipe: Recipe, rank: int, *, no_sync: bool = False) -> Run:
    """Train `model`, wrapped already, on this rank's batches; gradients by name are only there with original
    parameters."""
    optimizer, run = make_optimizer(recipe.optimizer, model), Run()
    for step in range(recipe.steps):
        total = 0.0
        for micro in range(recipe.micro_batches):
            last = micro == recipe.micro_batches - 1
            with model.no_sync() if no_sync and not last else contextlib.nullcontext():
                loss = model.loss(model(*model.make_inputs(step + 100 * micro, rank))) / recipe.micro_batches
                loss.backward()
            total += loss.item()
        run.losses.append(total)
        if model._sherd_state.choices.use_orig_params:
            run.grads.append(by_plain_name(whole_grads(model)))
        if recipe.max_norm is not None:
            run.norms.append(model.clip_grad_norm_(recipe.max_norm, recipe.norm_type).item())
        optimizer.step()
        optimizer.zero_grad()
    run.params = whole_params(model)
    return run


def train_wrapped(
    recipe: Recipe, *, no_sync: bool = False, wrap: Callable[..., nn.Module] = wrap_units, **options: Any
) -> Run:
    """On a rank: build, wrap with `options` of FullyShardedDataParallel, train."""
    return steps_wrapped(wrap(build(recipe.model), **options), recipe, dist.get_rank(), no_sync=no_sync)


def by_plain_name(values: Named) -> Named:
    """Returns the same, by the names of the model before it was wrapped, and in their order."""
    return dict(sorted((plain_name(name), value) for name, value in values.items()))


def assert_trained_as(found: Run, expected: Run, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Losses, norms, last parameters, and gradients where they were noted, agree, by plain names."""
    noted = min(len(found.grads), len(expected.grads))
    mine, plainly = (
        Run(run.losses, [by_plain_name(each) for each in run.grads[:noted]], run.norms, by_plain_name(run.params))
        for run in (found, expected)
    )
    assert_same_run(mine, plainly, rtol=rtol, atol=atol)


def assert_all_trained_plainly(runs: list[Run], recipe: Recipe, **tolerance: float) -> None:
    """Every rank's run agrees with plain training."""
    for found, expected in zip(runs, train_plain(recipe, len(runs)), strict=True):
        assert_trained_as(found, expected, **tolerance)
