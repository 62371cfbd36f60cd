"""`python -m bench.gpus`: correctness, speed compared with FSDP2, the capture check, a lost rank; a table and a page.

    sherd doctor --gpus            # in a clone: the same
    make gpu                       # the same, in an environment that make sets up

Each part has a limit, ten minutes in all. A part that fails is told, and the next one goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

import sherd
from sherd.guard.flight import FOLDER
from sherd.tools.doctor.findings import FAILURE, WARNING, Finding, as_json, as_table, exit_code, failed, warned
from sherd.tools.doctor.machine import devices

from ..device import page
from ..device.cases import CASES, LARGE, PLAIN, SMALLER, STACKS, Case, Stack
from ..device.figure import Job, results_of
from ..device.groups import Failed, Group, Ranks, in_a_line
from ..device.lines import circumstances
from ..device.rows import Result, rows_of, unlike_losses
from ..ranks import Conditions, load_device
from ..systems import FLAT, FSDP2, SHERD
from .captured import FRONT_ENDS, captured
from .correctness import SET_UPS, differences
from .lost_rank import NAMED_WITHIN_S, left_behind, lose

NO_GPU = "run it on a machine whose GPUs torch sees: python -c 'import torch; print(torch.cuda.is_available())'"
TELL = "please open an issue, with the file and the page"
MOST_RANKS = 8
FAKE_SIZE = 8
"""With one device, speed is measured as rank 0 of so many whose collectives copy within the device."""
NUM_TURNS = 3
ROOM = 40 << 30
"""A device of so many bytes or more gets eight layers of Llama 3 8 B, others a smaller model."""


@dataclass
class Run:
    """What was asked for, and what has come out so far."""

    conditions: Conditions
    num_ranks: int
    parts: Sequence[str]
    findings: list[Finding] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)

    @property
    def group(self) -> Group:
        """A rank on each device."""
        return Group("real", self.num_ranks)

    def ranks(self, work: Callable[[DeviceMesh, Any], Any]) -> Ranks:
        return Ranks(self.group, self.conditions.device, self.conditions.load, work)


# The parts


def correctness(run: Run, until: float) -> Iterator[Finding]:
    """Each set-up computes what plain torch computes on one device."""
    left = [each for each in SET_UPS if run.num_ranks >= each.fewest_ranks and run.num_ranks % each.fewest_ranks == 0]
    while left:
        with run.ranks(differences) as ranks:
            while left:
                set_up = left.pop(0)
                try:
                    said = [each for each in ranks.ask(set_up, _seconds_until(until)) if each]
                except Failed as failure:  # its processes are not used again
                    yield failed("correctness", set_up.name, failure, TELL)
                    break
                as_plain = f"as plain torch on one device, on {run.num_ranks} rank(s)"
                yield failed("correctness", set_up.name, said[0] if said else as_plain, TELL if said else "")


def compared_with_fsdp2(run: Run, until: float) -> Iterator[Finding]:
    """Steps, host time, memory and exposed communication, in turns of opposite order."""
    group = run.group if run.num_ranks > 1 else Group("fake", FAKE_SIZE)
    stack = stack_for(run.conditions)
    cases = [CASES[name] for name in run.conditions.cases]
    turns = range(1 if run.conditions.quick else NUM_TURNS)
    jobs = [job for case in cases for turn in turns for job in jobs_of(case, stack, turn, run.conditions.rounds)]
    for result in results_of(group, jobs, run.conditions, until):
        run.results.append(result)
        print(f"  {result.line()}", file=sys.stderr, flush=True)
        if result.why:
            yield Finding("compared with FSDP2", f"{result.case}, {result.system}", result.why, WARNING, TELL)
    for row in rows_of(run.results):
        if row.values:
            seen = ", ".join(f"{name} {value:.4g}" for name, value in row.values.items())
            yield Finding("compared with FSDP2", row.figure.partition(", ")[2], f"{seen} {row.unit}")
    unlike = unlike_losses(run.results)
    yield failed("compared with FSDP2", "losses", unlike or "as FSDP2's", TELL if unlike else "")


def jobs_of(case: Case, stack: Stack, turn: int, num_steps: int) -> list[Job]:
    """Every second turn in the opposite order, so that what drifts on the machine meets all alike."""
    systems = [FSDP2, SHERD, FLAT]
    return [Job(each, case, stack, turn, num_steps) for each in systems[:: -1 if turn % 2 else 1]]


def stack_for(conditions: Conditions) -> Stack:
    """What was asked for, or what the first device has room for."""
    if conditions.stack:
        return STACKS[conditions.stack]
    module = torch.get_device_module(conditions.device)
    total = module.mem_get_info()[1] if hasattr(module, "mem_get_info") else 0
    return LARGE if total >= ROOM and not conditions.quick else SMALLER


def capture(run: Run, until: float) -> Iterator[Finding]:
    """Whether a step may be captured as a graph of the device, by each front end: what `sherd.capturable` says."""
    stack = run.conditions.stack or SMALLER.name
    with run.ranks(captured) as ranks:
        for system in FRONT_ENDS:
            for may_be, said in dict.fromkeys(ranks.ask((system, stack), _seconds_until(until))):
                yield warned("capture", system.name, said, "" if may_be else TELL)


def lost_rank(run: Run, until: float) -> Iterator[Finding]:
    """The last rank is killed; all others raise an error that names it."""
    if run.num_ranks < 2:
        yield Finding("a lost rank", "the last rank", "not tried: it takes two devices")
        return
    lost = run.num_ranks - 1
    with run.ranks(lose) as ranks:
        for rank, (taken, said) in enumerate(ranks.ask(lost, _seconds_until(until), silent=[lost])):
            is_named = f"rank {lost} has died" in said.lower() and taken <= NAMED_WITHIN_S
            text = f"{taken:.1f} s after rank {lost} was killed: {said.splitlines()[0] if said else 'nothing'}"
            yield failed("a lost rank", f"rank {rank} says", text, "" if is_named else TELL)


PARTS: dict[str, tuple[Callable[[Run, float], Iterator[Finding]], float]] = {
    "correctness": (correctness, 150),
    "compared with FSDP2": (compared_with_fsdp2, 240),
    "capture": (capture, 60),
    "a lost rank": (lost_rank, 60),
}
"""By name, with the seconds that each may take; the start of processes comes to each."""


def _seconds_until(until: float) -> float:
    return max(5.0, until - time.monotonic())


def try_all(run: Run) -> None:
    """All parts in order. A part that raises is a failure, and the next one goes on."""
    for name in run.parts:
        part, seconds = PARTS[name]
        print(f"{name} ...", file=sys.stderr, flush=True)
        began = time.monotonic()
        try:
            for finding in part(run, began + seconds):
                run.findings.append(finding)
        except Exception as error:
            run.findings.append(Finding(name, "end", in_a_line(error), FAILURE, TELL))
        run.findings.append(Finding(name, "seconds", f"{time.monotonic() - began:.0f}"))


# The command


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code of the findings."""
    chosen = _parse(arguments)
    load_device(chosen.load)
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        findings = [Finding("accelerators", "accelerator", "torch sees none", FAILURE, NO_GPU)]
        print(as_json(findings) if chosen.json else as_table(findings))
        return exit_code(findings, chosen.strict)
    conditions = Conditions(
        found.type,
        quick=chosen.quick,
        rounds=2 if chosen.quick else 5,
        load=chosen.load,
        stack=chosen.stack,
        cases=(PLAIN.name,) if chosen.quick else (PLAIN.name, "mixed"),
    )
    run = Run(conditions, min(chosen.ranks or conditions.num_devices, MOST_RANKS), chosen.parts)
    around = {**circumstances(conditions), "sherd": sherd.__version__, "ranks": run.num_ranks, "topology": topology()}
    run.findings += devices(run.num_ranks)
    with _own_temporary_files() as folder, left_behind(folder) as left:
        try_all(run)
    run.findings.append(failed("afterwards", "left behind", ", ".join(left) or "nothing", TELL if left else ""))
    chosen.out.mkdir(parents=True, exist_ok=True)
    file, text = chosen.out / "gpus.json", chosen.out / "gpus.md"
    file.write_text(json.dumps({**around, "findings": run.findings, "results": run.results}, default=asdict, indent=1))
    text.write_text(as_page(around, run))
    print(as_json(run.findings) if chosen.json else as_table(run.findings))
    print(f"to send: {file} and {text} (docs/look_up/gpu_runs.md)", file=sys.stderr)
    return exit_code(run.findings, chosen.strict)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpus", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpus"), metavar="FOLDER", help="for the file and the page")
    parser.add_argument("--json", action="store_true", help="print one line of JSON in place of the table")
    parser.add_argument("--strict", action="store_true", help="exit with 1 after a warning")
    parser.add_argument("--ranks", type=int, metavar="N", help=f"ranks, one per device, at most {MOST_RANKS}")
    parser.add_argument("--quick", action="store_true", help="one case, one turn, two steps")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help="some of them")
    parser.add_argument("--stack", choices=STACKS, default="", help="the model that is measured")
    parser.add_argument("--import", dest="load", default="", metavar="MODULE[:FUNCTION]", help="as of python -m bench")
    return parser.parse_args(arguments)


