"""Asks the tests whether they notice mutants of the library: `python -m tests.mutants --seed 0 --count 60`.

First the suite runs once, on a copy of the tree with probes, and so shows which tests reach each mutant's place: also
tests whose ranks, threads or programs reach it. (mutmut and cosmic-ray see the process of pytest alone.) Then each
mutant is put into a copy of the tree and asked of these tests; the first that fails, or hangs, has killed it, unless it
fails without the mutant too. CONTRIBUTING.md has the figures.
"""

import argparse
import concurrent.futures
import contextlib
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tests.mutants.sites import Mutant, drawn
from tests.support.suites import SUITES

ROOT = Path(__file__).parents[2]
FIRST = 30  # tests that are asked first: most mutants are killed by them
HANGS_S = 180  # without a word from pytest
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="which mutants are drawn")
    parser.add_argument("--count", type=int, default=60, help="how many")
    parser.add_argument("--suite", choices=SUITES, default="quick", help="whose tests are asked")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the mutants to ask")
    parser.add_argument("--reached", type=Path, help="file of an earlier run that says which test reaches what")
    args = parser.parse_args()
    mutants = drawn(ROOT, args.seed, args.count)
    reached = args.reached or Path(f"reached-{args.suite}-{args.seed}.txt")
    if not reached.exists():
        note_reached(mutants, args.suite, reached.absolute())
    tests = read_reached(reached)
    numbers = args.only if args.only is not None else range(len(mutants))
    verdicts = {}
    with copies(os.cpu_count() or 1) as roots, concurrent.futures.ThreadPoolExecutor(roots.qsize()) as pool:
        asked = {pool.submit(verdict, mutants[number], sorted(tests[number]), roots): number for number in numbers}
        for done in concurrent.futures.as_completed(asked):
            number = asked[done]
            verdicts[number] = done.result()
            mutant = mutants[number]
            what = f"{mutant.before!r:.60} -> {mutant.after!r:.60}"
            print(f"{number:3} {mutant.file}:{mutant.line} {what}: {verdicts[number]}", flush=True)
    killed = sum(each.startswith("killed") for each in verdicts.values())
    print(f"{killed} of {len(verdicts)} mutants killed by the suite {args.suite}")


def note_reached(mutants: Sequence[Mutant], suite: str, reached: Path) -> None:
    """Run the suite on a copy with probes, which write into the file `reached`."""
    with copies(1) as roots:
        root = roots.get()
        # From the end of each file to its beginning, so that the places of those before stay right.
        for number, mutant in reversed(list(enumerate(mutants))):
            (root / mutant.file).write_bytes(mutant.probed(root, number))
        shutil.copy(Path(__file__).parent / "reached.py", root / "sherd" / "_reached.py")
        words = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", f"--suite={suite}", "-q"]
        # Tests of the sources themselves, which find the probes, may fail here.
        pytest_in(root, words, sys.stderr.fileno(), SHERD_REACHED=str(reached)).wait()


def read_reached(file: Path) -> dict[int, set[str]]:
    """Returns the names of the tests that reach each mutant's place."""
    tests: dict[int, set[str]] = defaultdict(set)
    for line in file.read_text().splitlines():
        number, _, test = line.partition("\t")
        if test:
            tests[int(number)].add(test)
    return tests


@contextlib.contextmanager
def copies(count: int) -> Iterator["queue.SimpleQueue[Path]"]:
    """Copies of the files that git tracks, each for one mutant at a time."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )[:-1]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        roots: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(count):
            root = Path(folder) / str(number)
            for name in tracked:
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, root / name)
            roots.put(root)
        yield roots


def verdict(mutant: Mutant, tests: list[str], roots: "queue.SimpleQueue[Path]") -> str:
    """Returns "not reached", "survived N tests", or "killed by" with the name of a test."""
    if not tests:
        return "not reached"
    root = roots.get()
    original = (root / mutant.file).read_bytes()
    try:
        random.Random(0).shuffle(tests)
        doubted: set[str] = set()
        for asked in (tests[:FIRST], tests[FIRST:]):
            while remaining := [test for test in asked if test not in doubted]:
                (root / mutant.file).write_bytes(mutant.applied(root))
                killer = first_failure(root, remaining)
                (root / mutant.file).write_bytes(original)
                if killer is None:
                    break
                if killer not in remaining or first_failure(root, [killer]) is None:
                    return f"killed by {killer}"
                doubted.add(killer)
        return f"survived {len(tests) - len(doubted)} tests" + (f", {len(doubted)} fail without it" if doubted else "")
    finally:
        (root / mutant.file).write_bytes(original)
        roots.put(root)


def first_failure(root: Path, tests: Iterable[str]) -> str | None:
    """Returns the first of `tests` that fails, or "a hang" or "an error", and None if all pass."""
    with tempfile.TemporaryDirectory() as folder:
        names, said = Path(folder) / "names", Path(folder) / "said"
        names.write_text("\n".join(tests))
        with said.open("wb") as file:
            process = pytest_in(root, ["-x", "-v", f"@{names}"], file.fileno())
        size, since = -1, time.monotonic()
        while process.poll() is None:
            time.sleep(0.2)
            if said.stat().st_size != size:
                size, since = said.stat().st_size, time.monotonic()
            elif time.monotonic() - since > HANGS_S:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return "a hang"
        if process.returncode == 0:
            return None
        failed = FAILED.search(said.read_text(errors="replace"))
        return failed[1] if failed else "an error"


def pytest_in(root: Path, words: list[str], output: int, **environment: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", *words]
    variables = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        command, cwd=root, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )


if __name__ == "__main__":
    main()
