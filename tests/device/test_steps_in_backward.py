"""Matrices that are stepped within backward travel beside it: in the order of streams, with no wait of the host."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import sherd
import simdevice
from sherd.optim.exchange import Bucket, Moving
from tests.device.small import WIDTH
from tests.device.test_peaks import held_before, requested
from tests.device.test_travel_of_matrices import MESHES, PLACEMENTS
from tests.support.models import chain, noise

STEPS = 4
BLOCKS = 4


def trained(model: torch.nn.Module, device: str) -> tuple[list[float], list[str], list[str]]:
    """The losses, what the host waited for in the last backward, and what it queued there, in order."""
    optimizer = sherd.Muon(model, lr=0.02, ns_dtype=torch.float32)
    if device == "sim":
        sherd.step_in_backward(model, optimizer)
    losses, waits, queued = [], [], list[str]()
    for block in model:
        block.register_full_backward_pre_hook(lambda *_: queued.append("backward"))
    start, wait, updates = Bucket._start, Moving.wait, optimizer.updates
    numbers: dict[int, int] = {}

    def started(self: Bucket, *args: object) -> Moving:
        moving = start(self, *args)
        numbers[id(moving)] = len(numbers)
        queued.append(f"send {numbers[id(moving)]}")
        return moving

    def waited(self: Moving) -> object:
        queued.append(f"take {numbers[id(self)]}")
        return wait(self)

    optimizer.updates = lambda *given: queued.append("products") or updates(*given)
    with mock.patch.object(Bucket, "_start", started), mock.patch.object(Moving, "wait", waited):
        for number in range(STEPS):
            loss = model(noise(number, 0, 3, WIDTH).to(device).requires_grad_()).square().mean()
            for each in (waits, queued, numbers):
                each.clear()
            if device == "sim":
                simdevice.on_host_wait(waits.append)
            loss.backward()
            if device == "sim":
                simdevice.on_host_wait(None)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, waits, queued


def on_device(how: str, shape: str) -> tuple[list[float], list[str], list[str]]:
    sizes, names = MESHES[shape]
    mesh = init_device_mesh("sim", sizes, mesh_dim_names=names)
    options = {} if PLACEMENTS[how] is None else {"placement": PLACEMENTS[how]}
    model = chain(BLOCKS, WIDTH).to("sim")
    for unit in (*model, model):
        sherd.fully_shard(unit, mesh=mesh, **options)
    return trained(model, "sim")


def beside(queued: list[str]) -> tuple[list[set[str]], int]:
    """What is computed between each exchange's start and the moment that compute takes what it brings; and how many
    exchanges start before backward enters the last block."""
    sent = [at for at, each in enumerate(queued) if each.startswith("send")]
    taken = [queued.index(queued[at].replace("send", "take")) for at in sent]
    computed = [{"backward", "products"} & set(queued[at:end]) for at, end in zip(sent, taken, strict=True)]
    last = max(at for at, each in enumerate(queued) if each == "backward")
    return computed, sum(at < last for at in sent)


@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("how", PLACEMENTS)
def test_what_a_unit_sends_lies_beside_the_backward_of_those_before_it(how, shape, sim_world):
    plain = chain(BLOCKS, WIDTH)
    expected, *_ = trained(plain, "cpu")
    for seed in range(3):
        found = sim_world(4 if "x" in shape else 2, pause_us=300, seed=seed).run(on_device, how, shape)
        by_rank = []
        for losses, waits, queued in found.values:
            assert losses == pytest.approx(expected, rel=1e-5)
            assert not waits
            computed, num_early = beside(queued)
            assert all("backward" in each for each in computed[:num_early]), queued
            by_rank.append(computed)
        # Behind the last backward, ranks compute in turns: some have nothing to compute beside what others send.
        exposed = [number for number, each in enumerate(zip(*by_rank, strict=True)) if not any(each)]
        assert all(number >= len(by_rank[0]) - 2 for number in exposed), found.values


UNIT_BYTES = 4 * 128 * 128


def scratch(num_units: int, how: str) -> int:
    """How much more a settled backward holds when Muon steps units within it, beside SGD with momentum."""
    options = {} if PLACEMENTS[how] is None else {"placement": PLACEMENTS[how]}
    peaks = []
    for make in (sherd.Muon, torch.optim.SGD):
        model = torch.nn.Sequential(*(torch.nn.Linear(128, 128, bias=False) for _ in range(num_units))).to("sim")
        for unit in (*model, model):
            sherd.fully_shard(unit, mesh=init_device_mesh("sim", (2,)), **options)
        before = held_before()
        kwargs = {"ns_dtype": torch.float32} if make is sherd.Muon else {"momentum": 0.9}
        sherd.step_in_backward(model, make(model if make is sherd.Muon else model.parameters(), lr=0.02, **kwargs))
        for _ in range(3):
            loss = model(torch.ones(2, 128, device="sim")).square().mean()
            requested()
            loss.backward()
            peak = requested() - before
        peaks.append(peak)
        del model, loss
    return peaks[0] - peaks[1]


@pytest.mark.parametrize("how", PLACEMENTS)
def test_backward_holds_the_scratch_of_the_units_under_way_however_many_there_are(how, sim_world):
    few, many = (max(sim_world(2).run(scratch, number, how).values) for number in (5, 9))
    assert many <= few + 1024
    assert many <= 8 * UNIT_BYTES


def of_several_backwards(steps_within: bool) -> list[torch.Tensor]:
    """The unsharded parameters, where only the last of three backwards before a step is said to be the last."""
    model = chain(BLOCKS, WIDTH).append(torch.nn.Linear(WIDTH, 5)).to("sim")  # of the root, which is reduced last
    for unit in (*model[:BLOCKS], model):
        sherd.fully_shard(unit, mesh=init_device_mesh("sim", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if steps_within:
        sherd.step_in_backward(model, optimizer)
    for number in range(3 * STEPS):
        is_last = number % 3 == 2
        model.set_is_last_backward(is_last)
        model(noise(number, torch.distributed.get_rank(), 3, WIDTH).to("sim")).square().mean().backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    torch.accelerator.synchronize()
    return [each.full_tensor().cpu() for each in model.parameters()]


def test_a_reduction_that_an_earlier_backward_has_left_does_not_make_the_step(sim_world):
    world = sim_world(2, pause_us=300, seed=1)
    expected = world.run(of_several_backwards, False).values
    for ours, theirs in zip(world.run(of_several_backwards, True).values, expected, strict=True):
        assert all(map(torch.equal, ours, theirs))
