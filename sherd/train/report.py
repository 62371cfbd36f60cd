"""The report of a run: on the screen, in metrics.jsonl, to loggers, and as a PNG of the loss curve."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sherd.extras import install
from sherd.train.display import Display, PlainDisplay, RichDisplay
from sherd.train.loggers import Loggers

__all__ = ["Report", "Silent", "curve", "peak_memory", "records"]

METRICS = "metrics.jsonl"


def peak_memory(device: torch.device) -> int:
    """Returns the most bytes this rank has held so far: of tensors on the accelerator, or of the process on a CPU."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Silent:
    """The report of every rank but the first: it says nothing."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def say(self, text: str) -> None:
        """Tell the user a line."""

    def begin(self, done: int, steps: int) -> None:
        """Tell that steps begin: `done` of `steps` are done; 0 steps: not yet known how many."""

    def write(self, event: str, **record: Any) -> None:
        """Keep a record in metrics.jsonl."""

    def step(self, **record: Any) -> None:
        """Keep and show the figures of a step: step, loss, seconds_left, ..."""

    def finish(self, sample: str, lzma_bits: float | None) -> None:
        """Keep the sample and draw the curve."""


class Report(Silent):
    """The report of rank 0, into `out`. With `quiet` nothing is on the screen, and all files are written.

    `loggers` is closed with it.
    """

    def __init__(self, out: Path, loggers: Loggers | None = None, quiet: bool = False) -> None:
        self.out, self.quiet = out, quiet
        self._metrics = _opened(out / METRICS)
        self._loggers = loggers
        self._display = Display() if quiet else PlainDisplay()

    def __enter__(self) -> Report:
        if sys.stdout.isatty() and not self.quiet:
            try:
                self._display = RichDisplay()
            except ImportError:
                self.say(f"for a progress bar: {install('train')}")
        return self

    def __exit__(self, *exception: object) -> None:
        self._display.close()
        self._metrics.close()
        if self._loggers:
            self._note(self._loggers.close())

    def say(self, text: str) -> None:
        self._display.say(text)

    def begin(self, done: int, steps: int) -> None:
        self._display.begin(done, steps)

    def write(self, event: str, **record: Any) -> None:
        self._metrics.write(json.dumps({"event": event, **record}) + "\n")
        self._metrics.flush()
        if self._loggers:
            self._note(self._loggers.pass_on(event, record))

    def step(self, **record: Any) -> None:
        self.write("step", **record)
        self._display.progress(record["step"], record)

    def finish(self, sample: str, lzma_bits: float | None) -> None:
        (self.out / "sample.txt").write_text(sample, encoding="utf-8")
        try:
            self._note(curve(self.out / METRICS, self.out / "curve.png", lzma_bits))
        except ImportError:
            self.say(f"for a picture of the loss curve: {install('train')}")
        there = [name for name in ("curve.png", "sample.txt", METRICS) if (self.out / name).exists()]
        self.say(f"written   {', '.join(there)} in {self.out}")

    def _note(self, notes: list[str]) -> None:
        for note in notes:
            self.say(note)


def _opened(metrics: Path) -> Any:
    """`metrics`, to be added to: on a line of its own, for a full disk or a power cut may have left half of one."""
    file = metrics.open("ab+")
    if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
        file.write(b"\n")
    file.close()
    return metrics.open("a", encoding="utf-8")


def curve(metrics: Path, picture: Path, lzma_bits: float | None) -> list[str]:
    """Draw the losses in `metrics` as a PNG. Returns a note if there are lines that were passed over.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.figure import Figure  # no pyplot: it keeps figures alive and may look for a screen

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    lines = metrics.read_text(encoding="utf-8", errors="replace").splitlines()
    read = list(records(lines))
    trained, judged = points(read, "step", "loss"), points(read, "evaluation", "bits")
    axes.plot(list(trained), list(trained.values()), linewidth=0.8, alpha=0.7, label="training, each step's batch")
    axes.plot(list(judged), list(judged.values()), "o-", label="held-out")
    if lzma_bits is not None:
        axes.axhline(lzma_bits, linestyle="--", color="grey", label="lzma on the held-out bytes")
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)
    damaged = sum(1 for line in lines if line.strip()) - len(read)
    several = "s" if damaged > 1 else ""
    return [f"note   {metrics} has {damaged} damaged line{several}, passed over"] if damaged else []


def records(lines: list[str]) -> Iterator[dict[str, Any]]:
    """The records of metrics.jsonl, without lines that a crash has cut."""
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "event" in record:
            yield record


def points(read: list[dict[str, Any]], event: str, name: str) -> dict[int, float]:
    """The value of `name` at each step of such an event. What a run did after the step that it was later resumed from
    has been done again, and the later values count."""
    found: dict[int, float] = {}
    for record in read:
        step, value = record.get("step"), record.get(name)
        if record["event"] == "start" and step:
            found = {earlier: kept for earlier, kept in found.items() if earlier <= step}
        if record["event"] == event and isinstance(step, int) and isinstance(value, (int, float)):
            found[step] = value
    return dict(sorted(found.items()))
