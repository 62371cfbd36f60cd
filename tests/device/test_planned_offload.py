"""What a plan says of offload is what the simulated device counts, and what `memory_report` says: bytes at rest, on the
device and on the host, and those of the optimizer's step."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import sherd
import simdevice
from sherd.engine.make import build
from sherd.memory import report as memory
from sherd.optim import chunks
from sherd.policy import OffloadPolicy, SavedOnHost
from sherd.tools.plan.sharding import spread
from sherd.tools.simulate import saved, sharded
from sherd.tools.simulate.settings import offload_policy
from tests.device.test_offload_activations import (
    CHECKPOINTS,
    ROWS,
    WIDTH,
    Stack,
    forget_host_memory,
    in_host_memory,
    layers,
)
from tests.device.test_peaks import GPT, TOKENS, held_before, requested

CHUNK = 1 << 16
SCALARS = 4 * sum(1 for _ in GPT().parameters())
"""Counts of steps, one for each parameter or fewer; and flags in reduced gradients."""
KINDS, SHARES = ("state", "masters", "step", "everything"), (0, 0.25, 0.5, 0.75, 1)
FIXED: dict[str, Any] = {"strategy": "auto", "placement": "shard", "wrapping": "auto", "reshard": True, "prefetch": 1}
FIXED |= {"checkpointing": False, "micro_batch": 2}
OPTIMIZERS = {
    "sgd-momentum": lambda model: optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=True),
    "adamw-fused": lambda model: optim.AdamW(model.parameters(), fused=True),
    "muon": lambda model: sherd.Muon(model),
}


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def wrap_units(model: Any, mesh: Any, offload_policy: OffloadPolicy, mp_policy: sherd.MixedPrecisionPolicy) -> Any:
    """The units of `shard_units`, made by wrappers."""
    halves = sherd.MixedPrecision(mp_policy.param_dtype, mp_policy.reduce_dtype)
    device = torch.accelerator.current_device_index()
    options = {"device_mesh": mesh, "device_id": device, "cpu_offload": offload_policy, "mixed_precision": halves}
    for at, block in enumerate(model.blocks):
        model.blocks[at] = sherd.FullyShardedDataParallel(block, use_orig_params=True, **options)
    return sherd.FullyShardedDataParallel(model, use_orig_params=True, **options)


def counted(offload: str, kind: str, is_wrapped: bool = False) -> dict[str, int]:
    """The bytes of a settled step: what is asked for at rest and in the optimizer's step, and what the report says."""
    before = held_before()
    model: Any = GPT().to("sim")
    if offload.startswith("masters"):
        model.to(torch.bfloat16)
    precision = sherd.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    policy, mesh = offload_policy(offload), init_device_mesh("sim", (torch.distributed.get_world_size(),))
    model = (wrap_units if is_wrapped else shard_units)(model, mesh=mesh, offload_policy=policy, mp_policy=precision)
    optimizer = OPTIMIZERS[kind](model)
    tokens = torch.zeros(2, TOKENS, dtype=torch.long, device="sim")
    gc.collect()
    for _ in range(3):
        loss_of(model, tokens).backward()
        gc.collect()
        requested()
        optimizer.step()
        step = requested() - before - tokens.nbytes
        in_step = sum(row.now for row in sherd.memory_report(model, optimizer).host)
        optimizer.zero_grad()
    torch.accelerator.synchronize()
    rest = torch.accelerator.memory_stats()["requested_bytes.all.current"] - before - tokens.nbytes
    report = sherd.memory_report(model, optimizer)
    return {
        "rest": int(rest),
        "reported": report.now,
        "step": int(step),
        "host at peak": sum(row.at_peak for row in report.host),
        "host in step": in_step,
    }


