"""Is a step on a device recorded in the times of its stream, and with every byte that its allocator counts?"""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import sherd
from sherd.planning.files import from_json, to_json
from sherd.planning.tracing import traced
from sherd.simulate.timeline import Lane
from tests.device.test_peaks import GPT, NUM_BLOCKS, TOKENS, VOCABULARY, held_before


def recorded(placement, offload):
    """A recorded step, and the most bytes that the allocator was asked for in it, beside what was there before."""
    before = held_before()
    torch.manual_seed(0)
    device = torch.device("sim", torch.accelerator.current_device_index())
    model = GPT().to(device)
    options = {"placement": sherd.Flat()} if placement == "flat" else {}
    if offload:
        options["offload_policy"] = sherd.CPUOffloadPolicy()
    mesh = init_device_mesh("sim", (2,))
    for each in (*model.blocks, model):
        sherd.fully_shard(each, mesh=mesh, **options)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tokens = torch.randint(VOCABULARY, (4, TOKENS)).to(device)

    def step():
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    for _ in range(2):
        step()
        optimizer.zero_grad()
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    with traced(model, optimizer) as trace:
        step()
    torch.accelerator.synchronize()
    return trace.timeline, torch.accelerator.memory_stats()["requested_bytes.all.peak"] - before


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("placement", ["shard", "flat"])
def test_a_step_is_recorded_as_the_device_runs_it(sim_world, placement, offload):
    for timeline, peak in sim_world(2).run(recorded, placement, offload).values:
        assert timeline.peak.nbytes == peak
        assert from_json(to_json(timeline)) == timeline
        gathered = [each for each in timeline.spans if each.lane is Lane.GATHER]
        assert {each.unit for each in gathered} == set(range(NUM_BLOCKS + 1))
        assert all(each.nbytes > 0 for each in gathered)
        assert sum(each.lane is Lane.REDUCE and each.nbytes > 0 for each in timeline.spans) == NUM_BLOCKS + 1
        assert timeline.seconds == max(each.end for each in timeline.spans)
