"""Errors of codecs on a device with streams: measured on the lanes, read in order, and no value is changed by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import sherd
from sherd import CommPolicy, Reduction
from sherd.errors import CommError
from tests.support.models import chain, noise

WIDTH = 24


def trained(policy: CommPolicy, reports: bool = False, **options: Any) -> tuple[list[Tensor], list[float | None], str]:
    """The unsharded parameters after some steps, the errors in a report, and what was raised."""
    torch.manual_seed(0)
    model = chain(3, WIDTH).to("sim")
    ranks = torch.distributed.get_world_size()
    shape = (2, 2) if ranks == 4 else (ranks,)
    mesh = init_device_mesh("sim", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for unit in (*model, model):
        sherd.fully_shard(unit, mesh=mesh, comm_policy=policy, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    raised = ""
    report = sherd.comm_report(model)
    for number in range(3):
        x = noise(number, torch.distributed.get_rank(), 3, WIDTH).to("sim")
        try:
            if reports:
                with report:
                    model(x).square().mean().backward()
            else:
                model(x).square().mean().backward()
        except CommError as error:
            raised = str(error)
        optimizer.step()
        optimizer.zero_grad()
    torch.accelerator.synchronize()
    values = [each.full_tensor().cpu() for each in model.parameters()]
    return values, [row.error for row in report.rows], raised


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("options", [{}, {"placement": sherd.Flat()}, {"offload_policy": sherd.CPUOffloadPolicy()}])
def test_measuring_changes_no_value_and_reads_nothing_early(options, num_ranks, sim_world):
    if num_ranks == 4 and options:
        pytest.skip("replicas are tried once")
    given = {"gather": "int8", "reduce": Reduction(wire="int8")}
    ran = sim_world(num_ranks, pause_us=200, seed=1)
    plain = ran.run(trained, CommPolicy(**given), **options).values
    limited = ran.run(trained, CommPolicy(**given, error_limit=0.5), **options).values
    measured = ran.run(trained, CommPolicy(**given), True, **options).values
    for (values, *_), (of_limited, *_), (of_measured, errors, _) in zip(plain, limited, measured, strict=True):
        assert all(
            torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(values, of_limited, of_measured, strict=True)
        )
        assert all(0 < error < 0.05 for error in errors)
    fallen = ran.run(trained, CommPolicy(**given, error_limit=1e-6, above_limit="unencoded"), **options).values
    assert not any(raised for *_, raised in fallen)
    raising = ran.run(trained, CommPolicy(**given, error_limit=1e-6), **options).values
    assert all("codecs change values" in raised for *_, raised in raising)
