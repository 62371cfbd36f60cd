"""Results as JSON lines, written as they come: whoever ends the run keeps what was measured by then."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ..ranks import Conditions
from .clock import Measured
from .rows import Result


class Lines:
    """A file with one JSON object per line: the circumstances, then a result each. None: nothing is written."""

    def __init__(self, file: Path | None) -> None:
        self._file = file

    def begin(self, conditions: Conditions) -> None:
        """Start the file anew, with the circumstances."""
        if self._file is not None:
            self._file.write_text("")
            self._write(circumstances(conditions))

    def add(self, result: Result) -> None:
        self._write(dataclasses.asdict(result))

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(json.dumps(record) + "\n")
                file.flush()
                os.fsync(file.fileno())


def read(files: Iterable[Path]) -> tuple[list[dict[str, Any]], list[Result]]:
    """Returns the circumstances of each file, and the results of all. A last line that was cut off is left out."""
    found: list[dict[str, Any]] = []
    results: list[Result] = []
    for file in files:
        first, *others = file.read_text().splitlines()
        found.append(json.loads(first))
        for line in others:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                break
            ranks = [Measured(**each) for each in record.pop("ranks")]
            results.append(Result(ranks=ranks, **record))
    return found, results


def circumstances(conditions: Conditions) -> dict[str, Any]:
    """On what machine, with what, and beside what load."""
    name, driver = device_name(conditions.device)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": name,
        "num_devices": conditions.num_devices,
        "driver": driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "nccl": ".".join(str(each) for each in torch.cuda.nccl.version()) if torch.cuda.is_available() else "",
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "steps": conditions.rounds,
        "quick": conditions.quick,
    }


def device_name(device: str) -> tuple[str, str]:
    """Returns what the device calls itself, and its driver's version where nvidia-smi says it."""
    module = None if device == "cpu" else torch.get_device_module(device)
    name = module.get_device_name() if hasattr(module, "get_device_name") else device
    if device != "cuda":
        return name, ""
    try:
        said = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return name, ""
    return name, said.stdout.split("\n")[0].strip()
