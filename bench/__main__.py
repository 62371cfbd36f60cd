"""`python -m bench`: measure what was asked for, print tables, write JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from . import bytes, cuda, mesh, overhead, padding_row, peak, shard_time, small, state_dict, steps
from .ranks import Conditions
from .systems import LEGEND
from .table import Figure, Row, render

FIGURES: dict[str, Callable[[Conditions], Figure]] = {
    "steps": steps.measure,
    "peak": peak.measure,
    "bytes": bytes.measure,
    "overhead": overhead.measure_overhead,
    "scale": overhead.measure_scale,
    "shard": shard_time.measure,
    "optimizer": small.measure_optimizer,
    "clip": small.measure_clip,
    "padding": padding_row.measure,
    "state_dict": state_dict.measure,
    "mesh": mesh.measure,
    "cuda": cuda.measure,
}
ON_CUDA_ALONE = ("cuda",)
"""Elsewhere they are a dry run, for whoever asks for it."""
ASKED_FOR = ("mesh",)
"""Not measured unless named: other ranks, another question."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 when the systems' losses differ, so that their times compare different trainings."""
    chosen = parse(arguments)
    conditions = Conditions(chosen.device, chosen.quick, chosen.rounds)
    began, load = time.perf_counter(), os.getloadavg()[0]
    figures: dict[str, Figure] = {}
    for name in chosen.only:
        print(f"measuring: {name} ...", end="", file=sys.stderr, flush=True)
        since = time.perf_counter()
        figures[name] = FIGURES[name](conditions)
        print(f" {time.perf_counter() - since:.0f} s", file=sys.stderr, flush=True)
    took = time.perf_counter() - began
    circumstances = {**machine(conditions), "load_before": load, "load_after": os.getloadavg()[0]}
    rows = [row for figure in figures.values() for row in figure.rows]
    print(render(rows))
    print_notes(circumstances, figures, took)
    if chosen.json is not None:
        chosen.json.write_text(as_json(circumstances, figures, rows, took))
    return 0 if all(figure.sound for figure in figures.values()) else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="smaller models, 3 rounds: about five minutes on two idle cores"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=FIGURES,
        metavar="NAME",
        help=f"some of: {', '.join(FIGURES)}; all but mesh, if left out, and on the CPU without "
        f"{', '.join(ON_CUDA_ALONE)}",
    )
    parser.add_argument("--mesh", action="store_true", help="two axes, 4 CPU ranks: as --only mesh")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, conditions and raw samples")
    parser.add_argument("--rounds", type=int, metavar="N", help="timed rounds (9, or 3 with --quick)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    chosen = parser.parse_args(arguments)
    if chosen.rounds is None:
        chosen.rounds = 3 if chosen.quick else 9
    if chosen.rounds < 1:
        parser.error(f"--rounds {chosen.rounds}: at least one round is needed")
    if chosen.json is not None and not chosen.json.parent.is_dir():
        parser.error(f"--json {chosen.json}: there is no folder {chosen.json.parent}; make it first")
    if chosen.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this torch sees no CUDA device; use --device cpu")
    if chosen.device == "auto":
        chosen.device = "cuda" if torch.cuda.is_available() else "cpu"
    if chosen.mesh:
        chosen.only = [*(chosen.only or []), "mesh"]
    if chosen.only is None:
        unasked = ASKED_FOR if chosen.device == "cuda" else (*ASKED_FOR, *ON_CUDA_ALONE)
        chosen.only = [name for name in FIGURES if name not in unasked]
    return chosen


def machine(conditions: Conditions) -> dict[str, Any]:
    group = ("nccl" if conditions.device == "cuda" else "gloo") if conditions.group_is_real else "fake"
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if conditions.device == "cuda" else "cpu",
        "group": f"{conditions.num_ranks} ranks, {group}, 1 intra-op thread each",
        "rounds": conditions.rounds,
        "quick": conditions.quick,
    }


def _processor() -> str:
    """The model as Linux names it; elsewhere what the platform module knows."""
    table = Path("/proc/cpuinfo")
    lines = table.read_text().splitlines() if table.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor()


def print_notes(circumstances: dict[str, Any], figures: dict[str, Figure], took: float) -> None:
    print()
    print(f"- {LEGEND}")
    for note in [note for figure in figures.values() for note in figure.notes]:
        print(f"- {note}")
    print("- " + ", ".join(f"{name} {value}" for name, value in circumstances.items()))
    print(f"- times and ratios are medians over rounds, in brackets the middle half; {took:.0f} s in all")


def as_json(circumstances: dict[str, Any], figures: dict[str, Figure], rows: list[Row], took: float) -> str:
    report = {
        "circumstances": circumstances,
        "seconds_in_all": took,
        "rows": rows,
        "samples": {name: figure.samples for name, figure in figures.items()},
        "notes": {name: figure.notes for name, figure in figures.items()},
    }
    return json.dumps(report, default=dataclasses.asdict, indent=1)


if __name__ == "__main__":
    sys.exit(main())
