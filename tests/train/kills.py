"""A run killed at random moments: what it said it had saved is there, and the next start goes on as if nothing was.

    python -m tests.train.kills --moments 100 --seed 0
    python -m tests.train.kills --moments 100 --offload masters@scratch --in-steps    # state and masters on a disk

In each moment SIGTERM, SIGHUP or SIGKILL comes to the launcher, to one rank, or to all at once: in the start, in a
step, in a save, in the sample, or at the end. Then the same command is started again, to the end. What must hold is
in `require`.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sherd.storage.folder import Folder
from sherd.storage.places import DiskPlace
from sherd.train.codes import NOT_SAVED, STOPPED
from tests.support.ranks.forked import sherd, start
from tests.train.test_loop import TREE

PATIENCE_S = 180.0
SAVING_S = 20  # ranks whose launcher is gone give up after that
STEPS, SAVE_EVERY = 12, 2
PHASES = ("start", "step", "save", "sample", "end")
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)
TARGETS = ("launcher", "rank 0", "rank 1", "all")
ENVIRONMENT = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SAVING_S)}


@dataclass(frozen=True)
class Moment:
    """When, by what and who is killed. `delay` is a share of about how long the phase takes."""

    phase: str
    number: signal.Signals
    target: str
    step: int
    delay: float

    def __str__(self) -> str:
        return f"{self.number.name} to {self.target} in phase {self.phase} ({self.delay:.2f} of it)"


def drawn(seed: int) -> Moment:
    """The moment of that number."""
    dice = random.Random(seed)
    step = dice.randint(1, STEPS - 1)
    return Moment(dice.choice(PHASES), dice.choice(SIGNALS), dice.choice(TARGETS), step, dice.random())


class Run:
    """A command `sherd train` in a process of its own, forked from one that has torch imported."""

    def __init__(self, folder: Path, name: str) -> None:
        self.out, self.said = folder / "run", folder / name
        words = ["train", "--config", str(folder / "run.json"), "--out", str(self.out), "--resume-or-start"]
        self.begun = time.monotonic()
        self._seen: set[int] = set()  # of its ranks
        self.process: Any = start(sherd, words, ENVIRONMENT, folder=folder, output=self.said)

    @property
    def code(self) -> int | None:
        return self.process.exitcode

    def ranks(self) -> list[int]:
        """Process numbers of the launcher's children that are ranks: leaders of sessions of their own."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                _, parent, _, session = stat.read_text().rpartition(")")[2].split()[:4]
                if int(parent) == self.process.pid and session == stat.parent.name:
                    found.append(int(stat.parent.name))
        self._seen |= {*found}
        return sorted(found)

    def records(self, event: str) -> list[dict[str, Any]]:
        """What metrics.jsonl has of that event; a line cut off by a kill is passed over."""
        metrics = self.out / "metrics.jsonl"
        found = []
        for line in metrics.read_text().splitlines() if metrics.exists() else []:
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                found += [record] if record["event"] == event else []
        return found

    def words(self, suffix: str = "") -> str:
        """What it printed; with `.err`, to stderr. Nothing, if it was killed before it could."""
        path = self.said.with_suffix(suffix)
        return path.read_text() if path.exists() else ""

    def until(self, condition: Callable[[], Any], *, alive: bool = True) -> None:
        """Wait for it, or for the end of the run."""
        deadline = time.monotonic() + PATIENCE_S
        while (self.code is None or not alive) and not condition():
            assert time.monotonic() < deadline, f"{self.said}: nothing happens"
            time.sleep(0.002)

    def gone(self) -> bool:
        """Whether none of its processes is left."""
        return not any(Path(f"/proc/{pid}").exists() for pid in self._seen)

    def end(self) -> int:
        """Its exit code, once all processes are gone."""
        self.until(lambda: False)
        self.until(self.gone, alive=False)
        assert self.code is not None
        return self.code


