"""How does a model train under `FullyShardedDataParallel`, and what of it is compared with plain training?"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sherd.api.fsdp1 import CPUOffload, MixedPrecision, ShardingStrategy
from sherd.api.wrapper import FullyShardedDataParallel
from tests.support.comparing import Named, is_close, whole_grads
from tests.support.models import Specimen, build
from tests.support.training import Recipe, Run, make_optimizer, train_plain

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


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """`make()`, with the same values on every rank."""
    torch.manual_seed(0)
    return make()


def wrap_units(
    model: Specimen, with_: Callable[..., nn.Module] = FullyShardedDataParallel, **options: Any
) -> nn.Module:
    """Wrap every unit of `model` by hand, bottom up, each with `options`; lists of modules one by one."""
    for unit in model.units():
        for module in unit if isinstance(unit, list) else [unit]:
            if module is not model:
                replace(model, module, with_(module, **options))
    return with_(model, **options)


def replace(root: nn.Module, module: nn.Module, wrapped: nn.Module) -> None:
    """Hang `wrapped` on every place below `root` where `module` is."""
    for parent in list(root.modules()):
        if parent is not wrapped:
            for name, child in parent._modules.items():
                if child is module:
                    parent._modules[name] = wrapped


def plain(name: str) -> str:
    """A parameter's name without activation checkpointing on the way, which unwrapped models still have."""
    return name.replace("_checkpoint_wrapped_module.", "")


def whole_values(model: nn.Module) -> Named:
    """Every parameter by its plain name, whole."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return {plain(name): each.detach().clone() for name, each in model.named_parameters()}


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
            run.grads.append({plain(name): each for name, each in whole_grads(model).items()})
        if recipe.max_norm is not None:
            run.norms.append(model.clip_grad_norm_(recipe.max_norm, recipe.norm_type).item())
        optimizer.step()
        optimizer.zero_grad()
    run.params = whole_values(model)
    return run


def train_wrapped(
    recipe: Recipe, *, no_sync: bool = False, wrap: Callable[..., nn.Module] = wrap_units, **options: Any
) -> Run:
    """On a rank: build, wrap with `options` of FullyShardedDataParallel, train."""
    return steps_wrapped(wrap(build(recipe.model), **options), recipe, dist.get_rank(), no_sync=no_sync)


@functools.cache
def plain_runs(recipe: Recipe, num_ranks: int) -> tuple[Run, ...]:
    """What each rank should have: plain training, under plain names."""
    return tuple(
        Run(
            run.losses,
            [{plain(name): each for name, each in grads.items()} for grads in run.grads],
            run.norms,
            {plain(name): each for name, each in run.params.items()},
        )
        for run in train_plain(recipe, num_ranks)
    )


def assert_trained_as(found: Run, expected: Run, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Losses, norms, last parameters, and gradients where they were noted, agree."""
    assert len(found.losses) == len(expected.losses) > 0
    for what in ("losses", "norms"):
        torch.testing.assert_close(
            torch.tensor(getattr(found, what)), torch.tensor(getattr(expected, what)), rtol=rtol, atol=atol
        )
    _assert_close(found.params, expected.params, "parameter", rtol, atol)
    for grads, expected_grads in zip(found.grads, expected.grads, strict=False):
        _assert_close(grads, expected_grads, "gradient", rtol, atol)


def _assert_close(found: Named, expected: Named, what: str, rtol: float, atol: float) -> None:
    assert sorted(found) == sorted(expected), f"{what}: other names"
    for name, tensor in expected.items():
        assert (found[name] is None) == (tensor is None), f"{what} of {name}: {found[name]} is not {tensor}"
        if tensor is not None and not is_close(found[name], tensor, rtol, atol):
            torch.testing.assert_close(
                found[name], tensor, rtol=rtol, atol=atol, msg=lambda text, n=name: f"{what} of {n}: {text}"
            )


def assert_all_trained_plainly(runs: list[Run], recipe: Recipe, **tolerance: float) -> None:
    """Every rank's run agrees with plain training."""
    for found, expected in zip(runs, plain_runs(recipe, len(runs)), strict=True):
        assert_trained_as(found, expected, **tolerance)
