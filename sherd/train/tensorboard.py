"""The logger of `run.tensorboard`: scalars into OUT/tensorboard, for `tensorboard --logdir OUT`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["TensorBoard", "start"]


def start(out: Path, config: dict[str, Any]) -> TensorBoard:
    """The logger of the run in `out`."""
    return TensorBoard(out / "tensorboard")


class TensorBoard:
    """Writes scalars to event files in `folder`. A resumed run adds a file, which replaces steps done twice."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), flush_secs=10)

    def __call__(self, scalars: dict[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is still in memory."""
        self._writer.close()