@contextlib.contextmanager
def _own_temporary_files() -> Iterator[Path]:
    """Inside, this process and the ranks have a folder of their own for temporary files and flight records, which goes
    on leaving."""
    folder = Path(tempfile.mkdtemp(prefix="sherd-gpus-"))
    before = {name: os.environ.get(name) for name in ("TMPDIR", FOLDER)}, tempfile.tempdir
    os.environ["TMPDIR"] = os.environ[FOLDER] = tempfile.tempdir = str(folder)
    try:
        yield folder
    finally:
        for name, value in before[0].items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        tempfile.tempdir = before[1]
        shutil.rmtree(folder, ignore_errors=True)


def topology() -> str:
    """Returns what nvidia-smi says of the links between devices; empty where there is none."""
    try:
        said = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.stdout


def as_page(around: dict[str, Any], run: Run) -> str:
    """The page to send: the table of findings, and the measured figures as docs/understand/benchmarks.md has them."""
    measured = page.section([around], run.results) if run.results else ""
    versions = "\n".join(f"- {name}: {value}" for name, value in around.items() if name != "topology")
    parts = ["# sherd on GPUs", versions, f"```\n{as_table(run.findings)}\n```", measured]
    parts += [f"```\n{around['topology'].rstrip()}\n```"] if around["topology"] else []
    return "\n\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    sys.exit(main())
