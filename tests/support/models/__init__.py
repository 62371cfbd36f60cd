"""The difficulties that a sharded model must survive: tiny models, one difficulty each.

Each knows its inputs, its loss and its units, so that a test is one line: `sharded(build("tied_across"))`.
Inputs are float32 of shape (BATCH, WIDTH) where a class does not say otherwise, and differ by seed and rank.
"""

from tests.support.models import calls, recomputed, shapes, stacks
from tests.support.models.nets import Net, Wired, chain, next_token_loss
from tests.support.models.specimen import (
    BATCH,
    MODELS,
    VOCABULARY,
    WIDTH,
    Block,
    Specimen,
    Unit,
    build,
    noise,
    tokens,
)

__all__ = [
    "BATCH",
    "MODELS",
    "VOCABULARY",
    "WIDTH",
    "Block",
    "Net",
    "Specimen",
    "Unit",
    "Wired",
    "build",
    "calls",
    "chain",
    "next_token_loss",
    "noise",
    "recomputed",
    "shapes",
    "stacks",
    "tokens",
]
