"""How tests train, plain and sharded: a `Recipe` trains a specimen, a `Job` any model.

The plain side is one process that runs each rank's batch in turn and averages the gradients, which is what
training on the concatenated global batch means. Both sides return a `Run`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sherd import fully_shard
from tests.support.comparing import Named, assert_named_close, whole, whole_grads, whole_params
from tests.support.meshes import mesh_of
from tests.support.models import Specimen, build, noise
from tests.support.sharding import sharded

# Large, so that Adam does not make whole steps of a tiny gradient's rounding error.
EPS = 1e-3

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "momentum": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": functools.partial(torch.optim.Adam, lr=1e-2, eps=EPS),
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2, eps=EPS),
    "adamw_foreach": functools.partial(torch.optim.AdamW, lr=1e-2, eps=EPS, foreach=True),
    "adamw_fused": functools.partial(torch.optim.AdamW, lr=1e-2, eps=EPS, fused=True),
}


@dataclass(frozen=True)
class Recipe:
    """What is trained and for how long; the same words for the plain and the sharded side."""

    model: str
    # Its step is in proportion to the gradient, and takes half of the operations of AdamW's (test_optimizers has both).
    optimizer: str = "momentum"
    # The first finds the order in which units run, the second runs by it.
    steps: int = 2
    micro_batches: int = 1
    max_norm: float | None = None
    norm_type: float = 2.0
    clip_foreach: bool | None = None


Announce = Callable[[Any, int, bool], object]
"""`announce(model, number, is_last)` of a micro-batch."""


@dataclass
class Run:
    """What a training left: per step the loss and the norm, of the first and last the whole gradients; whole
    parameters."""

    losses: list[float] = field(default_factory=list)
    grads: list[Named] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    params: Named = field(default_factory=dict)
    finished: int = 0


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer called `kind` over the parameters that need a gradient now."""
    return OPTIMIZERS[kind]([param for param in model.parameters() if param.requires_grad])


def clip(model: nn.Module, recipe: Recipe) -> float:
    """Clip as `recipe` says; the norm before clipping."""
    assert recipe.max_norm is not None, "asked to clip without a norm"
    norm = nn.utils.clip_grad_norm_(
        model.parameters(), recipe.max_norm, norm_type=recipe.norm_type, foreach=recipe.clip_foreach
    )
    full = whole(norm)
    assert full is not None, "a norm is never None"
    return full.item()


def finish_step(model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe, run: Run) -> None:
    """Note the gradients, clip, update, clear."""
    if run.finished in (0, recipe.steps - 1):
        run.grads.append(whole_grads(model))
    run.finished += 1
    if recipe.max_norm is not None:
        run.norms.append(clip(model, recipe))
    optimizer.step()
    optimizer.zero_grad()


