"""How much runs pad real models: the worst of `bench.padding`'s blocks, as rows. docs/data/packing.csv has all."""

from __future__ import annotations

from .padding import BLOCKS, RANKS, result
from .ranks import Conditions
from .table import Aim, Figure, Row

SOME_RANKS = (2, 100, 1024)
LIMIT = 3.0


def measure(conditions: Conditions) -> Figure:
    """A row per placement that pads, in percent of the buffers; all in the column of Flat."""
    ranks = SOME_RANKS if conditions.quick else RANKS
    worst = {
        placement: max(100 * result(model, placement, num_ranks).padding for model in BLOCKS for num_ranks in ranks)
        for placement in ("Flat()", "Blocks(1)", "Blocks(32)")
    }
    rows = [
        Row(
            f"padding under {placement}, worst of {len(BLOCKS)} models",
            "%",
            {"Flat": most},
            aim=[Aim(LIMIT, of="Flat")],
        )
        for placement, most in worst.items()
    ]
    return Figure(rows, {"percent": worst}, ["padding: of one block of each model; docs/data/packing.csv has all"])
