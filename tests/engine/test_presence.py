"""Shards stay one parameter when ranks use different parameters of a unit."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sherd import CommPolicy, Flat, Owned, PrefetchPolicy, fully_shard
from sherd.comm.streams import RecordingStreams, use_streams
from sherd.engine.moves.gradients import Gradients
from sherd.engine.run.unit import Unit
from sherd.schedule.state import Live
from tests.support.comparing import Named, assert_named_close, whole_grads
from tests.support.models import Wired, noise
from tests.support.sharding import sharded
from tests.support.training import Job, made


def gradients(model: nn.Module, job: Job, steps: int = 1) -> list[Named]:
    """On a rank: the whole gradients of each step."""
    found = []
    for step in range(steps):
        model.zero_grad()
        job(model, dist.get_rank(), step).backward()
        found.append(whole_grads(model))
    return found


def assert_gradients_are_the_mean(ranks: list[list[Named]], make: Any, job: Job) -> None:
    plain = made(make, seed=7)
    for step in range(len(ranks[0])):
        plain.zero_grad()
        (sum(job(plain, rank, step) for rank in range(len(ranks))) / len(ranks)).backward()
        for found in ranks:
            assert_named_close(found[step], whole_grads(plain), f"step {step}: gradient", 1.3e-6, 1e-5)


def either() -> nn.Module:
    """Rank 0 uses `left`, the others `right`; nobody uses `unused`."""
    parts = {"left": nn.Linear(4, 6), "right": nn.Linear(4, 6), "unused": nn.Linear(4, 6)}
    return Wired(lambda self, x, rank: self.left(x) if rank == 0 else self.right(x), **parts)


def either_large() -> nn.Module:
    """Two matrices of 4 MiB. Rank 0 uses one, the others use the other."""
    left, right = (nn.Parameter(torch.zeros(1024, 1024)) for _ in range(2))
    return Wired(
        lambda self, x, rank: (x.sum() * (self.left if rank == 0 else self.right)).sum(), left=left, right=right
    )


class Square(nn.Module):
    """A unit of as many bytes as its root's own parameters. Rank 1 uses none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return x.tanh() if rank == 1 else (x @ self.weight + self.bias).tanh()


class Rooted(Square):
    def __init__(self) -> None:
        super().__init__()
        self.unit = Square()

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return self.unit(x @ self.weight + self.bias, rank)


def by_rank(model: Any, rank: int, step: int) -> Tensor:
    return model(noise(step, rank, 3, 4), rank).square().sum()


def test_a_rank_without_a_gradient_takes_its_part_of_the_others(threads):
    found = threads(3).run(lambda: gradients(fully_shard(made(either, 7)), by_rank))
    assert_gradients_are_the_mean(found, either, by_rank)
    assert found[0][0]["unused.weight"] is None


def test_a_rank_without_a_large_part_takes_its_share_of_the_others(threads):
    def linear(model: Any, rank: int, step: int) -> Tensor:
        return model(torch.ones(3) * (rank + 1), rank)

    def in_parts() -> list[Named]:
        with use_streams(RecordingStreams()):
            model = fully_shard(either_large(), comm_policy=CommPolicy("torch", part_bytes=4 << 20))
        assert len(Unit.of(model).weights) == 2
        return gradients(model, linear)

    assert_gradients_are_the_mean(threads(2).run(in_parts), either_large, linear)


def test_a_rank_that_uses_none_of_a_unit_reduces_it_in_its_turn(threads):
    found = threads(2).run(lambda: gradients(sharded(made(Rooted, 7)), by_rank))
    assert_gradients_are_the_mean(found, Rooted, by_rank)


