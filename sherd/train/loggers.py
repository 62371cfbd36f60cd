"""Other places where the figures of a run go: TensorBoard, Weights & Biases, MLflow, or a function of the user's.

A logger is a callable. Rank 0 calls it with scalars by name and the step that they are of:

    log({"loss": 2.31, "learning_rate": 0.002, ...}, 17)

`run.logger = "module:function"` names a function that is given the run's folder and its config, a dict of sections,
and returns one. At the end its `end("finished")` is called, or with "stopped" or "failed"; without it, its `close()`.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sherd.train.config import TRACKERS, Config, InputError

__all__ = ["Log", "Loggers", "require_loggers"]

Log = Callable[[dict[str, float], int], Any]
OF_A_STEP = ("loss", "gradient_norm", "learning_rate", "tokens_per_second")


def require_loggers(config: Config) -> None:
    """Raises InputError where the config asks for a package that is not there. Loads none."""
    for name in sorted(TRACKERS.keys() & _names(config)):
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a mere folder of that name, as wandb writes one, has no origin
            raise InputError(f"the logger {name} needs the package {name}: pip install {name}")


def _names(config: Config) -> list[str]:
    """Returns the loggers of a run, each once."""
    names = ["tensorboard"] * config.run.tensorboard + [config.run.logger] * bool(config.run.logger)
    return list(dict.fromkeys(names))


class Loggers:
    """The loggers of a run, of which none can end it.

    Raises:
        InputError: one cannot be made.
    """

    def __init__(self, config: Config, out: Path) -> None:
        require_loggers(config)
        self._logs: dict[str, Log] = {name: _made(name, config, out) for name in _names(config)}

    def pass_on(self, event: str, record: Mapping[str, Any]) -> list[str]:
        """Call each logger with the scalars of the event, if the event has any.

        Returns a note for each logger that failed. A logger that failed is not called again.
        """
        scalars = _scalars(event, record)
        return self._each(lambda log: log(scalars, record["step"])) if scalars else []

    def end(self, outcome: str) -> list[str]:
        """Call each logger's `end` or `close`, if it has one. Returns notes, as `pass_on` does."""

        def end(log: Log) -> None:
            told = getattr(log, "end", None)
            told(outcome) if told else getattr(log, "close", lambda: None)()

        notes = self._each(end)
        self._logs.clear()
        return notes

    def _each(self, action: Callable[[Log], Any]) -> list[str]:
        notes = []
        for name, log in list(self._logs.items()):
            try:
                action(log)
            except Exception as error:  # whatever a user's function, or the network behind it, comes up with
                del self._logs[name]
                said = f"{type(error).__name__}: {' '.join(str(error).split())}"
                notes.append(f"note   the logger {name} failed ({said}); it gets nothing more, the run goes on")
        return notes


def _scalars(event: str, record: Mapping[str, Any]) -> dict[str, float]:
    """Losses are in bits per byte, as in metrics.jsonl, and once more in nats."""
    if event == "step":
        return {**{name: record[name] for name in OF_A_STEP}, "loss_nats": record["loss"] * math.log(2)}
    if event == "evaluation":
        return {"held_out": record["bits"], "held_out_nats": record["bits"] * math.log(2)}
    return {}


def _made(name: str, config: Config, out: Path) -> Log:
    module, _, function = TRACKERS.get(name, name).partition(":")
    try:
        log = getattr(importlib.import_module(module), function)(out, config.tree())
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise InputError(f"run.logger = {name!r} cannot be started: {said}") from error
    if not callable(log):
        raise InputError(
            f"run.logger = {name!r} returned {type(log).__name__}, which cannot be called; it must return a function "
            "of scalars and a step"
        )
    started: Log = log
    return started
