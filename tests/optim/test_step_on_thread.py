"""A thread makes the steps: what is trained is what is trained without it, and readers wait for the steps."""

import pytest
import torch
from torch import distributed as dist

import sherd
from tests.support.comparing import whole_params
from tests.support.models import build, noise
from tests.support.sharding import sharded

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-1),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-1, momentum=0.9),
    "flat": lambda params: sherd.flatten_optimizer(torch.optim.AdamW(params, lr=torch.tensor(1e-2))),
}
WAYS = ("after", "in backward", "clip", "accumulate")


def model_of(front="shard"):
    return sharded(build("mlp"), front)


def trained(model, optimizer, way, on_thread, num_steps=4):
    """The parameters and the state."""
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    if on_thread:
        sherd.step_on_thread(optimizer)
    if way == "in backward":
        sherd.step_in_backward(model, optimizer)
    micro = 3 if way == "accumulate" else 1
    for step in range(num_steps):
        with sherd.accumulate(model, micro):
            for number in range(micro):
                model(noise(10 * step + number, dist.get_rank())).square().mean().backward()
        if way == "clip":
            sherd.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        scheduler.step()
    return whole_params(model), optimizer.state_dict()


def compared(optimizer, way, front="shard"):
    (expected, state), (found, other) = (trained(model_of(front), optimizer, way, each) for each in (False, True))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    for key, values in state["state"].items():
        for name, value in values.items():
            one, there = (getattr(each, "_local_tensor", each) for each in (value, other["state"][key][name]))
            assert torch.equal(one, there) if isinstance(one, torch.Tensor) else one == there, name


@pytest.mark.pairs
@pytest.mark.parametrize("front", ["shard", "flat"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_parameters_and_state_are_those_of_steps_that_the_caller_makes(optimizer, way, front, threads):
    if (optimizer, way) != ("flat", "in backward"):
        threads(2).run(compared, optimizer, way, front, timeout=40.0)
