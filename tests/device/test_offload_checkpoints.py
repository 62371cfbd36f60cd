"""State and masters on the host of a simulated device: saved while copies are on their way, loaded past the device."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

import sherd
from sherd import Flat, OffloadPolicy, Owned
from sherd.tensor.ragged import local_part
from tests.device.test_offload_axes import WIDTH, made, model_of
from tests.device.test_peaks import GPT, TOKENS, held_before, requested
from tests.optim.test_masters import masters_of
from tests.support.models import noise

BOTH = OffloadPolicy(optimizer="host", masters="host")
POLICIES = {
    "both": BOTH,
    "step": OffloadPolicy(gradients="host", masters="host"),
    "masters": OffloadPolicy(masters="host"),
    "half": OffloadPolicy(optimizer="host", masters="host", share=0.5),
}


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        model(noise(step, 0, 3, WIDTH).to(torch.bfloat16).to("sim")).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def built(policy: OffloadPolicy, kind: Any, placement: Any, flattens: bool) -> Any:
    model = model_of(policy, torch.bfloat16, placement=placement)
    optimizer = made(kind, model)
    return model, sherd.flatten_optimizer(optimizer) if flattens else optimizer


def masters_after(folder: str, policy: OffloadPolicy, *how: Any) -> tuple[dict[str, Tensor], ...]:
    """Masters after steps, after a load into another model and the same steps, and of a copy after these."""
    model, optimizer = built(policy, *how)
    items = {"model": model, "optimizer": optimizer}
    train(model, optimizer, range(3))
    sherd.save(folder, items, step=3)
    train(model, optimizer, range(3, 5))
    ours = copies_in(optimizer.state_dict())  # at once, while copies of the last step are on their way
    copied = copy.deepcopy((model, optimizer))
    train(model, optimizer, range(5, 7))
    found = [masters_of(model)]
    train(*copied, range(5, 7))
    found.append(masters_of(copied[0]))
    other, its = built(policy, *how)
    train(other, its, range(1))
    sherd.load(folder, {"model": other, "optimizer": its})
    train(other, its, range(3, 5))
    for key, value in copies_in(its.state_dict()).items():
        assert torch.equal(value, ours[key]), key
    train(other, its, range(5, 7))
    found.append(masters_of(other))
    return tuple({name: each.cpu() for name, each in masters.items()} for masters in found)


def copies_in(state_dict: dict[str, Any]) -> dict[tuple[int, str], Tensor]:
    """Copies of this rank's parts of the state, in host memory."""
    return {
        (key, name): local_part(value).to("cpu", copy=True)
        for key, state in state_dict["state"].items()
        for name, value in state.items()
    }


KINDS = [
    (optim.AdamW, None, False),
    (optim.AdamW, Flat(), True),
    (optim.SGD, None, False),
    (sherd.Muon, Owned(), False),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_goes_on_exactly_with_what_rests_on_the_host(sim_world, tmp_path, policy):
    for at, how in enumerate(KINDS):
        folder = str(tmp_path / str(at))
        world = sim_world(2, pause_us=200, seed=1)
        for straight, copied, loaded in world.run(masters_after, folder, POLICIES[policy], *how).values:
            for name, master in straight.items():
                assert torch.equal(master, copied[name]), (how, name)
                assert torch.equal(master, loaded[name]), (how, name)


def copied_at_once(flattens: bool) -> None:
    """Copies and pickles of an optimizer have the state of its last step."""
    model, optimizer = built(OffloadPolicy(optimizer="host"), optim.AdamW, None, flattens)
    for way in (copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))):
        train(model, optimizer, range(3))
        found = copies_in(way(optimizer).state_dict())
        torch.accelerator.synchronize()
        for key, value in copies_in(optimizer.state_dict()).items():
            assert torch.equal(value, found[key]), key


@pytest.mark.filterwarnings("ignore:a sharded tensor is pickled")
def test_a_copy_of_an_optimizer_waits_for_its_state(sim_world):
    for flattens in (False, True):
        sim_world(2, pause_us=2000, seed=1).run(copied_at_once, flattens)


def bytes_of_loads(folder: str, policy: OffloadPolicy) -> tuple[int, dict[str, int]]:
    """This rank's bytes of state, and the most that each way to load it took of the device."""
    torch.manual_seed(0)
    model: Any = GPT().to("sim").to(torch.bfloat16)
    mesh = init_device_mesh("sim", (2,))
    for unit in (*model.blocks, model):
        sherd.fully_shard(unit, mesh=mesh, offload_policy=policy)
    optimizer = optim.AdamW(model.parameters())
    tokens = torch.zeros(2, TOKENS, dtype=torch.long, device="sim")
    model(tokens).logsumexp(-1).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    items = {"model": model, "optimizer": optimizer}
    sherd.save(folder, items, step=1)
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)  # on rank 0 alone
    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    on_each = StateDictOptions(full_state_dict=True)
    states = {
        "torch": copy.deepcopy(optimizer.state_dict()),
        "full": get_optimizer_state_dict(model, optimizer, options=full),
    }
    ways: dict[str, Callable[[], object]] = {
        "torch": lambda: optimizer.load_state_dict(states["torch"]),
        "sherd": lambda: sherd.load(folder, items),
        "full from rank 0": lambda: set_optimizer_state_dict(model, optimizer, states["full"], options=broadcast),
        "full": lambda: set_optimizer_state_dict(model, optimizer, on_all[0], options=on_each),
    }
    on_all = [states["full"]]
    torch.distributed.broadcast_object_list(on_all, device=torch.device("sim"))
    peaks = {}
    for way, load in ways.items():
        before = held_before()
        requested()
        load()
        peaks[way] = requested() - before
        for state in optimizer.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                local = local_part(state[key])
                assert local.dtype is torch.float32, way
                assert local.is_pinned() or not local.numel(), way
    return 8 * sum(local_part(each).numel() for each in model.parameters()), peaks


def test_loaded_state_does_not_pass_through_the_device(sim_world, tmp_path):
    for nbytes, peaks in sim_world(2).run(bytes_of_loads, str(tmp_path), BOTH).values:
        assert peaks["torch"] == 0
        assert max(peaks.values()) < nbytes / 4, (nbytes, peaks)
