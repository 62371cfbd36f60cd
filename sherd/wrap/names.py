"""Paths of modules and parameters without the wrappers in between."""

from __future__ import annotations

from torch import nn

WRAPPED = "_fsdp_wrapped_module"
"""The name that sherd's wrapper gives to its one child. torch's FSDP1 has it too, and peft and TRL look for it."""

WRAPPERS = (WRAPPED, "_checkpoint_wrapped_module")
"""The names that wrappers give to their one child, also torch's of activation checkpointing."""


def plain_name(path: str) -> str:
    """Returns a module's or parameter's path without wrappers, as it is in the user's own model."""
    return ".".join(part for part in path.split(".") if part not in WRAPPERS) if "_wrapped_module" in path else path


def wrapped_by(module: nn.Module) -> nn.Module | None:
    """Returns the one child of a wrapper, of FSDP or of activation checkpointing; None if `module` is no wrapper."""
    children = vars(module).get("_modules", {})
    return next((children[name] for name in WRAPPERS if name in children), None)
