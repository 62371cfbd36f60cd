"""What sherd tells of a step on a device: an error of its allocator is explained, beside what else is on the device,
and a recorded step has the times of its stream, and every byte that is asked for."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import sherd
from sherd.errors import MemoryLimitError
from sherd.tools.plan.files import from_json, to_json
from sherd.tools.plan.tracing import traced
from sherd.tools.simulate.timeline import Lane
from tests.device.test_peaks import NUM_BLOCKS, TOKENS, VOCABULARY, held_before, requested, sharded
from tests.gpu.settings import Setting


def trained(setting: Setting, samples: int) -> tuple[Any, torch.optim.Optimizer, Callable[[], None]]:
    """A model, its optimizer, and what does a step, after two steps."""
    model = sharded(setting)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tokens: Tensor = torch.randint(VOCABULARY, (samples, TOKENS)).to("sim")

    def step() -> None:
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    gc.collect()
    torch.accelerator.synchronize()
    return model, optimizer, step


def out_of_memory(limit: bool) -> tuple[str, list[str]]:
    """The notes of an error of the allocator, or of one at a limit."""
    before = held_before()
    model, optimizer, step = trained(Setting(), 32)
    torch.accelerator.empty_cache()
    requested()
    step()
    peak = requested()
    if limit:
        most = peak - before - (2 << 20)
        with pytest.raises(MemoryLimitError) as raised, sherd.explain_memory(model, optimizer, limit=most):
            step()
        return str(raised.value), raised.value.__notes__
    torch.accelerator.empty_cache()
    os.environ["SIM_MEMORY_MIB"] = str((peak >> 20) - 12)
    try:
        with pytest.raises(torch.OutOfMemoryError) as raised, sherd.explain_memory(model, optimizer):
            step()
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
        assert re.search(r"  \d+ micro-batch(es)? of \d+ samples?: saves \d", note)


def recorded(setting: Setting) -> tuple[Any, int]:
    """A recorded step, and the most bytes that the allocator was asked for in it, beside what was there before."""
    before = held_before()
    model, optimizer, step = trained(setting, 4)
    requested()
    with traced(model, optimizer) as trace:
        step()
    return trace.timeline, requested() - before


@pytest.mark.parametrize("offload", ["", "pinned"])
@pytest.mark.parametrize("placement", ["Shard(0)", "Flat"])
def test_a_step_is_recorded_as_the_device_runs_it(sim_world, placement, offload):
    setting = Setting(placement=placement, offload=offload)
    for timeline, peak in sim_world(2).run(recorded, setting).values:
        assert timeline.peak.nbytes == peak
        assert from_json(to_json(timeline)) == timeline
        gathered = [each for each in timeline.spans if each.lane is Lane.GATHER]
        assert {each.unit for each in gathered} == set(range(NUM_BLOCKS + 1))
        assert all(each.nbytes > 0 for each in gathered)
        assert sum(each.lane is Lane.REDUCE and each.nbytes > 0 for each in timeline.spans) == NUM_BLOCKS + 1
        assert timeline.seconds == max(each.end for each in timeline.spans)
