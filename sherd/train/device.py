"""The device that a run computes on, and the number of ranks it takes."""

from __future__ import annotations

import os

import torch

from sherd.train.axes import axes_of, usual_ranks
from sherd.train.config import Config, InputError

__all__ = ["default_ranks", "device_type", "require_ranks"]


def device_type(config: Config) -> str:
    """Returns `cpu` or `cuda`. Raises InputError for a GPU where there is none."""
    cuda = torch.cuda.is_available()
    if config.run.device == "cuda" and not cuda:
        raise InputError("run.device = 'cuda', but torch sees no GPU here; set run.device = 'cpu'")
    return config.run.device if config.run.device != "auto" else "cuda" if cuda else "cpu"


def default_ranks(config: Config) -> int:
    """Returns the number of ranks to start where the user names none: two, or one per GPU, as the mesh allows."""
    return usual_ranks(config, torch.cuda.device_count() if device_type(config) == "cuda" else 2)


def require_ranks(num_ranks: int, config: Config) -> None:
    """Refuse a number of ranks that the config, or this machine, has no use for."""
    axes = axes_of(config, num_ranks)
    config.split(axes.num_data, axes.pp)
    if device_type(config) == "cuda" and config.shard.transport in ("gloo", "shared_memory"):
        raise InputError(
            f"shard.transport = {config.shard.transport!r} serves CPU ranks; leave it out, or set run.device = 'cpu'"
        )
    local, num_gpus = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)), torch.cuda.device_count()
    if device_type(config) == "cuda" and local > num_gpus:
        raise InputError(f"{local} ranks on a machine of {num_gpus} GPUs; start one per GPU, or set run.device")
