"""Forward and backward where layers are on several ranks: micro-batches follow each other from stage to stage."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B

from sherd.interop.pipelining import PipelineStage
from sherd.tensor.reduction_table import wide
from sherd.train.config import Config
from sherd.train.mesh import Grid
from sherd.train.passes import Batch, Passes
from sherd.train.text import VOCABULARY

__all__ = ["Pipelined"]


class Pipelined(Passes):
    """A stage of a model. It is trained by one forward, one backward in turn (1F1B): a stage holds the activations of
    at most as many micro-batches as there are stages behind it, itself included."""

    def __init__(self, model: nn.Module, grid: Grid, config: Config) -> None:
        super().__init__(model, grid)
        assert grid.pp is not None, "without stages there are plain passes"
        self._group, self._num_stages = grid.pp.get_group(), grid.axes.pp
        self._is_first, self._is_last = grid.stage == 0, grid.stage == self._num_stages - 1
        self._dtype = torch.bfloat16 if config.run.precision == "bf16" else torch.float32
        self._width = config.model.width
        split = config.split(grid.axes.num_data, grid.axes.pp)
        num, samples = split.times, split.micro_batch
        length = config.data.context // grid.axes.cp
        tokens = torch.empty(samples, length, dtype=torch.int64, device=self.device)
        stream = self._stream(samples, length)
        stage = PipelineStage(
            model,
            grid.stage,
            self._num_stages,
            self.device,
            # Told, so that no first step is taken to find out; and that they have gradients.
            input_args=tokens if self._is_first else stream.requires_grad_(),
            output_args=(self._logits(samples, length) if self._is_last else stream).requires_grad_(),
            group=self._group,
        )
        self._schedule = Schedule1F1B(
            stage,
            num,
            loss_fn=lambda logits, targets: self.cross_entropy(logits, targets).mean() / num,
            scale_grads=False,
        )

    def train(self, micro_batches: Iterable[Batch], num: int) -> Tensor:
        inputs, targets = (self.part(torch.cat(each)) for each in zip(*micro_batches, strict=True))
        losses: list[Tensor] = []
        with self.running():
            self._schedule.step(
                *([inputs] if self._is_first else []),
                target=targets if self._is_last else None,
                losses=losses if self._is_last else None,
                return_outputs=False,
            )
        total = torch.zeros((), dtype=wide(torch.float32, self.device), device=self.device)
        for loss in losses:
            total += loss.detach()
        # Only the last stage has losses: each stands for those of the ranks in front of it.
        return total * self._num_stages / self.grid.axes.num_ranks

    def _forward(self, part: Tensor) -> Tensor:
        """From stage to stage, and the last one's logits to all. Without gradients."""
        samples, length = part.shape
        x = part
        if not self._is_first:
            x = self._stream(samples, length)
            dist.recv(x, group=self._group, group_src=self.grid.stage - 1)
        x = self.model(x)
        if not self._is_last:
            dist.send(x.contiguous(), group=self._group, group_dst=self.grid.stage + 1)
        logits = x.contiguous() if self._is_last else self._logits(samples, length)
        dist.broadcast(logits, group=self._group, group_src=self._num_stages - 1)
        return logits

    def _stream(self, samples: int, length: int) -> Tensor:
        """The tensor that goes from one stage to the next."""
        return self._empty(samples, length // self.grid.axes.tp, self._width)

    def _logits(self, samples: int, length: int) -> Tensor:
        """The tensor that the last stage returns."""
        return self._empty(samples, length, VOCABULARY // self.grid.axes.tp)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self.device)