def planned(offload: str, kind: str, num_ranks: int) -> tuple[int, int, int, float]:
    """The bytes at rest, in the optimizer's step, and on the host, that a plan says; and the seconds of the step."""
    torch.manual_seed(0)
    tokens = torch.zeros(2, TOKENS, dtype=torch.long)
    options = FIXED | {"offload": offload, "loss": loss_of, "optimizer": kind}
    found = sherd.plan(GPT(), {"dp": num_ranks}, tokens, cluster="h100", shard=shard_units, **options).prediction
    changes = found.timeline.changes
    lasting = ("shards", "optimizer state", "masters")
    rest = sum(each.nbytes for each in changes if each.time == 0.0 and each.kind in lasting)
    begin = min(each.start for each in found.timeline.spans if each.name == "optimizer")
    now = list(accumulate(each.nbytes for each in changes))
    before = max(at for at, each in enumerate(changes) if each.time <= begin)
    in_step = max(now[before:])
    host = sum(each for kind, each in found.in_host.items() if kind not in (sharded.PINNED, "temporaries"))
    return rest, in_step, host, found.timeline.seconds


def shard_units(model: Any, **options: Any) -> nn.Module:
    for unit in model.blocks:
        sherd.fully_shard(unit, **options)
    return sherd.fully_shard(model, **options)


def all_counted(offloads: list[str], *how: Any) -> list[dict[str, int]]:
    with mock.patch.object(chunks, "CHUNK_NUMEL", CHUNK):
        return [counted(each, *how) for each in offloads]


@pytest.mark.values
@pytest.mark.parametrize(
    ("kind", "num_ranks", "shares"),
    [
        ("adamw-fused", 2, (0.5, 1)),
        ("adamw-fused", 2, SHARES),
        ("sgd-momentum", 2, SHARES),
        ("adamw-fused", 1, (0.5, 1)),
        ("adamw-fused", 4, (0.5, 1)),
    ],
)
def test_planned_bytes_are_those_counted(kind, num_ranks, shares, sim_world):
    world = sim_world(num_ranks, spoil="no", races="off")
    for word in KINDS:
        offloads = ["nothing", *(f"{word}:{share}" for share in shares)]
        with mock.patch.object(sharded, "CHUNK_NUMEL", CHUNK):
            said = [planned(each, kind, num_ranks) for each in offloads]
        require_same(offloads, said, world.run(all_counted, offloads, kind).values[0])


def require_same(offloads: list[str], said: list[tuple[int, int, int, float]], found: list[dict[str, int]]) -> None:
    """Planned bytes are those counted, and more of a kind on the host is less on the device, and a longer step."""
    for offload, (rest, step, host, _), each in zip(offloads, said, found, strict=True):
        assert abs(each["rest"] - rest) <= SCALARS, offload
        assert abs(each["reported"] - rest) <= SCALARS, offload
        assert abs(each["step"] - step) <= SCALARS, offload
        assert each["host at peak"] == each["host in step"] == host, offload
    require_steady(offloads, found)
    seconds = [each for *_, each in said[1:]]
    assert seconds == sorted(seconds), offloads


def require_steady(offloads: list[str], found: list[dict[str, int]]) -> None:
    on_device, on_host = ([each[key] for each in found[1:]] for key in ("rest", "host in step"))
    assert on_device == sorted(set(on_device), reverse=True), offloads
    assert on_host == sorted(set(on_host)), offloads


@pytest.mark.parametrize("word", KINDS)
def test_more_of_a_kind_on_the_host_is_less_on_the_device_under_the_wrapper(word, sim_world):
    offloads = ["nothing", *(f"{word}:{share}" for share in SHARES)]
    found = sim_world(2, spoil="no", races="off").run(all_counted, offloads, "adamw-fused", True).values[0]
    require_steady(offloads, found)
    nothing, none, *_ = found
    assert word == "masters" or none == nothing


