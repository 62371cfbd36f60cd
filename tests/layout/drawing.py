"""How does a packing of runs look, rank by rank, in the docstrings? One letter for 16 elements, `.` for padding."""

from itertools import groupby

from sherd.layout.packing import WHOLE_ALIGNMENT, Packing


def drawn(packing: Packing, names: str) -> list[str]:
    """`rank 0 | a a a | . | b b |` and so on; `|` stands between tensors. All sizes are multiples of 16 elements."""
    letters = ["."] * (packing.rows_numel // WHOLE_ALIGNMENT)
    for name, slot in zip(names, packing.slots, strict=True):
        assert slot.whole.numel % WHOLE_ALIGNMENT == 0, (
            f"{name} cannot be drawn in letters of {WHOLE_ALIGNMENT} elements"
        )
        start, stop = slot.whole.start // WHOLE_ALIGNMENT, slot.whole.stop // WHOLE_ALIGNMENT
        letters[start:stop] = name * (stop - start)
    return [_line(rank, letters, packing) for rank in range(packing.num_ranks)]


def _line(rank: int, letters: list[str], packing: Packing) -> str:
    start = packing.starts[rank] // WHOLE_ALIGNMENT
    run = letters[start : start + packing.rest_numels[rank] // WHOLE_ALIGNMENT]
    return f"rank {rank} " + "".join("| " + " ".join(group) + " " for _, group in groupby(run)) + "|"