def steps_sharded(
    model: Specimen,
    recipe: Recipe,
    rank: int,
    *,
    announce: Announce | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Run:
    """Train `model`, sharded already, on this rank's batches, each of which `announce` is told before."""
    optimizer, run = optimizer or make_optimizer(recipe.optimizer, model), Run()
    for step in range(recipe.steps):
        losses = []
        for micro in range(recipe.micro_batches):
            if announce is not None:
                announce(model, micro, micro == recipe.micro_batches - 1)
            loss = model.loss(model(*model.make_inputs(step + 100 * micro, rank))) / recipe.micro_batches
            loss.backward()
            losses.append(loss.item())
        run.losses.append(sum(losses))
        finish_step(model, optimizer, recipe, run)
    run.params = whole_params(model)
    return run


def train_sharded(
    recipe: Recipe,
    *,
    mesh_shape: tuple[int, ...] | None = None,
    with_: Callable[..., Any] = fully_shard,
    prepare: Callable[[Any], object] | None = None,
    announce: Announce | None = None,
    **options: Any,
) -> Run:
    """On a rank: build, shard with `options` of fully_shard, `prepare` the model, train."""
    model = sharded(build(recipe.model), with_=with_, mesh=mesh_of(mesh_shape), **options)
    if prepare is not None:
        prepare(model)
    return steps_sharded(model, recipe, dist.get_rank(), announce=announce)


def train_each(recipes: Iterable[Recipe], **options: Any) -> dict[Recipe, Run]:
    """On a rank: `train_sharded` one after another, on one mesh.

    Making it, and what DTensor then works out anew, takes longer than most trainings.
    """
    return {recipe: train_sharded(recipe, **options) for recipe in recipes}


def plain_step(model: Specimen, recipe: Recipe, num_ranks: int, step: int) -> list[float]:
    """Every rank's forward and backward in turn, gradients averaged; the losses by rank."""
    losses = []
    for rank in range(num_ranks):
        total = 0.0
        for micro in range(recipe.micro_batches):
            loss = model.loss(model(*model.make_inputs(step + 100 * micro, rank))) / recipe.micro_batches
            (loss / num_ranks).backward()
            total += loss.item()
        losses.append(total)
    return losses


@functools.cache
def train_plain(recipe: Recipe, num_ranks: int) -> tuple[Run, ...]:
    """In this process, unsharded: what each rank should return."""
    model = build(recipe.model)
    optimizer, shared = make_optimizer(recipe.optimizer, model), Run()
    losses: list[list[float]] = []
    for step in range(recipe.steps):
        losses.append(plain_step(model, recipe, num_ranks, step))
        finish_step(model, optimizer, recipe, shared)
    shared.params = whole_params(model)
    return tuple(
        Run([of_step[rank] for of_step in losses], shared.grads, shared.norms, shared.params)
        for rank in range(num_ranks)
    )


def assert_same_run(run: Run, plain: Run, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Losses, gradients of every step, norms and last parameters agree."""
    assert len(run.losses) == len(plain.losses) > 0
    torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(plain.losses), rtol=rtol, atol=atol)
    torch.testing.assert_close(torch.tensor(run.norms), torch.tensor(plain.norms), rtol=rtol, atol=atol)
    for which, (found, expected) in enumerate(zip(run.grads, plain.grads, strict=True)):
        assert_named_close(found, expected, f"{'last' if which else 'first'} step: gradient", rtol, atol)
    assert_named_close(run.params, plain.params, "parameter", rtol, atol)


# bfloat16 sums of more than two ranks round in another order than the plain side's, and the float32 parameters follow
# them; two ranks round alike, so there the comparison is tight.
LOOSE_BFLOAT16 = {"rtol": 3e-2, "atol": 3e-2}


def tolerance(model: str, num_ranks: int) -> dict[str, float]:
    """How far sums in another order may lead; `assert_same_run`'s own, but for models that magnify rounding."""
    return LOOSE_BFLOAT16 if model == "mixed_bfloat" and num_ranks > 2 else {}


def assert_all_same(runs: list[Run], recipe: Recipe, **tolerance: float) -> None:
    """Every rank's run agrees with the plain one."""
    for rank, (run, plain) in enumerate(zip(runs, train_plain(recipe, len(runs)), strict=True)):
        try:
            assert_same_run(run, plain, **tolerance)
        except AssertionError as error:
            raise AssertionError(f"{recipe} on rank {rank} of {len(runs)}: {error}") from error


def assert_each_same(runs: list[dict[Recipe, Run]]) -> None:
    """Every rank's run of every recipe agrees with the plain one."""
    for recipe in runs[0]:
        assert_all_same([run[recipe] for run in runs], recipe, **tolerance(recipe.model, len(runs)))


LR = 0.1
Job = Callable[[Any, int, int], Tensor]
"""`job(model, rank, step)` returns the loss; run on every rank, or rank by rank on the plain model."""


def made(make: Callable[..., nn.Module], seed: int = 0) -> Any:
    """Returns the module that `make` builds, with the same weights wherever it is called."""
    torch.manual_seed(seed)
    return make()


def mean_square(model: Any, rank: int, step: int) -> Tensor:
    """The ordinary job: noise in, the output's mean square out."""
    return model(noise(step, rank)).square().mean()


def train_job(model: nn.Module, job: Job, steps: int = 3) -> Named:
    """On a rank: SGD steps on a sharded model; unsharded parameters."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    for step in range(steps):
        job(model, dist.get_rank(), step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole_params(model)


def train_job_plain(model: nn.Module, job: Job, num_ranks: int, steps: int = 3) -> Named:
    """In one process: what `train_job` should give; a parameter that no rank used stays as it is."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    for step in range(steps):
        for rank in range(num_ranks):
            (job(model, rank, step) / num_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole_params(model)


def assert_trained(found: Sequence[Named], make: Callable[..., nn.Module], job: Job = mean_square) -> None:
    """Every rank's parameters are those of the plain training."""
    expected = train_job_plain(made(make), job, len(found))
    for params in found:
        assert_named_close(params, expected, "parameter", 1e-5, 1e-6)
