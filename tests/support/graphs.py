"""A graph that Python replays, for devices that capture none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import torch
from torch import Tensor, nn

from sherd.train import loop, passes


class Graph:
    """Stands in for a device's graph of a trainer's gradients: a replay writes into the tensors of the capture.

    A capture computes nothing, so what it leaves is spoilt. `waits` has what the host has waited for in it.
    """

    def __init__(self) -> None:
        self.num_replays = 0
        self.waits: list[str] = []
        self._build = loop.build
        self._model: nn.Module | None = None

    @contextlib.contextmanager
    def for_trainers(self) -> Iterator[Graph]:
        """A context in which trainers capture with this."""
        with mock.patch.object(loop, "build", self.build), mock.patch.object(passes, "recorded", self.recorded):
            yield self

    def build(self, *args: object) -> nn.Module:
        self._model = self._build(*args)  # type: ignore[arg-type]
        return self._model

    def recorded(self, step: Callable[[], Sequence[Tensor]], device: torch.device) -> Callable[[], Sequence[Tensor]]:
        assert self._model is not None
        parameters = list(self._model.parameters())
        hear = getattr(torch.get_device_module(device), "on_host_wait", lambda noted: None)
        hear(self.waits.append)
        figures = step()
        hear(None)
        kept = [*figures, *(each.grad for each in parameters)]

        def replay() -> Sequence[Tensor]:
            self.num_replays += 1
            for each in parameters:
                each.grad = None
            now = [*step(), *(each.grad for each in parameters)]
            with torch.no_grad():
                for to, each in zip(kept, now, strict=True):
                    to.copy_(each)
            return figures

        with torch.no_grad():
            for each in kept:
                each.fill_(float("nan"))
        return replay
