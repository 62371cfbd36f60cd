"""Ranks with devices that part: where they run other units all raise one error, a step that one of them cannot finish
all skip, and under `join` a rank that skips units or has fewer batches counts as zero. There it is the device that
waits and not the host, and no stream reads what another still writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import sherd
from tests.divergence import test_join as joins
from tests.divergence.programs import Chain, batch, sharded, step
from tests.support import sharding
from tests.support.comparing import assert_same
from tests.support.ranks import RanksFailed


def other_units(order: tuple[int, ...]) -> None:
    model = sharded(mesh=init_device_mesh("sim", (dist.get_world_size(),)))
    for number in range(6):
        step(model, *(order if dist.get_rank() == 1 and number > 3 else ()))
        torch.accelerator.synchronize()


@pytest.mark.parametrize("order", [(0, 2), (1, 0, 2), (0, 1, 2, 0)], ids=str)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_that_runs_other_units_is_named_on_all_ranks(num_ranks, order, sim_world):
    with pytest.raises(RanksFailed) as failed:
        sim_world(num_ranks).run(other_units, order)
    for rank in range(num_ranks):
        kind, text = failed.value.errors[rank]
        assert kind == "CommError"
        assert "ranks are about to start different collectives" in text


def joining(more: dict[str, Any], **policy: Any) -> Any:
    mesh = init_device_mesh("sim", (dist.get_world_size(),))
    comm_policy = sherd.CommPolicy(divergence="join", **policy)
    model = Chain().to("sim")
    return sharding.sharded(model, units=[*model.blocks, model], mesh=mesh, comm_policy=comm_policy, **more)


def hook_that_raises(gradient: Tensor) -> None:
    raise torch.OutOfMemoryError("in backward")


def skipping(fails_in: dict[int, str], steps: list[int], more: dict[str, Any]) -> tuple[list[Tensor], list[bool]]:
    model = joining(more)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    said = []
    for number in steps:
        where = fails_in.get(number) if dist.get_rank() == 1 else None
        with sherd.step(model, optimizer) as attempt:
            out = model(batch().to("sim") + number)
            if where == "nan":
                out = out * float("nan")
            if where == "backward":
                out.register_hook(hook_that_raises)
            if where == "forward":
                raise torch.OutOfMemoryError("behind forward")
            out.square().sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        said.append(attempt.skipped)
    return [each.to_local().cpu().clone() for each in model.parameters()], said


@pytest.mark.parametrize("offload", [False, True], ids=["on the device", "offloaded"])
@pytest.mark.parametrize("where", ["forward", "backward", "nan"])
def test_ranks_with_devices_skip_together(where, offload, sim_world):
    more: Any = {"offload_policy": sherd.CPUOffloadPolicy(pin_memory=False)} if offload else {}
    found = sim_world(2).run(skipping, {0: where, 2: where}, [0, 1, 2, 3], more)
    without = sim_world(2).run(skipping, {}, [1, 3], more)
    for (values, said), (expected, _) in zip(found.values, without.values, strict=True):
        assert said == [True, False, True, False]
        assert_same(values, expected)


def joined(of_ranks: list[list[joins.Way]], more: dict[str, Any]) -> dict[str, Tensor]:
    """In parts of a few bytes, which backward frees one by one."""
    model = joining(more, part_bytes=64)
    rank, optimizer = dist.get_rank(), torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    with sherd.join(model, optimizer):
        for number, way in enumerate(of_ranks[rank]):
            model(joins.batch(rank, number).to("sim"), way).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    with sherd.unsharded(model):
        return {name: each.detach().cpu().clone() for name, each in model.named_parameters()}


@pytest.mark.parametrize("skips", joins.SKIPS)
@pytest.mark.parametrize(
    "more", [{}, {"offload_policy": sherd.CPUOffloadPolicy()}, {"reshard_after_forward": False}], ids=str
)
def test_a_rank_that_skips_counts_as_zero(sim_world, more, skips):
    found = sim_world(2, pause_us=200, seed=1).run(joined, joins.SKIPS[skips], more)
    for rank, params in enumerate(found.values):
        assert_same(params, joins.reference(joins.SKIPS[skips]), f"rank {rank}", rtol=1e-5, atol=1e-6)