class Perhaps(nn.Module):
    """A unit between others that some ranks run without using any of its parameters, others with all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor, how: str) -> Tensor:
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

    def forward(self, x: Tensor, how: str) -> Tensor:
        return x.cos() if how in ("some", "half") else super().forward(x)


class Between(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList((nn.Linear(4, 4), Perhaps(), One(), Perhaps(), nn.Linear(4, 4)))

    def forward(self, x: Tensor, how: str) -> Tensor:
        first, perhaps, middle, again, last = self.blocks
        return last(again(middle(perhaps(first(x), how), how), how))


HOW = ["all", "its input", "its input, changed", "some", "all", "half"]


def in_turns(model: Any, rank: int, step: int) -> Tensor:
    """Each rank does in each step what the next one does in the step before."""
    return model(noise(0, rank, 3, 4), HOW[(step + rank) % len(HOW)]).square().sum()


def trained_where_ranks_use_none(**options: Any) -> list[Named]:
    return gradients(sharded(made(Between, 7), **options), in_turns, len(HOW))


@pytest.mark.values
@pytest.mark.parametrize("placement", [None, Flat(), Owned()], ids=["shard", "flat", "whole"])
@pytest.mark.parametrize("transport", ["shared_memory", "gloo", "torch"])
def test_ranks_may_use_none_of_a_unit_while_others_use_all_of_it(world, placement, transport):
    options = {"placement": placement, "comm_policy": CommPolicy(transport=transport)}
    assert_gradients_are_the_mean(world(3).run(trained_where_ranks_use_none, **options), Between, in_turns)


def test_ranks_may_use_none_of_a_part_while_others_use_all_of_it(threads):
    def in_parts() -> list[Named]:
        with use_streams(RecordingStreams()):
            return trained_where_ranks_use_none(comm_policy=CommPolicy("torch", part_bytes=1))

    assert_gradients_are_the_mean(threads(3).run(in_parts), Between, in_turns)


def test_a_backward_for_an_input_alone_reduces_nothing(threads):
    def by_its_input() -> None:
        x = noise(0, 0, 3, 4).requires_grad_()
        torch.autograd.grad(sharded(made(Between))(x, "all").sum(), x)

    with mock.patch.object(Gradients, "reduce") as reduce:
        threads(2).run(by_its_input)
    reduce.assert_not_called()


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, used: str) -> Tensor:
        return torch.stack([getattr(self, name)(x) for name in used]).sum(0)


class Heads(Branch):
    """A block, and two heads of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(8, 8)
        self.units: list[nn.Module] = [self.block, self]

    def forward(self, x: Tensor, *used: str) -> Tensor:
        return super().forward(self.block(x).tanh(), used[0])


class Branches(nn.Module):
    """Three units that take one input. `seen` notes, when backward is behind each, which are unsharded."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branches = nn.Linear(8, 8), nn.ModuleList(Branch() for _ in range(3))
        self.units: list[nn.Module] = [*self.branches, self]
        self.seen: list[list[bool]] = []

    def forward(self, x: Tensor, *used: str) -> Tensor:
        x = self.stem(x).tanh()
        outputs = [branch(x, each) for branch, each in zip(self.branches, used, strict=True)]
        for output in outputs if x.requires_grad else ():
            output.register_hook(lambda _: self.seen.append([unsharded(each) for each in self.branches]))
        return torch.stack([output.square() for output in outputs]).sum(0)


def unsharded(module: nn.Module) -> bool:
    unit = Unit.of(module)
    return unit is not None and unit.live is not Live.SHARDED


@pytest.mark.parametrize("front", ["shard", "flat"])
@pytest.mark.parametrize("make", [Heads, Branches])
@pytest.mark.parametrize("seed", range(3))
def test_ranks_may_use_other_parameters_of_a_unit_in_each_step(seed, make, front, threads):
    def job(model: Any, rank: int, step: int) -> Tensor:
        draw = random.Random(f"{seed} {rank} {step}")
        used = [draw.choice(["ab", "ab", "a", "b"]) if step else "ab" for _ in range(3)]  # first all of it
        return model(noise(step, rank), *used).square().sum()

    def run() -> list[Named]:
        model = made(make, seed=7)
        return gradients(sharded(model, front, model.units), job, 8)

    assert_gradients_are_the_mean(threads(2).run(run), make, job)


def test_units_that_share_an_input_are_freed_one_by_one(threads):
    def run() -> list[list[bool]]:
        model = made(Branches, seed=7)
        sharded(model, units=model.units, prefetch_policy=PrefetchPolicy(backward_depth=0))
        for _ in range(2):
            model.seen.clear()
            model(noise(0, 0), "ab", "ab", "ab").sum().backward()
        return model.seen

    # Backward is behind the last branch first.
    assert threads(2).run(run)[0] == [[False, False, False], [False, False, False], [False, False, False]]
