"""`python -m bench.gpus`: correctness, speed compared with FSDP2, the capture check, a lost rank; a table and a page.

    sherd doctor --gpus            # in a clone: the same
    make gpu                       # the same, in an environment that make sets up

Each part has a limit, ten minutes in all. A part that fails or reaches its limit is told, and the next one goes on.
What was found is written after each.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import sherd
from sherd.tools.doctor.findings import FAILURE, WARNING, Finding, as_json, as_table, exit_code, failed
from sherd.tools.doctor.machine import devices

from ..device import page
from ..device.cases import PLAIN, STACKS
from ..device.groups import Failed
from ..device.lines import circumstances
from ..device.rows import Result, rows_of, unlike_losses
from ..ranks import Conditions, load_device
from ..systems import FSDP2
from .left import left_behind
from .limited import told
from .parts import PARTS, TELL, Part, Run

NO_GPU = "run it on a machine whose GPUs torch sees: python -c 'import torch; print(torch.cuda.is_available())'"
SIMULATED = "nothing here was measured on hardware"
MOST_RANKS = 8
LIMIT_S = 600.0
AROUND_S = 60.0
"""What of it is left to what comes before and behind the parts."""
HARD_S = 10.0
"""A part that heeds its time ends so long before it would be stopped, and says what it has left out."""
AGAIN = "run it again, and let it end"


@dataclass
class Report:
    """What has come out so far, and where it is written."""

    around: dict[str, Any]
    out: Path
    findings: list[Finding] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)

    @property
    def files(self) -> tuple[Path, Path]:
        return self.out / "gpus.json", self.out / "gpus.md"

    def write(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        record = {**self.around, "findings": self.findings, "results": self.results}
        self.files[0].write_text(json.dumps(record, default=asdict, indent=1))
        self.files[1].write_text(as_page(self))


def comparison(results: Sequence[Result]) -> Iterator[Finding]:
    """What the results of a part, be it entire or not, say."""
    for result in results:
        if result.why:
            yield Finding("compared with FSDP2", f"{result.case}, {result.system}", result.why, WARNING, TELL)
    for row in rows_of(results):
        if row.values:
            seen = ", ".join(f"{name} {value:.4g}" for name, value in row.values.items())
            yield Finding("compared with FSDP2", row.figure.partition(", ")[2], f"{seen} {row.unit}")
    unlike, measured = unlike_losses(results), [each for each in results if each.ranks]
    if any(each.kind != "real" for each in measured):
        yield Finding("compared with FSDP2", "losses", "not compared: fake ranks do not reduce")
    elif {each.system for each in measured} > {FSDP2.name}:
        yield failed("compared with FSDP2", "losses", unlike or "as FSDP2's", TELL if unlike else "")


def try_all(
    run: Run, parts: Mapping[str, tuple[Part, float]], report: Report, until: float, now: Callable[[], float]
) -> None:
    """All parts in order, none beyond its limit or `until`. A part that raises or is stopped is a failure, and the next
    one goes on."""
    for name, (part, seconds) in parts.items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        began, results = now(), []
        limit = min(began + seconds, until)
        try:
            with closing(told(part, run, limit - HARD_S, until=limit, now=now)) as found:
                for each in found:
                    if isinstance(each, Finding):
                        report.findings.append(each)
                    else:
                        results.append(each)
                        print(f"  {each.line()}", file=sys.stderr, flush=True)
        except Failed as failure:
            report.findings.append(Finding(name, "end", f"{failure}, after {now() - began:.0f} s", FAILURE, TELL))
        finally:
            report.results += results
            report.findings += comparison(results)
            report.findings.append(Finding(name, "seconds", f"{now() - began:.0f}"))
            report.write()


# The command


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code of the findings."""
    began = time.monotonic()
    chosen = _parse(arguments)
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
    run = Run(conditions, min(chosen.ranks or conditions.num_devices, MOST_RANKS))
    simulated = {"simulated": SIMULATED} if found.type == "sim" else {}
    around = {
        **simulated,
        **circumstances(conditions),
        "sherd": sherd.__version__,
        "ranks": run.num_ranks,
        "topology": topology(),
    }
    report = Report(around, chosen.out, [*devices(run.num_ranks)])
    more = sum(seconds for _, seconds in PARTS.values()) / sum(PARTS[name][1] for name in chosen.parts)
    parts = {name: (PARTS[name][0], more * PARTS[name][1]) for name in chosen.parts}  # they have the time of the others
    with left_behind() as left:
        _on_signals(_stop)
        try:
            try_all(run, parts, report, began + LIMIT_S - AROUND_S, time.monotonic)
        except KeyboardInterrupt:
            report.findings.append(Finding("run", "end", "stopped by a signal", FAILURE, AGAIN))
        finally:
            _on_signals(signal.SIG_IGN)  # what is left takes seconds
    report.findings.append(failed("afterwards", "left behind", ", ".join(left) or "nothing", TELL if left else ""))
    report.write()
    print(as_json(report.findings) if chosen.json else as_table(report.findings))
    print("to send: {} and {} (docs/look_up/gpu_runs.md)".format(*report.files), file=sys.stderr)
    return exit_code(report.findings, chosen.strict)


def _on_signals(do: Any) -> None:
    """For what asks this process to end, but for what its starter had it ignore."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, do)


def _stop(*_: object) -> None:
    _on_signals(signal.SIG_IGN)
    raise KeyboardInterrupt


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
    chosen = parser.parse_args(arguments)
    try:
        load_device(chosen.load)
    except RuntimeError as error:  # the simulated device without a compiler, for one
        parser.error(f"{chosen.load}: {error}")
    return chosen


def topology() -> str:
    """Returns what nvidia-smi says of the links between devices; empty where there is none."""
    try:
        said = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.stdout


def as_page(report: Report) -> str:
    """The page to send: the table of findings, and the measured figures as docs/understand/benchmarks.md has them."""
    around = report.around
    measured = page.section([around], report.results) if report.results else ""
    if "simulated" in around and measured:
        measured = f"**A simulated device: {SIMULATED}.**\n\n{measured}"
    versions = "\n".join(f"- {name}: {value}" for name, value in around.items() if name != "topology")
    parts = ["# sherd on GPUs", versions, f"```\n{as_table(report.findings)}\n```", measured]
    parts += [f"```\n{around['topology'].rstrip()}\n```"] if around["topology"] else []
    return "\n\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    sys.exit(main())
