"""The screen of a run: a progress bar, plain lines, or nothing."""

from __future__ import annotations

import math
import time
from typing import Any

__all__ = ["Display", "PlainDisplay", "RichDisplay"]

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
        self._task = self._progress.add_task("", total=steps or None, completed=done, figures="", left="?:??")
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
        return "?:??"
    minutes, seconds = divmod(round(record["seconds_left"]), 60)
    return f"{minutes}:{seconds:02}"
