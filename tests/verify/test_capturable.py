"""`sherd.capturable` where there is no accelerator: what it sees without one, and what it refuses."""

from functools import partial

import pytest
import torch
from torch import nn

import sherd
from sherd.errors import ModuleError, PolicyError, StateError
from tests.support.models import chain
from tests.support.ranks.bodies import on_threads

WIDTH = 8


class Training:
    def __init__(self) -> None:
        self.model = chain(2, WIDTH)
        for block in self.model:
            sherd.fully_shard(block)
        sherd.fully_shard(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.x, self.count = torch.ones(2, WIDTH), 0

    def step(self) -> None:
        self.count += 1
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def problems(training, step, **options):
    return sherd.capturable(training.model, step, **options).problems


@on_threads(2)
def test_steps_that_are_alike_have_no_problem_and_train():
    training = Training()
    report = sherd.capturable(training.model, training.step, warmup=2)
    assert report
    assert training.count == 4
    assert "the step may be captured: as watched on cpu" in str(report)
    assert "ask again on an accelerator" in str(report)


@on_threads(2)
def test_a_unit_that_runs_in_one_of_two_steps_is_named():
    training = Training()

    def runs_a_unit_more():
        if training.count % 2:
            training.model[0](training.x)
        training.step()

    (found,) = problems(training, runs_a_unit_more)
    assert (found.kind, found.ranks) == ("schedule", (0, 1))
    assert "BeforeForward of 0 c" in found.what
    assert found.where.startswith("sherd/engine/run/")
    assert f"called from {__file__}:" in found.where


@on_threads(2)
def test_a_number_that_a_scheduler_changes_is_named():
    training = Training()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.5)

    def step():
        training.step()
        scheduler.step()

    (found,) = problems(training, step)
    assert found.kind == "host value"
    assert found.what.startswith("lr of group 0 of SGD was ")


@on_threads(2)
def test_a_buffer_that_moves_is_named():
    training = Training()
    training.model.register_buffer("seen", torch.zeros(4096))
    kept = []

    def step():
        kept.append(training.model.seen)
        training.model.seen = training.model.seen + 1
        training.step()

    (found,) = problems(training, step)
    assert (found.kind, found.what) == ("address", "buffer seen: at other addresses than in the step before")


@on_threads(2)
def test_bad_input_is_refused_in_one_line():
    training = Training()
    for error, call in (
        (ModuleError, lambda: sherd.capturable(nn.Linear(2, 2), training.step)),
        (PolicyError, lambda: sherd.capturable(training.model, training.step, warmup=0)),
        (StateError, lambda: sherd.capturable(training.model, None)),
        (StateError, lambda: sherd.capturable(training.model, lambda: 1 / 0)),
    ):
        with pytest.raises(error) as raised:
            call()
        assert "\n" not in str(raised.value)
        assert "capturable" in str(raised.value)
    training.step()
    assert problems(training, training.step) == ()


class Halving(torch.optim.SGD):
    """Its rate is a number of the host, and half of it after each step."""

    def step(self, closure=None):
        super().step(closure)
        self.param_groups[0]["lr"] /= 2


@on_threads(2)
def test_verify_equivalence_asks_it_of_the_sharded_model_where_it_is_told_to():
    batches = [torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))]
    for make, problems in ((torch.optim.SGD, []), (Halving, ["host value"])):
        report = sherd.verify_equivalence(
            partial(chain, 2, WIDTH), batches, optimizer=partial(make, lr=0.1), capture=True
        )
        assert report.ok, report
        assert [each.kind for each in report.capture.problems] == problems
        assert str(report.capture).splitlines()[0] in str(report)
    assert sherd.verify_equivalence(partial(chain, 2, WIDTH), batches).capture is None
