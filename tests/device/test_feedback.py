"""What gradients lose on the wire, on a device with lanes: the values of ranks on a CPU, no race and no wait."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import sherd
import simdevice
from sherd import CommPolicy, Reduction
from tests.support.models import chain, noise

WIDTH = 24
BF16 = torch.bfloat16
REDUCTIONS = {
    "codec": Reduction(wire="int8", feedback=True),
    "at random": Reduction(wire=BF16, feedback=True, rounding="stochastic"),
    "in order": Reduction(wire=BF16, order="ranks", rounding="stochastic"),
}


def trained(device: str, reduction: Reduction, folder: Path | None = None) -> tuple[list[Tensor], int]:
    """Trains seven steps, maybe the last five with a model that loads. Returns parameters, and waits of the host.

    These are of the last step, unless it loads: after the first of an optimizer, ranks compare the values of replicas.
    """

    def made() -> tuple[sherd.FSDPModule, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = chain(3, WIDTH).to(device)
        shape = (2, 2) if dist.get_world_size() == 4 else (2,)
        mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for unit in (*model, model):
            sherd.fully_shard(unit, mesh=mesh, comm_policy=CommPolicy(reduce=reduction))
        return model, torch.optim.SGD(model.parameters(), lr=0.5, foreach=True)

    model, optimizer = made()
    inputs = [noise(number, dist.get_rank(), 3, WIDTH).to(device) for number in range(7)]
    for number, x in enumerate(inputs):
        if number == 2 and folder is not None:
            sherd.save(folder, {"model": model}, step=number)
            model, optimizer = made()
            sherd.load(folder, {"model": model})
        elif number == 6 and device == "sim":
            simdevice.host_waits()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    waits = len(simdevice.host_waits()) if device == "sim" and folder is None else 0
    return [each.full_tensor().cpu() for each in model.parameters()], waits


@pytest.mark.values
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_values_are_those_of_ranks_on_a_cpu_also_when_resumed(reduction, num_ranks, sim_world, world, tmp_path):
    expected, _ = world(num_ranks).run(trained, "cpu", REDUCTIONS[reduction])[0]
    for number, folder in enumerate((None, tmp_path / "saved")):
        ranks = sim_world(num_ranks, pause_us=200, seed=number)
        for found, waits in ranks.run(trained, "sim", REDUCTIONS[reduction], folder).values:
            assert all(map(torch.equal, found, expected))
            assert waits == 0
