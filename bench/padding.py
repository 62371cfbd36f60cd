"""What runs cost on real shapes: `python -m bench.padding` prints a summary of docs/data/packing.csv.

`--write` writes the file, and the summary into docs/understand/layouts.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import prod

from sherd.layout.packing import Packing, pack
from sherd.layout.placement import Shape
from sherd.layout.plan import Wanted, plan
from sherd.layout.runs import Blocks, Flat, Owned, RunPlacement

from .pages import DOCS, as_csv, written

PAGE, DATA = DOCS / "understand/layouts.md", DOCS / "data/packing.csv"

RANKS = (2, 3, 4, 6, 8, 16, 64, 100, 128, 256, 512, 1000, 1024)

PLACEMENTS: dict[str, RunPlacement] = {
    "Flat()": Flat(),
    "Blocks(1)": Blocks(1),
    "Blocks(32)": Blocks(32),
    "Owned()": Owned(),
}


def gpt2(width: int) -> list[Shape]:
    """One block; its matrices lie as `Conv1D` has them, inputs first."""
    matrices = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    biases = [(columns,) for _, columns in matrices]
    return [*matrices, *biases, *[(width,)] * 4]


def llama(hidden: int, keys: int, mlp: int) -> list[Shape]:
    """One decoder layer: q, k, v, o, gate, up, down, two norms."""
    attention = [(hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden)]
    return [*attention, (mlp, hidden), (mlp, hidden), (hidden, mlp), (hidden,), (hidden,)]


def swiglu(hidden: int, mlp: int) -> list[Shape]:
    """Gate, up and down of one expert."""
    return [(mlp, hidden), (mlp, hidden), (hidden, mlp)]


def qwen3_moe(hidden: int, heads: int, experts: int, mlp: int) -> list[Shape]:
    """One decoder layer; heads of 128, 4 of them for keys and values; the experts are separate matrices."""
    attention = [(heads * 128, hidden), (4 * 128, hidden), (4 * 128, hidden), (hidden, heads * 128), (128,), (128,)]
    return [*attention, (experts, hidden), *swiglu(hidden, mlp) * experts, (hidden,), (hidden,)]


def deepseek_v3() -> list[Shape]:
    """One layer: latent attention of 128 heads, 256 routed experts and a shared one."""
    queries = [(1536, 7168), (1536,), (128 * (128 + 64), 1536)]
    keys_and_values = [(512 + 64, 7168), (512,), (128 * (128 + 128), 512)]
    attention = [*queries, *keys_and_values, (7168, 128 * 128)]
    return [*attention, (256, 7168), (256,), *swiglu(7168, 2048) * 257, (7168,), (7168,)]


BLOCKS: dict[str, list[Shape]] = {
    "GPT-2": gpt2(768),
    "GPT-2 XL": gpt2(1600),
    "Llama-3 8B": llama(4096, 1024, 14336),
    "Llama-3 70B": llama(8192, 1024, 28672),
    "Qwen3-30B-A3B": qwen3_moe(2048, 32, 128, 768),
    "Qwen3-235B-A22B": qwen3_moe(4096, 64, 128, 1536),
    "DeepSeek-V3": deepseek_v3(),
}
"""The parameters of one transformer block, by model."""


@dataclass(frozen=True, slots=True)
class Result:
    """One block packed for one number of ranks."""

    packing: Packing
    bound: int
    plan_seconds: float
    pack_seconds: float

    @property
    def padding(self) -> float:
        """The share of the places that hold no element."""
        return self.packing.padding

    @property
    def imbalance(self) -> float:
        """By how much the longest run exceeds the mean."""
        return self.packing.imbalance

    @property
    def over_bound(self) -> float:
        """By how much the longest run exceeds the least that any way to cut must have; padding included."""
        return max(self.packing.shard_numels) / self.bound - 1


@cache
def result(model: str, placement: str, num_ranks: int) -> Result:
    shapes, rule = BLOCKS[model], PLACEMENTS[placement]
    began = time.perf_counter()
    cuts = plan([Wanted(shape, rule, model) for shape in shapes], num_ranks)
    planned = time.perf_counter()
    packing = pack(cuts, num_ranks)
    packed = time.perf_counter()
    return Result(packing, least_longest_run(shapes, rule, num_ranks), planned - began, packed - planned)


def least_longest_run(shapes: Sequence[Shape], rule: RunPlacement, num_ranks: int) -> int:
    """What the longest run must hold at least: the mean; the largest piece that is never cut; and of tensors that have
    owners, k + 1 of the `k * num_ranks + 1` largest, for some rank gets so many of them."""
    numels = [prod(shape) for shape in shapes]
    grains = [min(numel, rule.grain(shape, "")) for numel, shape in zip(numels, shapes, strict=True)]
    bound = max(-(-sum(numels) // num_ranks), *grains)
    if not rule.owned:
        return bound
    largest_first = sorted(numels, reverse=True)
    up_to = list(accumulate(largest_first, initial=0))
    crowded = range(1, (len(numels) - 1) // num_ranks + 1)
    return max(bound, *(up_to[k * num_ranks + 1] - up_to[k * num_ranks - k] for k in crowded), 0)


# The data, and their summary on the page

FIGURES = {"padding": "padding", "imbalance": "imbalance", "over_bound": "over the bound"}
"""The properties of `Result` that are shown, in percent, and their names on the page."""


def rows() -> list[list[str]]:
    """Returns the lines of docs/data/packing.csv: a case each, behind a line of names."""
    lines = [["model", "placement", "ranks", *(f"{figure} (%)" for figure in FIGURES)]]
    for placement in PLACEMENTS:
        for model in BLOCKS:
            for num_ranks in RANKS:
                this = result(model, placement, num_ranks)
                figures = [f"{100 * getattr(this, figure):.2f}" for figure in FIGURES]
                lines.append([model, placement, str(num_ranks), *figures])
    return lines


def summary(lines: Sequence[Sequence[str]]) -> str:
    """Returns a table of the median and the worst of `rows()`, for each placement and figure."""
    _, *cases = lines
    table = [["placement", *(f"{name}, {of} (%)" for name in FIGURES.values() for of in ("median", "worst"))]]
    for placement in PLACEMENTS:
        columns = zip(*(map(float, case[3:]) for case in cases if case[1] == placement), strict=True)
        figures = [f"{of(column):.1f}" for column in columns for of in (statistics.median, max)]
        table.append([f"`{placement}`", *figures])
    return "\n".join(markdown(table))


def markdown(lines: list[list[str]]) -> Iterator[str]:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    for line in (lines[0], rule, *lines[1:]):
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        yield "| " + " | ".join(cells) + " |"


def times() -> str:
    lines = [["slowest of all", "plan (ms)", "pack (ms)"]]
    for placement in PLACEMENTS:
        results = [result(model, placement, num_ranks) for model in BLOCKS for num_ranks in RANKS]
        slowest = [max(each.plan_seconds for each in results), max(each.pack_seconds for each in results)]
        lines.append([f"`{placement}`", *(f"{1000 * seconds:.0f}" for seconds in slowest)])
    return "\n".join(markdown(lines))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.padding", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"{DATA.name}, and the summary into {PAGE.name}")
    lines = rows()
    sections = {"packing": summary(lines), "times": times()}
    if parser.parse_args().write:
        DATA.write_text(as_csv(lines))
        PAGE.write_text(written(PAGE.read_text(), sections))
    else:
        print(*sections.values(), sep="\n\n")


if __name__ == "__main__":
    main()
