"""FSDP2 and sherd on the simulated clock: eight ranks are imagined, nothing is computed, and a step has a time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import simdevice
from bench.device import played
from bench.device.cases import SMALLER
from bench.pages import read_csv
from bench.published import DATA, read_rows
from bench.systems import DDP, FSDP2, SHERD, System
from sherd.tools.simulate.cluster import read_cluster
from sherd.train.config import read_tree
from simdevice import machines


@pytest.fixture
def eight_ranks(device: torch.device) -> Iterator[None]:
    simdevice.imagine_ranks(8)
    yield
    torch.accelerator.synchronize()
    dist.destroy_process_group()


def times_of_a_step(system: System) -> simdevice.Times:
    """Returns the times of the third step of four blocks in bfloat16."""
    torch.manual_seed(0)
    model = system.distribute(SMALLER.on(torch.device("sim:0"), torch.bfloat16), init_device_mesh("sim", (8,)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    tokens, targets = (each.to("sim:0") for each in SMALLER.batch(0))
    for _ in range(3):
        torch.accelerator.synchronize()
        simdevice.reset_times()
        model(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return simdevice.times()


@pytest.mark.usefixtures("eight_ranks")
def test_a_step_has_a_time_that_is_the_same_each_time():
    for system in (FSDP2, SHERD):
        found = []
        for _ in range(2):
            simdevice.configure(machine="h100", compute=False)
            found.append(times_of_a_step(system))
        times, again = found
        # The second model's streams are others.
        assert (times.end, times.host, times.compute) == (again.end, again.host, again.compute), system.name
        assert 1e3 < times.compute.computing < times.end < 1e5, system.name
        assert any(each.communicating for each in times.streams.values()), system.name


@pytest.mark.usefixtures("eight_ranks")
def test_ddp_finds_imagined_ranks_alike_and_copies_gradients_once_they_are_reduced():
    simdevice.configure(machine="h100", compute=False)
    assert times_of_a_step(DDP).end > 1e3
    tasks = simdevice.trace()
    *_, reduced = (task for task in tasks if task.name == "all_reduce")
    copied = max(task.start for task in tasks if task.name == "copy")
    assert copied >= reduced.end


def test_the_machines_of_the_device_are_those_of_the_clusters():
    for name in machines.names():
        cluster, figures = read_cluster(name), machines.record(name)
        device = cluster.device
        assert (figures["launch"], figures["host"]) == pytest.approx((device.launch, device.host)), name
        assert figures["bandwidth"] == pytest.approx(device.bandwidth), name
        for dtype in machines.DTYPES:
            assert figures[f"flops.{dtype}"] == pytest.approx(device.flops[dtype]), name
        for link in machines.LINKS:
            its = getattr(cluster, link)
            found = (figures[f"{link}.latency"], figures[f"{link}.bandwidth"])
            assert found == pytest.approx((its.latency, its.bandwidth)), name


@pytest.mark.slow
def test_a_published_training_is_played_as_the_table_says():
    tree = read_tree(str(DATA))
    (row,) = (row for row in read_rows(tree) if row.id == "titan-533")
    expected = {line[0]: line for line in read_csv(played.TABLE)}[row.id]
    assert played.in_a_process(played.played_line, tree, row) == expected
