"""How does a sharded model train beside the plain one on an accelerator, with the same arithmetic?

The plain one computes in another dtype by a cast of its parameters (`functional_call`), so that gradients come back
through the same casts, and both must agree to rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import sherd
from sherd import CPUOffload, CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from sherd.wrap import ModuleWrapPolicy
from tests.api.own_collectives import GatherByList, ReduceByAllReduce

WIDTH, TOKENS, VOCABULARY, NUM_BLOCKS, NUM_STEPS = 64, 16, 96, 3, 4


class Layer(nn.Module):
    """A decoder layer; `recompute` is None, or what checkpointing is told about reentering."""

    def __init__(self, recompute: bool | None, width: int = WIDTH) -> None:
        super().__init__()
        self.recompute = recompute
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute is None:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.recompute)

    def body(self, x: Tensor) -> Tensor:
        query, key, value = (
            each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        weights = (query @ key.transpose(-1, -2) / key.shape[-1] ** 0.5).softmax(-1)
        x = x + self.out((weights @ value).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Token numbers in, logits out."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(recompute) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@dataclass(frozen=True)
class Recipe:
    """What a training does beside forward, backward and a step.

    SGD, which answers a small difference with a small one. In another dtype nothing is recomputed: the plain model's
    cast parameters are gone by then.
    """

    dtype: torch.dtype | None = None
    recompute: bool | None = None
    micro_batches: int = 1
    max_norm: float | None = None
    scaled: bool = False


RECIPES = {
    "float32": Recipe(),
    "bfloat16": Recipe(dtype=torch.bfloat16),
    "float16, scaled": Recipe(dtype=torch.float16, scaled=True),
    "float32, scaled": Recipe(scaled=True),
    "recomputed": Recipe(recompute=False),
    "recomputed by reentering": Recipe(recompute=True),
    "unsynced": Recipe(micro_batches=3),
    "clipped": Recipe(max_norm=0.1),
    "bfloat16, clipped": Recipe(dtype=torch.bfloat16, max_norm=0.1),
}


@dataclass
class Run:
    """What came out."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)


def decoder(recipe: Recipe, device: torch.device) -> Decoder:
    """The same weights each time."""
    torch.manual_seed(0)
    return Decoder(recipe.recompute).to(device)


def batch(seed: int, rank: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + seed)
    return torch.randint(VOCABULARY, (4, TOKENS + 1), generator=generator).to(device)


