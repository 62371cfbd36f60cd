"""Optimizer state, masters and gradients that rest elsewhere: the values of no offload to the last bit, fewer bytes on
the device, no race and no wait of the host in a settled step."""

from __future__ import annotations

import errno
import gc
import os
import tempfile
import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh

import sherd
import simdevice
from sherd import Blocks, CPUOffloadPolicy, Disk, OffloadPolicy
from sherd.comm.transport import LargeCoalesced
from sherd.engine.make import build as make_build
from sherd.errors import ScratchError
from sherd.optim import chunks
from sherd.policy import SavedOnHost
from tests.device.test_peaks import GPT, TOKENS, held_before, requested
from tests.optim.test_masters import KINDS, made
from tests.support.models import chain, noise

pytestmark = pytest.mark.filterwarnings("ignore:scratch folder .* is on tmpfs")

WIDTH = 24
DISK = Disk(tempfile.gettempdir())
STATE, ON_HOST = OffloadPolicy(optimizer="host"), OffloadPolicy(gradients="host")
AXES = {
    "state": STATE,
    "step": ON_HOST,
    "everything": CPUOffloadPolicy(),
    "state, pageable": OffloadPolicy(optimizer="host", pin_memory=False),
    "half of the state": OffloadPolicy(optimizer="host", share=0.5),
    "disk": OffloadPolicy(parameters=DISK, optimizer=DISK),
}


