"""Training on the device gives plain PyTorch's numbers, on one rank: streams are real, collectives the device's own.

tests/gpu/test_settings.py has several ranks.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import sherd
from sherd.comm import transports
from sherd.comm.transport import CoalescedCalls, SingleCalls
from tests.gpu.setting_model import plain
from tests.gpu.setting_runs import differences, report, trained
from tests.gpu.settings import Setting, legal

# What a training does beside forward, backward and a step.
RECIPES = {
    "float32": {},
    "bfloat16": {"param_dtype": "bfloat16"},
    "float16, scaled": {"param_dtype": "float16", "scaled": True},
    "float32, scaled": {"scaled": True},
    "recomputed": {"recompute": "kept graph"},
    "recomputed by reentering": {"recompute": "reentrant"},
    "unsynced": {"micro_batches": 3, "accumulation": "no_sync"},
    "clipped": {"max_norm": 0.1},
    "bfloat16, clipped": {"param_dtype": "bfloat16", "max_norm": 0.1},
}
WAYS = {
    "Shard(0)": {},
    "Shard(1)": {"placement": "Shard(1)"},
    "Flat": {"placement": "Flat"},
    "Blocks": {"placement": "Blocks"},
    "Owned": {"placement": "Owned"},
    "coalesced": {"transport": "coalesced"},
    "in parts": {"part_bytes": 1},
    "wrapper": {"front": "wrapper"},
    "flat wrapper": {"front": "flat wrapper"},
    "wrapper, gradients sharded": {"front": "wrapper", "strategy": "zero2"},
    "flat wrapper, gradients sharded": {"front": "flat wrapper", "strategy": "zero2"},
    "wrapper, not sharded": {"front": "wrapper", "strategy": "ddp"},
    "flat wrapper, not sharded": {"front": "flat wrapper", "strategy": "ddp"},
    "memory of the group": {"group_memory": True},
    "memory of the group, kept": {"group_memory": True, "reshard": False},
    "memory of the group, Flat": {"group_memory": True, "placement": "Flat"},
    "memory of the group, Flat, kept": {"group_memory": True, "placement": "Flat", "reshard": False},
}
OFFLOADING = {
    "Shard(0)": {"offload": "pinned"},
    "Flat": {"offload": "pinned", "placement": "Flat"},
    "wrapper": {"offload": "pinned", "front": "wrapper"},
    "flat wrapper": {"offload": "pinned", "front": "flat wrapper"},
}


@pytest.fixture
def on_one_rank(alone, accelerator):
    """`on_one_rank(...)` trains a setting in this process. A group of one rank is served by copies; here the device's
    collectives are asked."""

    def train(**choices):
        setting = legal(Setting(mesh=(1,), **choices))
        calls = CoalescedCalls if setting.transport == "coalesced" else SingleCalls
        with mock.patch.object(transports, "_ONE_RANK", calls(dist.group.WORLD)):
            found = trained(setting)
        said = differences(setting, 0, found, plain(setting)[0], accelerator.counts_waits_of_ranks)
        assert not said, report({setting: "\n".join(said)})

    return train


@pytest.mark.values
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_shard_trains_as_the_plain_model(way, recipe, on_one_rank):
    on_one_rank(**WAYS[way], **RECIPES[recipe])


@pytest.mark.values
@pytest.mark.parametrize("recipe", ["float32", "bfloat16", "recomputed", "unsynced", "clipped"])
@pytest.mark.parametrize("way", OFFLOADING)
def test_shards_that_rest_in_pinned_host_memory_train_as_the_plain_model(way, recipe, on_one_rank):
    on_one_rank(**OFFLOADING[way], **RECIPES[recipe])


def test_offloaded_shards_and_gradients_lie_in_host_memory_and_the_shards_are_pinned(alone, accelerator):
    model = torch.nn.Linear(64, 64).to(accelerator.device)
    sherd.fully_shard(model, mesh=alone, offload_policy=sherd.CPUOffloadPolicy())
    model(torch.ones(2, 64, device=accelerator.device)).sum().backward()
    for parameter in model.parameters():
        assert parameter.to_local().device.type == "cpu"
        assert parameter.to_local().is_pinned()
        assert parameter.grad.to_local().device.type == "cpu"


def test_whole_parameters_are_freed_after_forward_and_after_backward(alone, accelerator):
    """As the allocator sees it: 64 MiB come, and go."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(3))).to(accelerator.device)
    for layer in model:
        sherd.fully_shard(layer, mesh=alone, reshard_after_forward=True)
    sherd.fully_shard(model, mesh=alone)
    x = torch.ones(1, 4096, device=accelerator.device)
    for _ in range(2):
        model(x).sum().backward()
        model.zero_grad()
    shards = sum(each.to_local().nbytes for each in model.parameters())
    before = accelerator.allocated()
    loss = model(x).sum()
    assert accelerator.allocated() - before < 1 << 20, "nothing is whole between forward and backward"
    loss.backward()
    assert abs(accelerator.allocated() - before - shards) < 1 << 20, "gradients, and nothing else"