def loss_of(compute: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    logits = compute(tokens[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


Clip = Callable[[Any, float], Tensor]


def train(
    model: Any,
    recipe: Recipe,
    device: torch.device,
    ranks: tuple[int, ...],
    *,
    compute: Callable[[Tensor], Tensor],
    scaler: torch.amp.GradScaler,
    clip: Clip,
    unsynced: Callable[[bool], contextlib.AbstractContextManager[None]],
) -> Run:
    """Train on the batches of `ranks`, of whose losses the mean is taken."""
    optimizer, run = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5, foreach=True), Run()
    for step in range(NUM_STEPS):
        total = 0.0
        for micro in range(recipe.micro_batches):
            with unsynced(micro + 1 < recipe.micro_batches):
                for rank in ranks:
                    tokens = batch(step + 100 * micro, rank, device)
                    loss = loss_of(compute, tokens) / (recipe.micro_batches * len(ranks))
                    if recipe.scaled and step == 1:
                        loss = loss * torch.inf
                    scaler.scale(loss).backward()
                    total += loss.item()
        if recipe.scaled:
            scaler.unscale_(optimizer)
        if recipe.max_norm is not None:
            run.norms.append(float(clip(model, recipe.max_norm)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        run.losses.append(total)
        run.scales.append(scaler.get_scale())
    return run


def train_plain(recipe: Recipe, device: torch.device, num_ranks: int = 1) -> Run:
    """In one process, on all ranks' batches."""
    model = decoder(recipe, device)

    def compute(tokens: Tensor) -> Tensor:
        if recipe.dtype is None:
            return model(tokens)
        cast = {name: each.to(recipe.dtype) for name, each in model.named_parameters()}
        return torch.func.functional_call(model, cast, (tokens,))

    run = train(
        model,
        recipe,
        device,
        tuple(range(num_ranks)),
        compute=compute,
        scaler=torch.amp.GradScaler(device.type, init_scale=2.0**10, enabled=recipe.scaled),
        clip=lambda model, norm: nn.utils.clip_grad_norm_(model.parameters(), norm),
        unsynced=lambda _: contextlib.nullcontext(),
    )
    run.params = {name: each.detach().clone() for name, each in model.named_parameters()}
    return run


def train_sharded(recipe: Recipe, mesh: DeviceMesh, device: torch.device, rank: int = 0, **options: Any) -> Run:
    """On a rank, by `fully_shard` with `options`; `offload` and `after` are this function's own.

    `after(unit)` is called with each unit when it was made.
    """
    after, offload = options.pop("after", None), options.pop("offload", False)
    model: Any = decoder(recipe, device)
    options |= {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=recipe.dtype),
        "offload_policy": CPUOffloadPolicy(pin_memory=True) if offload else OffloadPolicy(),
    }
    for module in (*model.layers, model):
        fully_shard(module, **options)
        if after is not None:
            after(module)

    @contextlib.contextmanager
    def unsynced(waits: bool) -> Any:
        model.set_requires_gradient_sync(not waits)
        yield

    run = _train_ours(
        model, recipe, device, rank, lambda m, norm: sherd.clip_grad_norm_(m.parameters(), norm), unsynced
    )
    run.params = joined(model, device) if dist.get_world_size() > 1 else whole(model, device)
    return run


def joined(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Unsharded parameters from what ranks hold of them, through host memory: under Shard(0) and Flat, one behind
    another.

    For groups that cannot gather tensors on a device.
    """
    params = {}
    for name, each in model.named_parameters():
        pieces: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(pieces, each.detach().to_local().cpu().flatten())
        params[name] = torch.cat(pieces).view(each.shape).to(device)
    return params


def train_wrapped(recipe: Recipe, device: torch.device, rank: int = 0, **options: Any) -> Run:
    """On a rank, by `FullyShardedDataParallel` with `options`; `offload` is this function's own."""
    offload = options.pop("offload", False)
    model = sherd.FullyShardedDataParallel(
        decoder(recipe, device),
        auto_wrap_policy=ModuleWrapPolicy({Layer}),
        mixed_precision=MixedPrecision(param_dtype=recipe.dtype),
        cpu_offload=CPUOffload(offload_params=offload),
        device_id=device,
        **options,
    )

    def unsynced(waits: bool) -> Any:
        return model.no_sync() if waits else contextlib.nullcontext()

    run = _train_ours(model, recipe, device, rank, lambda m, norm: m.clip_grad_norm_(norm), unsynced)
    run.params = whole(model, device)
    return run


def whole(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    with sherd.unsharded(model, writeback=False):
        return {name: each.detach().to(device, copy=True) for name, each in model.named_parameters()}


def train_here(recipe: Recipe, how: str, device: torch.device, options: dict[str, Any]) -> Run:
    """On a rank, on a mesh of all: `how` is "torch's calls", "own collectives" or "wrapper"."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    if how == "wrapper":
        return train_wrapped(recipe, device, dist.get_rank(), device_mesh=mesh, **options)
    after = _with_own_collectives if how == "own collectives" else None
    return train_sharded(recipe, mesh, device, dist.get_rank(), after=after, **options)


def _with_own_collectives(unit: Any) -> None:
    unit.set_custom_all_gather(GatherByList(waits=True))
    unit.set_custom_reduce_scatter(ReduceByAllReduce())


def _train_ours(
    model: Any, recipe: Recipe, device: torch.device, rank: int, clip: Clip, unsynced: Callable[[bool], Any]
) -> Run:
    scaler = sherd.ShardedGradScaler(device.type, init_scale=2.0**10, enabled=recipe.scaled)
    return train(model, recipe, device, (rank,), compute=model, scaler=scaler, clip=clip, unsynced=unsynced)


def assert_same(found: Run, expected: Run, recipe: Recipe, own_losses: bool = True) -> None:
    """Numbers agree; `own_losses`: both trained on the same batches, and not on one rank's and all ranks'."""
    rtol, atol = (1e-4, 1e-5) if recipe.dtype is None else (2e-2, 4e-3)
    compared = ("losses", "norms", "scales") if own_losses else ("norms", "scales")
    for what in compared:
        ours, theirs = (torch.tensor(getattr(run, what), dtype=torch.float64) for run in (found, expected))
        assert torch.allclose(ours, theirs, rtol=rtol, atol=atol, equal_nan=True), f"{what}: {ours} is not {theirs}"
    assert found.params.keys() == expected.params.keys()
    for name, tensor in expected.params.items():
        assert torch.isfinite(tensor).all(), name
        difference = (found.params[name] - tensor).abs().max().item()
        assert torch.allclose(found.params[name], tensor, rtol=rtol, atol=atol), f"{name}: differs by {difference}"
