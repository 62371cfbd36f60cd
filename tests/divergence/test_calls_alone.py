"""A collective call that some ranks make alone, or in another order, is told within seconds, with the places of all."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

import sherd
from sherd.guard.checker import DivergenceChecker
from tests.divergence.programs import batch, comm_errors, num_calls, sharded
from tests.support.ranks import RanksFailed
from tests.support.ranks.bodies import on_processes

FOLDER = f"{tempfile.gettempdir()}/sherd-calls-alone-{os.getppid()}"
FULL = StateDictOptions(full_state_dict=True)


def unsharded(model: Any, _: Any) -> None:
    with sherd.unsharded(model):
        pass


def saved(model: Any, _: Any) -> None:
    sherd.save(FOLDER, {"model": model}, step=1)


def first(model: Any) -> Any:
    return next(model.parameters())


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "save": saved,
    "load": lambda model, _: sherd.load(FOLDER, {"model": model}),
    "unsharded": unsharded,
    "get_model_state_dict": lambda model, _: get_model_state_dict(model, options=FULL),
    "get_optimizer_state_dict": lambda model, optimizer: get_optimizer_state_dict(model, optimizer, options=FULL),
    "clip_grad_norm_": lambda model, _: sherd.clip_grad_norm_(model.parameters(), 1.0),
    "norm": lambda model, _: first(model).grad.norm().item(),
    "full_tensor": lambda model, _: first(model).full_tensor(),
    "weights out": lambda model, _: list(sherd.iter_full_parameters(model)),
    "nothing": lambda *_: None,
}


def step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(batch()).square().sum().backward()
    optimizer.step()


def train(front: str, steps_before: int, each_step: str, of_ranks: dict[int, tuple[str, ...]]) -> None:
    """After `steps_before` steps, each with the call `each_step`, a rank makes its calls and goes on."""
    model = sharded(front=front)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps_before):
        step(model, optimizer)
        CALLS[each_step](model, optimizer)
    if steps_before and each_step != "nothing":
        step(model, optimizer)
    for call in of_ranks.get(dist.get_rank(), ("nothing",)):
        CALLS[call](model, optimizer)
    for _ in range(2):
        step(model, optimizer)


ALONE = [(call, front) for call in CALLS if call != "nothing" for front in ("shard", "flat")]


@pytest.mark.values
@pytest.mark.parametrize(("call", "front"), ALONE, ids=str)
def test_a_call_of_one_rank_is_told_with_both_places(world, call, front):
    odd = len(call) % 2
    for text in comm_errors(world(2), train, front, 3, "nothing", {odd: (call,)}):
        assert "start different collectives" in text, call
        said = {"norm": "is in Tensor.norm", "weights out": "reads out full parameters"}.get(call, call)
        assert re.search(rf"rank {odd} (is in )?.*{said}", text), text
        assert f"rank {1 - odd} gathers unit" in text, text
        assert "test_calls_alone.py:" in text, text
        assert "All ranks of the mesh must make such a call" in text, text


@pytest.mark.parametrize(
    ("num_ranks", "steps_before", "each_step", "of_ranks"),
    [
        (2, 0, "nothing", {0: ("load",)}),
        (3, 3, "nothing", {0: ("save",), 2: ("save",)}),
        (2, 3, "nothing", {0: ("save",), 1: ("get_model_state_dict",)}),
        (2, 3, "nothing", {0: ("norm", "full_tensor"), 1: ("full_tensor", "norm")}),
    ],
    ids=["before the first step", "two of three", "two calls", "another order"],
)
def test_calls_that_differ_are_told(world, num_ranks, steps_before, each_step, of_ranks):
    for text in comm_errors(world(num_ranks), train, "flat", steps_before, each_step, of_ranks):
        assert "start different collectives" in text
        assert "All ranks of the mesh must make such a call" in text


def test_a_rank_that_leaves_out_the_call_of_every_step_is_told(world):
    with pytest.raises(RanksFailed) as failed:
        world(2).run(train, "flat", 4, "norm", {0: ("norm",)})
    # The rank inside of the call raises when the other one has ended, or ends by itself.
    texts = [text for kind, text in failed.value.errors.values() if kind == "CommError"]
    assert texts, str(failed.value)
    for text in texts:
        assert "rank 0 is in " in text, text
        assert "rank 1 gathers unit" in text, text


def clip_by(order: float, first: int) -> None:
    model = sharded(front="flat")
    optimizer = torch.optim.Adam(model.parameters())
    for number in range(first + 1):
        model(batch()).square().sum().backward()
        is_odd = number == first and dist.get_rank() == 1
        clip = sherd.clip_grad_norm_ if order == 3 else torch.nn.utils.clip_grad_norm_
        clip(model.parameters(), 1.0, order if is_odd else 2.0)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("order", [3.0, float("inf")])
@pytest.mark.parametrize("first", [0, 3])
def test_ranks_that_clip_by_norms_of_different_orders_are_told(world, order, first):
    with pytest.raises(RanksFailed) as failed:
        world(2).run(clip_by, order, first)
    texts = [text for kind, text in failed.value.errors.values() if kind == "CommError"]
    assert texts, str(failed.value)
    for text in texts:
        assert "for the norm of order 2" in text, text
        assert f"for the norm of order {order:g}" in text, text


@on_processes(2)
def test_calls_that_all_ranks_make_go_on_and_settled_ones_compare_nothing():
    model = sharded(front="flat")
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    for call in CALLS:
        CALLS[call](model, optimizer)

    def settled(_: int) -> None:
        step(model, optimizer)
        for call in ("clip_grad_norm_", "norm", "full_tensor"):
            CALLS[call](model, optimizer)

    counts = num_calls(DivergenceChecker, "_compare", settled, 5)
    assert counts[-1] == 0, counts
