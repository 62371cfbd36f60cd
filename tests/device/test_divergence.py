"""Ranks that go different ways on a device, where it is the device that waits and not the host: all raise one error."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.divergence.programs import sharded, step
from tests.support.ranks import RanksFailed


def other_units(order: tuple[int, ...]) -> None:
    model = sharded(mesh=init_device_mesh("sim", (dist.get_world_size(),)))
    for number in range(6):
        step(model, *(order if dist.get_rank() == 1 and number > 3 else ()))
        torch.accelerator.synchronize()


@pytest.mark.parametrize("order", [(0, 2), (1, 0, 2), (0, 1, 2, 0)], ids=str)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_that_runs_other_units_is_named_on_all_ranks(num_ranks, order, sim_world):
    with pytest.raises(RanksFailed) as failed:
        sim_world(num_ranks).run(other_units, order)
    for rank in range(num_ranks):
        kind, text = failed.value.errors[rank]
        assert kind == "CommError"
        assert "ranks are about to start different collectives" in text
