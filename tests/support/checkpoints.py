"""A model and its optimizer by torch's distributed checkpointing, as a training loop writes and reads them."""

from __future__ import annotations

import os

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str | os.PathLike[str]) -> None:
    """On every rank: what `load` reads, by shards."""
    dcp.save(_states(model, optimizer), checkpoint_id=folder)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str | os.PathLike[str]) -> None:
    """On every rank, of any number of them."""
    states = _states(model, optimizer)
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
