"""A tree over the ranks of a mesh: to add up over all of them takes a rank few connections and few messages.

Ranks stand in blocks of `BLOCK`, the first ones of four blocks in a block again, and so on. Each block has a group of
the host, whose ranks connect to the two beside them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from sherd._torch import backend_of, timeout_of
from sherd.comm.groups import host_group_beside

BLOCK = 4


@dataclass(frozen=True, slots=True)
class Tree:
    """A rank's place among `ranks`: its `blocks`, from below, all but the last of which it is the first rank of; and
    whether the last one `is_top`. `whole` makes the group of all ranks, which must call it together. Its groups wait
    `timeout_s` for other ranks."""

    ranks: Sequence[int]
    blocks: Sequence[dist.ProcessGroup]
    is_top: bool
    whole: Callable[[], dist.ProcessGroup]
    timeout_s: float

    def add_up(self, own: Sequence[int], wait: Callable[[dist.Work], None]) -> tuple[int, ...]:
        """Returns the sums over all ranks of their `own` numbers, in 64 bits. All of them must call this; `wait` waits
        for each of the collectives. They go past the dispatcher, where users count collectives."""
        packed = bytearray(struct.pack(f"={len(own)}q", *own))
        numbers = torch.frombuffer(packed, dtype=torch.int64)
        for block in self.blocks:
            wait(_all_reduce(numbers, block))
        if not self.is_top:
            numbers.zero_()  # the first one of the block has the sum
        for block in reversed(self.blocks[: -1 if self.is_top else None]):
            wait(_all_reduce(numbers, block))
        return struct.unpack(f"={len(own)}q", packed)


def _all_reduce(numbers: torch.Tensor, block: dist.ProcessGroup) -> dist.Work:
    started: dist.Work = backend_of(block, numbers.device).allreduce([numbers])  # type: ignore[attr-defined]
    return started


def tree_beside(parent: dist.ProcessGroup, purpose: str, ranks: Sequence[int], device: torch.device) -> Tree:
    """Returns this rank's place in the tree of `ranks`; for the arguments and errors see `group_beside`."""
    group = partial(host_group_beside, parent, purpose, device=device)
    blocks, level, this_rank = [], list(ranks), dist.get_rank()
    while this_rank in level and len(level) > 1:
        first = level.index(this_rank) // BLOCK * BLOCK
        block, level = level[first : first + BLOCK], level[::BLOCK]
        if len(block) > 1:
            blocks.append(group(ranks=block))
    timeout = timeout_of(parent, device) or dist.default_pg_timeout
    return Tree(ranks, blocks, len(level) == 1, partial(group, ranks=ranks), timeout.total_seconds())
