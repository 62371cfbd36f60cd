"""CPU offload on a device: wherever a model was built, its shards rest in host memory and train. Parameters stay the
objects that an optimizer holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import sherd
from sherd.errors import UnsupportedError
from tests.device import sim
from tests.support.ranks import RanksFailed

WIDTH = 24


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


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def built(where: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(block(), block(), nn.Linear(WIDTH, 5))
    return model.to(where)


def options(**more: Any) -> dict[str, Any]:
    return {"mesh": init_device_mesh("sim", (2,)), "offload_policy": sherd.CPUOffloadPolicy(), **more}


def sharded(model: Any, **more: Any) -> Any:
    for each in model[:2]:
        sherd.fully_shard(each, **options(**more))
    return sherd.fully_shard(model, **options(**more))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def loss_of(model: nn.Module, number: int, device: str = "sim") -> Tensor:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(number))
    return model(x.to(device)).square().mean()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, device: str = "sim") -> float:
    loss = loss_of(model, number, device)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def trained(model: nn.Module, device: str = "sim") -> list[float]:
    """The losses of three steps."""
    optimizer = adam(model)
    return [step(model, optimizer, number, device) for number in range(3)]


def assert_trains(losses: list[float]) -> None:
    """The losses are those of the plain model."""
    assert losses == pytest.approx(trained(built("cpu"), "cpu"), rel=1e-5)


def assert_trains_in_host_memory(ranks: Any) -> None:
    """Each rank says its losses, and whether its shards lie in host memory."""
    for losses, rests in ranks.values:
        assert rests
        assert_trains(losses)


def rest_in_host_memory(model: nn.Module) -> bool:
    return all(each.device.type == each.to_local().device.type == "cpu" for each in model.parameters())


# Where models are built, and moved


def train_offloaded(where: str, how: str) -> tuple[list[float], bool]:
    model = built(where)
    if how == "wrapper":
        model = sherd.FullyShardedDataParallel(
            model,
            device_mesh=init_device_mesh("sim", (2,)),
            cpu_offload=sherd.CPUOffload(offload_params=True),
            device_id=torch.accelerator.current_device_index(),
        )
    else:
        sharded(model, placement=sherd.Flat() if how == "Flat" else None)
    return trained(model), rest_in_host_memory(model)


@pytest.mark.parametrize("how", ["Shard(0)", "Flat", "wrapper"])
@pytest.mark.parametrize("where", ["cpu", "sim"])
def test_a_model_trains_wherever_it_was_built(where, how, sim_world):
    assert_trains_in_host_memory(sim_world(2, pause_us=300).run(train_offloaded, where, how))


def built_on_the_host() -> list[float]:
    model = built("cpu")
    sharded(model, offload_policy=sherd.OffloadPolicy())
    assert all(each.device == each.to_local().device for each in model.parameters())
    assert {each.device.type for each in model.parameters()} == {"sim"}
    return trained(model)


def test_a_model_of_the_host_is_moved_to_the_meshs_device(sim_world):
    for losses in sim_world(2).run(built_on_the_host).values:
        assert_trains(losses)


def moved_there_and_back(how: str) -> tuple[list[float], bool, bool]:
    """The model is moved to the device, where shards do not rest, after the optimizer was built."""
    model = built("cpu")
    if how == "flat parameter":
        model = sherd.FullyShardedDataParallel(
            model,
            device_mesh=init_device_mesh("sim", (2,)),
            cpu_offload=sherd.CPUOffload(offload_params=True),
            device_id=torch.accelerator.current_device_index(),
            use_orig_params=False,
        )
    else:
        sharded(model)
    before = list(model.parameters())
    optimizer = adam(model)
    model.to("sim")
    losses = [step(model, optimizer, number) for number in range(3)]
    return losses, rest_in_host_memory(model), all(a is b for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("how", ["shards", "flat parameter"])
def test_shards_that_were_moved_come_back_as_the_same_objects(how, sim_world):
    for losses, rests, same in sim_world(2).run(moved_there_and_back, how).values:
        assert rests
        assert same
        assert_trains(losses)


def moved_with_gradients() -> None:
    model = sharded(built("sim"))
    model(torch.ones(3, WIDTH, device="sim")).sum().backward()
    model.to("sim")
    model(torch.ones(3, WIDTH, device="sim"))


def test_a_model_with_gradients_is_not_moved(sim_world):
    with pytest.raises(RanksFailed, match="Call zero_grad") as failed:
        sim_world(2).run(moved_with_gradients)
    assert failed.value.errors[0][0] == UnsupportedError.__name__


def from_the_meta_device(where: str) -> tuple[list[float], bool]:
    with torch.device("meta"):
        model: Any = nn.Sequential(block(), block(), nn.Linear(WIDTH, 5))
    sharded(model)
    model.to_empty(device=where)
    with sherd.unsharded(model):
        for target, source in zip(model.parameters(), built("cpu").parameters(), strict=True):
            target.data.copy_(source)
    return trained(model), rest_in_host_memory(model)


@pytest.mark.parametrize("where", ["cpu", "sim"])
def test_a_model_without_memory_gets_it_in_the_host(where, sim_world):
    assert_trains_in_host_memory(sim_world(2).run(from_the_meta_device, where))


def gathers_itself(where: str) -> tuple[list[float], bool]:
    model: Any = built(where)
    model[0][0].weight = nn.Parameter(Doubled(model[0][0].weight.detach()))
    sharded(model)
    return trained(model), rest_in_host_memory(model)


@pytest.mark.parametrize("where", ["cpu", "sim"])
def test_a_tensor_that_gathers_itself_rests_in_the_host_too(where, sim_world):
    assert_trains_in_host_memory(sim_world(2).run(gathers_itself, where))


# Steps within backward


def stepped_in_backward(offloads: bool) -> tuple[list[float], int]:
    policy = sherd.CPUOffloadPolicy() if offloads else sherd.OffloadPolicy()
    model = sharded(built("sim"), offload_policy=policy)
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
    model = sharded(built("sim"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        step(model, optimizer, number)
    x = torch.randn(3, WIDTH).to("sim").requires_grad_()
    seen: list[str] = []
    model[0].register_full_backward_hook(lambda *_: seen.append("backward of the first block"))
    loss = model(x).square().mean()
    sim.sleep(20_000)
    sim.on_host_wait(lambda cause: seen.append("wait"))
    loss.backward()
    sim.on_host_wait(None)
    return seen


def test_the_host_waits_when_backward_is_over_and_not_within(sim_world):
    for seen in sim_world(2).run(copies_of_a_step).values:
        assert seen[0] == "backward of the first block"
        assert set(seen[1:]) == {"wait"}
