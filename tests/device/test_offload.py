"""CPU offload on a device: shards rest in host memory and train, also where a model is moved, a tensor gathers itself,
or units are stepped within backward. Parameters stay the objects that an optimizer holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sherd
import simdevice
from sherd.errors import UnsupportedError
from tests.device.small import WIDTH, built, loss_of, sharded, step
from tests.support.ranks import RanksFailed

OFFLOADED = "shard, offloaded"


class Doubled(torch.Tensor):
    """A tensor with an all-gather of its own: it sends twice its values, and halves what has come."""

    @staticmethod
    def __new__(cls, values: Tensor) -> Doubled:
        return torch.Tensor._make_subclass(cls, values, values.requires_grad)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        keeps = func in (torch.Tensor.detach, torch.Tensor.clone, torch.Tensor.to, torch.Tensor.contiguous)
        return found.as_subclass(cls) if keeps and type(found) is torch.Tensor else found

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], None]:
        return (self.as_subclass(torch.Tensor) * 2,), None

    def fsdp_post_all_gather(self, gathered: Any, _: None, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
        if out is not None:
            out.copy_(gathered[0] / 2)
            return None
        whole = gathered[0] / 2
        return whole, (whole,)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(model: nn.Module, device: str = "sim") -> list[float]:
    """The losses of three steps."""
    optimizer = adam(model)
    return [step(model, optimizer, number, device) for number in range(3)]


def assert_trains(losses: list[float]) -> None:
    """The losses are those of the plain model."""
    assert losses == pytest.approx(trained(built("cpu"), "cpu"), rel=1e-5)


def rest_in_host_memory(model: nn.Module) -> bool:
    return all(each.device.type == each.to_local().device.type == "cpu" for each in model.parameters())


# Models that are moved


def moved_there_and_back(front: str) -> tuple[list[float], bool, bool]:
    """The model is moved to the device, where shards do not rest, after the optimizer was built."""
    model = sharded(built("cpu"), f"{front}, offloaded")
    before = list(model.parameters())
    optimizer = adam(model)
    model.to("sim")
    losses = [step(model, optimizer, number) for number in range(3)]
    return losses, rest_in_host_memory(model), all(a is b for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("front", ["shard", "flat wrapper"])
def test_shards_that_were_moved_come_back_as_the_same_objects(front, sim_world):
    for losses, rests, same in sim_world(2).run(moved_there_and_back, front).values:
        assert rests
        assert same
        assert_trains(losses)


def moved_with_gradients() -> None:
    model = sharded(built("sim"), OFFLOADED)
    model(torch.ones(3, WIDTH, device="sim")).sum().backward()
    model.to("sim")
    model(torch.ones(3, WIDTH, device="sim"))


def test_a_model_with_gradients_is_not_moved(sim_world):
    with pytest.raises(RanksFailed, match="Call zero_grad") as failed:
        sim_world(2).run(moved_with_gradients)
    assert failed.value.errors[0][0] == UnsupportedError.__name__


def gathers_itself(where: str) -> tuple[list[float], bool]:
    model: Any = built(where)
    model[0].up.weight = nn.Parameter(Doubled(model[0].up.weight.detach()))
    sharded(model, OFFLOADED)
    return trained(model), rest_in_host_memory(model)


def test_a_tensor_that_gathers_itself_rests_in_the_host_too(sim_world):
    for where in ("cpu", "sim"):
        for losses, rests in sim_world(2).run(gathers_itself, where).values:
            assert rests, where
            assert_trains(losses)


# Steps within backward


def stepped_in_backward(offloads: bool) -> tuple[list[float], int]:
    model = sharded(built("sim"), OFFLOADED if offloads else "shard")
    optimizer = adam(model)
    sherd.step_in_backward(model, optimizer)
    losses, left = [], 0
    for number in range(3):
        loss = loss_of(model, number)
        loss.backward()
        left += sum(each.grad is not None for each in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    return losses, left


@pytest.mark.parametrize("offloads", [True, False])
def test_units_stepped_within_backward_train_as_after_it(offloads, sim_world):
    for losses, left in sim_world(2, pause_us=300, seed=3).run(stepped_in_backward, offloads).values:
        assert left == 0
        assert_trains(losses)


# Copies


def copies_of_a_step() -> list[str]:
    """The host's waits in a settled backward on a busy stream, and where backward was when they came."""
    model = sharded(built("sim"), OFFLOADED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        step(model, optimizer, number)
    x = torch.randn(3, WIDTH).to("sim").requires_grad_()
    seen: list[str] = []
    model[0].register_full_backward_hook(lambda *_: seen.append("backward of the first block"))
    loss = model(x).square().mean()
    gate = simdevice.closed_gate()
    simdevice.on_host_wait(lambda cause: (seen.append("wait"), gate.open()))
    loss.backward()
    simdevice.on_host_wait(None)
    return seen


def test_the_host_waits_when_backward_is_over_and_not_within(sim_world):
    for seen in sim_world(2).run(copies_of_a_step).values:
        assert seen[0] == "backward of the first block"
        assert set(seen[1:]) == {"wait"}
