"""The versions of torch that sherd has run with, which `docs/look_up/support.md` lists, and a word on newer ones."""

from __future__ import annotations

import logging
import os

import torch

OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)

_log = logging.getLogger("sherd.versions")


def minor_of_torch() -> tuple[int, int]:
    """Returns the major and the minor version of torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def note_untried_torch() -> None:
    """Log a line if no test has run with a torch as new as this one, on the first rank of each machine.

    It is no warning: where warnings are errors, sherd would be refused for what may work.
    """
    if minor_of_torch() > NEWEST_TORCH and os.environ.get("LOCAL_RANK", "0") == "0":
        _log.warning(
            "sherd has not been tried with torch %s, only with %d.%d to %d.%d; if something fails, try one of these",
            torch.__version__,
            *OLDEST_TORCH,
            *NEWEST_TORCH,
        )
