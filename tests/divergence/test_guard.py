"""Ranks that go different ways all raise one error, soon, and it names both; ranks that change alike go on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import sherd
from sherd import guard
from sherd.engine.run.runtime import Runtime
from sherd.engine.run.unit import Unit
from sherd.errors import CommError, PolicyError
from sherd.guard import board, checker
from tests.divergence.programs import batch, comm_errors, hybrid, num_calls, sharded, step, wrapped
from tests.support.comparing import assert_same, whole
from tests.support.models import Wired
from tests.support.ranks.bodies import on_processes


def texts_of(ranks: Any, program: Callable[..., None], *arguments: Any) -> list[str]:
    """All ranks raise one text, which names the odd rank and another one; long before gloo gives up."""
    texts = [text.partition("] ")[2] for text in comm_errors(ranks, program, *arguments)]
    for text in texts:
        assert "ranks are about to start different collectives" in text
        assert "same order" in text
    return texts


# Another way through the units


def go_other_ways(odd: dict[int, tuple[int, ...]], make: Callable[[], Any], steps_before: int) -> None:
    """Two steps, so that a rank which leaves at the end of the first one is noticed in the second."""
    model = make()
    for _ in range(steps_before):
        step(model)
    for _ in range(2):
        step(model, *odd.get(dist.get_rank(), ()))


ORDERS = [(0, 2), (1, 2), (0, 1), (1, 0, 2), (0, 1, 2, 0), (2, 1, 0)]


@pytest.mark.front("Errors that say what to do")
@pytest.mark.values
@pytest.mark.parametrize(
    ("transport", "order", "steps_before"),
    [
        *(("shared_memory", order, 4) for order in ORDERS),
        *(("gloo", order, 4) for order in ORDERS),
        *(("torch", order, 4) for order in ORDERS[::2]),
        *(("auto", (0, 2), steps_before) for steps_before in (0, 1, 2)),
    ],
    ids=str,
)
def test_a_rank_that_runs_other_units_is_named_on_all_ranks(world, transport, order, steps_before):
    first, second = texts_of(world(2), go_other_ways, {1: order}, partial(sharded, transport), steps_before)
    assert first == second
    assert "rank 0 " in first
    assert "rank 1 " in first
    assert "programs.py:" in first


@pytest.mark.values
@pytest.mark.parametrize("make", [sharded, wrapped, hybrid])
@pytest.mark.parametrize(
    "odd", [{2: (0, 2)}, {1: (0, 2), 3: (0, 2)}, {0: (0, 2), 1: (0, 1), 3: (1,)}], ids=["one", "two alike", "three"]
)
def test_ranks_of_four_that_go_other_ways_are_named_on_all(world, odd, make):
    for text in texts_of(world(4), go_other_ways, odd, make, 3):
        assert any(f"rank {rank} " in text or f"{rank}, " in text or f" {rank} " in text for rank in odd)


def one_of_many_inquires(odd: dict[int, tuple[int, ...]]) -> None:
    """As more than `board.FEW` ranks do, of which one that waits asks for all."""
    on_board = board.board_of(dist.group.WORLD)
    with mock.patch.object(board, "MOST_QUERIES", 1), mock.patch.object(on_board, "_is_few", False):
        go_other_ways(odd, sharded, 3)


def test_one_rank_of_many_that_wait_asks_for_all_of_them(world):
    texts = texts_of(world(4), one_of_many_inquires, {2: (0, 2), 3: (0, 2)})
    assert len(set(texts)) == 1
    assert "ranks 0, 1 reduces" in texts[0]


@on_processes(2)
def test_a_store_that_has_died_is_named():
    gone = RuntimeError("the client socket has timed out")
    model = sharded(mesh=DeviceMesh.from_group(dist.new_group(), "cpu"))
    with (
        mock.patch.object(guard, "board_of", side_effect=gone),
        pytest.raises(CommError, match=r"the store.* among ranks \[0, 1\].* timed out"),
    ):
        step(model)


def write_alone_to_what_stays_whole() -> None:
    model = sharded(reshard_after_forward=False)
    shards = list(model.parameters())
    for _ in range(3):
        step(model)
    with torch.no_grad():
        model(batch())
        for shard in shards if dist.get_rank() == 1 else ():
            shard.mul_(0.5)
    step(model)


def test_a_rank_that_alone_writes_to_shards_of_units_that_stay_whole_is_named(world):
    first, second = texts_of(world(2), write_alone_to_what_stays_whole)
    assert first == second
    assert "rank 1 gathers unit" in first, first


# Another kind of pass


def passes_of_ranks(what: str) -> None:
    """Of six steps rank 1 does this in the fourth."""
    model = wrapped() if what == "does not reduce" else sharded()
    for number in range(6):
        odd = what if dist.get_rank() == 1 and number == 3 else ""
        if what == "evaluates once more":
            for _ in range(2 if odd else 1):
                with torch.no_grad():
                    model(batch())
        if odd == "gives up a forward":
            with contextlib.suppress(IndexError):  # as many a training script does with a bad batch
                model(batch(), (0, 1, 7))  # there is no such block
        elif odd == "leaves out a backward":
            model(batch())
        else:
            with model.no_sync() if odd == "does not reduce" else contextlib.nullcontext():
                step(model)


@pytest.mark.parametrize(
    "what", ["does not reduce", "evaluates once more", "gives up a forward", "leaves out a backward"]
)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rank_whose_passes_are_others_is_named_on_all_ranks(world, what, num_ranks):
    for text in texts_of(world(num_ranks), passes_of_ranks, what):
        assert "rank 1 " in text


# Ranks that change alike


def layers_dropped_alike(divergence: str) -> list[torch.Tensor]:
    """Each step runs other blocks, drawn alike on all ranks, with evaluations in between."""
    model = sharded(divergence=divergence)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(3)
    for number in range(12):
        order = tuple(block for block in range(3) if torch.rand((), generator=draw) < 0.7)
        model(batch(), order or (0,)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 3 == 2:
            with torch.no_grad():
                model(batch())
    return whole(list(model.parameters()))


@on_processes(2)
def test_ranks_that_change_alike_train_as_they_do_unchecked():
    assert_same(layers_dropped_alike("error"), layers_dropped_alike("trust"))


@pytest.mark.parametrize("make", [sharded, wrapped])
@on_processes(2)
def test_settled_steps_compare_nothing(make):
    model: list[Any] = []

    def one(number):
        if number == 0:
            model.append(make())
        step(*model)

    counts = num_calls(checker, "agree", one, 8)
    assert sum(counts[:3]) > 0
    assert sum(counts[3:]) == 0


@on_processes(2)
def test_ranks_that_compare_while_a_profiler_follows_them_do_not_hang():
    model = sharded()
    for _ in range(4):
        with torch.profiler.profile(with_stack=True):
            step(model)


@on_processes(2)
def test_models_that_share_a_mesh_take_turns():
    one, other = sharded(), wrapped()
    for number in range(6):
        step(one)
        if number % 2:
            step(other)
            with torch.no_grad():
                one(batch())


# Trust


@on_processes(1, 2, divergence=["trust", "error"])
def test_trust_adds_nothing_and_one_rank_has_nobody_to_compare_with(divergence):
    model = sharded(divergence=divergence)
    adds_nothing = divergence == "trust" or dist.get_world_size() == 1
    assert (not Runtime.of(Unit.of(model), model).monitors) == adds_nothing


def test_other_words_are_refused():
    with pytest.raises(PolicyError, match=r"divergence='skip'\): expected one of error, join, trust"):
        sherd.CommPolicy(divergence="skip")


def with_a_large() -> Any:
    """Rank 0 alone uses a parameter that is large enough to travel alone."""
    parts = {"large": torch.nn.Linear(1024, 1024, bias=False), "small": torch.nn.Linear(1024, 8)}
    return sherd.fully_shard(Wired(lambda self, x, large: self.small(self.large(x) if large else x), **parts))


def one_rank_uses_a_large_tensor(first: int) -> None:
    model = with_a_large()
    for number in range(4):
        model(torch.ones(2, 1024), dist.get_rank() == 0 or number < first).sum().backward()


@pytest.mark.parametrize("first", [0, 3])
def test_a_rank_that_lacks_the_gradient_of_a_tensor_that_travels_alone_is_named(world, first):
    for text in texts_of(world(2), one_rank_uses_a_large_tensor, first):
        assert "rank 0 reduces the gradients of unit Wired (" in text
        assert "rank 1 reduces the gradients of unit Wired without large.weight" in text


@on_processes(2)
def test_ranks_that_all_lack_it_go_on():
    model = with_a_large()
    for number in range(6):
        model(torch.ones(2, 1024), number % 2 == 0).sum().backward()
