"""Steps of whole matrices on devices: values, and what is wrong on one rank, without a host that waits for others."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import sherd
import simdevice
from sherd.errors import SherdError
from tests.support.comparing import whole_params
from tests.support.refusals import NOTHING, one_line


def model_of(front: str) -> nn.Module:
    torch.manual_seed(0)
    options = {"owned": {"placement": sherd.Owned()}, "cut": {"placement": Shard(0)}, "shard": {}}[front]
    model = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 6, bias=False), nn.Linear(6, 3, bias=False))
    return sherd.fully_shard(model.to("sim"), mesh=init_device_mesh("sim", (dist.get_world_size(),)), **options)


def backward(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.ones(2, 5, device="sim")).square().mean().backward()


def train(front: str) -> tuple[list[torch.Tensor], dict[str, int]]:
    model = model_of(front)
    optimizer = sherd.Muon(model.parameters(), lr=0.1, ns_dtype=torch.float32)
    for step in range(4):
        backward(model)
        if step == 2:
            simdevice.host_waits()
        optimizer.step()
    waits = simdevice.host_waits()
    return [each.cpu() for each in whole_params(model).values()], waits


@pytest.mark.parametrize("front", ["shard", "cut"])
def test_a_step_after_the_first_waits_for_nobody_and_its_values_are_those_of_one_rank(sim_world, front):
    several, alone = sim_world(2, pause_us=200).run(train, front), sim_world(1).run(train, front)
    for (values, waits), expected in zip(several.values, alone.values * 2, strict=True):
        torch.testing.assert_close(values, expected[0], rtol=1e-5, atol=1e-6)
        assert not {cause for cause in waits if "Event" not in cause}, waits


def refused(front: str, wrong: str, at: int) -> tuple[list[str], bool]:
    """Returns what this rank said to each of four steps, and whether values stayed finite; step `at` goes wrong."""
    model, said, now = model_of(front), [], []

    def function(matrices: torch.Tensor) -> torch.Tensor:
        if matrices.shape[1:] == (6, 7) and now == [at] and wrong in ("raises", "nan"):
            return matrices[0] if wrong == "raises" else matrices / 0
        return matrices

    optimizer = sherd.MatrixOptimizer(model.parameters(), function, lr=0.1)
    for step in range(4):
        now[:] = [step]
        backward(model)
        if wrong == "missing" and step == at and dist.get_rank() == 1:
            model[1].weight.grad = None
        said.append(one_line(SherdError, optimizer.step))
    return said, all(bool(each.isfinite().all()) for each in whole_params(model).values())


WORDS = {"raises": "returned a tensor|failed for 1.weight", "nan": "1.weight, computed on", "missing": "rank 1 has no"}


@pytest.mark.parametrize("front", ["shard", "cut"])
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("wrong", WORDS)
def test_what_is_wrong_in_the_first_step_raises_at_once_and_later_in_the_next_step_on_all_ranks(
    sim_world, wrong, at, front
):
    raising = at if at == 0 else at + 1
    for said, is_finite in sim_world(2).run(refused, front, wrong, at).values:
        assert is_finite
        assert [each == NOTHING for each in said] == [step != raising for step in range(4)], said
        assert any(words in said[raising] for words in WORDS[wrong].split("|")), said


def test_where_nothing_travels_the_owner_alone_raises_in_the_next_step(sim_world):
    told = [said for said, _ in sim_world(2).run(refused, "owned", "nan", 2).values]
    assert sorted(said[3] == NOTHING for said in told) == [False, True], told


def refused_by_torchs() -> list[str]:
    model, said = model_of("cut"), []
    optimizer = torch.optim.Muon(model.parameters(), lr=0.1)
    for number in range(4):
        backward(model)
        if number == 2:
            model[1].weight.grad.mul_(float("nan"))
        said.append(one_line(SherdError, optimizer.step))
    return said


def test_steps_of_torchs_muon_raise_so_too(sim_world):
    for said in sim_world(2).run(refused_by_torchs).values:
        assert [each == NOTHING for each in said] == [True, True, True, False], said
        assert "1.weight, computed on" in said[3]
