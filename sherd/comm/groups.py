"""Which process groups does sherd make beside the user's own, for collectives that must not wait for those of these?"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from sherd._torch import named_group, timeout_of

_beside: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, tuple[int, ...]], dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)
"""By parent, then by purpose and ranks. Gone with the parent, so that a later one of its name begins anew."""


def group_beside(
    parent: dist.ProcessGroup, purpose: str, ranks: Sequence[int], device: torch.device, backend: str | None = None
) -> dist.ProcessGroup:
    """A group of `ranks`, given by their global numbers, all of them of `parent` and this rank's among them.

    It waits no longer than `parent` does for `device`. One for each purpose, made when it is first asked for, which its
    ranks do at the same moment; the others of `parent` need not.
    """
    groups = _beside.setdefault(parent, {})
    key = (purpose, tuple(ranks))
    if key not in groups:
        # The parent's name is the same on all of its ranks, and no other group alive has it.
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8).hexdigest()  # thousands of ranks would be long
        name = f"sherd/{parent.group_name}/{purpose}/{digest}"
        groups[key] = named_group(name, ranks, timeout_of(parent, device), backend)
    return groups[key]


def one_rank_group() -> dist.ProcessGroup:
    """A group of this rank alone; the same one each time."""
    default = dist.group.WORLD
    assert default is not None, "the default group was initialized"
    return group_beside(default, "alone", [dist.get_rank()], torch.device("cpu"))
