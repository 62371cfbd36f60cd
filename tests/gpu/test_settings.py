"""Does everything that a user may choose train on the device as the plain model trains on the CPU?

Each case is one choice, or some that meet. tests/gpu/test_random_settings.py mixes them at random.
"""

from __future__ import annotations

import pytest

from tests.gpu.setting_runs import report, wrong
from tests.gpu.settings import Setting, legal

HSDP = {"mesh": (2, 2), "strategy": "hsdp"}
BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}

CASES = {
    # Placements
    "Shard(1)": Setting(width=13, placement="Shard(1)"),
    "Flat": Setting(width=13, placement="Flat", scalar=True),
    "Blocks": Setting(width=13, placement="Blocks", optimizer="flattened"),
    "Owned": Setting(width=13, placement="Owned", max_norm=0.1),
    "each parameter by its own placement": Setting(width=13, placement="mixed", scalar=True),
    # Strategies and meshes
    "ddp": Setting(strategy="ddp", micro_batches=2, accumulation="accumulate"),
    "zero1": Setting(strategy="zero1", placement="Flat", micro_batches=2, accumulation="accumulate"),
    "zero2": Setting(strategy="zero2", **BF16),
    "four ranks, resharded to two": Setting(mesh=(4,), reshard=2, width=13),
    "hsdp": Setting(**HSDP, micro_batches=2, accumulation="no_sync"),
    "hsdp, flat, accumulated": Setting(**HSDP, placement="Flat", micro_batches=2, accumulation="accumulate"),
    "hfsdp": Setting(mesh=(2, 2), strategy="hfsdp", placement="Flat", micro_batches=2, accumulation="accumulate"),
    "zero1 across zero2": Setting(mesh=(2, 2), strategy="zero1_across_zero2_within", max_norm=0.1),
    # The wrapper
    "wrapper": Setting(front="wrapper", max_norm=0.1, micro_batches=2, accumulation="no_sync"),
    "wrapper, flat parameters": Setting(front="flat wrapper", max_norm=0.1, between="unsharded"),
    "wrapper, gradients sharded": Setting(front="flat wrapper", strategy="zero2", between="state dict", **BF16),
    "wrapper, hybrid": Setting(front="wrapper", **HSDP, after_backward=True),
    "wrapper, not sharded": Setting(front="wrapper", strategy="ddp", between="written"),
    # Ways to run ahead, and to keep
    "kept": Setting(reshard=False),
    "root freed too": Setting(reshard=True, forward_depth=2, backward_depth=2, num_blocks=3),
    "not ahead": Setting(forward_depth=0, backward_depth=0, after_backward=True),
    "coalesced": Setting(transport="coalesced", width=13, **BF16),
    "in parts": Setting(parts=True, scalar=True, max_norm=0.1),
    "in parts, recomputed, accumulated": Setting(parts=True, recompute="kept graph", micro_batches=2, **BF16),
    "own collectives": Setting(own_collectives=True, placement="Flat"),
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
    "offloaded from the meta device": Setting(offload="pinned", built="meta"),
    "offloaded, wrapped": Setting(offload="pinned", front="flat wrapper", between="unsharded"),
    "offloaded, hsdp": Setting(offload="pinned", **HSDP, between="written"),
    "offloaded, scaled": Setting(offload="pinned", scaled=True),
    # Between steps
    "evaluated": Setting(between="eval", placement="Flat", **BF16),
    "written": Setting(between="written"),
    "saved whole": Setting(between="state dict", placement="Owned"),
}
"""By name."""


@pytest.mark.parametrize("name", CASES)
def test_each_choice_trains_as_the_plain_model(name, ranks_with, accelerator):
    setting = legal(CASES[name])
    ranks = ranks_with(setting.num_ranks, "single_gather", "single_scatter", "list_gather", "all_reduce")
    failing = wrong(ranks, [setting], accelerator.counts_waits_of_ranks)
    assert not failing, report(failing)
