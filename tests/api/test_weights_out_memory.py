"""Does the reading of weights take two buckets, the largest parameter and what is sent of a bucket, and no more?"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import sherd
from bench.peak import live_bytes

WIDTH = 64
NUM_LAYERS = 12
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


def peak_of_reading(placement: Any, transport: str, bucket_bytes: int, large: int) -> int:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)), nn.Linear(WIDTH, large))
    for layer in model:
        sherd.fully_shard(layer, placement=placement, comm_policy=sherd.CommPolicy(transport=transport))
    sherd.fully_shard(model)
    peaks = []
    with live_bytes(torch.device("cpu")) as live:
        for _ in range(2):
            gc.collect()
            live.forget_peak()
            before = live.peak
            for _, weight in sherd.iter_full_parameters(model, bucket_bytes):
                assert weight.numel()
            del weight
            peaks.append(live.peak - before)
    return peaks[-1]


@pytest.mark.pairs
@pytest.mark.parametrize("transport", ["shared_memory", "gloo", "torch"])
@pytest.mark.parametrize("placement", [None, sherd.Flat()], ids=["rows", "flat"])
@pytest.mark.parametrize(("layers_a_bucket", "large"), [(1, WIDTH), (3, WIDTH), (2, 8 * WIDTH)])
def test_two_buckets_and_the_largest_parameter(layers_a_bucket, large, placement, transport, world):
    bucket, largest = layers_a_bucket * LAYER_BYTES, 4 * large * WIDTH
    sent, slack = max(bucket, largest) // 2, 8192  # views, padding and texts
    if transport != "shared_memory":
        slack += bucket  # a thread of gloo lets go of the rows somewhat later than its collective ends
    for peak in world(2).run(peak_of_reading, placement, transport, bucket, large):
        assert 0 < peak <= 2 * bucket + largest + sent + slack
        assert peak < NUM_LAYERS * LAYER_BYTES or large > WIDTH