def model_of(policy: OffloadPolicy, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(0)
    model = chain(3, WIDTH).append(nn.Linear(WIDTH, 5)).to("sim").to(torch.bfloat16).to(dtype)
    shape = (2, 2) if torch.distributed.get_world_size() == 4 else (torch.distributed.get_world_size(),)
    mesh = init_device_mesh("sim", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for unit in (*model[:3], model):
        sherd.fully_shard(unit, mesh=mesh, offload_policy=policy, **options)
    return model


def stepped(model: Any, optimizer: Any, steps: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Trains with clipping. Returns the unsharded parameters."""
    for number in range(steps):
        x = noise(number, torch.distributed.get_rank(), 3, WIDTH).to(torch.bfloat16).to(dtype)
        model(x.to("sim")).float().square().mean().backward()
        sherd.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    torch.accelerator.synchronize()
    return [each.full_tensor().float().cpu() for each in model.parameters()]


def trained(policy: OffloadPolicy, kind: Any, placement: Any, flattens: bool = False) -> list[Tensor]:
    model = model_of(policy, placement=placement)
    optimizer = made(kind, model)
    if flattens:
        sherd.flatten_optimizer(optimizer)
    return stepped(model, optimizer, 4)


def is_same(policy: OffloadPolicy, *options: Any, chunk: int = 64) -> bool:
    """In chunks that cut tensors, and parameter groups."""
    with mock.patch.object(chunks, "CHUNK_NUMEL", chunk):
        pairs = zip(trained(policy, *options), trained(OffloadPolicy(), *options), strict=True)
        return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.values
@pytest.mark.parametrize("axis", AXES)
def test_a_step_has_the_values_of_one_without_offload(axis, sim_world):
    for options in KINDS:
        if axis not in ("state", "half of the state", "state, pageable") and options[0] is not optim.AdamW:
            continue  # the host computes products of its own
        assert all(sim_world(2, pause_us=200, seed=1).run(is_same, AXES[axis], *options).values), options


def compiled(policy: OffloadPolicy) -> tuple[int, list[Tensor]]:
    """How many graphs a compiled step of the optimizer has, and the unsharded parameters."""
    graphs = []
    model = model_of(policy)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.step = torch.compile(  # type: ignore[method-assign]
        optimizer.step, backend=lambda graph, _: graphs.append(graph) or graph.forward
    )
    with mock.patch.object(chunks, "CHUNK_NUMEL", 64), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Dynamo imports what torch has deprecated
        found = stepped(model, optimizer, 3)
    return len(graphs), found


@pytest.mark.parametrize("axis", ["state", "half of the state"])
def test_a_compiled_step_in_chunks_is_compiled_for_none_of_them(axis, sim_world):
    ((num_graphs, found), *_) = sim_world(2).run(compiled, AXES[axis]).values
    ((_, expected), *_) = sim_world(2).run(compiled, OffloadPolicy()).values
    assert num_graphs == 0
    torch.testing.assert_close(found, expected)


POLICIES = {
    **AXES,
    "masters": OffloadPolicy(masters="host", optimizer="host"),
    "masters, step": OffloadPolicy(masters="host", gradients="host"),
    "masters, everything": OffloadPolicy(masters="host", parameters="host"),
    "half of everything": CPUOffloadPolicy(share=0.5),
    "masters, disk": OffloadPolicy(masters=DISK, parameters=DISK),
    "half on a disk": OffloadPolicy(parameters=DISK, share=0.5),
    "activations": OffloadPolicy(activations="host"),
    "activations, state": OffloadPolicy(activations="host", optimizer="host"),
}
PLACED = {
    "Shard": {},
    "Flat": {"placement": sherd.Flat()},
    "Blocks": {"placement": Blocks(2)},
    "Owned": {"placement": sherd.Owned()},
    "HSDP": {"placements": "hsdp"},
}
OPTIMIZED = {
    "AdamW": (optim.AdamW, False),
    "flattened": (optim.AdamW, True),
    "SGD": (optim.SGD, False),
    "Muon": (sherd.Muon, False),
}


def trained_in_pair(axis: str, placed: str, optimized: str, offloads: bool) -> tuple[list[Tensor], dict[str, int]]:
    """The unsharded parameters, and what the host waited for in the last step of the optimizer."""
    policy, (kind, flattens), options = POLICIES[axis], OPTIMIZED[optimized], PLACED[placed]
    dtype = torch.float32 if policy.masters is None else torch.bfloat16
    if not offloads:
        policy = OffloadPolicy(masters=None if policy.masters is None else "device")
    model = model_of(policy, dtype, **options)
    optimizer = made(kind, model, flattens)
    stepped(model, optimizer, 3, dtype)
    model(
        noise(3, torch.distributed.get_rank(), 3, WIDTH).to(torch.bfloat16).to(dtype).to("sim")
    ).float().sum().backward()
    simdevice.host_waits()
    optimizer.step()
    waits = simdevice.host_waits()
    torch.accelerator.synchronize()
    return [each.full_tensor().float().cpu() for each in model.parameters()], waits


def in_pair(*of_case: str) -> tuple[bool, dict[str, int]]:
    small = partial(SavedOnHost, min_bytes=1)
    with mock.patch.object(chunks, "CHUNK_NUMEL", 64), mock.patch.object(make_build, "SavedOnHost", small):
        found, waits = trained_in_pair(*of_case, True)
        expected, _ = trained_in_pair(*of_case, False)
    return all(map(torch.equal, found, expected)), waits


@pytest.mark.pairs
@pytest.mark.parametrize("optimized", OPTIMIZED)
@pytest.mark.parametrize("placed", PLACED)
@pytest.mark.parametrize("axis", POLICIES)
def test_every_place_under_every_layout_has_the_values_of_no_offload(axis, placed, optimized, sim_world):
    steps_on_host = POLICIES[axis].step_place == "host"
    if optimized == "Muon" and (steps_on_host or POLICIES[axis].share < 1):
        return  # the host computes products of its own
    world = sim_world(4 if placed == "HSDP" else 2, pause_us=200, seed=6)
    for same, waits in world.run(in_pair, axis, placed, optimized).values:
        assert same
        assert not waits or optimized == "Muon" or "pageable" in axis, waits


class Counting(optim.Optimizer):
    """Has state of no parameter, which the step goes by."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        number = self.state["all"]["number"] = self.state["all"].get("number", 0) + 1
        for group in self.param_groups:
            for each in group["params"]:
                mean = self.state[each].setdefault("mean", torch.zeros_like(each))
                each.sub_(mean.mul_(0.9).add_(each.grad), alpha=group["lr"] / number)


class Subclass(optim.AdamW):
    """Calls the step of torch's class, which has steps of its own in chunks."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


OPTIMIZERS = {"state of no parameter": Counting, "subclass": Subclass}


def otherwise(policy: OffloadPolicy, how: str) -> list[Tensor]:
    """The unsharded parameters after steps in another kind of loop."""
    model = model_of(policy, placement=Blocks(2) if how == "some without gradients" else None)
    optim.AdamW([nn.Parameter(torch.ones(1))])  # torch prepares a class's step with its first object
    optimizer = OPTIMIZERS.get(how, optim.AdamW)(model.parameters(), lr=1e-2)
    scaler = sherd.ShardedGradScaler("sim", init_scale=8.0, enabled=how == "scaler")
    if how == "step in backward":
        sherd.step_in_backward(model, optimizer)
    if how == "evaluation first":
        with torch.inference_mode():
            model(torch.ones(3, WIDTH, device="sim"))
    for number in range(4):
        with sherd.accumulate(model, 2) if how == "accumulate" else nullcontext():
            for micro in range(1 + (how == "accumulate")):
                x = noise(2 * number + micro, torch.distributed.get_rank(), 3, WIDTH).to("sim")
                scaler.scale(model(x).square().mean()).backward()
        if how == "some without gradients" and number % 2:
            model[1].up.weight.grad = None
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    torch.accelerator.synchronize()
    return [each.full_tensor().cpu() for each in model.parameters()]


def is_same_otherwise(policy: OffloadPolicy, how: str) -> bool:
    with mock.patch.object(chunks, "CHUNK_NUMEL", 64):
        pairs = zip(otherwise(policy, how), otherwise(OffloadPolicy(), how), strict=True)
        return all(torch.equal(one, other) for one, other in pairs)


def with_masters(policy: OffloadPolicy) -> list[Tensor]:
    model = model_of(policy, torch.bfloat16)
    return stepped(model, optim.AdamW(model.parameters(), lr=1e-2), 4, torch.bfloat16)


def is_same_with_masters(policies: list[OffloadPolicy]) -> list[bool]:
    with mock.patch.object(chunks, "CHUNK_NUMEL", 64):
        near = with_masters(OffloadPolicy(masters="device"))
        return [all(map(torch.equal, with_masters(policy), near)) for policy in policies]


def test_masters_have_the_same_values_wherever_they_rest(sim_world, tmp_path):
    disk = Disk(str(tmp_path))
    policies = [
        OffloadPolicy(masters="host"),
        OffloadPolicy(masters="host", optimizer="host"),
        OffloadPolicy(masters=disk, optimizer=disk),
        OffloadPolicy(masters="host", gradients="host"),
        OffloadPolicy(masters="host", parameters="host"),
        OffloadPolicy(masters=disk, optimizer=disk, parameters="host"),
    ]
    for values in sim_world(2, pause_us=200, seed=5).run(is_same_with_masters, policies).values:
        assert values == [True] * len(policies)


@pytest.mark.values
@pytest.mark.parametrize("axis", ["state", "step", "disk"])
@pytest.mark.parametrize(
    "how",
    ["accumulate", "scaler", "step in backward", "some without gradients", "evaluation first", *OPTIMIZERS],
)
def test_other_loops_have_the_values_of_no_offload(axis, how, sim_world):
    assert all(sim_world(2, pause_us=200, seed=4).run(is_same_otherwise, AXES[axis], how).values)


def test_state_on_a_disk_has_the_same_values(sim_world, tmp_path):
    disk = Disk(str(tmp_path))
    for policy in (OffloadPolicy(optimizer=disk), OffloadPolicy(gradients="host", optimizer=disk)):
        assert all(sim_world(2, pause_us=200, seed=2).run(is_same, policy, optim.AdamW, None).values), policy


def with_large_groups(policy: OffloadPolicy) -> tuple[bool, str]:
    """Whether values are those of no offload where each tensor is gathered by itself, and what a lost disk says."""
    with mock.patch.object(LargeCoalesced, "each_from_bytes", 0.0):
        same, model = is_same(policy, optim.AdamW, None), model_of(policy)
        broken = mock.Mock(side_effect=OSError(errno.EIO, "broken"))
        with mock.patch.object(os, "preadv", broken if torch.distributed.get_rank() else os.preadv):
            try:
                model(noise(0, 0, 3, WIDTH).to("sim"))
            except ScratchError as error:
                return same, str(error)
    return same, "nothing"


def test_large_groups_are_read_from_a_disk_as_others(sim_world, tmp_path):
    disk = Disk(str(tmp_path))  # after a failure a process uses its folder no more
    policy = OffloadPolicy(parameters=disk, optimizer=disk)
    (one, said), (other, told) = sim_world(2, pause_us=200, seed=3).run(with_large_groups, policy).values
    assert (one, other) == (True, True)
    assert all("on rank 1: scratch file" in each and "broken" in each for each in (said, told))


def wrapped(policy: OffloadPolicy, flat: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = chain(2, WIDTH).append(nn.Linear(WIDTH, 5)).to("sim")
    mesh, device = init_device_mesh("sim", (2,)), torch.accelerator.current_device_index()
    options = {"cpu_offload": policy, "device_mesh": mesh, "device_id": device, "use_orig_params": not flat}
    for index in range(2):
        model[index] = sherd.FullyShardedDataParallel(model[index], **options)
    model = sherd.FullyShardedDataParallel(model, **options)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(3):
        model(noise(number, torch.distributed.get_rank(), 3, WIDTH).to("sim")).square().mean().backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    torch.accelerator.synchronize()
    with sherd.unsharded(model):
        return [each.detach().cpu().clone() for each in model.parameters()]


def is_same_wrapped(policy: OffloadPolicy, flat: bool) -> bool:
    with mock.patch.object(chunks, "CHUNK_NUMEL", 64):
        pairs = zip(wrapped(policy, flat), wrapped(OffloadPolicy(), flat), strict=True)
        return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.values
@pytest.mark.parametrize("axis", ["state", "step", "disk"])
@pytest.mark.parametrize("flat", [True, False])
def test_the_wrapper_takes_the_policy_as_cpu_offload(axis, flat, sim_world):
    assert all(sim_world(2, pause_us=200, seed=3).run(is_same_wrapped, AXES[axis], flat).values)


def where_flat_state_rests() -> set[str]:
    mesh, device = init_device_mesh("sim", (2,)), torch.accelerator.current_device_index()
    model = sherd.FullyShardedDataParallel(chain(1, WIDTH), cpu_offload=STATE, device_mesh=mesh, device_id=device)
    optimizer = optim.AdamW(model.parameters())
    model(torch.ones(2, WIDTH, device="sim")).sum().backward()
    optimizer.step()
    return {each.device.type for state in optimizer.state.values() for each in state.values()}


def test_state_of_a_flat_parameter_rests_on_the_host(sim_world):
    assert sim_world(2).run(where_flat_state_rests).values == [{"cpu"}] * 2


def scaled_on_the_host() -> tuple[float, bool]:
    """The count of steps, and whether the weights are as before, after a fused step with inf among the gradients."""
    model = model_of(ON_HOST)
    before = [each.to_local().clone() for each in model.parameters()]
    optimizer = optim.AdamW(model.parameters(), fused=True)
    scaler = sherd.ShardedGradScaler("sim", init_scale=8.0)
    scaler.scale(model(torch.full((3, WIDTH), torch.inf, device="sim")).sum()).backward()
    scaler.step(optimizer)
    same = all(torch.equal(one, each.to_local()) for one, each in zip(before, model.parameters(), strict=True))
    return max(float(state["step"]) for state in optimizer.state.values()), same


def test_a_fused_step_on_the_host_is_skipped_where_a_scaler_says_so(sim_world):
    assert sim_world(2, pause_us=2000, seed=5).run(scaled_on_the_host).values == [(0.0, True)] * 2


@pytest.mark.parametrize("axis", ["state", "step", "disk"])
def test_replicas_and_a_single_rank_do_so_too(axis, sim_world):
    for num_ranks in (1, 4):
        assert all(sim_world(num_ranks).run(is_same, AXES[axis], optim.AdamW, None).values), num_ranks


def of_a_step(policy: OffloadPolicy, dtype: torch.dtype = torch.float32) -> tuple[int, dict[str, int]]:
    """The most bytes asked for in a settled step of a GPT with AdamW, and what the host waited for in its step."""
    before = held_before()
    torch.manual_seed(0)
    model: Any = GPT().to("sim").to(dtype)
    mesh = init_device_mesh("sim", (2,))
    for unit in (*model.blocks, model):
        sherd.fully_shard(unit, mesh=mesh, offload_policy=policy)
    optimizer = optim.AdamW(model.parameters())
    tokens = torch.zeros(2, TOKENS, dtype=torch.long, device="sim")
    for _ in range(3):
        requested()
        model(tokens).logsumexp(-1).mean().backward()
        simdevice.host_waits()
        optimizer.step()
        waits = simdevice.host_waits()
        optimizer.zero_grad()
        gc.collect()
        peak = requested()
    return peak - before, waits


def of_steps(policies: list[OffloadPolicy], *options: Any) -> list[tuple[int, dict[str, int]]]:
    with mock.patch.object(chunks, "CHUNK_NUMEL", 1 << 16):
        return [of_a_step(policy, *options) for policy in policies]


def test_the_peak_falls_with_the_share_of_state_on_the_host(sim_world):
    shares = [OffloadPolicy(optimizer="host", share=share) for share in (0, 0.25, 0.5, 0.75, 1)]
    for found in sim_world(2).run(of_steps, shares).values:
        peaks = [peak for peak, _ in found]
        assert peaks == sorted(peaks, reverse=True)
        assert peaks[0] - peaks[2] == pytest.approx((peaks[0] - peaks[-1]) / 2, rel=0.25)
        assert peaks[-1] <= 0.55 * peaks[0]
        assert not any(waits for _, waits in found)


def test_masters_take_two_bytes_and_a_bit_of_an_element_where_they_rest(sim_world):
    policies = [OffloadPolicy(optimizer="host", masters=masters) for masters in ("host", "device")]
    for (far, waits), (near, _) in sim_world(2).run(of_steps, policies, torch.bfloat16).values:
        assert near - far == pytest.approx(2.125 * sum(each.numel() for each in GPT().parameters()) / 2, rel=0.1)
        assert not waits


def verified(axis: str) -> str:
    """What `verify_equivalence` says of a training under a policy; empty if it is equivalent."""
    mesh = init_device_mesh("sim", (2,))

    def shard(model: Any) -> Any:
        for unit in (*model, model):
            sherd.fully_shard(unit, mesh=mesh, offload_policy=POLICIES[axis])
        return model

    def build() -> nn.Module:
        torch.manual_seed(0)
        return chain(2, WIDTH).to("sim")

    batches = [noise(number, 0, 4, WIDTH).to("sim") for number in range(2)]
    found = sherd.verify_equivalence(build, batches, shard=shard, loss=lambda model, x: model(x).square().mean())
    return "" if found.ok else str(found)


def test_trainings_under_the_policies_are_verified_as_the_plain_one(sim_world):
    for axis in ("state", "step", "everything", "half of the state", "activations", "disk"):
        assert sim_world(2).run(verified, axis).values == [""] * 2, axis


def keeps_from_capture(policy: OffloadPolicy) -> str:
    """What `capturable` says of a training under a policy."""
    model = model_of(policy)
    optimizer = optim.AdamW(model.parameters(), capturable=policy.step_place == "device")
    x = noise(0, torch.distributed.get_rank(), 3, WIDTH).to("sim")

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    report = sherd.capturable(model, step, warmup=2)
    return str(report)


def test_what_keeps_a_step_with_offload_from_being_captured_is_named_with_its_axis(sim_world, tmp_path):
    on_disk = OffloadPolicy(optimizer=Disk(str(tmp_path)))
    named = {
        AXES["step"]: "OffloadPolicy(gradients='host') steps in host memory, for which the host waits",
        AXES["everything"]: "OffloadPolicy(parameters='host'), as CPUOffloadPolicy() has it, steps in host memory",
        POLICIES["half of everything"]: "OffloadPolicy(parameters='host'), as CPUOffloadPolicy() has it, steps in",
        AXES["state, pageable"]: "OffloadPolicy(optimizer='host', pin_memory=False): the host waits for each copy",
        on_disk: f"OffloadPolicy(optimizer=Disk(path={str(tmp_path)!r})) reads and writes files",
        AXES["disk"]: f"OffloadPolicy(parameters={DISK!r}) steps in host memory",
        AXES["state"]: "has not waited for what its reduce lane does",
    }
    for policy, words in named.items():
        for said in sim_world(2).run(keeps_from_capture, policy).values:
            assert words in said, said
            assert ("CPUOffloadPolicy" in said) == (policy.parameters == "host"), said


def read_after_a_step_of_nothing(masters: str | None, reader: str) -> None:
    dtype = torch.float32 if masters is None else torch.bfloat16
    model = model_of(OffloadPolicy(optimizer="host", masters=masters), dtype)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    sherd.step_in_backward(model, optimizer)
    for number in range(2):
        model(noise(number, 0, 3, WIDTH).to("sim").to(dtype)).float().square().mean().backward()
        optimizer.step()  # of nothing: backward has made it
    if reader == "average":
        sherd.Ema(model)  # reads masters: the device sees the race
        return
    moments = [each["exp_avg"].to_local() for each in optimizer.state_dict()["state"].values()]
    found = [each.clone() for each in moments]
    torch.accelerator.synchronize()
    assert all(map(torch.equal, found, moments))


@pytest.mark.parametrize(("masters", "reader"), [(None, "state dict"), ("host", "state dict"), ("host", "average")])
def test_readers_wait_for_a_step_within_backward_also_after_a_step_of_nothing(masters, reader, sim_world):
    sim_world(2, pause_us=2000, seed=3).run(read_after_a_step_of_nothing, masters, reader)
