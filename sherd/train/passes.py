"""Forward and backward on this rank's part of the data: the parts of samples, and the losses of all of it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

from sherd import FSDPModule, accumulate
from sherd.interop.pipelining import PipelineStage
from sherd.tensor.reduction_table import sum_dtype
from sherd.train.config import Config
from sherd.train.mesh import RankGrid
from sherd.train.text import VOCABULARY

__all__ = ["Batch", "Passes", "Pipelined", "passes"]

Batch = tuple[Tensor, Tensor]  # inputs and targets, int64 [samples, context]


def passes(model: nn.Module, grid: RankGrid, config: Config) -> Passes:
    """Those of `model` on `grid`."""
    if grid.pp is None:
        return Passes(model, grid)
    from sherd.train.passes import Pipelined  # torch's pipelines take a while to import, and bring its FSDP along

    return Pipelined(model, grid, config)


class Passes:
    """A model on a grid. All ranks call each method alike, each with the samples of its data rank."""

    def __init__(self, model: nn.Module, grid: RankGrid) -> None:
        self.model, self.grid = model, grid
        self.device = torch.device(grid.device_type)

    def train(self, micro_batches: Iterable[Batch], num: int) -> Tensor:
        """Compute the gradients of the mean loss of `num` micro-batches over all ranks.

        Returns this rank's share of that loss in nats, in float64 where the device has it. The caller adds up the
        shares of all ranks.

        Gradients are reduced over `dp` after every micro-batch, not once per step: whole gradients, kept from one
        micro-batch to the next, are what sharding is there to avoid. Over `replicate` they are once.
        """
        assert isinstance(self.model, FSDPModule), "build shards the root"
        total = torch.zeros((), dtype=sum_dtype(torch.float32, self.device), device=self.device)
        with accumulate(self.model, num):
            for number, (inputs, targets) in enumerate(micro_batches, 1):
                self.model.set_is_last_backward(number == num)
                with self.running():
                    loss = self.loss(inputs, targets) / num
                    loss.backward()
                total += loss.detach() / self.grid.axes.num_ranks
        return total

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of this rank's `part`. Call it and its backward in `running`."""
        return self._losses(inputs, targets).mean()

    def losses(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The cross-entropy of each target of this rank's `part`, in nats, float32, flat. Without gradients."""
        with torch.no_grad(), self.running():
            return self._losses(inputs, targets)

    def _losses(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.cross_entropy(self._forward(self.part(inputs)), self.part(targets))

    def _forward(self, part: Tensor) -> Tensor:
        """This rank's logits of `part`."""
        logits: Tensor = self.model(part)
        return logits

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Of each target, flat; `logits` are those of this rank."""
        logits = self._of_all_tp(logits).float().flatten(0, 1)
        losses = F.cross_entropy(logits, targets.flatten(), reduction="none")
        return losses.to_local() if isinstance(losses, DTensor) else losses

    def _of_all_tp(self, logits: Tensor) -> Tensor:
        """Returns the logits as a tensor of the whole vocabulary, if tp cuts it."""
        if self.grid.tp is None:
            return logits
        return DTensor.from_local(logits, self.grid.tp, [Shard(-1)], run_check=False)

    def part(self, samples: Tensor) -> Tensor:
        """This rank's tokens of `samples`, [samples, context], on its device."""
        return samples.chunk(self.grid.axes.cp, dim=1)[self.grid.context_rank].to(self.device)

    def logits(self, tokens: Tensor) -> Tensor:
        """The logits of `tokens`, [samples, length] of any length and the same on all ranks, whole on every rank."""
        length, parts = tokens.shape[1], self.grid.axes.cp * self.grid.axes.tp
        # Nothing is seen of what comes later, so what fills the last part up changes nothing.
        filled = F.pad(tokens, (0, -length % parts))
        logits = self._of_all_tp(self._forward(self.part(filled)))
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        if self.grid.cp is None:
            return logits[:, :length]
        of_all = [torch.empty_like(logits) for _ in range(self.grid.axes.cp)]
        dist.all_gather(of_all, logits.contiguous(), group=self.grid.cp.get_group())
        return torch.cat(of_all, dim=1)[:, :length]

    def running(self) -> AbstractContextManager[None]:
        """Within it, the cross-entropy of logits that are cut by vocabulary, and its backward, need no whole ones."""
        return nullcontext() if self.grid.tp is None else loss_parallel()


# Where layers are on several ranks


class Pipelined(Passes):
    """A stage of a model, trained by one forward and one backward in turn (1F1B).

    A stage holds the activations of at most as many micro-batches as there are stages from it to the last.
    """

    def __init__(self, model: nn.Module, grid: RankGrid, config: Config) -> None:
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
        total = torch.zeros((), dtype=sum_dtype(torch.float32, self.device), device=self.device)
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