def kill(run: Run, moment: Moment, usual: float) -> None:
    """Send the signal in that moment of a run whose start takes about `usual` seconds."""
    parts = {
        # Ranks are there after some of the start, for which we wait below.
        "start": (lambda: True, usual if moment.target == "launcher" else usual / 2),
        "step": (lambda: len(run.records("step")) >= moment.step, 0.02),
        "save": (lambda: list(run.out.glob(f"checkpoints/step-{2 * -(-moment.step // 2):08}")), 0.05),
        "sample": (lambda: len(run.records("evaluation")) >= STEPS // SAVE_EVERY, 0.2),
        "end": (lambda: (run.out / "sample.txt").exists(), 0.3),
    }
    begins, seconds = parts[moment.phase]
    run.until(begins)
    if moment.target != "launcher":
        run.until(lambda: len(run.ranks()) == 2)
    time.sleep(moment.delay * seconds)
    ranks = run.ranks()
    who = {"launcher": [run.process.pid], "rank 0": ranks[:1], "rank 1": ranks[1:], "all": [run.process.pid, *ranks]}
    for pid in who[moment.target]:
        with contextlib.suppress(ProcessLookupError):
            if run.code is None:
                os.kill(pid, moment.number)


def require(first: Run, code: int, saved: int, second: Run, never_killed: dict[int, float]) -> None:
    """What must hold after a run was killed, and started again to the end."""
    went_on = re.search(r"going on after step (\d+)", second.words())
    reported = [record["step"] for record in second.records("checkpoint")]
    said, err = first.words(), first.words(".err")
    stopped = re.search(r"stopped after step (\d+), which is saved", said)
    begun_from = int(went_on[1]) if went_on else 0
    context = f"{code}\n{said}\n{err}\n--- then\n{second.words()}\n{second.words('.err')}"
    assert "Traceback" not in context, context
    assert "terminate called" not in context, context
    assert begun_from >= saved, context
    if stopped:
        assert begun_from == int(stopped[1]), context
    if code == STOPPED:  # and not -SIGTERM, which is the interpreter's before it has come to sherd's first line
        assert stopped, context
    if code == NOT_SAVED:
        assert "stopped without saving" in err or "nothing new was saved" in err, context
    losses = {record["step"]: record["loss"] for record in second.records("step")}
    assert losses == never_killed, context
    for record in second.records("step"):  # also those that were done twice
        assert record["loss"] == never_killed[record["step"]], context
    assert max(reported) == STEPS, context
    folder = Folder(DiskPlace(second.out / "checkpoints"))
    assert len(folder.whole()) == len(folder.steps()), context
    assert not folder.sweep(), context


def prepared(folder: Path, offload: str = "nothing") -> None:
    """The run's config and text."""
    folder.mkdir(parents=True)
    (folder / "text.txt").write_text("the quick brown foxes jump over the lazy dog. " * 100)
    text = str(folder / "text.txt")
    tree = {**TREE, "data": text, "batch": 4, "steps": STEPS, "every": SAVE_EVERY, "device": "cpu"}
    tree |= {"offload": offload, "precision": "bf16" if offload.startswith("masters") else "fp32"}
    (folder / "run.json").write_text(json.dumps(tree))


@contextlib.contextmanager
def never_killed(folder: Path, offload: str = "nothing") -> Iterator[tuple[dict[int, float], float]]:
    """The losses of a run that nobody kills, and how long its start takes."""
    prepared(folder, offload)
    run = Run(folder, "said")
    run.until(lambda: run.records("step"))
    usual = time.monotonic() - run.begun
    assert run.end() == 0, run.words(".err")
    losses = {record["step"]: record["loss"] for record in run.records("step")}
    assert list(losses) == list(range(1, STEPS + 1))
    yield losses, usual
    shutil.rmtree(folder)


def tried(folder: Path, moment: Moment, losses: dict[int, float], usual: float, offload: str = "nothing") -> int:
    """The exit code of a run killed in that moment. Raises AssertionError where something does not hold."""
    prepared(folder, offload)
    first = Run(folder, "first")
    kill(first, moment, usual)
    code = first.end()
    saved = max((record["step"] for record in first.records("checkpoint")), default=0)
    second = Run(folder, "second")
    assert second.end() == 0, (first.words(".err"), second.words(".err"))
    require(first, code, saved, second, losses)
    _, _, scratch = offload.partition("@")
    assert not scratch or not list((folder / scratch).iterdir()), "scratch files are left"
    shutil.rmtree(folder)
    return code


def main() -> int:
    """Try many, and show a table of outcomes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first moment; the others follow")
    parser.add_argument("--offload", default="nothing", help="as of sherd train; a folder is one below the run's")
    parser.add_argument("--in-steps", action="store_true", help="SIGKILL within steps alone")
    args = parser.parse_args()
    table: collections.Counter[tuple[str, str, str, str]] = collections.Counter()
    failed = 0
    with (
        tempfile.TemporaryDirectory() as place,
        never_killed(Path(place) / "whole", args.offload) as (losses, usual),
    ):
        for seed in range(args.seed, args.seed + args.moments):
            moment = drawn(seed)
            if args.in_steps:
                moment = replace(moment, phase="step", number=signal.SIGKILL)
            try:
                outcome = f"exit {tried(Path(place) / str(seed), moment, losses, usual, args.offload)}"
            except AssertionError as error:
                outcome, failed = "FAILED", failed + 1
                print(f"seed {seed}: {moment}: {error}", flush=True)
            print(f"seed {seed:3}: {moment}: {outcome}", flush=True)
            table[moment.phase, moment.number.name, moment.target, outcome] += 1
    for (phase, number, target, outcome), count in sorted(table.items()):
        print(f"{phase:8}{number:9}{target:10}{outcome:10}{count:4}")
    print(f"{failed} of {args.moments} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
