"""The training that faults happen to: a chain of units, four steps and a checkpoint after each, as one rank runs it."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import sherd
from sherd.storage import places
from tests.faults.builder import CAUGHT, Fault, Kind, Phase, Probe, is_caught
from tests.support import sharding
from tests.support.comparing import plain_name
from tests.support.models import noise
from tests.support.sharding import WRAPPERS

_BUILDING = threading.Lock()

WIDTH, NUM_BLOCKS, NUM_STEPS = 8, 3, 4
ALL = tuple(range(NUM_BLOCKS))
LR = 0.05
TRANSPORTS = ("auto", "gloo", "torch")
DIVERGENCES = ("error", "join")


@dataclass(frozen=True, slots=True)
class Setting:
    """How a training is sharded."""

    num_ranks: int = 2
    front: str = "shard"
    transport: str = "auto"
    divergence: str = "error"
    is_hybrid: bool = False
    """Two replicas of two shards each."""

    def __str__(self) -> str:
        mesh = "2x2" if self.is_hybrid else f"{self.num_ranks}"
        return f"{mesh} ranks, {self.front}, {self.transport}, divergence={self.divergence}"


class Probed(nn.Module):
    """A unit that tells the probe when it runs."""

    def __init__(self, number: int, probe: Probe | None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.number, self.probe = number, probe

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).tanh()
        return x if self.probe is None else self.probe.at(Phase.FORWARD, x, self.number)


class Chain(nn.Module):
    """Its caller says which of its blocks run, in which order."""

    def __init__(self, probe: Probe | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Probed(number, probe) for number in ALL)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, order: tuple[int, ...] = ALL) -> Tensor:
        for number in order:
            x = self.blocks[number](x)
        return self.head(x)


OTHERWISE: dict[str, dict[str, Any]] = {
    "": {},
    "strategy": {"placements": "zero2"},
    "computed in": {"mp_policy": sherd.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)},
    "reduced in": {"mp_policy": sherd.MixedPrecisionPolicy(reduce_dtype=torch.float64)},
}
"""Arguments of `fully_shard` by the way in which a rank makes units otherwise."""


def sharded(setting: Setting, model: Any, way: str = "") -> Any:
    """Returns `model` with a unit a block; made otherwise than on other ranks in a `way` of `MADE`."""
    policy = sherd.CommPolicy(transport=setting.transport, divergence=setting.divergence)
    if way == "parts":
        policy = replace(policy, part_bytes=2 * policy.part_bytes)
    elif way == "placement":
        setting = replace(setting, front="shard" if setting.front == "flat" else "flat")
    options: dict[str, Any] = {"comm_policy": policy, **OTHERWISE.get(way, {})}
    if setting.is_hybrid:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        if setting.front in WRAPPERS:
            options |= {"device_mesh": mesh, "sharding_strategy": sherd.ShardingStrategy.HYBRID_SHARD}
        else:
            options["mesh"] = mesh
    return sharding.sharded(model, setting.front, [*model.blocks, model], **options)


def change(unit: Any, way: str) -> None:
    """Change a unit in a `way` of `CHANGED`."""
    match way:
        case "divided by":
            unit.set_gradient_divide_factor(7.0)
        case "frozen":
            unit.linear.weight.requires_grad_(False)
        case "unused":
            unit.set_reduce_scatter_unused_params(True)
        case "hook":
            unit.set_all_reduce_hook(lambda gradient: None)


def batch(rank: int, step: int) -> Tensor:
    return noise(step, rank, 2, WIDTH)


def whole(model: Any) -> dict[str, Tensor]:
    """Returns the parameters, unsharded."""
    with sherd.unsharded(model):
        return {plain_name(name): each.detach().clone() for name, each in model.named_parameters()}


def owners(model: Any) -> dict[str, Tensor]:
    """Returns for each element the rank that steps it."""
    shards = [local(each) for each in model.parameters()]
    values = [each.clone() for each in shards]
    for each in shards:
        each.fill_(dist.get_rank())
    owned = whole(model)
    for each, value in zip(shards, values, strict=True):
        each.copy_(value)
    return owned


def save(probe: Probe, model: Any, folder: Path) -> None:
    """Write a checkpoint, each rank its own; it appears under its name when it is complete.

    Ranks write what they hold, which needs no collective, so that a rank that has lost a step may write, too. Where the
    fault is in a checkpoint, they write all parameters, unsharded, and the fault comes before they are gathered, so
    that the others wait for them; or after, if the loop is to go on.
    """
    is_here = probe.fault is not None and probe.fault.phase is Phase.CHECKPOINT
    goes_on = is_here and probe.fault.kind in CAUGHT
    if (is_here and not goes_on) or (probe.fault is not None and probe.fault.kind is Kind.ANYWHERE):
        probe.at(Phase.CHECKPOINT)
    with sherd.unsharded(model) if is_here else contextlib.nullcontext():
        if goes_on:
            probe.at(Phase.CHECKPOINT)
        values = {name: local(each).tolist() for name, each in model.named_parameters()}
    path = folder / f"{probe.rank}.ckpt"
    part = path.with_suffix(".part")
    if is_here and probe.fault.kind is Kind.READ and probe.fault.step == probe.step:
        saved_and_loaded(probe, model, folder / "whole")
    try:
        with open(probe.disk(str(part)), "wb") as file:
            pickle.dump(values, file)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def saved_and_loaded(probe: Probe, model: Any, folder: Path) -> None:
    """Save by `sherd.save`, and load that; on the rank of the fault one of the files gives a read error."""
    path = Path(sherd.save(folder, {"model": model}, step=probe.step))
    names, number = sorted(each.name for each in path.iterdir()), probe.cannot_read()
    theirs = places._DiskFile.read_into

    def read_into(file: Any, start: int, into: memoryview) -> None:
        if number is not None and file.name.endswith(names[number % len(names)]):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        theirs(file, start, into)

    places._DiskFile.read_into = read_into  # type: ignore[method-assign]  # in this rank's process
    sherd.load(folder, {"model": model})


def local(parameter: Tensor) -> Tensor:
    """Returns this rank's own elements."""
    found = parameter.detach()
    return found.to_local() if isinstance(found, DTensor) else found


