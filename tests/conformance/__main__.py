"""Runs PyTorch's own public tests of FSDP, those of its 2.6 tree, on sherd, on the CPU with gloo: `make conformance`.

`bar.json` has the tests that touch public names alone and pass with torch's own FSDP (2.13); `accepted.json` has those
that differ for a reason, by reason. Each test runs in a process of its own, whose output is in `.conformance/logs`.
"""

import argparse
import inspect
import json
import os
import re
import select
import signal
import sys
import time
import traceback
import unittest
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

from tests.conformance.sources import FOLDER, source_tree

HERE, LOGS = Path(__file__).parent, FOLDER / "logs"
NEEDS_4 = re.compile(r"// ?2\b|2d|3d|hsdp|hybrid|tp_mesh|dp_mesh|tp_size|dp_size", re.I)
"""Words of a test with a mesh of two axes: on two ranks one of them would have size 1."""

AREAS = {"distributed/_composable/fsdp": "FSDP2", "distributed/fsdp": "FSDP1"}

Tests = dict[str, dict[str, list[str]]]
"""The tests of a file by class."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--tests", default="", help="a regular expression on FILE::CLASS::TEST")
    parser.add_argument("--jobs", type=int, default=2, help="files at a time")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for one test")
    args = parser.parse_args()
    bar: Tests = json.loads((HERE / "bar.json").read_text())
    wanted = [
        (file, cls, test)
        for file, classes in bar.items()
        for cls, tests in classes.items()
        for test in tests
        if re.search(args.tests, f"{file}::{cls}::{test}")
    ]
    by_reason: dict[str, list[str]] = json.loads((HERE / "accepted.json").read_text())
    reason_of = {test: reason for reason, tests in by_reason.items() for test in tests}
    tree = source_tree()
    os.environ.setdefault("SHERD_FLIGHT_DIR", str(FOLDER))
    from tests.conformance import rewrite

    rewrite.install()
    found = {}
    for test, why in outcomes(tree, wanted, args.jobs, args.timeout):
        found[test] = why
        if why and test not in reason_of:
            print(f"LOST {test}: {why}", flush=True)
    if not report(["::".join(each) for each in wanted], found, reason_of):
        sys.exit(1)


def area_of(test: str) -> str:
    """Returns the part of FSDP that a test is about."""
    folder = test.rpartition("/")[0]
    return AREAS.get(folder, "2-D, pipelines, checkpoints")


def report(wanted: list[str], found: dict[str, str], reason_of: dict[str, str]) -> bool:
    """Print what passes, by area, and why tests differ that are accepted. Returns whether no other is lost."""
    passed = {test for test in wanted if found.get(test) == ""}
    for area in dict.fromkeys(map(area_of, wanted)):
        here = [test for test in wanted if area_of(test) == area]
        accepted = Counter(reason_of[test] for test in here if test not in passed and test in reason_of)
        num_passed = len(passed.intersection(here))
        lost = len(here) - num_passed - accepted.total()
        print(f"{area}: {num_passed} pass, {accepted.total()} are accepted, {lost} are lost, of {len(here)}")
        for reason, count in accepted.items():
            print(f"  {count} accepted: {reason}")
    for test in passed.intersection(reason_of):
        print(f"passes, and need not be accepted: {test}")
    return passed.union(reason_of).issuperset(wanted)


# Files beside one another, each in a fork of this process, which has imported torch


def outcomes(tree: Path, wanted: list[tuple[str, str, str]], jobs: int, timeout: float) -> Iterator[tuple[str, str]]:
    """Yields each test with what it failed with, "" if it passes."""
    ahead = list(dict.fromkeys(file for file, _, _ in wanted))
    running: dict[int, tuple[int, bytes]] = {}
    while ahead or running:
        while ahead and len(running) < jobs:
            file = ahead.pop(0)
            tests = [(cls, test) for its_file, cls, test in wanted if its_file == file]
            reading, writing = os.pipe()
            pid = os.fork()
            if not pid:
                _end(lambda file=file, tests=tests, to=writing: run_file(tree, file, tests, timeout, to))
            os.close(writing)
            running[reading] = pid, b""
        for pipe in select.select(list(running), [], [])[0]:
            data, (pid, before) = os.read(pipe, 65536), running[pipe]
            *lines, rest = (before + data).split(b"\n")
            running[pipe] = pid, rest
            yield from (tuple(json.loads(line)) for line in lines)
            if not data:
                os.close(pipe)
                os.waitpid(pid, 0)
                del running[pipe]


def _end(run: Any) -> None:
    """Run a forked process to its end, past what the parent would do then."""
    try:
        run()
    finally:
        sys.stdout.flush()
        os._exit(0)


def run_file(tree: Path, file: str, tests: list[tuple[str, str]], timeout: float, to: int) -> None:
    """Run tests of one file, and write a line to `to` for each."""
    from tests.conformance import rewrite

    folder = LOGS / file.removesuffix(".py").replace("/", ".")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        module, why = rewrite.loaded(tree, file), ""
    except BaseException as error:
        module, why = None, f"import: {type(error).__name__}: {error}"
    for cls, test in tests:
        said = run_test(getattr(module, cls)(test), timeout, folder / f"{cls}.{test}.log") if module else why
        os.write(to, json.dumps([f"{file}::{cls}::{test}", said]).encode() + b"\n")


def run_test(case: unittest.TestCase, timeout: float, log: Path) -> str:
    """Run one test in a process group of its own, with `timeout`. Returns what it failed with, "" if it passes."""
    from torch.testing._internal import common_fsdp
    from torch.testing._internal.distributed._tensor import common_dtensor

    from tests.conformance import ours, rewrite

    method = getattr(case, case._testMethodName)
    number = max(2, getattr(method, "num_ranks", 2))
    if NEEDS_4.search(case._testMethodName + inspect.getsource(inspect.unwrap(method.__func__))):
        number = max(4, number)
    rewrite.num_ranks = common_fsdp.DEVICE_COUNT = number
    common_dtensor.NUM_DEVICES = max(4, number)
    ours.running = f"{type(case).__name__}::{case._testMethodName}"
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1), os.dup2(output, 2)
        _end(lambda: os.write(writing, _outcome(case).encode() or b"\0"))
    os.close(writing)
    # Its ranks have the pipe too, so its end is not that of the test.
    said = os.read(reading, 65536).decode() if select.select([reading], [], [], timeout)[0] else f"over {timeout:g} s"
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(reading)
    return said.strip("\0") if said else "the process died"


def _outcome(case: unittest.TestCase) -> str:
    result = unittest.TestResult()
    start = time.monotonic()
    try:
        case.run(result)
    except BaseException:
        result.errors.append((case, traceback.format_exc()))
    print(f"{time.monotonic() - start:.1f} s")
    for _, text in (*result.errors, *result.failures):
        print(text)
        said = re.findall(r"^[\w.]*(?:Error|Exception|Exit|Interrupt|Warning)\b.*", text, re.MULTILINE)
        inner = [line for line in said if "exited with" not in line and "closed by peer" not in line]
        return (inner or said or [text.strip()[-300:]])[0][:300]
    return f"skipped: {result.skipped[0][1]}" if result.skipped else ""


if __name__ == "__main__":
    main()
