"""The random generators of one process: torch's, Python's, and numpy's if it is loaded."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from sherd.checkpoint.tree import NOT_WRITTEN
from sherd.errors import CheckpointError


def random_state() -> dict[str, object]:
    """Returns the states of the generators, in tensors, numbers and lists."""
    state: dict[str, object] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.accelerator.is_available():
        state["accelerator"] = _accelerator().get_rng_state()
    if "numpy" in sys.modules:
        numpys = sys.modules["numpy"].random.get_state(legacy=False)
        state["numpy"] = {**numpys, "state": {**numpys["state"], "key": numpys["state"]["key"].tolist()}}
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Give the generators of this process the states that `random_state` has returned.

    Raises:
        CheckpointError: it has not returned these.
    """
    try:
        _restore(state)
    except NOT_WRITTEN as error:
        raise CheckpointError(f"the state of the random generators is not what sherd writes: {error}") from error


def _restore(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "accelerator" in state and torch.accelerator.is_available():
        _accelerator().set_rng_state(state["accelerator"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])


def _accelerator() -> Any:
    """Returns the module of the accelerator, `torch.cuda` for one."""
    return torch.get_device_module(torch.accelerator.current_accelerator())
