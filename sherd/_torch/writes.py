"""Writes under names that torch does not declare: functions of torch that are replaced, and marks on modules."""

from __future__ import annotations

from types import ModuleType

import torch


def write_into(owner: ModuleType | torch.nn.Module, name: str, value: object) -> None:
    """Write attribute `name` of a file of torch, or of a user's module.

    Type checkers know none of these names, so an assignment would need an ignored error in each place. All such writes
    come here: a search for `write_into` finds them with their names. A `__setattr__` of the user's class is passed by.
    """
    object.__setattr__(owner, name, value)
