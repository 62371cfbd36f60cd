"""The model that a `Setting` describes, its batches, its loss, and what comes out of it in one process on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.gpu.settings import Setting

VOCABULARY, ROWS, TOKENS, NUM_STEPS = 24, 2, 5, 3
ASIDE = 50
"""The number of the batch that nothing is learnt from."""
INFINITE_STEP = 1
"""Where losses are scaled, that of this step is infinite, and no parameter may change in it."""


class Block(nn.Module):
    """Four matrices and vectors, and perhaps a scalar."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.recompute = setting.recompute
        self.norm = nn.LayerNorm(setting.width)
        self.up = nn.Linear(setting.width, 2 * setting.width + 1)
        self.down = nn.Linear(2 * setting.width + 1, setting.width, bias=False)
        self.gain = nn.Parameter(torch.tensor(0.9)) if setting.scalar else None

    def forward(self, x: Tensor) -> Tensor:
        if not self.recompute:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.recompute == "reentrant")

    def body(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(x))))
        return x + (y if self.gain is None else y * self.gain)


class Net(nn.Module):
    """Token numbers in, logits out."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, setting.width)
        self.blocks = nn.ModuleList(Block(setting) for _ in range(setting.num_blocks))
        self.norm = nn.LayerNorm(setting.width)
        self.head = nn.Linear(setting.width, VOCABULARY, bias=False)
        if setting.tied:
            self.head.weight = self.embed.weight
        if setting.ignored:
            self.norm.requires_grad_(False)
        if setting.frozen == "block":
            self.blocks[0].requires_grad_(False)
        elif setting.frozen == "norms":
            for block in self.blocks:
                block.norm.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def made(setting: Setting, device: torch.device | str = "cpu") -> Net:
    """Returns the same weights each time."""
    torch.manual_seed(0)
    if device == "meta":
        with torch.device(device):  # where `to` would untie what is tied
            return Net(setting)
    return Net(setting).to(device)


def batch(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * rank + 100 * micro + step)
    return torch.randint(VOCABULARY, (ROWS, TOKENS + 1), generator=generator)


def loss_of(compute: Any, tokens: Tensor) -> Tensor:
    return F.cross_entropy(compute(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def optimizer_of(setting: Setting, model: nn.Module) -> torch.optim.Optimizer:
    params = [each for each in model.parameters() if each.requires_grad]
    if setting.optimizer == "adamw":
        # A large eps: otherwise the rounding error of a gradient that ranks cancel makes a whole step.
        return torch.optim.AdamW(params, lr=3e-2, eps=3e-2, foreach=True)
    return torch.optim.SGD(params, lr=0.2, momentum=0.5, foreach=True)


@dataclass
class Outcome:
    """Of one rank: the losses of its batches in order, the norm of each step, and all parameters at the end.

    `races` are accesses that nothing orders, `waits` the host's waits in the last step. `error` is what
    it raised instead.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)
    races: dict[str, int] = field(default_factory=dict)
    waits: dict[str, int] = field(default_factory=dict)
    error: str = ""


def plain(setting: Setting) -> list[Outcome]:
    """Returns what each rank must find: one process, on all ranks' batches in turn."""
    arithmetic = ("width", "num_blocks", "tied", "frozen", "ignored", "scalar", "mesh", "param_dtype", "reduce_dtype")
    arithmetic += ("optimizer", "micro_batches", "max_norm", "scaled", "between")
    kept = {name: getattr(setting, name) for name in arithmetic}
    return _plain(replace(Setting(), **kept))


@functools.cache
def _plain(setting: Setting) -> list[Outcome]:
    model = made(setting)
    optimizer = optimizer_of(setting, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=setting.scaled)
    outcomes = [Outcome() for _ in range(setting.num_ranks)]
    dtype = getattr(torch, setting.param_dtype) if setting.param_dtype else None

    def compute(tokens: Tensor) -> Tensor:
        if dtype is None:
            return model(tokens)
        cast = {name: each.to(dtype) for name, each in model.named_parameters()}
        return torch.func.functional_call(model, cast, (tokens,))

    for step in range(NUM_STEPS):
        for micro in range(setting.micro_batches):
            for rank, outcome in enumerate(outcomes):
                loss = loss_of(compute, batch(step, micro, rank)) / setting.micro_batches
                outcome.losses.append(loss.item())
                scaler.scale(share_of(setting, loss, step) / setting.num_ranks).backward()
        finish(setting, scaler, optimizer, lambda norm: nn.utils.clip_grad_norm_(model.parameters(), norm), outcomes[0])
        if setting.between == "written":
            shrink(model)
        for rank, outcome in enumerate(outcomes):
            if setting.between in ("unsharded", "written"):
                outcome.between.append(total(model.parameters()))
            if setting.between == "state dict":
                outcome.between.append(total(model.state_dict().values()))
            if setting.between == "eval":
                outcome.between.append(evaluated(model, compute, batch(step, ASIDE, rank)))
    for outcome in outcomes:
        outcome.params = {name: each.detach().clone() for name, each in model.named_parameters()}
        outcome.norms = [float(each) for each in outcomes[0].norms]
    return outcomes


def share_of(setting: Setting, loss: Tensor, step: int) -> Tensor:
    """Returns the loss to go backward from."""
    return loss * torch.inf if setting.scaled and step == INFINITE_STEP else loss


def finish(setting: Setting, scaler: Any, optimizer: torch.optim.Optimizer, clip: Any, outcome: Any) -> None:
    """End a step: unscale, clip, update, drop gradients. The norm is kept as it is, for nobody to wait for it."""
    if setting.scaled:
        scaler.unscale_(optimizer)
    if setting.max_norm is not None:
        outcome.norms.append(clip(setting.max_norm).detach())
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def shrink(model: nn.Module) -> None:
    """Write to all parameters by hand."""
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(0.99)


def total(tensors: Iterable[Tensor]) -> float:
    """Returns one number of all values."""
    return float(sum(each.detach().double().abs().sum().cpu() for each in tensors))


@torch.no_grad()
def evaluated(model: nn.Module, compute: Any, tokens: Tensor) -> float:
    """Returns the loss of `model` in eval mode."""
    model.eval()
    loss = loss_of(compute, tokens).item()
    model.train()
    return loss
