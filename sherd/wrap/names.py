"""Paths of modules and parameters without the wrappers in between."""

from __future__ import annotations

WRAPPED = "_checkpoint_wrapped_module"
"""The name that wrappers give to their one child. torch's checkpointing takes it out of every path, and so do we."""


def plain_name(path: str) -> str:
    """Returns a module's or parameter's path without wrappers, as it is in the user's own model."""
    return ".".join(part for part in path.split(".") if part != WRAPPED) if WRAPPED in path else path
