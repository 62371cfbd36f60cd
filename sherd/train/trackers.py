"""The loggers that have a word of their own: TensorBoard, Weights & Biases and MLflow. Each is called as `Log` says."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any


class TensorBoard:
    """Writes scalars to event files in OUT/tensorboard. A resumed run adds a file, which replaces steps done twice."""

    def __init__(self, out: Path, config: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(out / "tensorboard"), flush_secs=10)

    def __call__(self, scalars: dict[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def end(self, outcome: str) -> None:
        """Write what is still in memory."""
        self._writer.close()


class WeightsAndBiases:
    """Logs to the run of Weights & Biases that belongs to OUT; a resumed run goes on in it.

    Project, account and mode are those of the environment: WANDB_PROJECT, WANDB_API_KEY, WANDB_MODE.
    """

    def __init__(self, out: Path, config: dict[str, Any]) -> None:
        import wandb

        of_the_folder = uuid.uuid5(uuid.NAMESPACE_URL, out.resolve().as_uri()).hex
        self._run = wandb.init(id=of_the_folder, name=out.name, dir=str(out), config=config, resume="allow")

    def __call__(self, scalars: dict[str, float], step: int) -> None:
        self._run.log(scalars, step)

    def end(self, outcome: str) -> None:
        """End the run."""
        self._run.finish({"finished": 0, "stopped": 255, "failed": 1}[outcome])  # 255: killed by Ctrl-C


class MLflow:
    """Logs to a run of MLflow, whose number is kept in OUT/mlflow_run, so that a resumed run goes on in it.

    Server and experiment are those of the environment: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME.
    """

    def __init__(self, out: Path, config: dict[str, Any]) -> None:
        import mlflow

        self._mlflow, kept = mlflow, out / "mlflow_run"
        if kept.exists():
            mlflow.start_run(run_id=kept.read_text())
            return
        kept.write_text(mlflow.start_run(run_name=out.name).info.run_id)
        mlflow.log_params(config)

    def __call__(self, scalars: dict[str, float], step: int) -> None:
        self._mlflow.log_metrics(scalars, step)

    def end(self, outcome: str) -> None:
        """End the run."""
        self._mlflow.end_run({"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[outcome])
