"""How does every parity test train, plain and sharded, and what does it compare?

The plain side is one process that runs each rank's batch in turn and averages the gradients, which is what
training on the concatenated global batch means. Both sides return a `Run`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from sherd import fully_shard
from tests.models import Specimen, build, shard
from tests.parity.gathered import gathered

Named = dict[str, Tensor | None]

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


@dataclass
class Run:
    """What a training left: per step the loss and the norm, of the first and last the whole gradients; whole
    parameters."""

    losses: list[float] = field(default_factory=list)
    grads: list[Named] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    params: Named = field(default_factory=dict)
    finished: int = 0


def whole(tensor: Tensor | None) -> Tensor | None:
    """A plain copy of `tensor`, gathered when it is sharded (then a collective)."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    # `full_tensor` leaves a replicated mesh axis alone: two replicas that drifted apart both show themselves.
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()


def whole_values(tensors: Named) -> Named:
    """Plain copies by the same names, gathered where they are sharded (then collectives)."""
    return dict(zip(tensors, gathered(tensors.values()), strict=True))


def whole_params(model: nn.Module) -> Named:
    """Every parameter of `model` by name, whole."""
    return whole_values(dict(model.named_parameters()))


def whole_grads(model: nn.Module) -> Named:
    """Every gradient of `model` by its parameter's name, whole; None where there is none."""
    return whole_values({name: param.grad for name, param in model.named_parameters()})


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


def mesh_of(shape: tuple[int, ...] | None) -> DeviceMesh | None:
    """None for the default mesh; (replicas, ranks) for HSDP; (ranks,) for an explicit one. The same one when called
    again by the function that a rank runs."""
    if shape is None:
        return None
    known: dict[tuple[int, ...], _Mesh] = vars(_meshes).setdefault("by_shape", {})
    for ended in [each for each, mesh in known.items() if not mesh.is_alive()]:
        del known[ended]
    if shape not in known:
        # DTensor remembers earlier, equal meshes, whose groups ended with the test that made them.
        _clear_sharding_prop_cache()
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        known[shape] = _Mesh(mesh, mesh.get_all_groups())
    return known[shape].mesh


# Of each rank, be it a thread: what it does twice on one mesh DTensor works out once.
_meshes = threading.local()


@dataclass(frozen=True)
class _Mesh:
    """A mesh and its groups, which live until the end of the function that a rank runs."""

    mesh: DeviceMesh
    groups: list[dist.ProcessGroup]

    def is_alive(self) -> bool:
        return all(group in dist.distributed_c10d._world.pg_map for group in self.groups)


def finish_step(model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe, run: Run) -> None:
    """Note the gradients, clip, update, clear."""
    if run.finished in (0, recipe.steps - 1):
        run.grads.append(whole_grads(model))
    run.finished += 1
    if recipe.max_norm is not None:
        run.norms.append(clip(model, recipe))
    optimizer.step()
    optimizer.zero_grad()


def steps_sharded(model: Specimen, recipe: Recipe, rank: int, *, sync_each: bool = True) -> Run:
    """Train `model`, sharded already, on this rank's batches."""
    optimizer, run = make_optimizer(recipe.optimizer, model), Run()
    for step in range(recipe.steps):
        losses = []
        for micro in range(recipe.micro_batches):
            last = micro == recipe.micro_batches - 1
            if not sync_each:
                model.set_requires_gradient_sync(last)
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
    **options: Any,
) -> Run:
    """On a rank: build, shard with `options` of fully_shard, train."""
    model = shard(build(recipe.model), with_=with_, mesh=mesh_of(mesh_shape), **options)
    return steps_sharded(model, recipe, dist.get_rank())


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


def assert_named_close(found: Named, expected: Named, what: str, rtol: float, atol: float) -> None:
    """The same names, None in the same places, and close values."""
    assert list(found) == list(expected), f"{what}: other names"
    for name, tensor in expected.items():
        assert (found[name] is None) == (tensor is None), f"{what} of {name}: {found[name]} is not {tensor}"
        if tensor is not None and not is_close(found[name], tensor, rtol, atol):
            torch.testing.assert_close(
                found[name], tensor, rtol=rtol, atol=atol, msg=lambda text, n=name: f"{what} of {n}: {text}"
            )


def is_close(found: Tensor, expected: Tensor, rtol: float, atol: float) -> bool:
    """`assert_close` in a tenth of its time, which the thousands of tensors here take; it has the last word."""
    if (found.shape, found.dtype, found.layout) != (expected.shape, expected.dtype, expected.layout):
        return False
    return torch.allclose(found, expected, rtol=rtol, atol=atol)


def assert_same(run: Run, plain: Run, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
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
    """How far sums in another order may lead; `assert_same`'s own, but for models that magnify rounding."""
    return LOOSE_BFLOAT16 if model == "mixed_bfloat" and num_ranks > 2 else {}


def assert_all_same(runs: list[Run], recipe: Recipe, **tolerance: float) -> None:
    """Every rank's run agrees with the plain one."""
    for rank, (run, plain) in enumerate(zip(runs, train_plain(recipe, len(runs)), strict=True)):
        try:
            assert_same(run, plain, **tolerance)
        except AssertionError as error:
            raise AssertionError(f"{recipe} on rank {rank} of {len(runs)}: {error}") from error


def assert_each_same(runs: list[dict[Recipe, Run]]) -> None:
    """Every rank's run of every recipe agrees with the plain one."""
    for recipe in runs[0]:
        assert_all_same([run[recipe] for run in runs], recipe, **tolerance(recipe.model, len(runs)))
