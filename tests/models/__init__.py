"""Which difficulties must a sharded model survive? Tiny models, one difficulty each.

Each knows its inputs, its loss and its units, so that a test is one line: `shard(build("tied_across"))`.
Inputs are float32 of shape (BATCH, WIDTH) where a class does not say otherwise, and differ by seed and rank.
"""

from tests.models import calls, recomputed, shapes, stacks
from tests.models.specimen import (
    BATCH,
    MODELS,
    VOCABULARY,
    WIDTH,
    Block,
    Specimen,
    Unit,
    build,
    noise,
    shard,
    tokens,
)

__all__ = [
    "BATCH",
    "MODELS",
    "VOCABULARY",
    "WIDTH",
    "Block",
    "Specimen",
    "Unit",
    "build",
    "calls",
    "noise",
    "recomputed",
    "shapes",
    "shard",
    "stacks",
    "tokens",
]
