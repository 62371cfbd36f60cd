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

from . import (
    bytes,
    checkpoints,
    host,
    host_step,
    mesh,
    muon,
    overhead,
    padding_row,
    peak,
    shard_time,
    small,
    state_dict,
    steps,
    weights_out,
)
from .device import page
from .device.cases import CASES, STACKS
from .device.figure import measure as measure_on_device
from .device.lines import circumstances as circumstances_of_devices
from .device.lines import device_name
from .device.simulated import measure as measure_simulated
from .ranks import Conditions, Place, backend_of, load_device
from .systems import LEGEND
from .table import Figure, Row, render

FIGURES: dict[str, Callable[[Conditions], Figure]] = {
    "steps": steps.measure,
    "peak": peak.measure,
    "bytes": bytes.measure,
    "overhead": overhead.measure_overhead,
    "scale": overhead.measure_scale,
    "host": host.measure,
    "shard": shard_time.measure,
    "optimizer": small.measure_optimizer,
    "host_step": host_step.measure,
    "clip": small.measure_clip,
    "muon": muon.measure,
    "padding": padding_row.measure,
    "state_dict": state_dict.measure,
    "checkpoints": checkpoints.measure,
    "weights_out": weights_out.measure,
    "mesh": mesh.measure,
    "device": measure_on_device,
    "simulated": measure_simulated,
}
ON_DEVICES = ("device",)
"""What is measured on an accelerator unless figures are named. On the CPU it is a dry run, for whoever names it."""
ASKED_FOR = ("host_step", "mesh", "muon", "simulated")
"""Not measured unless named: other ranks, or another question. `--device sim` alone asks for the last one."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 when the systems' losses differ, so that their times compare different trainings, or when a figure
    has no value at all."""
    chosen = parse(arguments)
    conditions = conditions_of(chosen)
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
    if chosen.write is not None:
        page.write(chosen.write, [circumstances_of_devices(conditions)], figures["device"].samples["results"])
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
        help=f"some of: {', '.join(FIGURES)}; if left out, {', '.join(ON_DEVICES)} on an accelerator, and on the CPU "
        f"all but that, {' and '.join(ASKED_FOR)}",
    )
    parser.add_argument("--mesh", action="store_true", help="two axes, 4 CPU ranks: as --only mesh")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, conditions and raw samples")
    parser.add_argument("--rounds", type=int, metavar="N", help="timed rounds (9, or 3 with --quick; 5 of device)")
    parser.add_argument(
        "--device", default="auto", help="auto (default), cpu, or a device that torch knows: cuda, xpu ..."
    )
    parser.add_argument(
        "--import",
        dest="load",
        default="",
        metavar="MODULE[:FUNCTION]",
        help="import this, and call the function, before the device is asked for: for devices that are not torch's own",
    )
    _add_arguments_of_device(parser.add_argument_group("of the figure `device`"))
    return checked(parser, parser.parse_args(arguments))


def _add_arguments_of_device(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--lines", type=Path, metavar="FILE", help="write each result as it comes, as a line of JSON")
    parser.add_argument(
        "--write", type=Path, metavar="PAGE", help="write ratios into PAGE (docs/understand/benchmarks.md), all as CSV"
    )
    parser.add_argument(
        "--minutes", type=float, metavar="N", help="start nothing after that long (8, or 2 with --quick)"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="CASE", help=f"some of: {', '.join(CASES)}")
    parser.add_argument(
        "--stack", choices=STACKS, default="", help="the model; by default what --quick leaves time for"
    )
    parser.add_argument(
        "--groups",
        nargs="+",
        choices=("real", "fake"),
        default=("real", "fake"),
        help="a rank on each device, where there are several; or one process as a rank of 2, 8 and 64 fake ones",
    )


def checked(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> argparse.Namespace:
    """Returns the arguments with what was left out filled in; ends the process where they make no sense."""
    for file in (chosen.json, chosen.lines):
        if file is not None and not file.parent.is_dir():
            parser.error(f"{file}: there is no folder {file.parent}; make it first")
    if chosen.device == "sim" and not chosen.load:
        chosen.load, chosen.only = "simdevice:load", chosen.only or ["simulated"]
    try:
        load_device(chosen.load)
    except RuntimeError as error:  # the simulated device without a compiler, for one
        parser.error(f"{chosen.load}: {error}")
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if chosen.device == "auto":
        chosen.device = "cpu" if found is None else found.type
    if chosen.device not in ("cpu", getattr(found, "type", "cpu")):
        seen = "no accelerator" if found is None else f"{found.type} alone"
        parser.error(f"--device {chosen.device}: this torch sees {seen}; use --device cpu")
    if chosen.mesh:
        chosen.only = [*(chosen.only or []), "mesh"]
    if chosen.only is None:
        named = [name for name in FIGURES if name not in (*ASKED_FOR, *ON_DEVICES)]
        chosen.only = named if chosen.device == "cpu" else list(ON_DEVICES)
    if chosen.write is not None and "device" not in chosen.only:
        parser.error("--write is for the figure `device`; name it with --only")
    if chosen.minutes is None:
        chosen.minutes = 2.0 if chosen.quick else 8.0
    if chosen.rounds is None:
        chosen.rounds = 3 if chosen.quick else 5 if chosen.only == ["device"] else 9
    if chosen.rounds < 1:
        parser.error(f"--rounds {chosen.rounds}: at least one round is needed")
    return chosen


def conditions_of(chosen: argparse.Namespace) -> Conditions:
    return Conditions(
        device=chosen.device,
        quick=chosen.quick,
        rounds=chosen.rounds,
        load=chosen.load,
        minutes=chosen.minutes,
        stack=chosen.stack,
        cases=tuple(chosen.cases or ()),
        groups=tuple(chosen.groups),
        lines=chosen.lines,
    )


def machine(conditions: Conditions) -> dict[str, Any]:
    kind = "real" if conditions.group_is_real else "fake"
    group = backend_of(Place(conditions.device, kind, conditions.num_ranks))
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device_name(conditions.device)[0],
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
