"""Offload policies on a CPU: which units a share takes, and what other parts of a training see of state elsewhere."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import sherd
from sherd import Disk, OffloadPolicy, fully_shard
from sherd.engine import Unit
from sherd.errors import ModuleError
from sherd.tensor.ragged import local_part
from tests.optim.test_masters import made, sharded, steps
from tests.support.models import chain
from tests.support.ranks.bodies import on_processes, on_threads


def places_of(model: nn.Module) -> list[object]:
    return [unit.place.state for unit in Unit.below(model)]


@on_threads(2)
def test_a_share_takes_the_same_units_on_all_ranks_whatever_one_does_with_a_model_of_its_own():
    alone = DeviceMesh("cpu", torch.tensor([dist.get_rank()]))
    own = fully_shard(nn.Linear(4, 4), mesh=alone)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    for number, each in enumerate(model):
        fully_shard(each, offload_policy=OffloadPolicy(optimizer="host", share=0.5))
        if number % 2 == dist.get_rank():
            own(torch.ones(1, 4))  # its model is complete, and only its
    assert places_of(model) == ["host", "device", "host", "device", "host"]


def test_what_is_no_model_saves_nothing_on_the_host():
    for model in (None, 1, [nn.Linear(4, 4)], torch.ones(2)):
        with pytest.raises(ModuleError, match="nothing below"):
            sherd.offload_activations(model)


@on_threads(2)
def test_an_optimizer_without_state_gets_none_from_its_steps(tmp_path):
    """Ranks with empty shards, which are in no chunk, would differ from the others."""
    for policy in (OffloadPolicy(masters="device"), OffloadPolicy(optimizer=Disk(str(tmp_path)))):
        for optimizer in (torch.optim.SGD, Stateless):
            model = chain(1, 24).append(nn.Linear(24, 1)).to(torch.bfloat16)
            fully_shard(model, offload_policy=policy)
            its = optimizer(model.parameters(), lr=1e-2)
            steps(model, its, range(2))
            assert not its.state, policy


class Stateless(torch.optim.Optimizer):
    """A user's own optimizer, without state."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for each in self.param_groups[0]["params"]:
            each.sub_(each.grad, alpha=self.param_groups[0]["lr"])


@on_processes(2)
def test_a_step_that_is_undone_brings_back_all_state_on_a_disk(tmp_path):
    policy = OffloadPolicy(optimizer=Disk(str(tmp_path)))
    for kind in (torch.optim.AdamW, sherd.Muon):
        model = sharded(policy, torch.float32, comm_policy=sherd.CommPolicy(divergence="join"))
        optimizer = made(kind, model)
        steps(model, optimizer, range(2))
        before = copy.deepcopy(optimizer.state_dict()["state"])
        with sherd.step(model, optimizer, undo_optimizer=True):
            steps(model, optimizer, range(2, 3))
            if dist.get_rank():
                raise RuntimeError("of this rank's data")
        now = optimizer.state_dict()["state"]
        assert now.keys() == before.keys()
        for key, state in before.items():
            for name, value in state.items():
                assert torch.equal(local_part(value), local_part(now[key][name])), (kind, key, name)
