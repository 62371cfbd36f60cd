"""An out of memory error says of each kind of state how much of it is on the device, on the host and on disks."""

from __future__ import annotations

import gc
import re
from collections import Counter
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, optim
from torch.distributed.device_mesh import init_device_mesh

import sherd
from sherd import CPUOffloadPolicy, Disk, OffloadPolicy
from sherd.engine import Unit
from sherd.engine.make import build as make_build
from sherd.on_disk import vectors_on
from sherd.policy import SavedOnHost
from sherd.tensor.ragged import local_part
from sherd.units import in_bytes
from tests.device.test_peaks import GPT, TOKENS

AXES = {
    "state": OffloadPolicy(optimizer="host"),
    "masters and state": OffloadPolicy(optimizer="host", masters="host"),
    "masters near": OffloadPolicy(masters="device"),
    "step": OffloadPolicy(gradients="host"),
    "everything": CPUOffloadPolicy(),
    "half": OffloadPolicy(optimizer="host", masters="host", share=0.5),
    "half of everything": CPUOffloadPolicy(share=0.5),
    "activations": OffloadPolicy(activations="host"),
}
PLACES = {"sim": "device", "cpu": "in host memory", "disk": "on disks"}


def counted(model: Any, optimizer: Any, disk: Disk) -> dict[str, Counter[str]]:
    """The bytes of each kind by place, storage by storage."""
    found: dict[str, Counter[str]] = {place: Counter() for place in PLACES.values()}
    seen = set()

    def count(kind: str, tensor: Tensor, is_of_disk: bool = False) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            place = "disk" if is_of_disk or is_on_disk(tensor) else tensor.device.type
            found[PLACES[place]][kind] += storage.nbytes()
        seen.add(storage.data_ptr())

    def is_on_disk(tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and tensor.ndim > 0 and vectors_on(disk).has(tensor)

    for unit in Unit.below(model):
        for group in (weights.group for weights in unit.weights):
            count("shards", group.shard_buffer)
            if group.place.keeps_copies:
                found["device"]["shards"] += group.shard_numel * group.compute_dtype.itemsize
            for part in () if group.masters is None else (group.masters.low, group.masters.carries):
                count("masters", part)
    for parameter in model.parameters():
        count("gradients", local_part(parameter.grad))
        values = [local_part(each) for each in optimizer.state[parameter].values()]
        for each in values:  # counts of steps too
            count("optimizer state", each, any(map(is_on_disk, values)))
    return found


def backward_that_fails(model: Any, tokens: Tensor) -> None:
    model(tokens).float().logsumexp(-1).mean().backward()
    torch.accelerator.synchronize()
    raise torch.OutOfMemoryError("no room")


def explained(policy: OffloadPolicy, folder: str) -> tuple[str, dict[str, Counter[str]], int]:
    """The note of an error after a backward, what rests where, and the bytes of buffers for activations."""
    gc.collect()
    torch.manual_seed(0)
    dtype = torch.float32 if policy.masters is None else torch.bfloat16
    model: Any = GPT().to("sim").to(dtype)
    mesh = init_device_mesh("sim", (2,))
    with mock.patch.object(make_build, "SavedOnHost", partial(SavedOnHost, min_bytes=1)):
        for unit in (*model.blocks, model):
            sherd.fully_shard(unit, mesh=mesh, offload_policy=policy)
    optimizer = optim.AdamW(model.parameters(), foreach=False)
    tokens = torch.zeros(2, TOKENS, dtype=torch.long, device="sim")
    for number in range(3):
        with pytest.raises(torch.OutOfMemoryError) as raised, sherd.explain_memory(model, optimizer):
            backward_that_fails(model, tokens)
        if number < 2:
            optimizer.step()
            optimizer.zero_grad()
    report = sherd.memory_report(model, optimizer)
    (note,) = raised.value.__notes__
    saved = sum(row.now for row in report.host if row.kind == "saved activations")
    return note, counted(model, optimizer, Disk(folder)), saved


def said(note: str, where: str) -> dict[str, str]:
    """The bytes of each kind in the line of a place, or in the table of the device."""
    if where == "device":
        return dict(re.findall(r"^  (\w[\w ]*?) {2,}([\d.,]+ \w+)", note, re.MULTILINE))
    (line,) = re.findall(f"^{where}: (.*)$", note, re.MULTILINE) or [""]
    return {kind: nbytes for nbytes, kind in re.findall(r"([\d.,]+ \w+) of ([^,]+)", line)}


@pytest.mark.parametrize("axis", [*AXES, "disk", "step, disk", "half on a disk"])
def test_an_error_says_where_each_kind_of_state_rests(axis, sim_world, tmp_path):
    disk = Disk(str(tmp_path))
    on_disk = {
        "disk": OffloadPolicy(optimizer=disk, masters=disk),
        "step, disk": OffloadPolicy(gradients="host", optimizer=disk),
        "half on a disk": OffloadPolicy(optimizer=disk, share=0.5),
    }
    policy = (AXES | on_disk)[axis]
    found = sim_world(2, spoil="no", races="off").run(explained, policy, disk.path).values
    for note, by_place, saved in found:
        assert "no more can be said" not in note
        assert (", optimizer state on a disk" in note) == (axis == "half on a disk"), note
        if saved:
            by_place["in host memory"]["saved activations"] = saved
        assert bool(saved) == (axis == "activations")
        for where in ("in host memory", "on disks"):
            assert said(note, where) == {kind: in_bytes(nbytes) for kind, nbytes in by_place[where].items()}, note
        near = said(note, "device")
        for kind in ("shards", "optimizer state", "masters"):
            assert near.get(kind, "") == (in_bytes(by_place["device"][kind]) if by_place["device"][kind] else ""), kind
