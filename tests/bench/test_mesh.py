"""Do two axes cost what the bench says they must, on the wire and in memory?"""

import pytest
from torch.distributed.device_mesh import init_device_mesh

from bench.mesh import Kept, bytes_of, least_sent
from bench.models import deep_narrow
from sherd.api.placements import PRESETS

WORKLOAD = deep_narrow(1, 4, num_blocks=2)
ABOVE = 0.03
"""Padding and flags, of a model as small as this."""

# In units of all parameters, on 2 replicas of 2 shards: kept between steps, gradients, those of a backward that is not
# the last, optimizer state.
EXPECTED = {
    "ddp": (1, 1, 1, 2),
    "zero1": (1, 1 / 4, 1, 1 / 2),
    "zero2": (1, 1 / 4, 1 / 4, 1 / 2),
    "zero3": (1 / 4, 1 / 4, 1 / 4, 1 / 2),
    "hsdp": (1 / 2, 1 / 2, 1 / 2, 1),
    "hsdp_zero2": (1, 1 / 2, 1 / 2, 1),
    "hfsdp": (1 / 2, 1 / 4, 1 / 2, 1 / 2),
    "zero1_across_zero2_within": (1, 1 / 4, 1 / 2, 1 / 2),
}


def counted() -> dict[str, Kept]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return {name: bytes_of(name, mesh, WORKLOAD) for name in PRESETS}


def test_a_strategy_sends_the_least_and_keeps_what_it_must(world) -> None:
    for of_rank in world(4).run(counted):
        for name, kept in of_rank.items():
            assert kept.least <= kept.sent <= kept.least * (1 + ABOVE), name
            found = kept.parameters, kept.gradients, kept.unreduced, kept.optimizer
            assert found == pytest.approx(EXPECTED[name], rel=ABOVE), name


def test_the_least_is_what_the_collectives_of_a_strategy_need() -> None:
    assert least_sent("ddp", 8, 0, 2, 2) == 2 * 8 * 3 / 4
    assert least_sent("zero3", 8, 2, 1, 4) == (2 * 8 - 2 + 8) * 3 / 4
    assert least_sent("hsdp", 8, 0, 2, 2) == 3 * 8 / 2 + 2 * 4 / 2
    assert least_sent("hfsdp", 8, 0, 2, 2) == least_sent("hsdp", 8, 0, 2, 2)
    assert least_sent("hsdp_zero2", 8, 0, 2, 2) == 2 * 8 / 2 + 2 * 4 / 2
