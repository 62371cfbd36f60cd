"""Is an out of memory error of a device's allocator explained, on a device and beside what else is on it?"""

from __future__ import annotations

import gc
import os
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import sherd
from sherd.errors import MemoryLimitError
from tests.device.test_peaks import GPT, TOKENS, VOCABULARY, held_before

SAMPLES = 32


def out_of_memory(limit):
    """The notes of an error of the allocator, or of one at a limit."""
    before = held_before()
    torch.manual_seed(0)
    device = torch.device("sim", torch.accelerator.current_device_index())
    model = GPT().to(device)
    mesh = init_device_mesh("sim", (dist.get_world_size(),))
    for each in (*model.blocks, model):
        sherd.fully_shard(each, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tokens = torch.randint(VOCABULARY, (SAMPLES, TOKENS)).to(device)

    def step(tokens):
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step(tokens)
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    step(tokens)
    torch.accelerator.synchronize()
    stats = torch.accelerator.memory_stats()
    if limit:
        with (
            pytest.raises(MemoryLimitError) as raised,
            sherd.explain_memory(model, optimizer, limit=stats["requested_bytes.all.peak"] - before - (2 << 20)),
        ):
            step(tokens)
        return str(raised.value), raised.value.__notes__
    torch.accelerator.empty_cache()
    os.environ["SIM_MEMORY_MIB"] = str((stats["requested_bytes.all.peak"] >> 20) - 12)
    try:
        with pytest.raises(torch.OutOfMemoryError) as raised, sherd.explain_memory(model, optimizer):
            step(tokens)
    finally:
        del os.environ["SIM_MEMORY_MIB"]
    return str(raised.value), raised.value.__notes__


@pytest.mark.parametrize("limit", [False, True])
def test_an_error_of_a_device_is_explained(sim_world, limit):
    # A device's own limit is met by each rank at a moment of its own, and the others would wait for it.
    for said, (note,) in sim_world(2 if limit else 1).run(out_of_memory, limit).values:
        if limit:
            assert re.search(r"are alive when .*blocks\.\d", said)
        else:
            assert "is out of memory: tried to allocate" in said
            assert re.search(r"are free; torch has .* in .*\n", note)
            assert re.search(r"out of memory in (forward|backward) of blocks\.\d\n", note)
            assert "predicted to be alive then: " in note
        assert re.search(r"  (\d+% of )?blocks computed again: saves \d", note)
        assert re.search(r"  \d+ samples? at once: saves \d", note)
