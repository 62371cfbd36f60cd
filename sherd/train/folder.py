"""The folders of runs: runs/1, runs/2, ... unless the user names another."""

from __future__ import annotations

from pathlib import Path

from sherd.train.config import Config, InputError

__all__ = ["claim", "last_run"]

RUNS = Path("runs")


def _runs() -> list[int]:
    return sorted(int(path.name) for path in RUNS.glob("*") if path.name.isdigit())


def last_run() -> Path:
    if not _runs():
        raise InputError(f"there is no run under {RUNS.absolute()} to resume; name one with --out")
    return RUNS / str(_runs()[-1])


def claim(config: Config) -> Path:
    """The run's folder, made if need be, and surely writable."""
    out = Path(config.run.out or RUNS / str((_runs() or [0])[-1] + 1))
    try:
        out.mkdir(parents=True, exist_ok=bool(config.run.out))
        probe = out / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(f"cannot write to {out}: {error.strerror}; choose another --out") from error
    return out