def one_step(probe: Probe, model: Any, optimizer: Any, folder: Path) -> None:
    if way := probe.changes_otherwise():
        change(model.blocks[probe.fault.unit], way)
    x = probe.at(Phase.BEFORE_FORWARD, batch(probe.rank, probe.step))
    loss = model(x, probe.route(ALL)).square().sum()
    probe.at(Phase.BETWEEN)
    loss.backward()
    probe.at(Phase.BEFORE_STEP)
    optimizer.step()
    optimizer.zero_grad()
    save(probe, model, folder)


def trained(setting: Setting, probe: Probe, folder: Path) -> dict[str, Tensor]:
    """Returns the parameters after a training with the fault that `probe` has, whole, and for a fault after which only
    some of the ranks have stepped, who steps which elements (`owner of ...`)."""
    model = sharded(setting, Chain(probe), probe.made_otherwise())
    owned = owners(model) if leaves_out_a_step(probe.fault, setting) else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    optimizer.register_step_pre_hook(lambda *_: probe.at(Phase.STEP))
    joins = setting.divergence == "join"
    with sherd.join(model, optimizer) if joins else contextlib.nullcontext():
        for step in range(NUM_STEPS):
            probe.step = step
            probe.watch_calls()
            try:
                one_step(probe, model, optimizer, folder)
            except Exception as error:
                if not is_caught(probe.fault, error):
                    raise
                optimizer.zero_grad()
            finally:
                sys.setprofile(None)
    return {**whole(model), **{f"owner of {name}": each for name, each in owned.items()}}


def leaves_out_a_step(fault: Fault | None, setting: Setting) -> bool:
    """Returns whether one rank does not step its elements where all others step theirs."""
    if fault is None or fault.kind not in CAUGHT:
        return False
    return fault.phase is Phase.STEP or (fault.phase is Phase.BEFORE_STEP and setting.divergence == "error")


# What comes out, by plain PyTorch


def reference(setting: Setting, fault: Fault | None, owned: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the parameters after the same training of a plain model that gets the mean gradient of all ranks.

    A batch that a rank gives up in forward or before backward counts as none: its next ones come a step earlier. With
    `owned`, who steps which elements, the rank of the fault leaves out its step.
    """
    gives_up = fault is not None and fault.kind in CAUGHT - {Kind.CATCH_FULL_DISK, Kind.ANYWHERE}
    gives_up_batch = gives_up and fault.phase in (Phase.BEFORE_FORWARD, Phase.FORWARD, Phase.BETWEEN)
    batches = [list(range(NUM_STEPS)) for _ in range(setting.num_ranks)]
    if gives_up_batch:
        batches[fault.rank].remove(fault.step)
    probe = Probe(fault if fault is not None and fault.kind is Kind.NAN else None, 0, lambda: None)
    with _BUILDING:  # cases are judged on several threads, which share torch's random generator
        model = Chain(probe)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(NUM_STEPS):
        for rank, steps in enumerate(batches):
            if step >= len(steps):
                continue
            probe.rank, probe.step = rank, steps[step]
            order = fault.order(rank, steps[step], ALL) if fault is not None else ALL
            x = probe.at(Phase.BEFORE_FORWARD, batch(rank, steps[step]))
            (model(x, order).square().sum() / setting.num_ranks).backward()
        before = {name: each.detach().clone() for name, each in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        if owned and step == fault.step:
            with torch.no_grad():
                for name, each in model.named_parameters():
                    each.copy_(torch.where(owned[name] == fault.rank, before[name], each))
    return {name: each.detach() for name, each in model.named_parameters()}
