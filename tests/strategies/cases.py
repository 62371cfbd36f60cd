"""Strategies, cuts and meshes, how a rank trains a combination of them, and its comparison with one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import sherd
from sherd import Blocks, Flat, FullyShardedDataParallel, Owned, Placements
from sherd.api.placements import PRESETS
from sherd.policy import Level
from tests.support import sharding
from tests.support.comparing import Named, assert_named_close, plain_name, whole_grads
from tests.support.meshes import mesh_of
from tests.support.models import Specimen, build
from tests.support.training import Recipe, Run, make_optimizer, train_plain
from tests.wrapper.training import assert_trained_as, wrap_units

CUTS: dict[str, Any] = {
    "rows": Shard(0),
    "columns": Shard(1),
    "flat": Flat(),
    "blocks": Blocks(2),
    "whole": Owned(),
}
"""By name, how what is sharded is cut."""

PAIRS = tuple((outer, inner) for outer in Level for inner in Level)
"""What two axes may shard, the outer one first: all of them are legal."""


def placements(levels: tuple[Level, ...], cut: str) -> Placements:
    """`levels` spelt out, axis by axis."""

    def kind(least: Level) -> list[Any]:
        return [CUTS[cut] if level >= least else Replicate() for level in levels]

    return Placements(kind(Level.PARAMETERS), kind(Level.GRADIENTS), kind(Level.OPTIMIZER))


def of_parameter(cut: str) -> Any:
    """The same as a `shard_placement_fn`, for models with tensors that have no dim 1."""
    chosen = CUTS[cut]
    return lambda parameter: (Shard(0) if parameter.dim() == 1 else chosen) if parameter.dim() else None


Levels = tuple[Level, ...] | str
"""What each axis shards, or a preset."""
Mesh = DeviceMesh | tuple[int, ...] | None
"""A mesh, or its shape; None: of 4 ranks, two by two if there are two levels."""


def _resolved(levels: Levels, mesh: Mesh) -> tuple[tuple[Level, ...], DeviceMesh | None]:
    levels = PRESETS[levels] if isinstance(levels, str) else levels
    shape = ((2, 2) if len(levels) == 2 else (4,)) if mesh is None else mesh
    return levels, shape if isinstance(shape, DeviceMesh) else mesh_of(shape)


def sharded(model: Specimen, levels: Levels, cut: str, mesh: Mesh = None, **options: Any) -> Specimen:
    """`model` under a strategy, by `fully_shard`."""
    levels, mesh = _resolved(levels, mesh)
    if cut == "columns":
        options.setdefault("shard_placement_fn", of_parameter(cut))
    else:
        model.placement = None
    return sharding.sharded(model, mesh=mesh, placements=placements(levels, cut), **options)


def wrapped(model: Specimen, levels: Levels, cut: str, mesh: Mesh = None, **options: Any) -> Any:
    """The same by the wrapper."""
    levels, mesh = _resolved(levels, mesh)
    return wrap_units(model, device_mesh=mesh, sharding_strategy=placements(levels, cut), **options)


def train(model: Any, recipe: Recipe, *, accumulate: bool = False, flatten: bool = False) -> Run:
    """Train on this rank's batches: losses and norms of all steps, gradients of the first as they were clipped,
    parameters after the last. With `accumulate` micro-batches are announced, with `flatten` the optimizer steps
    buffers."""
    rank, optimizer, run = dist.get_rank(), make_optimizer(recipe.optimizer, model), Run()
    if flatten:
        sherd.flatten_optimizer(optimizer)
    for step in range(recipe.steps):
        losses = []
        with sherd.accumulate(model, recipe.micro_batches) if accumulate else nullcontext():
            for micro in range(recipe.micro_batches):
                loss = model.loss(model(*model.make_inputs(step + 100 * micro, rank))) / recipe.micro_batches
                loss.backward()
                losses.append(loss.item())
        run.losses.append(sum(losses))
        if recipe.max_norm is not None:
            run.norms.append(sherd.clip_grad_norm_(model.parameters(), recipe.max_norm, recipe.norm_type).item())
        if step == 0 and not _is_flat(model):
            run.grads.append({plain_name(name): each for name, each in whole_grads(model).items()})
        optimizer.step()
        optimizer.zero_grad()
    # Not by `full_tensor`, which trusts what shards say of themselves.
    with sherd.unsharded(model, writeback=False):
        run.params = {plain_name(name): each.detach().clone() for name, each in model.named_parameters()}
    return run


def _is_flat(model: Any) -> bool:
    return isinstance(model, FullyShardedDataParallel) and not model._sherd_state.choices.use_orig_params


@dataclass(frozen=True)
class Case:
    """What is trained, under which strategy, by `sharded` or `wrapped` with `options`, and how: see `train`."""

    recipe: Recipe
    levels: Levels
    cut: str = "flat"
    mesh: tuple[int, ...] | None = None
    by: Callable[..., Any] = sharded
    options: dict[str, Any] = field(default_factory=dict)
    how: dict[str, bool] = field(default_factory=dict)

    def run(self) -> Run:
        model = self.by(build(self.recipe.model), self.levels, self.cut, self.mesh, **self.options)
        return train(model, self.recipe, **self.how)


Cases = Mapping[Hashable, Case]


def assert_each_trains(cases: Cases) -> None:
    """On a rank: each of `cases` trains as in one process."""
    for name, case in cases.items():
        try:
            assert_trained_as(case.run(), plainly(case.recipe, dist.get_world_size())[dist.get_rank()])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@functools.cache
def plainly(recipe: Recipe, num_ranks: int) -> tuple[Run, ...]:
    """The same in this process, by rank; with the first step's gradients as they were clipped."""
    runs = []
    for run in train_plain(recipe, num_ranks):
        factor = 1.0
        if recipe.max_norm is not None:
            factor = min(1.0, recipe.max_norm / (run.norms[0] + 1e-6))
        grads = {name: None if each is None else each * factor for name, each in run.grads[0].items()}
        runs.append(Run(run.losses, [grads], run.norms, run.params))
    return tuple(runs)


def assert_mean_gradients(
    found: dict[Hashable, Named], plain: nn.Module, loss_of: Callable[[Any, int], Tensor]
) -> None:
    """On a rank: its gradients, by case, are the means of those of `loss_of(plain, rank)` over ranks."""
    num_ranks = dist.get_world_size()
    for rank in range(num_ranks):
        (loss_of(plain, rank) / num_ranks).backward()
    expected = whole_grads(plain)
    for case, grads in found.items():
        assert_named_close(grads, expected, f"{case}: gradient", 1.3e-6, 1e-5)
