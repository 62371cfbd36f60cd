"""Drawings of a packing of runs, rank by rank, as in the docstrings. One letter for 16 elements, `.` for padding."""

from itertools import groupby

from sherd.layout.packing import UNSHARDED_ALIGNMENT, Packing


def drawn(packing: Packing, names: str) -> list[str]:
    """`rank 0 | a a a | . | b b |` and so on; `|` stands between tensors. All sizes are multiples of 16 elements."""
    letters = ["."] * (packing.gathered_numel // UNSHARDED_ALIGNMENT)
    for name, slot in zip(names, packing.slots, strict=True):
        assert slot.unsharded.numel % UNSHARDED_ALIGNMENT == 0, (
            f"{name} cannot be drawn in letters of {UNSHARDED_ALIGNMENT} elements"
        )
        start, stop = slot.unsharded.start // UNSHARDED_ALIGNMENT, slot.unsharded.stop // UNSHARDED_ALIGNMENT
        letters[start:stop] = name * (stop - start)
    return [_line(rank, letters, packing) for rank in range(packing.num_ranks)]


def _line(rank: int, letters: list[str], packing: Packing) -> str:
    start = packing.starts[rank] // UNSHARDED_ALIGNMENT
    run = letters[start : start + packing.shard_numels[rank] // UNSHARDED_ALIGNMENT]
    return f"rank {rank} " + "".join("| " + " ".join(group) + " " for _, group in groupby(run)) + "|"
