"""The model that a `Setting` describes, its batches, and what comes out of it in one process on the CPU.

The plain model computes in another dtype by a cast of its parameters (`functional_call`), so that gradients come back
through the same casts, and both must agree to rounding.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.gpu.settings import Setting
from tests.support import models
from tests.support.models import next_token_loss, tokens

NUM_STEPS = 4
"""The last one is a settled step: before the second, third and fifth, replicas compare their values, and hosts wait."""
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


class NormInItsOwnDtype(nn.LayerNorm):
    """One that is ignored stays in float32, which no kernel of CUDA takes beside an input in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class Net(models.Net):
    """Token numbers in, logits out."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(0, tied=setting.tied, width=setting.width)
        if setting.ignored:
            self.norm = NormInItsOwnDtype(setting.width).requires_grad_(False)
        self.blocks.extend(Block(setting) for _ in range(setting.num_blocks))
        if setting.frozen == "block":
            self.blocks[0].requires_grad_(False)
        elif setting.frozen == "norms":
            for block in self.blocks:
                block.norm.requires_grad_(False)


def made(setting: Setting, device: torch.device | str = "cpu") -> Net:
    """Returns the same weights each time."""
    torch.manual_seed(0)
    if device == "meta":
        with torch.device(device):  # where `to` would untie what is tied
            return Net(setting)
    return Net(setting).to(device)


def batch(step: int, micro: int, rank: int) -> Tensor:
    return tokens(100 * micro + step, rank)


def optimizer_of(setting: Setting, model: nn.Module) -> torch.optim.Optimizer:
    params = [each for each in model.parameters() if each.requires_grad]
    if setting.optimizer == "adamw":
        # A large eps: otherwise the rounding error of a gradient that ranks cancel makes a whole step.
        return torch.optim.AdamW(params, lr=3e-2, eps=3e-2, foreach=True)
    return torch.optim.SGD(params, lr=0.2, momentum=0.5, foreach=True)


@dataclass
class Outcome:
    """Of one rank: the losses of its batches in order, of each step the norm and the loss scale, and all parameters at
    the end.

    `races` are accesses that nothing orders, `waits` the host's waits in the last step. `error` is what
    it raised instead.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
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
                loss = next_token_loss(compute, batch(step, micro, rank)) / setting.micro_batches
                outcome.losses.append(loss.item())
                scaler.scale(share_of(setting, loss, step) / setting.num_ranks).backward()
        finish(setting, scaler, optimizer, lambda norm: nn.utils.clip_grad_norm_(model.parameters(), norm), outcomes[0])
        if setting.between == "written":
            shrink(model)
        for rank, outcome in enumerate(outcomes):
            if setting.between:
                outcome.between.append(seen_between(setting, model, compute, batch(step, ASIDE, rank)))
    for outcome in outcomes:
        outcome.params = {name: each.detach().clone() for name, each in model.named_parameters()}
        outcome.norms = [float(each) for each in outcomes[0].norms]
        outcome.scales = outcomes[0].scales
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
    outcome.scales.append(scaler.get_scale())
    optimizer.zero_grad()


def shrink(model: nn.Module) -> None:
    """Write to all parameters by hand."""
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(0.99)


def seen_between(setting: Setting, model: nn.Module, compute: Any, tokens: Tensor) -> float:
    """Returns one number of what is seen between two steps: the loss in eval mode, or all values."""
    if setting.between == "eval":
        with torch.no_grad():
            model.eval()
            loss = next_token_loss(compute, tokens).item()
            model.train()
            return loss
    tensors = model.state_dict().values() if setting.between == "state dict" else model.parameters()
    found = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in tensors]
    return float(sum(each.detach().double().abs().sum().cpu() for each in found))
