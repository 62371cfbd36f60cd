"""The report of a run: on the screen, in metrics.jsonl, to loggers, and as a PNG of the loss curve."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sherd.train.loggers import Loggers

__all__ = ["Display", "PlainDisplay", "RichDisplay", "RunReport", "Silent", "curve", "peak_memory", "records"]

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

    def over(self) -> None:
        """Tell that no steps follow: what is said from now on stands below the bar."""

    def write(self, event: str, **record: Any) -> None:
        """Keep a record in metrics.jsonl."""

    def step(self, **record: Any) -> None:
        """Keep and show the figures of a step: step, loss, seconds_left, ..."""

    def finish(self, sample: str, lzma_bits: float | None) -> None:
        """Keep the sample and draw the curve."""


class RunReport(Silent):
    """The report of rank 0, into `out`. With `quiet` nothing is on the screen, and all files are written.

    `loggers` end with it, and are told how: "finished" after `finish`, "failed" by an exception, or else "stopped".
    """

    def __init__(self, out: Path, loggers: Loggers | None = None, quiet: bool = False) -> None:
        self.out, self.quiet = out, quiet
        self._metrics = _opened(out / METRICS)
        self._loggers, self._outcome = loggers, "stopped"
        self._display = Display() if quiet else PlainDisplay()

    def __enter__(self) -> RunReport:
        if sys.stdout.isatty() and not self.quiet:
            try:
                self._display = RichDisplay()
            except ImportError:
                self.say("for a progress bar: pip install rich")
        return self

    def __exit__(self, *exception: object) -> None:
        self._display.close()
        self._metrics.close()
        if self._loggers:
            self._note(self._loggers.end("failed" if exception[0] else self._outcome))

    def say(self, text: str) -> None:
        self._display.say(text)

    def begin(self, done: int, steps: int) -> None:
        self._display.begin(done, steps)

    def over(self) -> None:
        self._display.close()

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
            self.say("for a picture of the loss curve: pip install matplotlib")
        there = [name for name in ("curve.png", "sample.txt", METRICS) if (self.out / name).exists()]
        self.say(f"written   {', '.join(there)} in {self.out}")
        self._outcome = "finished"

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
    """Returns the value of `name` at each step that has such an event.

    A resumed run repeats the steps after its checkpoint; the later values count.
    """
    found: dict[int, float] = {}
    for record in read:
        step, value = record.get("step"), record.get(name)
        if record["event"] == "start" and step:
            found = {earlier: kept for earlier, kept in found.items() if earlier <= step}
        if record["event"] == event and isinstance(step, int) and isinstance(value, (int, float)):
            found[step] = value
    return dict(sorted(found.items()))


# The screen


Record = dict[str, Any]  # the figures of a step, as in metrics.jsonl


class Display:
    """The place where rank 0 shows what happens. This one shows nothing, for `--quiet`."""

    def say(self, text: str) -> None:
        """Show a line."""

    def begin(self, done: int, steps: int) -> None:
        """Show that steps begin: `done` of `steps` are done; 0 steps: not yet known how many."""

    def progress(self, step: int, record: Record) -> None:
        """Show the step just done."""

    def close(self) -> None:
        """Give the screen back."""


class PlainDisplay(Display):
    """A line every few seconds, for files and pipes."""

    SECONDS = 5.0

    def __init__(self) -> None:
        self._last = -self.SECONDS

    def say(self, text: str) -> None:
        """Print a line."""
        print(text, flush=True)

    def progress(self, step: int, record: Record) -> None:
        """Show the step just done, unless another was shown a moment ago."""
        if time.monotonic() - self._last < self.SECONDS and step != record["steps"]:
            return
        self._last = time.monotonic()
        self.say(f"step {step:>6}/{record['steps'] or '?'}  {'  '.join(_figures(record))}  {_left(record)} left")


class RichDisplay(Display):
    """A progress bar, for terminals. Raises ImportError where rich is missing."""

    SHORTEST_BAR = 4

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.table import Column

        self._progress = Progress(
            BarColumn(),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),  # what else does not fit, the bar alone gives
            TextColumn("{task.fields[figures]}"),
            TextColumn("{task.fields[left]} left"),
            console=Console(),
        )

    def say(self, text: str) -> None:
        """Print a line above the bar. The terminal breaks a long one, so that a command in it can be copied."""
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin(self, done: int, steps: int) -> None:
        """Show the bar."""
        self._task = self._progress.add_task("", total=steps or None, completed=done, figures="", left="?")
        self._progress.start()

    def progress(self, step: int, record: Record) -> None:
        """Move the bar to the step just done."""
        total, left = record["steps"] or None, _left(record)
        others = f" {total or step}/{total or '?'}  {left} left "  # the bar pads the step to the width of the last
        room = self._progress.console.width - len(others) - self.SHORTEST_BAR
        figures = _fitting(_figures(record), room)
        self._progress.update(self._task, completed=step, total=total, figures=figures, left=left)
        if step == total:
            self.close()  # what is said at the end shall stand below the bar

    def close(self) -> None:
        """Leave the bar as it stands and give the terminal back."""
        self._progress.stop()


def _figures(record: Record) -> list[str]:
    """The figures of a step, what matters most first. An untrained model's loss is ln 256 = 5.55 nats, 8 bits."""
    return [
        f"loss {record['loss'] * math.log(2):.3f} nats",
        f"{record['loss']:.3f} bits",
        f"{record['tokens_per_second']:,.0f} tokens/s",
        f"lr {record['learning_rate']:.1e}",
        f"gradient norm {record['gradient_norm']:.2g}",
        f"rank 0 holds {record['peak_bytes'] / 2**20:,.0f} MiB",
    ]


def _fitting(figures: list[str], room: int) -> str:
    """As many of the first figures as fit into `room` columns, at least one."""
    text, *others = figures
    for figure in others:
        if len(text) + 2 + len(figure) > room:
            break
        text += "  " + figure
    return text


def _left(record: Record) -> str:
    if record["seconds_left"] is None:
        return "?"
    minutes, seconds = divmod(round(record["seconds_left"]), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min" if minutes else f"{seconds} s"
