"""Packages that sherd can do without, and how a user installs them: the extras of pyproject.toml."""

from __future__ import annotations


def install(extra: str) -> str:
    """The command for `extra`, which works where sherd was cloned: it is on no package index."""
    return f"pip install '.[{extra}]' in the folder of sherd's sources"
