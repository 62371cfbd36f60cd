"""Everything that a user may choose trains on the device as the plain model trains on the CPU.

Each case is one choice, or some that meet. tests/gpu/test_random_settings.py mixes them at random. On the simulated
device every access is ordered, too, and the host waits for nothing but with offload; FSDP2 goes through the same, as
the control of that device.
"""

from __future__ import annotations

import pytest

from tests.gpu.setting_runs import report, wrong
from tests.gpu.settings import Setting, legal

HSDP = {"mesh": (2, 2), "strategy": "hsdp"}
BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}

CASES = {
    # The control
    "FSDP2": Setting(front="FSDP2"),
    "FSDP2, bfloat16": Setting(front="FSDP2", **BF16),
    "FSDP2, accumulated": Setting(front="FSDP2", micro_batches=2, accumulation="no_sync", reshard=False),
    "FSDP2, hsdp": Setting(front="FSDP2", **HSDP, optimizer="adamw"),
    "FSDP2, offloaded": Setting(front="FSDP2", offload="pinned"),
    # Placements
    "Shard(0)": Setting(),
    "Shard(1)": Setting(width=13, placement="Shard(1)"),
    "Flat": Setting(width=13, placement="Flat", scalar=True),
    "Blocks": Setting(width=13, placement="Blocks", optimizer="flattened"),
    "Blocks, clipped": Setting(placement="Blocks", max_norm=0.1),
    "Owned": Setting(width=13, placement="Owned", max_norm=0.1),
    "Owned, recomputed": Setting(placement="Owned", recompute="kept graph"),
    "each parameter by its own placement": Setting(width=13, placement="mixed", scalar=True),
    "small parameters whole": Setting(placement="replicated", param_dtype="bfloat16"),
    # Strategies and meshes
    "ddp": Setting(strategy="ddp", micro_batches=2, accumulation="accumulate"),
    "zero1": Setting(strategy="zero1", placement="Flat", micro_batches=2, accumulation="accumulate"),
    "zero2": Setting(strategy="zero2", **BF16),
    "four ranks, resharded to two": Setting(mesh=(4,), reshard=2, width=13),
    "hsdp": Setting(**HSDP, micro_batches=2, accumulation="no_sync"),
    "hsdp, flat, accumulated": Setting(**HSDP, placement="Flat", micro_batches=2, accumulation="accumulate"),
    "hsdp, bfloat16": Setting(**HSDP, param_dtype="bfloat16", micro_batches=2, accumulation="no_sync"),
    "hsdp, replicas summed once": Setting(**HSDP, micro_batches=3, accumulation="replicas once"),
    "hfsdp": Setting(mesh=(2, 2), strategy="hfsdp", placement="Flat", micro_batches=2, accumulation="accumulate"),
    "zero1 across zero2": Setting(mesh=(2, 2), strategy="zero1_across_zero2_within", max_norm=0.1),
    # Reductions
    "in the order of ranks": Setting(width=13, reduction="ranks", micro_batches=2, accumulation="accumulate"),
    "in the order of ranks, hsdp": Setting(**HSDP, reduction="ranks", micro_batches=3, accumulation="replicas once"),
    "in the order of ranks, ddp": Setting(strategy="ddp", reduction="ranks", micro_batches=2),
    "in the order of ranks, hfsdp, offloaded": Setting(
        mesh=(2, 2), strategy="hfsdp", placement="Flat", reduction="ranks", offload="pinned", max_norm=0.1
    ),
    "bfloat16 summed in float32": Setting(width=13, reduction="any bfloat16", placement="Flat"),
    "bfloat16 summed in float32, hsdp": Setting(**HSDP, reduction="any bfloat16"),
    "encoded in 8 bits": Setting(width=13, reduction="any int8", micro_batches=2),
    "encoded in 8 bits, hsdp": Setting(**HSDP, reduction="any int8"),
    "gathered in 8 bits": Setting(width=13, encoded=True, recompute="kept graph"),
    "gathered in 8 bits, hfsdp": Setting(mesh=(2, 2), strategy="hfsdp", placement="Flat", encoded=True),
    "gathered in 8 bits, bfloat16, offloaded": Setting(encoded=True, offload="pinned", **BF16),
    "wrapper, in the order of ranks": Setting(front="flat wrapper", reduction="ranks", max_norm=0.1),
    # The wrapper
    "wrapper": Setting(front="wrapper", max_norm=0.1, micro_batches=2, accumulation="no_sync"),
    "wrapper, flat parameters": Setting(front="flat wrapper", max_norm=0.1, between="unsharded"),
    "wrapper, gradients sharded": Setting(front="flat wrapper", strategy="zero2", between="state dict", **BF16),
    "wrapper, hybrid": Setting(front="wrapper", **HSDP, after_backward=True),
    "wrapper, hybrid, flat parameters": Setting(front="flat wrapper", **HSDP, param_dtype="bfloat16"),
    "wrapper, not sharded": Setting(front="wrapper", strategy="ddp", between="written"),
    # Ways to run ahead, and to keep
    "kept": Setting(reshard=False, optimizer="adamw"),
    "root freed too": Setting(reshard=True, forward_depth=2, backward_depth=2, num_blocks=3),
    "not ahead": Setting(forward_depth=0, backward_depth=0, after_backward=True),
    "coalesced": Setting(transport="coalesced", width=13, **BF16),
    "in parts": Setting(part_bytes=1, scalar=True, max_norm=0.1),
    "in parts, recomputed, accumulated": Setting(part_bytes=1, recompute="kept graph", micro_batches=2, **BF16),
    "in parts, tied": Setting(part_bytes=1, tied=True, optimizer="adamw"),
    "in parts, not reduced each time": Setting(
        part_bytes=1, **BF16, micro_batches=2, accumulation="no_sync", max_norm=0.1
    ),
    "in parts, coalesced, recomputed": Setting(part_bytes=1, transport="coalesced", recompute="kept graph"),
    "in parts, hsdp": Setting(part_bytes=1, **HSDP, micro_batches=2, accumulation="replicas once"),
    "in parts, offloaded": Setting(part_bytes=1, offload="pinned"),
    "in parts, interrupted": Setting(part_bytes=1, interrupted=True, reduce_buffers=2),
    "interrupted": Setting(interrupted=True),
    "several reductions, interrupted": Setting(reduce_buffers=2, interrupted=True),
    "gathers behind an event": Setting(follows_event=True),
    "hook on a stream of its own": Setting(hook=True),
    "own collectives": Setting(own_collectives=True, placement="Flat"),
    "own collectives, bfloat16, clipped": Setting(own_collectives=True, param_dtype="bfloat16", max_norm=0.1),
    "own collectives, recomputed": Setting(
        own_collectives=True, recompute="kept graph", micro_batches=3, accumulation="no_sync"
    ),
    "own collectives, recomputed by reentering": Setting(own_collectives=True, placement="Flat", recompute="reentrant"),
    "own collectives, float16, scaled": Setting(own_collectives=True, param_dtype="float16", scaled=True),
    "own collectives, offloaded": Setting(own_collectives=True, offload="pinned", max_norm=0.1),
    "own collectives, flat, offloaded": Setting(
        own_collectives=True, placement="Flat", offload="pinned", micro_batches=3, accumulation="no_sync"
    ),
    # Precision
    "bfloat16": Setting(param_dtype="bfloat16", placement="Flat"),
    "bfloat16, reduced in float32": Setting(**BF16, max_norm=0.1),
    "float16, scaled": Setting(param_dtype="float16", scaled=True, placement="Flat"),
    "float32, scaled": Setting(scaled=True, max_norm=0.1),
    # Recomputation
    "recomputed": Setting(recompute="kept graph", num_blocks=3),
    "recomputed by reentering": Setting(recompute="reentrant", placement="Flat", micro_batches=2),
    # Parameters that are special
    "tied": Setting(tied=True, placement="Flat"),
    "tied, bfloat16": Setting(tied=True, **BF16),
    "tied, hsdp": Setting(tied=True, placement="Flat", **HSDP),
    "tied, wrapped": Setting(tied=True, front="flat wrapper"),
    "a block frozen": Setting(frozen="block", recompute="reentrant"),
    "norms frozen": Setting(frozen="norms", placement="Flat", front="wrapper"),
    "ignored": Setting(ignored=True),
    "ignored, wrapped": Setting(ignored=True, front="flat wrapper"),
    # Where the model was, and where it rests
    "built on the CPU": Setting(built="cpu"),
    "built on the CPU, flat": Setting(built="cpu", placement="Flat", optimizer="flattened"),
    "built on the CPU, wrapped": Setting(built="cpu", front="flat wrapper"),
    "built on the CPU, tied, wrapped": Setting(built="cpu", front="wrapper", tied=True),
    "built on the meta device": Setting(built="meta", placement="Flat", tied=True),
    "built on the meta device, hsdp": Setting(built="meta", **HSDP, ignored=True),
    "offloaded": Setting(offload="pinned", max_norm=0.1),
    "offloaded, not pinned": Setting(offload="pageable", placement="Flat"),
    "offloaded, bfloat16, accumulated": Setting(offload="pinned", micro_batches=2, accumulation="no_sync", **BF16),
    "offloaded from the CPU": Setting(offload="pinned", built="cpu", placement="Flat", optimizer="flattened"),
    "offloaded from the CPU, wrapped": Setting(offload="pinned", built="cpu", front="wrapper"),
    "offloaded from the meta device": Setting(offload="pinned", built="meta"),
    "offloaded, wrapped": Setting(offload="pinned", front="flat wrapper", between="unsharded"),
    "offloaded, wrapped, original parameters": Setting(offload="pinned", front="wrapper"),
    "offloaded, hsdp": Setting(offload="pinned", **HSDP, between="written"),
    "offloaded, scaled": Setting(offload="pinned", scaled=True),
    # Between steps
    "evaluated": Setting(between="eval", placement="Flat", **BF16),
    "written": Setting(between="written"),
    "saved whole": Setting(between="state dict", placement="Owned"),
}


def calls_of(setting: Setting) -> tuple[str, ...]:
    """Which collectives carry it: on CUDA ranks share the first GPU, over gloo where gloo takes its tensors."""
    own = ("list_gather", "all_reduce")
    return own if setting.own_collectives else (*own, "single_gather", "single_scatter")


@pytest.mark.parametrize("name", CASES)
def test_each_choice_trains_as_the_plain_model(name, ranks_with, accelerator):
    setting = legal(CASES[name])
    if setting.front == "FSDP2" and not accelerator.names_races:
        pytest.skip("the control of the simulated device")
    ranks = ranks_with(setting.num_ranks, *calls_of(setting))
    failing = wrong(ranks, [setting], accelerator.counts_waits_of_ranks)
    assert not failing, report(failing)
