"""How do these tests compare a sharded model of their own with the same model in one process?

A *job* is a function `(model, rank, step) -> loss`, run on every rank of the sharded side and, rank by rank, on
the plain side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sherd import SherdError, fully_shard
from tests.models import noise
from tests.parity.training import Named, assert_named_close, whole_params

Job = Callable[[Any, int, int], Tensor]
LR = 0.1


def made(make: Callable[..., nn.Module]) -> Any:
    """The module that `make` builds, with the same weights wherever it is called."""
    torch.manual_seed(0)
    return make()


def mean_square(model: Any, rank: int, step: int) -> Tensor:
    """The ordinary job: noise in, the output's mean square out."""
    return model(noise(step, rank)).square().mean()


def shard_children(model: nn.Module, **options: Any) -> nn.Module:
    """Each child with parameters a unit, and then the root."""
    for child in model.children():
        fully_shard(child, **options)
    fully_shard(model, **options)
    return model


def train(model: nn.Module, job: Job, steps: int = 3) -> Named:
    """On a rank: SGD steps on a sharded model; unsharded parameters."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    for step in range(steps):
        job(model, dist.get_rank(), step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole_params(model)


def train_plain(model: nn.Module, job: Job, num_ranks: int, steps: int = 3) -> Named:
    """In one process: what `train` should give; a parameter that no rank used stays as it is."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    for step in range(steps):
        for rank in range(num_ranks):
            (job(model, rank, step) / num_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole_params(model)


def assert_trained(found: Sequence[Named], make: Callable[..., nn.Module], job: Job = mean_square) -> None:
    """Every rank's parameters are those of the plain training."""
    expected = train_plain(made(make), job, len(found))
    for params in found:
        assert_named_close(params, expected, "parameter", 1e-5, 1e-6)


def form(module: nn.Module) -> str:
    """What `module` shows as its own parameters: "shard" or "whole"."""
    kinds = {isinstance(param, DTensor) for param in module.parameters(recurse=False)}
    assert len(kinds) == 1, "all parameters of a module have one form"
    return "shard" if kinds == {True} else "whole"


def assert_refused(action: Callable[[], Any], kind: type[SherdError], also: type[Exception], *words: str) -> None:
    """`action` raises `kind`, which is the built-in `also` too, and whose message has every one of `words`."""
    with pytest.raises(kind) as raised:
        action()
    assert isinstance(raised.value, SherdError)
    assert isinstance(raised.value, also)
    for word in words:
        assert word in str(raised.value), f"{word!r} is not in: {raised.value}"
