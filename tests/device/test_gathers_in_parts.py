"""Units in host memory are gathered in parts, as those of the unit before are freed: no value differs from a gather at
once, and all ranks start the same, whatever has passed on each of them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import sherd
from sherd.engine import Runtime, Unit
from sherd.policy import CommPolicy, CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, PrefetchPolicy
from sherd.schedule.actions import GatherMore
from tests.support.comparing import assert_same
from tests.support.ranks import RanksFailed

WIDTH, NUM_BLOCKS = 16, 4


def nothing(gradient: Tensor) -> None:
    """What `look` is by default."""


class Block(nn.Module):
    """Three layers, each a part. `skips`: the second one is left out. `look` is called when backward is before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.skips, self.recomputes, self.look = False, False, nothing

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        y = y if self.skips else torch.tanh(self.second(y))
        if y.requires_grad:
            y.register_hook(lambda gradient: self.look(gradient))
        return x + (checkpoint(self.third, y, use_reentrant=False) if self.recomputes else self.third(y))


def built() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)), nn.Linear(WIDTH, 3))


def sharded(mesh: tuple[int, ...] = (), **options: Any) -> Any:
    names = ("replicate", "shard")[-max(len(mesh), 1) :]
    options |= {"mesh": init_device_mesh("sim", mesh or (dist.get_world_size(),), mesh_dim_names=names)}
    usual = {"offload_policy": CPUOffloadPolicy(), "comm_policy": CommPolicy(part_bytes=4 * WIDTH * WIDTH)}
    model = built().to("sim")
    for module in (*model[:-1], model):
        sherd.fully_shard(module, **(usual | options))
    return model


def loss_of(model: nn.Module, number: int, device: str = "sim") -> Tensor:
    torch.manual_seed(number)
    return model(torch.randn(4, WIDTH).to(device)).square().mean()


def values(model: Any) -> dict[str, Tensor]:
    return {name: each.to_local().clone() for name, each in model.named_parameters()}


def trained(model: Any, way: str = "", micro: int = 1, steps: int = 5) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(steps):
        for block in model[:-1]:
            # One rank lacks gradients of the part that backward comes to second, in some steps.
            block.skips = way == "one rank skips" and number % 2 == 1 and dist.get_rank() == 1
            block.recomputes = way == "recomputes"
        for each in range(micro):
            model.set_requires_gradient_sync(way != "no_sync" or each + 1 == micro)
            loss_of(model, 10 * number + each).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def is_in_parts(model: Any) -> bool:
    """Whether any gather of the steps until now was in parts."""
    edges = (edge for node in Runtime.over(Unit.of(model)).schedule._nodes.values() for edge in node.edges.values())
    return any(isinstance(action, GatherMore) for edge in edges for action in edge.actions)


def in_parts_and_at_once(
    way: str, mesh: tuple[int, ...], options: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    model, other = sharded(mesh, **options), sharded(mesh, **options)
    micro = 2 if way in ("no_sync", "accumulates") else 1
    Unit.of(other).change(prefetch=PrefetchPolicy(after_backward=True))
    found = trained(model, way, micro), trained(other, way, micro)
    assert not is_in_parts(other)
    return *found, is_in_parts(model)


WAYS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "plain": ((), {}),
    "one rank skips": ((), {}),
    "recomputes": ((), {}),
    "no_sync": ((), {}),
    "accumulates": ((), {}),
    "replicas": ((2, 2), {}),
    "parts of replicas": ((2, 2), {"placements": "hfsdp"}),
    "copies on the device": ((), {"offload_policy": OffloadPolicy(gradients="host")}),
    "bfloat16": ((), {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}),
}


@pytest.mark.values
@pytest.mark.parametrize("way", WAYS)
def test_gathers_in_parts_change_no_bit(way, sim_world):
    mesh, options = WAYS[way]
    found = sim_world(4 if mesh else 2, pause_us=200, seed=5).run(in_parts_and_at_once, way, mesh, options).values
    for in_parts, at_once, is_any_in_parts in found:
        assert is_any_in_parts == (way != "recomputes"), "a part of forward that runs again reads all parts"
        for name, each in in_parts.items():
            assert torch.equal(each, at_once[name]), name


def raising(gradient: Tensor) -> None:
    raise torch.OutOfMemoryError("in backward")


def fails_once(rank: int | None) -> tuple[dict[str, Tensor], bool]:
    """Backward of a block raises on `rank`, or on all, when one of its parts is freed, and the program goes on."""
    model = sharded()
    trained(model, steps=3)
    was_in_parts = is_in_parts(model)
    for _ in range(2):
        if rank in (None, dist.get_rank()):
            model[2].look = raising
        with contextlib.suppress(torch.OutOfMemoryError):
            loss_of(model, 100).backward()
        model[2].look = nothing
        model.zero_grad()
    return trained(model), was_in_parts


def trained_on() -> dict[str, Tensor]:
    model = sharded()
    trained(model, steps=3)
    return trained(model)


def test_after_an_error_between_two_parts_training_goes_on(sim_world):
    expected = sim_world(2).run(trained_on).values
    for (found, was_in_parts), without in zip(sim_world(2).run(fails_once, None).values, expected, strict=True):
        assert was_in_parts
        assert_same(found, without)


def test_where_one_rank_raises_between_two_parts_all_say_that_they_differ(sim_world):
    with pytest.raises(RanksFailed) as failed:
        sim_world(2).run(fails_once, 1)
    for kind, text in failed.value.errors.values():
        assert kind == "CommError"
        assert "ranks are about to start different collectives" in text
