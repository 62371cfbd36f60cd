"""What a run tells: a progress bar or plain lines, metrics.jsonl, and the loss curve as a PNG."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sherd.train.extras import install

__all__ = ["PlainDisplay", "Report", "RichDisplay", "Silent", "curve", "peak_memory"]


def peak_memory(device: torch.device) -> int:
    """The most bytes this rank has held so far: of the GPU, or of the process where there is none."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class PlainDisplay:
    """A line every few seconds, for files and pipes."""

    SECONDS = 5.0

    def __init__(self) -> None:
        self._last = -self.SECONDS

    def say(self, text: str) -> None:
        print(text, flush=True)

    def progress(self, step: int, record: dict[str, Any]) -> None:
        """Show the step just done, unless another was shown a moment ago."""
        if time.monotonic() - self._last < self.SECONDS and step != record["steps"]:
            return
        self._last = time.monotonic()
        self.say(f"step {step:>6}/{record['steps'] or '?'}  {_figures(record)}  {_left(record)} left")

    def close(self) -> None:
        """Nothing to put back."""


class RichDisplay:
    """A progress bar, for terminals. Raises ImportError where rich is missing."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TextColumn("{task.fields[left]} left"),
        )
        self._task = self._progress.add_task("", total=None, figures="", left="?")
        self._progress.start()

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def progress(self, step: int, record: dict[str, Any]) -> None:
        """Move the bar to the step just done."""
        total, left = record["steps"] or None, _left(record)
        self._progress.update(self._task, completed=step, total=total, figures=_figures(record), left=left)
        if step == total:
            self.close()  # what is said at the end shall stand below the bar

    def close(self) -> None:
        """Leave the bar as it stands and give the terminal back."""
        self._progress.stop()


def _figures(record: dict[str, Any]) -> str:
    tokens, memory = record["tokens_per_second"], record["peak_bytes"] / 2**20
    return f"loss {record['loss']:.3f}  {tokens:,.0f} tokens/s  {memory:,.0f} MiB"


def _left(record: dict[str, Any]) -> str:
    if record["seconds_left"] is None:
        return "?:??"
    minutes, seconds = divmod(round(record["seconds_left"]), 60)
    return f"{minutes}:{seconds:02}"


class Silent:
    """The report of every rank but the first: it says nothing."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def say(self, text: str) -> None:
        """Tell the user a line."""

    def write(self, event: str, **record: Any) -> None:
        """Keep a record in metrics.jsonl."""

    def step(self, **record: Any) -> None:
        """Keep and show the figures of a step: step, loss, seconds_left, ..."""

    def finish(self, sample: str, lzma_bits: float | None) -> None:
        """Keep the sample and draw the curve."""


class Report(Silent):
    """The report of rank 0, into `out`."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._metrics = (out / "metrics.jsonl").open("a")  # resuming adds to it
        self._display: PlainDisplay | RichDisplay = PlainDisplay()

    def __enter__(self) -> Report:
        if sys.stdout.isatty():
            try:
                self._display = RichDisplay()
            except ImportError:
                self.say(f"for a progress bar: {install('cli')}")
        return self

    def __exit__(self, *exception: object) -> None:
        self._display.close()
        self._metrics.close()

    def say(self, text: str) -> None:
        self._display.say(text)

    def write(self, event: str, **record: Any) -> None:
        self._metrics.write(json.dumps({"event": event, **record}) + "\n")
        self._metrics.flush()

    def step(self, **record: Any) -> None:
        self.write("step", **record)
        self._display.progress(record["step"], record)

    def finish(self, sample: str, lzma_bits: float | None) -> None:
        (self.out / "sample.txt").write_text(sample, encoding="utf-8")
        try:
            curve(self.out / "metrics.jsonl", self.out / "curve.png", lzma_bits)
        except ImportError:
            self.say(f"for a picture of the loss curve: {install('viz')}")


def curve(metrics: Path, picture: Path, lzma_bits: float | None) -> None:
    """Draw the losses in `metrics` as a PNG. Raises ImportError where matplotlib is missing."""
    from matplotlib.figure import Figure  # no pyplot: it keeps figures alive and may look for a screen

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    trained, judged = dict(_points(metrics, "step", "loss")), dict(_points(metrics, "evaluation", "bits"))
    axes.plot(list(trained), list(trained.values()), linewidth=0.8, alpha=0.7, label="training, each step's batch")
    axes.plot(list(judged), list(judged.values()), "o-", label="held-out")
    if lzma_bits is not None:
        axes.axhline(lzma_bits, linestyle="--", color="grey", label="lzma on the held-out bytes")
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)


def _points(metrics: Path, event: str, name: str) -> Iterator[tuple[int, float]]:
    """(step, value) of each such event; after a resume a step may come twice, and the later one counts."""
    for line in metrics.read_text().splitlines():
        record = json.loads(line)
        if record["event"] == event:
            yield record["step"], record[name]
