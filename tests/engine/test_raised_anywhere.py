"""An exception at any place of a step, caught, leaves nothing of that step behind."""

import contextlib
import gc
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.api.own_collectives import GatherByList
from tests.support.comparing import is_close, whole_grads
from tests.support.models import noise
from tests.support.ranks.bodies import on_threads
from tests.support.sharding import sharded
from tests.support.training import made

WITHIN = ("/sherd/engine/", "/sherd/schedule/")
EACH = 4
"""Every so many calls one raises: each front end has a quarter of them."""


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


class RaiseAt:
    """Raises `error` at the call of that number into `WITHIN`, on this thread. `num_calls` there were."""

    def __init__(self, number: int, error: type[BaseException]) -> None:
        self.number, self.error, self.num_calls, self.where = number, error, 0, ""

    def __enter__(self) -> "RaiseAt":
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _called(self, frame, event, arg) -> None:
        # Python ignores what is raised in a `__del__`, a weak reference's callback, and a generator that is closed.
        is_heard = frame.f_code.co_name not in ("__del__", "_forget", "<genexpr>")
        if event == "call" and is_heard and any(each in frame.f_code.co_filename for each in WITHIN):
            self.num_calls += 1
            if self.num_calls == self.number:
                self.where = f"{frame.f_code.co_filename.rpartition('/')[2]}: {frame.f_code.co_name}"
                sys.setprofile(None)
                raise self.error


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([each.flatten() for each in whole_grads(model).values()])


def step(model: nn.Module, number: int) -> None:
    model(noise(number, 0)).square().mean().backward()


@pytest.mark.parametrize(("first", "front"), list(enumerate(["shard", "flat", "wrapper", "flat wrapper"], 1)))
@on_threads(1)
def test_a_step_that_raised_anywhere_leaves_nothing_behind(first, front) -> None:
    model, plain = sharded(made(net), front), made(net)
    step(plain, 1)
    for _ in range(2):
        step(model, 0)
    gc.disable()  # what is collected may call ours
    try:
        for number in range(first, 10_000, EACH):
            error = (KeyboardInterrupt, ValueError)[number // EACH % 2]
            at = RaiseAt(number, error)
            with contextlib.suppress(error), at:
                step(model, 0)
            model.zero_grad()
            step(model, 1)
            assert is_close(gradient(model), gradient(plain), 1e-5, 1e-6), f"call {number}, {error}, {at.where}"
            if not at.where:
                return
    finally:
        gc.enable()


class Fails(GatherByList):
    """Once, after another unit was gathered within."""

    other: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        other, self.other = self.other, None
        if other is not None:
            other.unshard()
            raise RuntimeError("once")
        return super().__call__(*args, **kwargs)


@on_threads(2)
def test_what_raises_after_something_within_it_has_ended_well_leaves_nothing_behind() -> None:
    model, plain = sharded(made(net)), made(net)
    gather = Fails()
    model[2].set_custom_all_gather(gather)
    step(model, 0)
    model.zero_grad()
    gather.other = model[0]
    model[0].reshard()
    with pytest.raises(RuntimeError, match="once"):
        model[2].unshard()
    step(model, 1)
    step(plain, 1)
    assert is_close(gradient(model), gradient(plain), rtol=1e-5, atol=1e-6)
