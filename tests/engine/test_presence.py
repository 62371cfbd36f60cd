"""Do shards stay one parameter when ranks use different parameters of a unit?"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sherd import CommPolicy, Flat, Owned, fully_shard
from sherd.comm.streams import RecordingStreams, use_streams
from sherd.engine.moves.gradients import Gradients
from sherd.engine.run.seal import unit_of


class Either(nn.Module):
    """Rank 0 uses `left`, the others `right`; nobody uses `unused`."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.unused = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(4, 6)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.left(x) if rank == 0 else self.right(x)


def inputs(rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))


def built() -> Either:
    torch.manual_seed(7)
    return Either()


def gradients_when_ranks_differ() -> dict[str, torch.Tensor | None]:
    model = built()
    fully_shard(model)
    rank = dist.get_rank()
    model(inputs(rank), rank).sum().backward()
    return {name: None if p.grad is None else p.grad.full_tensor() for name, p in model.named_parameters()}


def test_a_rank_without_a_gradient_takes_its_part_of_the_others(world):
    ranks = world(3).run(gradients_when_ranks_differ)
    plain = built()
    (sum(plain(inputs(rank), rank).sum() for rank in range(3)) / 3).backward()
    for found in ranks:
        for name, parameter in plain.named_parameters():
            if parameter.grad is None:
                assert found[name] is None, f"{name} has a gradient that nobody made"
            else:
                torch.testing.assert_close(found[name], parameter.grad)


class EitherLarge(nn.Module):
    """Two matrices of 4 MiB. Rank 0 uses one, the others use the other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.zeros(1024, 1024)) for _ in range(2))

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return (x.sum() * (self.left if rank == 0 else self.right)).sum()


def gradients_of_large_parts() -> list[float]:
    """One element of each, of which each matrix is a part of the unit."""
    rank = dist.get_rank()
    with use_streams(RecordingStreams()):
        model = fully_shard(EitherLarge(), comm_policy=CommPolicy("torch", part_bytes=4 << 20))
    assert len(unit_of(model).weights) == 2
    model(torch.ones(3) * (rank + 1), rank).backward()
    return [float(p.grad.full_tensor()[-1, -1]) for p in model.parameters()]


def test_a_rank_without_a_large_part_takes_its_share_of_the_others(world):
    assert world(2).run(gradients_of_large_parts) == [[1.5, 3.0]] * 2


class Perhaps(nn.Module):
    """A unit between others that some ranks run without using any of its parameters, others with all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, how: str) -> torch.Tensor:
        if how == "its input":
            return x
        if how == "its input, changed":
            return x * 0.5
        if how == "some":
            return x + self.down.bias
        if how == "half":
            return x + self.up(x)[:, :4]
        return x + self.down(self.up(x).tanh())


class One(nn.Linear):
    """A unit of one parameter, which some ranks do not use."""

    def __init__(self) -> None:
        super().__init__(4, 4, bias=False)

    def forward(self, x: torch.Tensor, how: str) -> torch.Tensor:
        return x.cos() if how in ("some", "half") else super().forward(x)


class Between(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList((nn.Linear(4, 4), Perhaps(), One(), Perhaps(), nn.Linear(4, 4)))

    def forward(self, x: torch.Tensor, how: str) -> torch.Tensor:
        first, perhaps, middle, again, last = self.units
        return last(again(middle(perhaps(first(x), how), how), how))


HOW = ["all", "its input", "its input, changed", "some", "all", "half"]


def built_between() -> Between:
    torch.manual_seed(7)
    return Between()


def trained_where_ranks_use_none(options: dict) -> list[dict[str, torch.Tensor | None]]:
    model = built_between()
    for unit in model.units:
        fully_shard(unit, **options)
    fully_shard(model, **options)
    found = []
    for step in range(len(HOW)):
        model.zero_grad()
        model(inputs(dist.get_rank()), HOW[(step + dist.get_rank()) % len(HOW)]).square().sum().backward()
        found.append({name: None if p.grad is None else p.grad.full_tensor() for name, p in model.named_parameters()})
    return found


@pytest.mark.values
@pytest.mark.parametrize("placement", [None, Flat(), Owned()], ids=["shard", "flat", "whole"])
@pytest.mark.parametrize("transport", ["shared_memory", "gloo", "torch"])
def test_ranks_may_use_none_of_a_unit_while_others_use_all_of_it(world, placement, transport):
    options = {"placement": placement, "comm_policy": CommPolicy(transport=transport)}
    assert_gradients_are_the_mean(world(3).run(trained_where_ranks_use_none, options))


def assert_gradients_are_the_mean(ranks: list[list[dict[str, torch.Tensor | None]]]) -> None:
    plain = built_between()
    for step in range(len(HOW)):
        plain.zero_grad()
        losses = (plain(inputs(rank), HOW[(step + rank) % len(HOW)]).square().sum() for rank in range(3))
        (sum(losses) / 3).backward()
        for found in ranks:
            for name, parameter in plain.named_parameters():
                torch.testing.assert_close(found[step][name], parameter.grad)


def trained_in_parts() -> list[dict[str, torch.Tensor | None]]:
    streams = RecordingStreams()
    with use_streams(streams):
        return trained_where_ranks_use_none({"comm_policy": CommPolicy("torch", part_bytes=1)})


def test_ranks_may_use_none_of_a_part_while_others_use_all_of_it(world):
    assert_gradients_are_the_mean(world(3).run(trained_in_parts))


def after_a_gradient_by_its_input() -> int:
    """How many reductions a backward for an input alone takes."""
    model = built_between()
    for unit in model.units:
        fully_shard(unit)
    fully_shard(model)
    x = inputs(0).requires_grad_()
    with mock.patch.object(Gradients, "reduce") as reduce:
        torch.autograd.grad(model(x, "all").sum(), x)
    return reduce.call_count


def test_a_backward_for_an_input_alone_reduces_nothing(world):
    assert world(2).run(after_a_gradient_by_its_input) == [0, 0]


class Square(nn.Module):
    """A unit of as many bytes as its root's own parameters. Rank 1 uses none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return x.tanh() if rank == 1 else (x @ self.weight + self.bias).tanh()


class Rooted(Square):
    def __init__(self) -> None:
        super().__init__()
        self.unit = Square()

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.unit(x @ self.weight + self.bias, rank)


def gradients_of_a_rooted_square() -> dict[str, torch.Tensor | None]:
    torch.manual_seed(7)
    model = Rooted()
    fully_shard(model.unit)
    fully_shard(model)
    model(inputs(dist.get_rank()), dist.get_rank()).square().sum().backward()
    return {name: None if p.grad is None else p.grad.full_tensor() for name, p in model.named_parameters()}


def test_a_rank_that_uses_none_of_a_unit_reduces_it_in_its_turn(world):
    ranks = world(2).run(gradients_of_a_rooted_square)
    torch.manual_seed(7)
    plain = Rooted()
    (sum(plain(inputs(rank), rank).square().sum() for rank in range(2)) / 2).backward()
    for found in ranks:
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad)
