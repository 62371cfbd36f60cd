"""What ranks save and load: a model whose values are a function of the number of the save."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import sherd
from sherd.errors import CheckpointError, NoCheckpointError
from tests.checkpoint.kills.cases import Job
from tests.support.sharding import PLACEMENTS, sharded

WIDTH = 50
MOST_PADDING = 64
"""Elements of a flat parameter that belong to nothing: they are not saved, and loaded as 0."""


class Training:
    """A model in a layout, and its optimizer."""

    def __init__(self, layout: str, num_weights: int) -> None:
        model = nn.Sequential(nn.Linear(WIDTH, num_weights), nn.Linear(5, 3), nn.BatchNorm1d(3))
        units = [model[0], model] if layout in PLACEMENTS else [model]
        self.model: nn.Module = model if layout == "plain" else sharded(model, layout, units)
        self._is_flat = layout == "flat wrapper"
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def fill(self, number: int) -> None:
        """Take the values of save `number`."""
        with sherd.unsharded(self.model):
            for name, parameter in self.model.named_parameters():
                parameter.copy_(expected(name, parameter, number))
        for buffer in self.model.buffers():
            buffer.fill_(number)
        for momentum in self._momenta():
            momentum.fill_(number)
        self.optimizer.param_groups[0]["lr"] = float(number)

    def _momenta(self) -> list[Tensor]:
        momenta = [each["momentum_buffer"] for each in self.optimizer.state.values()]
        return [each.to_local() if isinstance(each, DTensor) else each for each in momenta]

    def items(self, number: int) -> dict[str, Any]:
        """Returns what is saved or loaded."""
        value = {"number": number, "tensor": torch.full((3,), number)}
        return {"model": self.model, "optimizer": self.optimizer, "value": value}

    @torch.no_grad()
    def wrong(self, number: int) -> list[str]:
        """Returns what has not the value of save `number`."""
        wrong = []
        with sherd.unsharded(self.model, writeback=False):
            for name, parameter in self.model.named_parameters():
                if not torch.equal(parameter, expected(name, parameter, number)):
                    wrong.append(name)
        wrong += [name for name, each in self.model.named_buffers() if not bool((each == number).all())]
        for momentum in self._momenta():
            differing = momentum[momentum != number]
            is_padding = self._is_flat and len(differing) <= MOST_PADDING and not differing.any()
            if len(differing) and not is_padding:
                wrong.append("momentum")
        if self.optimizer.param_groups[0]["lr"] != number:
            wrong.append("learning rate")
        return wrong


def expected(name: str, parameter: Tensor, number: int) -> Tensor:
    """Returns the values of a parameter in save `number`."""
    kind = 0.5 if name.endswith("bias") else 0.25
    return torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape) + number * 1000 + kind


def save(training: Training, job: Job, folder: str, step: int, number: int) -> None:
    """Save the values of `number` as `step`, as the job does it."""
    training.fill(number)
    kept = {"keep_last": job.keep_last, "keep_every": job.keep_every if job.keep_last else None}
    given: dict[str, Any] = {"step": step, "user": {"number": number}, "per_rank": {"number": number}, **kept}
    if not job.is_async:
        sherd.save(folder, training.items(number), **given)
        return
    saving = sherd.async_save(folder, training.items(number), **given, staging_bytes=job.staging_bytes)
    training.fill(number + 500)  # the training goes on
    saving.wait()


@dataclass(frozen=True)
class Seen:
    """What a load has come to: the step and the number of the save, None if there was no whole checkpoint; what was
    passed over, or the error's text; what was wrong; and whether a run would begin anew."""

    step: int | None
    number: int | None
    passed_over: str
    wrong: tuple[str, ...]
    is_anew: bool = False


def load(training: Training, folder: str, step: int | None = None) -> Seen:
    """Load the newest checkpoint, or that of `step`."""
    training.fill(-7)
    try:
        restored = sherd.load(folder, training.items(-7), step=step)
    except NoCheckpointError as error:
        return Seen(None, None, str(error), (), is_anew=True)
    except CheckpointError as error:
        is_told = "holds no complete checkpoint" in str(error)
        return Seen(None, None, str(error), () if is_told else (f"CheckpointError: {error}",))
    number = restored.user["number"]
    wrong = training.wrong(number)
    value = restored.values["value"]
    if value["number"] != number or not bool((value["tensor"] == number).all()):
        wrong.append("value")
    if restored.per_rank not in ({}, {"number": number}):
        wrong.append("per_rank")
    return Seen(restored.step, number, " | ".join(restored.passed_over), tuple(wrong))


# What the judge's ranks do


def look(folder: str, layout: str, num_weights: int, steps: tuple[int, ...]) -> list[Seen]:
    """Returns what loads of the newest checkpoint and of `steps` have come to."""
    training = Training(layout, num_weights)
    return [load(training, folder, step) for step in (None, *steps)]


def go_on(folder: str, job: Job, num_weights: int, step: int, number: int) -> Seen:
    """Save `step`, and return what a load has come to."""
    training = Training(job.layout, num_weights)
    save(training, job, folder, step, number)
    return load(training, folder)


# Reports


def report(path: str, word: str, job: int, rank: int, step: int, number: int) -> None:
    """Append a line at once, which is there whatever happens to this process then."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(fd, f"{word} {job} {rank} {step} {number}\n".encode())
    os.close(fd)


def reported(path: str, word: str) -> list[tuple[int, int, int, int]]:
    """Returns (job, rank, step, number) of the lines with `word`."""
    try:
        with open(path) as file:
            lines = [line.split() for line in file]
    except FileNotFoundError:
        return []
    return [(int(a), int(b), int(c), int(d)) for found, a, b, c, d in lines if found == word]