def test_the_state_of_muon_comes_for_its_step_and_goes_back_as_planned(sim_world):
    headers = 2 << 10  # of what travels, and counts of steps
    for num_ranks in (1, 2):
        offloads = ["nothing", "state:0.5", "state"]
        said = [planned(each, "muon", num_ranks) for each in offloads]
        found = sim_world(num_ranks, spoil="no", races="off").run(all_counted, offloads, "muon").values[0]
        for offload, (rest, step, host, _), each in zip(offloads, said, found, strict=True):
            assert abs(each["rest"] - rest) <= headers, offload
            assert abs(each["step"] - step) <= headers, offload
            assert abs(each["host in step"] - host) <= SCALARS, offload
        assert [rest for rest, *_ in said] == sorted((rest for rest, *_ in said), reverse=True)
        assert [seconds for *_, seconds in said] == sorted(seconds for *_, seconds in said)


def peaks_within_backward(offload: str, kind: str) -> list[tuple[int, int]]:
    """With one micro-batch and with two, the most bytes of a step that is made within backward, on the device, and of
    gradients in host memory."""
    found, in_use, plain_empty = [], [0, 0], torch.empty

    def add(nbytes: int) -> None:
        in_use[:] = in_use[0] + nbytes, max(in_use[1], in_use[0] + nbytes)

    def empty(*args: Any, **kwargs: Any) -> Tensor:
        made = plain_empty(*args, **kwargs)
        if kwargs.get("pin_memory"):
            add(made.nbytes)
            weakref.finalize(made.untyped_storage(), add, -made.nbytes)
        return made

    for num in (1, 2):
        before = held_before()
        model: Any = GPT().to("sim").to(torch.bfloat16 if offload.startswith("masters") else torch.float32)
        precision = sherd.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        policy, mesh = offload_policy(offload), init_device_mesh("sim", (torch.distributed.get_world_size(),))
        shard_units(model, mesh=mesh, offload_policy=policy, mp_policy=precision)
        optimizer = OPTIMIZERS[kind](model)
        sherd.step_in_backward(model, optimizer)
        tokens = torch.zeros(2, TOKENS, dtype=torch.long, device="sim")
        for number in range(2):
            gc.collect()
            requested()
            in_use[1] = in_use[0]
            with sherd.accumulate(model, num), mock.patch.object(torch, "empty", empty if number else plain_empty):
                for _ in range(num):
                    loss_of(model, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append((requested() - before, in_use[1]))
        assert not in_use[0]
        del model, optimizer
    return found


@pytest.mark.values
@pytest.mark.parametrize("kind", ["adamw-fused", "sgd-momentum"])
@pytest.mark.parametrize("offload", ["everything", "nothing", "state", "masters", "step", "everything:0.5"])
def test_planned_peaks_of_a_step_within_backward_are_those_counted(offload, kind, sim_world):
    world, cuts = sim_world(2, spoil="no", races="off"), mock.patch.object(sharded, "CHUNK_NUMEL", CHUNK)
    options = FIXED | {"offload": offload, "loss": loss_of, "optimizer": kind, "shard": shard_units}
    tokens = torch.zeros(2, TOKENS, dtype=torch.long)
    found = world.run(chunked_peaks_within_backward, offload, kind).values[0]
    for num, (on_device, on_host) in zip((1, 2), found, strict=True):
        with cuts:
            after, within = (
                sherd.plan(GPT(), {"dp": 2}, tokens, samples=4 * num, step_in_backward=is_so, **options)
                for is_so in (False, True)
            )
        # Temporaries that replace one another are counted together.
        assert 0 <= within.prediction.timeline.peak.nbytes - on_device <= 2048
        assert within.prediction.in_host.get("gradients", 0) == on_host
        assert "stepped within backward" in str(within.settings)
        assert "stepped" not in str(after.settings)
        if num == 1:
            taken = [each.prediction.timeline.peak.nbytes + each.prediction.host_bytes for each in (within, after)]
            assert taken[0] < taken[1]


def chunked_peaks_within_backward(*how: Any) -> list[tuple[int, int]]:
    with mock.patch.object(chunks, "CHUNK_NUMEL", CHUNK):
        return peaks_within_backward(*how)


OFFLOADED = ("nothing", "activations", "activations:0.5")
LEAST = 16 << 10
"""Smaller saved tensors stay on the device, as ones of 1 MiB do by default."""


def stack(kind: str) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    if kind == "gpt":
        return GPT(), torch.zeros(64, TOKENS, dtype=torch.long)
    return Stack(layers(8), CHECKPOINTS if kind == "by the root" else None), torch.randn(ROWS, WIDTH)


def shard_layers(model: Any, **options: Any) -> nn.Module:
    for unit in getattr(model, "layers", None) or model.blocks:
        sherd.fully_shard(unit, **options)
    return sherd.fully_shard(model, **options)


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def peak_with_saved(offload: str, kind: str, share: float, num: int, halves: bool) -> tuple[int, int]:
    """The most bytes of a step on the device, and of saved tensors in host memory."""
    forget_host_memory()
    before = held_before()
    model, x = stack(kind)
    model, x = model.to("sim"), x.to("sim")
    for block in spread([list(getattr(model, "layers", None) or model.blocks)], share):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    precision = sherd.MixedPrecisionPolicy(*(torch.bfloat16, torch.float32) * halves)
    mesh = init_device_mesh("sim", (torch.distributed.get_world_size(),))
    with mock.patch.object(build, "SavedOnHost", partial(SavedOnHost, min_bytes=LEAST)):
        shard_layers(model, mesh=mesh, offload_policy=offload_policy(offload), mp_policy=precision)
    for _ in range(3):
        gc.collect()
        requested()
        for _ in range(num):
            mean_square(model, x).backward()
        peak = requested() - before
        model.zero_grad()
    return peak, in_host_memory()


def peaks_with_saved(*how: Any) -> list[tuple[int, int]]:
    return [peak_with_saved(each, *how) for each in OFFLOADED]


@pytest.mark.values
@pytest.mark.parametrize(
    ("kind", "share", "num", "halves"),
    [
        ("stack", 0, 1, False),
        ("gpt", 0, 1, True),
        ("gpt", 0, 2, False),
        ("gpt", 1, 1, True),
        ("stack", 0.5, 1, False),
        ("stack", 1, 1, False),
        ("by the root", 0, 1, False),
    ],
)
def test_planned_peaks_with_saved_tensors_on_the_host_are_those_counted(kind, share, num, halves, sim_world):
    found = sim_world(2, spoil="no", races="off").run(peaks_with_saved, kind, share, num, halves).values[0]
    model, x = stack(kind)
    options = FIXED | {"checkpointing": float(share), "micro_batch": len(x), "optimizer": "sgd"}
    options |= {"compute_dtype": torch.bfloat16 if halves else None, "loss": mean_square, "shard": shard_layers}
    seconds = []
    with mock.patch.object(saved, "LEAST", LEAST):
        for each, (on_device, on_host) in zip(OFFLOADED, found, strict=True):
            plan = sherd.plan(model, {"dp": 2}, x, samples=2 * num * len(x), offload=each, **options).prediction
            # Temporaries that replace one another are counted together.
            print(each, plan.timeline.peak.nbytes, on_device, on_host)
            assert 0 <= plan.timeline.peak.nbytes - on_device <= 0.02 * found[0][0]
            assert plan.in_host.get("activations", 0) == on_host
            seconds.append(plan.timeline.seconds)
    assert seconds[1] >= seconds[2] >= seconds[0]
    assert found[1][0] <= found[0][0]


def reported_and_taken(offload: str) -> tuple[int, int, str]:
    """The peak of a step without activations: reported beforehand, and asked for. And the report."""
    before = held_before()
    model: Any = GPT().to("sim").to(torch.bfloat16)
    mesh = init_device_mesh("sim", (torch.distributed.get_world_size(),))
    shard_units(model, mesh=mesh, offload_policy=offload_policy(offload))
    tokens = torch.zeros(0, TOKENS, dtype=torch.long, device="sim")

    def step() -> None:
        model(tokens).sum().backward()

    step()
    model.zero_grad()
    with sherd.track_memory(model):
        step()
    model.zero_grad()
    report = sherd.memory_report(model)
    gc.collect()
    requested()
    step()
    return report.predicted_peak, requested() - before, str(report)


def test_a_report_has_the_peak_of_a_step_and_a_table_of_the_host(sim_world):
    for offload in ("state", "masters:0.5", "step", "everything:0.5"):
        for said, taken, text in sim_world(2, spoil="no", races="off").run(reported_and_taken, offload).values:
            assert 0 <= taken - said <= 64 + 2 * 256, offload
            assert ("\nin host memory: " in text) == (offload != "state"), "no optimizer was given"


def reported_and_taken_by_the_optimizer(offload: str) -> tuple[int, int, str]:
    """The peak of a step with its optimizer, which steps a large chunk at a time: reported, and asked for."""
    before = held_before()
    model: Any = GPT().to("sim").to(torch.bfloat16 if offload.startswith("masters") else torch.float32)
    mesh = init_device_mesh("sim", (torch.distributed.get_world_size(),))
    shard_units(model, mesh=mesh, offload_policy=offload_policy(offload))
    optimizer = OPTIMIZERS["adamw-fused"](model)
    tokens = torch.zeros(0, TOKENS, dtype=torch.long, device="sim")
    said = []
    for _ in range(2):
        model(tokens).sum().backward()
        requested()
        optimizer.step()
        taken = requested() - before
        optimizer.zero_grad()
        gc.collect()
        report = sherd.memory_report(model, optimizer)
        said.append(report.predicted_peak)
    return said[0], taken, str(report)


def test_a_report_has_what_comes_for_the_step(sim_world):
    for offload in ("state", "state:0.5", "masters"):
        found = sim_world(2, spoil="no", races="off").run(reported_and_taken_by_the_optimizer, offload).values
        for said, taken, text in found:
            assert abs(taken - said) <= SCALARS, (offload, said, taken)
            assert "when the optimizer steps" in text
            assert "state in flight" in text


def in_figures(offload: str) -> tuple[int, int, int]:
    """Of a settled step without activations: the peak that is asked for, the peak that is forecast, and the waits of
    the host."""
    before = held_before()
    model: Any = GPT().to("sim")
    mesh = init_device_mesh("sim", (torch.distributed.get_world_size(),))
    shard_units(model, mesh=mesh, offload_policy=offload_policy(offload))
    optimizer = optim.AdamW(model.parameters())
    tokens = torch.zeros(0, TOKENS, dtype=torch.long, device="sim")
    with mock.patch.object(chunks, "CHUNK_NUMEL", CHUNK), mock.patch.object(memory, "CHUNK_NUMEL", CHUNK):
        for number in range(4):
            simdevice.host_waits()
            with sherd.track_memory(model) if number == 1 else nullcontext():
                logits = model(tokens)  # of no samples, so that neither they nor a loss take memory
                logits.backward(torch.empty_like(logits))
            optimizer.step()
            waits = simdevice.host_waits()
            optimizer.zero_grad()
            gc.collect()
            if number == 2:
                requested()
        peak = requested() - before
        return peak, sherd.memory_report(model, optimizer).predicted_peak, sum(waits.values())


def test_state_on_the_host_takes_at_most_0_55_of_the_device_at_two_ranks_and_no_wait(sim_world):
    """A world without `races="off"` fails at a race."""
    world = sim_world(2, pause_us=200, seed=1)
    near, far = (world.run(in_figures, offload).values[0] for offload in ("nothing", "state"))
    shares = f"{far[0]:,} of {near[0]:,} bytes, {far[0] / near[0]:.3f}"
    print(f"\nOffloadPolicy(optimizer='host'): {shares}; forecast {far[1]:,}; {far[2]} waits of the host; 0 races")
    assert far[0] <= 0.55 * near[0]
    assert far[2] == 0
    assert far[0] == far[1]
