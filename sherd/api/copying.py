"""`copy.deepcopy` of sharded modules of both front ends."""

from __future__ import annotations

from typing import Any

from torch import nn

from sherd._torch import write_into
from sherd.api.wrapper_state import find_state
from sherd.engine import Unit, deep_copied


def deep_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Returns a deep copy of `module`, a unit: a model of its own, with copied shards, and the same policies and mesh.

    Raises:
        ModuleError: a unit with a flat parameter; one that uses parameters outside of what is copied.
        StateError: inside an unshard context, or in the middle of a forward or backward.
    """
    return deep_copied(module, memo, _finish)


def _finish(unit: Unit, copied: Unit, memo: dict[int, Any]) -> None:
    for module in unit.modules:
        state = find_state(module)
        if state is not None:
            write_into(memo[id(module)], Unit.FRONT_END, state.of_copy(copied, memo))
