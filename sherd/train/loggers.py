"""Another place where the figures of a run go: TensorBoard, Weights & Biases, MLflow, or a function of the user's.

A logger is a callable. Rank 0 calls it with scalars by name and the step that they are of:

    log({"loss": 2.31, "learning_rate": 0.002, ...}, 17)

`logger = "module:function"` names a function that is given the run's folder and its config, a dict of fields, and
returns one. At the end its `end("finished")` is called, or with "stopped" or "failed"; without it, its `close()`.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sherd.train.config import TRACKERS, Config, InputError

Log = Callable[[dict[str, float], int], Any]
OF_A_STEP = ("loss", "gradient_norm", "learning_rate", "tokens_per_second")


def require_logger(config: Config) -> None:
    """Raises InputError where the config asks for a package that is not there. Loads none."""
    if (name := config.logger) in TRACKERS:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a mere folder of that name, as wandb writes one, has no origin
            raise InputError(f"the logger {name} needs the package {name}: pip install {name}")


class Logger:
    """The logger of a run, which cannot end it: one that fails is not called again.

    Raises:
        InputError: it cannot be made.
    """

    def __init__(self, config: Config, out: Path) -> None:
        require_logger(config)
        self._name = config.logger
        self._log: Log | None = _made(self._name, config, out) if self._name else None

    def pass_on(self, event: str, record: Mapping[str, Any]) -> str:
        """Call it with the scalars of the event, if the event has any. Returns a note if it failed."""
        scalars = _scalars(event, record)
        return self._called(lambda log: log(scalars, record["step"])) if scalars else ""

    def end(self, outcome: str) -> str:
        """Call its `end` or `close`, if it has one. Returns a note, as `pass_on` does."""

        def end(log: Log) -> None:
            told = getattr(log, "end", None)
            told(outcome) if told else getattr(log, "close", lambda: None)()

        note = self._called(end)
        self._log = None
        return note

    def _called(self, action: Callable[[Log], Any]) -> str:
        try:
            if self._log:
                action(self._log)
            return ""
        except Exception as error:  # whatever a user's function, or the network behind it, comes up with
            self._log = None
            return f"note   the logger {self._name} failed ({_in_words(error)}); it gets nothing more, the run goes on"


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


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
        raise InputError(f"logger = {name!r} cannot be started: {_in_words(error)}") from error
    if not callable(log):
        raise InputError(
            f"logger = {name!r} returned {type(log).__name__}, which cannot be called; it must return a function of "
            "scalars and a step"
        )
    started: Log = log
    return started
