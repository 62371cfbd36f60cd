"""What sherd does for a model with many units is in proportion to their number."""

import cProfile
import pstats
from collections.abc import Callable

import pytest
import torch
from torch import nn

from sherd import clip_grad_norm_, memory_report
from tests.support.ranks.bodies import on_threads
from tests.support.sharding import sharded


def calls_of(work: Callable[[], object]) -> int:
    """How many functions are called."""
    profile = cProfile.Profile()
    profile.runcall(work)
    return pstats.Stats(profile).total_calls


def calls_for(num_units: int) -> dict[str, int]:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(num_units)))
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(torch.ones(1, 2)).sum().backward()

    return {
        "shard": calls_of(lambda: sharded(model)),
        "first step": calls_of(step),
        "second step": calls_of(step),
        "third step": calls_of(step),
        "clip": calls_of(lambda: clip_grad_norm_(model.parameters(), 1.0)),
        "optimizer": calls_of(optimizer.step),
        "state dict": calls_of(model.state_dict),
        "move": calls_of(lambda: model.to(torch.float64)),
        "report": calls_of(lambda: str(memory_report(model))),
    }


@on_threads(1)
def test_four_times_the_units_take_four_times_the_calls():
    """A call for each pair of units would make it sixteen."""
    calls_for(2)  # what is done once, whatever the number
    few, many = calls_for(20), calls_for(80)
    for what, calls in many.items():
        assert calls / few[what] == pytest.approx(4, abs=0.7), what
