"""May a step of AdamW with clipping be captured as a graph of this machine's devices?"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

import sherd

from ..device.cases import STACKS
from ..systems import SHERD, WRAPPER, System, device_of

FRONT_ENDS = (SHERD, WRAPPER)


def captured(mesh: DeviceMesh, question: tuple[System, str]) -> tuple[bool, str]:
    """On a rank: whether a step of a system, with the stack of this name, may be captured, and what the check says."""
    device, (system, stack) = device_of(mesh), question
    model = system.distribute(STACKS[stack].on(device, torch.float32), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True, foreach=True)
    batch = [each.to(device) for each in STACKS[stack].batch(mesh.get_rank())]

    def step() -> None:
        model(*batch).backward()
        sherd.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    report = sherd.capturable(model, step)
    return bool(report), str(report)
