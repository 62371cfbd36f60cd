"""What torch's own DTensor does not do right by itself, and is told."""

from __future__ import annotations

import functools

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from sherd._torch import DTensorSpec

Shardings = list[tuple[list[Replicate | Shard], list[Replicate | Shard]]]


@functools.cache
def see_complex_shards_as_pairs() -> None:
    """Let `view_as_real` of a DTensor be a view of its shard, however it is sharded.

    Torch replicates a tensor that is sharded on its last dim, a vector say, and makes pairs of that copy. Adam and its
    like step the copy, and train nothing (`test_complex_parameters_train_under_every_placement`).
    """

    def shardings(tensor: DTensorSpec) -> Shardings:
        sharded: Shardings = [([Shard(dim)], [Shard(dim)]) for dim in range(tensor.ndim)]
        return [([Replicate()], [Replicate()]), *sharded]

    register_sharding(torch.ops.aten.view_as_real.default)(shardings)
