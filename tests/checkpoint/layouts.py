"""The model that the checkpoint tests save and load, its layouts, and the comparison.

Every rank trains on the same batch, so a training goes on with the same losses on any number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from sherd import Blocks, Flat, MixedPrecisionPolicy, Owned, RaggedDTensor, fully_shard
from tests.support.comparing import assert_same
from tests.support.models import noise

WIDTH = 6
LR = 0.05


class Odd(nn.Module):
    """Rows that do not divide, fewer rows than ranks, a scalar, one element, bfloat16, three dims, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.tensor([0.5]))
        self.thin = nn.Parameter(torch.randn(2, 7) / 4)
        self.short = nn.Parameter((torch.randn(5, 7) / 4).to(torch.bfloat16))
        self.cube = nn.Parameter(torch.randn(3, 4, WIDTH) / 4)
        self.fixed = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x) * self.gain + self.one)
        narrow = F.linear(hidden, self.thin).sum(-1) + F.linear(hidden, self.short.to(x.dtype)).sum(-1)
        return x + narrow[..., None] * self.cube.sum((0, 1)) + torch.tanh(x @ self.fixed.t())


class Stack(nn.Module):
    """Odd units between an embedding and a head that share their weight."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(blocks or [Odd()])
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.arange(3.0))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


PLACEMENTS: dict[str, Any] = {
    "rows": {"placement": None},
    "columns": {"shard_placement_fn": lambda parameter: Shard(1) if parameter.dim() > 1 else None},
    "flat": {"placement": Flat()},
    "blocks": {"placement": Blocks(1)},
    "blocks of 3": {"placement": Blocks(3)},
    "whole": {"placement": Owned()},
    "replicated": {"placement": Flat(), "replicate_below": 120},
}
"""By name, the arguments of `fully_shard`."""

LAYOUTS = (*PLACEMENTS, "plain")
RUNS = ("flat", "blocks", "blocks of 3", "whole")


def built(seed: int = 0) -> Stack:
    """The plain model."""
    torch.manual_seed(seed)
    return Stack()


def model_in(layout: str, seed: int = 0, model: Stack | None = None, **options: Any) -> Any:
    """The model sharded in a layout, with more `options` of `fully_shard`; "plain" leaves it as it is."""
    model = built(seed) if model is None else model
    if layout == "plain":
        return model
    options |= {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32), **PLACEMENTS[layout]}
    for unit in (*model.blocks, model):
        fully_shard(unit, **options)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    """AdamW over what is trained; a large eps, so that rounding errors stay small, and lists, which are quicker."""
    trained = [each for each in model.parameters() if each.requires_grad]
    return torch.optim.AdamW(trained, lr=LR, eps=1e-2, foreach=True)


def loss_of(model: nn.Module, step: int) -> Tensor:
    """The loss on a step's batch."""
    tokens = (noise(step, 0, 4, 5).abs() * 1000).long() % 11
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """The losses of these steps, and what the last would be once more; gradients are cleared after each."""
    losses = []
    for step in steps:
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        return [*losses, loss_of(model, steps[-1]).item()]


def trained_in(layout: str, seed: int = 0, steps: range = range(1), **options: Any) -> tuple[Any, torch.optim.AdamW]:
    """The model in a layout and its optimizer, after these steps."""
    model = model_in(layout, seed, **options)
    optimizer = optimizer_of(model)
    train(model, optimizer, steps)
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Parameters and buffers by name; of each trained parameter, what the optimizer keeps."""
    names = {id(each): name for name, each in model.named_parameters()}
    states = {names[id(each)]: dict(state) for each, state in optimizer.state.items()}
    return {"model": model.state_dict(), "optimizer": states}


def assert_held(found: Any, expected: Any, where: str) -> None:
    """This rank's pieces in `found` are those of the whole values, to the bit and in dtype."""
    if isinstance(expected, dict):
        assert set(found) == set(expected), f"{where}: other names"
        for name, value in expected.items():
            assert_held(found[name], value, f"{where}/{name}")
    elif isinstance(found, DTensor):
        assert found.shape == expected.shape, where
        assert_same(found.to_local(), part_of(expected, found), where)
    else:
        assert_same(found, expected, where)


def part_of(expected: Tensor, like: DTensor) -> Tensor:
    """What this rank should hold of `expected`, worked out without the library; only the last axis may shard."""
    rank, num_ranks = like.device_mesh.get_coordinate()[-1], like.device_mesh.size(-1)
    *copies, placement = like.placements
    assert all(isinstance(each, Replicate) for each in copies)
    if isinstance(like, RaggedDTensor):
        start = 0 if rank <= like.cut.first else like.cut.ends[min(rank - like.cut.first, len(like.cut.ends)) - 1]
        flat = expected.flatten()[start:]
        return flat[: like.to_local().numel()].view(like.to_local().shape)
    if isinstance(placement, Replicate):
        return expected
    chunks = expected.chunk(num_ranks, placement.dim)
    return chunks[rank] if rank < len(chunks) else expected.narrow(placement.dim, 0, 0)


MODEL = nn.Linear(3, 3)
"""Whose elements all have one value, so that a test tells which save was loaded."""


def filled(value: float) -> dict[str, nn.Module]:
    """The items to save or to load, with this value everywhere."""
    with torch.no_grad():
        for parameter in MODEL.parameters():
            parameter.fill_(value)
    return {"model": MODEL}


def value() -> float:
    """The value that is everywhere."""
    (found,) = {float(each) for parameter in MODEL.parameters() for each in parameter.detach().flatten()}
    return found
