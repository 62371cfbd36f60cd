"""An exception at any place of a step, caught, leaves nothing of that step behind."""

import contextlib
import gc
import sys

import pytest
import torch
from torch import Tensor, nn

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
                self.where = f"{frame.f_code.co_filename.rpartition('/')[2]}: {frame.f_code.co_qualname}"
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
