"""The memory that a step takes on a device, as its allocator counts the bytes asked for, beside what torch's FSDP2
takes, and beside what `memory_report` predicts."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import sherd
from sherd.comm.transport import CoalescedCalls, LargeCoalesced
from tests.gpu.devices import end_backwards
from tests.gpu.setting_runs import mesh_of, shard_units
from tests.gpu.settings import Setting
from tests.support.versions import torch_is_older

WIDTH, NUM_BLOCKS, VOCABULARY, TOKENS = 256, 8, 512, 16
PART_BYTES = 512 << 10
"""A block has 3 MiB, and is gathered in parts as one of 384 MiB is by default."""
PHASES = ("forward", "backward", "step")
SCALARS = 64
"""Bytes for the loss and its gradient."""
FLAGS = 4 * (11 * NUM_BLOCKS + 4)
"""Bytes that come with reduced gradients: a flag for each parameter says whether any rank had a gradient for it."""


class GPTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        x = x + self.out(q * k * v)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(GPTBlock() for _ in range(NUM_BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).float()


def sharded(setting: Setting) -> Any:
    torch.manual_seed(0)
    return shard_units(setting, GPT().to("sim"), mesh_of((dist.get_world_size(),)))


def held_before() -> int:
    """What earlier tests have left, once what waits in cycles is gone."""
    end_backwards("sim")
    gc.collect()
    torch.accelerator.synchronize()
    return int(torch.accelerator.memory_stats()["requested_bytes.all.current"])


def requested() -> int:
    """The most bytes that were asked for since this was last called."""
    torch.accelerator.synchronize()
    peak = torch.accelerator.memory_stats()["requested_bytes.all.peak"]
    torch.accelerator.reset_peak_memory_stats()
    return int(peak)


def peaks_of_a_step(setting: Setting) -> dict[str, int]:
    """The most bytes asked for in each phase of a settled step with AdamW."""
    before = held_before()
    model = sharded(setting)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    tokens = torch.zeros(2, TOKENS, dtype=torch.long, device="sim")
    gc.collect()
    for _ in range(3):
        found = dict.fromkeys(PHASES, 0)
        requested()
        for micro in range(setting.micro_batches):
            model.set_requires_gradient_sync(micro + 1 == setting.micro_batches)
            loss = model(tokens).logsumexp(-1).mean()
            found["forward"] = max(found["forward"], requested())
            loss.backward()
            found["backward"] = max(found["backward"], requested())
        del loss
        optimizer.step()
        found["step"] = requested()
        optimizer.zero_grad()
    return {phase: peak - before for phase, peak in found.items()}


IN_PARTS = Setting(part_bytes=PART_BYTES)
BF16, TWICE = {"param_dtype": "bfloat16"}, {"micro_batches": 2}
SETTINGS = {
    "float32": IN_PARTS,
    "float32, in one part": Setting(),
    "bfloat16": replace(IN_PARTS, **BF16),
    "bfloat16, summed in float32": replace(IN_PARTS, **BF16, reduce_dtype="float32"),
    "accumulated": replace(IN_PARTS, **TWICE),
    "bfloat16, accumulated": replace(IN_PARTS, **BF16, **TWICE),
    "offload": replace(IN_PARTS, offload="pinned"),
    "bfloat16, offload": replace(IN_PARTS, **BF16, offload="pinned"),
}
MOST = {
    ("float32", 2): (0.945, 0.92),
    ("float32", 4): (0.91, 0.87),
    ("float32, in one part", 2): (0.945, 0.955),
    ("float32, in one part", 4): (0.91, 0.92),
    ("bfloat16", 2): (0.97, 0.95),
    ("bfloat16", 4): (0.945, 0.915),
    ("bfloat16, summed in float32", 2): (0.97, 0.95),
    ("bfloat16, summed in float32", 4): (0.945, 0.915),
    ("accumulated", 2): (0.965, 0.985),
    ("accumulated", 4): (0.95, 0.99),
    ("bfloat16, accumulated", 2): (0.975, 0.975),
    ("bfloat16, accumulated", 4): (0.965, 0.985),
    ("offload", 2): (0.79, 0.695),
    ("offload", 4): (0.79, 0.695),
    ("bfloat16, offload", 2): (0.82, 0.71),
    ("bfloat16, offload", 4): (0.79, 0.695),
}
"""Of FSDP2's peaks: in forward and in backward. Shards and Adam's states, alike in both, are a large part of them."""

if not torch_is_older(2, 15):  # FSDP2 takes an eighth less since then, in forward with offload
    MOST |= {at: (0.95, most[1]) for at, most in MOST.items() if at[0].endswith("offload")}


@pytest.mark.values
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", SETTINGS)
def test_no_phase_of_a_step_takes_more_than_fsdp2(name, num_ranks, sim_world):
    world = sim_world(num_ranks, spoil="no", races="off")
    theirs = world.run(peaks_of_a_step, replace(SETTINGS[name], front="FSDP2")).values[0]
    ours = world.run(peaks_of_a_step, SETTINGS[name]).values[0]
    for phase, most in zip(PHASES, (*MOST[name, num_ranks], 1), strict=True):
        print(f"{name}, {num_ranks} ranks, {phase}: {ours[phase]:,} of {theirs[phase]:,} bytes")
        assert ours[phase] <= most * theirs[phase] + SCALARS + FLAGS, phase


# What is predicted


def predicted_and_taken(setting: Setting) -> tuple[int, int]:
    """The peak of a step, said beforehand and asked for, less what the device held before. There are no activations:
    the batch has no rows."""
    before = held_before()
    model = sharded(setting)
    tokens = torch.zeros(0, TOKENS, dtype=torch.long, device="sim")

    def step() -> None:
        for micro in range(setting.micro_batches):
            model.set_requires_gradient_sync(micro + 1 == setting.micro_batches)
            model(tokens).sum().backward()

    step()
    model.zero_grad()
    with sherd.track_memory(model):
        step()
    model.zero_grad()
    said = sherd.memory_report(model, unsynced_batches=setting.micro_batches - 1).predicted_peak
    gc.collect()
    requested()
    step()
    return said, requested() - before


@pytest.mark.values
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", [*SETTINGS, "Flat", "coalesced", "replicated", "in order", "in float32", "encoded"])
def test_a_step_takes_what_was_predicted_to_the_byte(name, num_ranks, sim_world):
    others = {each: replace(IN_PARTS, placement=each) for each in ("Flat", "replicated")}
    others |= {"in order": replace(IN_PARTS, reduction="ranks")}
    others |= {"in float32": replace(IN_PARTS, reduction="any bfloat16")}
    others |= {"encoded": replace(IN_PARTS, encoded=True)}
    others["coalesced"] = replace(IN_PARTS, transport="coalesced")
    setting = (SETTINGS | others)[name]
    for said, taken in sim_world(num_ranks, spoil="no", races="off").run(predicted_and_taken, setting).values:
        # Autograd makes the gradients of a norm's weight and bias together: the second is there when the first arrives.
        assert 0 <= taken - said <= SCALARS + 2 * WIDTH


def gathered_in_place(setting: Setting, least: int) -> tuple[int, int, list[int]]:
    """What `predicted_and_taken` says, and the bytes of each gather into place, from `least` bytes on."""
    gathered: list[int] = []

    def counted(self: LargeCoalesced, targets: Any, shard_buffers: Any, async_op: bool) -> Any:
        gathered.append(sum(each.nbytes for each in targets))
        return CoalescedCalls.all_gather_each(self, targets, shard_buffers, async_op)

    with mock.patch.multiple(LargeCoalesced, each_from_bytes=least, all_gather_each=counted):
        return *predicted_and_taken(setting), gathered


def test_large_groups_are_gathered_into_place_by_default_with_the_peak_that_was_predicted(sim_world):
    least = PART_BYTES
    for said, taken, gathered in sim_world(2, spoil="no", races="off").run(gathered_in_place, IN_PARTS, least).values:
        assert 0 <= taken - said <= SCALARS + 2 * WIDTH
        assert len(gathered) > NUM_BLOCKS
        assert min(gathered) >= least
