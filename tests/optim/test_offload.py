"""Offload policies on a CPU: which units a share takes, and what other parts of a training see of state elsewhere."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import sherd
from sherd import OffloadPolicy, fully_shard
from sherd.engine import Unit
from sherd.errors import ModuleError
from tests.support.ranks.bodies import on_threads


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
