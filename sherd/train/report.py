"""The report of a run: on the screen, in metrics.jsonl, and to a logger."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

from sherd.train.loggers import Logger

METRICS = "metrics.jsonl"
Record = dict[str, Any]  # an event, or the figures of a step, as in metrics.jsonl


def peak_memory(device: torch.device) -> int:
    """Returns the most bytes this rank has held so far: of tensors on the accelerator, or of the process on a CPU."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Report:
    """The reports of a run: on the screen unless `quiet`, in OUT/metrics.jsonl, and to `logger`.

    Without `out`, as on every rank but the first, it tells nothing. The logger ends with the report, and is told the
    `outcome`, or "failed" after an exception.
    """

    def __init__(self, out: Path | None = None, logger: Logger | None = None, quiet: bool = False) -> None:
        self.outcome = "stopped"
        self._logger = logger
        self._metrics = _opened(out / METRICS) if out else None
        self._display = Lines() if out and not quiet else None

    def __enter__(self) -> Report:
        if self._display and sys.stdout.isatty():
            try:
                self._display = Bar()
            except ImportError:
                self.say("for a progress bar: pip install rich")
        return self

    def __exit__(self, *exception: object) -> None:
        self.over()
        if self._metrics:
            self._metrics.close()
        if self._logger:
            self.say(self._logger.end("failed" if exception[0] else self.outcome))

    def say(self, text: str) -> None:
        """Tell the user a line, unless it is empty."""
        if self._display and text:
            self._display.say(text)

    def begin(self, done: int, steps: int) -> None:
        """Tell that steps begin: `done` of `steps` are done; 0 steps: not yet known how many."""
        if self._display:
            self._display.begin(done, steps)

    def over(self) -> None:
        """Tell that no steps follow: what is said from now on stands below the bar."""
        if self._display:
            self._display.close()

    def write(self, event: str, **record: Any) -> None:
        """Keep a record in metrics.jsonl, pass it on, and show it if it is of a step."""
        if self._metrics:
            self._metrics.write(json.dumps({"event": event, **record}) + "\n")
            self._metrics.flush()
        if self._logger:
            self.say(self._logger.pass_on(event, record))
        if self._display and event == "step":
            self._display.progress(record["step"], record)


def _opened(metrics: Path) -> Any:
    """`metrics`, to be added to: on a line of its own, for a full disk or a power cut may have left half of one."""
    file = metrics.open("ab+")
    if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
        file.write(b"\n")
    file.close()
    return metrics.open("a", encoding="utf-8")


# The screen


MOST_IMPORTANT = 3  # figures, which a bar shows


class Lines:
    """A line every few seconds, for files and pipes."""

    SECONDS = 5.0

    def __init__(self) -> None:
        self._last = -self.SECONDS

    def say(self, text: str) -> None:
        """Show a line."""
        print(text, flush=True)

    def begin(self, done: int, steps: int) -> None:
        """Show that steps begin: `done` of `steps` are done; 0 steps: not yet known how many."""

    def progress(self, step: int, record: Record) -> None:
        """Show the step just done, unless another was shown a moment ago."""
        if time.monotonic() - self._last < self.SECONDS and step != record["steps"]:
            return
        self._last = time.monotonic()
        self.say(f"step {step:>6}/{record['steps'] or '?'}  {'  '.join(_figures(record))}  {_left(record)} left")

    def close(self) -> None:
        """Give the screen back."""


class Bar(Lines):
    """A progress bar, for terminals. Raises ImportError where rich is missing."""

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
        self._task = self._progress.add_task("", total=steps or None, completed=done, figures="", left="?")
        self._progress.start()

    def progress(self, step: int, record: Record) -> None:
        """Move the bar to the step just done."""
        total, figures = record["steps"] or None, "  ".join(_figures(record)[:MOST_IMPORTANT])
        self._progress.update(self._task, completed=step, total=total, figures=figures, left=_left(record))
        if step == total:
            self.close()  # what is said at the end shall stand below the bar

    def close(self) -> None:
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


def _left(record: Record) -> str:
    if record["seconds_left"] is None:
        return "?"
    minutes, seconds = divmod(round(record["seconds_left"]), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min" if minutes else f"{seconds} s"
