"""A rank is killed in the middle of a training: do the others say which, in time?"""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import sherd

from ..device.cases import TINY
from ..systems import SHERD, device_of

NAMED_WITHIN_S = 15.0
NUM_STEPS = 5


def lose(mesh: DeviceMesh, lost: int) -> tuple[float, str]:
    """On a rank: seconds until the loss of the rank `lost` was raised here, and what was said. That rank does not
    return."""
    device = device_of(mesh)
    model = SHERD.distribute(TINY.on(device, torch.float32), mesh)
    batch = [each.to(device) for each in TINY.batch(mesh.get_rank())]
    for _step in range(2):
        model(*batch).backward()
    torch.accelerator.synchronize()
    dist.barrier()
    if mesh.get_rank() == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        for _step in range(NUM_STEPS):
            model(*batch).backward()
            torch.accelerator.synchronize()
    except sherd.SherdError as error:
        return time.monotonic() - began, str(error)
    return time.monotonic() - began, ""
