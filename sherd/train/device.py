"""The device that a run computes on, and the number of ranks it takes."""

from __future__ import annotations

import os

import torch

from sherd.comm.accelerator import accelerator
from sherd.train.axes import axes_of, usual_ranks
from sherd.train.config import Config, InputError


def device_type(config: Config) -> str:
    """Returns `cpu` or the type of the accelerator. Raises InputError for a device that is not here."""
    asked, here = config.device, accelerator()
    device = here or "cpu" if asked == "auto" else asked
    if config.cuda_graph and device in ("cpu", here) and device != "cuda":
        raise InputError(f"cuda_graph = true needs CUDA, and this run is on {device}; leave it out")
    if device in ("cpu", here):
        return device
    available = f"cpu, {here}" if here else "cpu"
    raise InputError(f"device = {asked!r}, but {_why_not(asked)}; available: {available}")


def _why_not(device: str) -> str:
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is not None and found.type == device:
        return f"torch has no backend of process groups that reaches {device}"
    return f"torch sees no {device} here"


def default_ranks(config: Config) -> int:
    """Returns the number of ranks to start where the user names none: two, or one per device, as the mesh allows."""
    return usual_ranks(config, num_devices_of(device_type(config)) or 2)


def num_devices_of(device: str) -> int:
    """Returns the number of accelerators here; 0 for the CPU."""
    return 0 if device == "cpu" else torch.accelerator.device_count()


def require_ranks(num_ranks: int, config: Config) -> None:
    """Refuse a number of ranks that the config, or this machine, has no use for."""
    config.split(axes_of(config, num_ranks).num_data)
    device = device_type(config)
    if device == "cpu":
        return
    local, num_devices = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)), num_devices_of(device)
    if local > num_devices:
        here = f"{num_devices} {device} device{'s' * (num_devices > 1)}"
        raise InputError(f"{local} ranks on a machine of {here}; start one per device, or set device = 'cpu'")
