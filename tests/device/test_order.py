"""Training on streams that are truly asynchronous: every access is ordered, the host waits for nothing, and the numbers
are those of the plain model on the CPU. With offload the host waits for gradients, once backward is over. FSDP2 goes
through the same, as the control of the device itself."""

from __future__ import annotations

import pytest
import torch

import sherd
from tests.device.training import NUM_BLOCKS, Setting, difference, train

SETTINGS = {
    "FSDP2": Setting(system="FSDP2"),
    "FSDP2, bfloat16": Setting(system="FSDP2", dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "FSDP2, accumulated": Setting(system="FSDP2", micro_batches=2, reshard=False),
    "FSDP2, HSDP": Setting(system="FSDP2", replicas=2, adam=True),
    "FSDP2, offload": Setting(system="FSDP2", offload=True),
    "Shard(0)": Setting(),
    "bfloat16": Setting(dtype=torch.bfloat16),
    "bfloat16, summed in float32": Setting(dtype=torch.bfloat16, reduce_dtype=torch.float32, tied=True),
    "accumulated": Setting(micro_batches=2, max_norm=0.1),
    "recomputed": Setting(recompute=True),
    "kept": Setting(reshard=False, adam=True),
    "two ahead": Setting(prefetch=sherd.PrefetchPolicy(forward_depth=2, backward_depth=2)),
    "none ahead": Setting(prefetch=sherd.PrefetchPolicy(forward_depth=0, backward_depth=0, after_backward=True)),
    "coalesced": Setting(transport="coalesced"),
    "in parts": Setting(parts=True, adam=True, tied=True),
    "in parts, bfloat16, accumulated": Setting(parts=True, dtype=torch.bfloat16, micro_batches=2, max_norm=0.1),
    "in parts, coalesced, recomputed": Setting(parts=True, transport="coalesced", recompute=True),
    "in parts, HSDP": Setting(parts=True, replicas=2, micro_batches=2, sums_replicas_once=True),
    "in parts, offload": Setting(parts=True, offload=True),
    "in parts, interrupted": Setting(parts=True, interrupted=True, reduce_buffers=2),
    "HSDP": Setting(replicas=2),
    "HSDP, accumulated": Setting(replicas=2, dtype=torch.bfloat16, micro_batches=2),
    "hook on a stream of its own": Setting(hook=True),
    "HSDP, replicas summed once": Setting(replicas=2, micro_batches=3, sums_replicas_once=True),
    "gathers behind an event": Setting(follows_event=True),
    "interrupted": Setting(interrupted=True),
    "several reductions": Setting(reduce_buffers=2, interrupted=True),
    "part kept": Setting(reshard=2),
    "offload": Setting(offload=True),
    "offload, built on the host": Setting(offload=True, built_on="cpu"),
    "offload, pageable": Setting(offload=True, pinned=False),
    "Flat": Setting(placement="Flat"),
    "Flat, bfloat16": Setting(placement="Flat", dtype=torch.bfloat16, micro_batches=2),
    "Flat, HSDP": Setting(placement="Flat", replicas=2, tied=True),
    "Flat, offload": Setting(placement="Flat", offload=True),
    "Blocks": Setting(placement="Blocks", max_norm=0.1),
    "Owned": Setting(placement="Owned", recompute=True),
    "wrapper": Setting(system="wrapper", micro_batches=2),
    "wrapper, flat parameter": Setting(system="wrapper", use_orig_params=False, max_norm=0.1),
    "wrapper, HSDP": Setting(system="wrapper", use_orig_params=False, replicas=2, dtype=torch.bfloat16),
    "wrapper, offload": Setting(system="wrapper", offload=True),
}


def num_ranks(setting: Setting) -> int:
    return 4 if setting.replicas > 1 or type(setting.reshard) is int else 2


@pytest.mark.values
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_numbers_are_those_of_the_plain_model(name, seed, sim_world):
    setting = SETTINGS[name]
    found = sim_world(num_ranks(setting), pause_us=1000, seed=seed).run(train, setting)
    assert not difference(found.values, setting)
    for trained in found.values:
        if not setting.offload:
            assert not trained.waits
        elif setting.system != "FSDP2":  # which waits for each gradient
            waits = {cause.partition(":")[0] for cause in trained.waits}
            pageable = {"copy to host, not to pinned memory as it lies on the device"}  # each copy is waited for
            assert waits <= {"Event.synchronize"} | (pageable if not setting.pinned else set()), trained.waits
            assert max(trained.waits.values(), default=0) <= NUM_BLOCKS + 1, trained.waits
