"""Forward and backward on this rank's samples: the gradients of a step, and how well a text is predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

from sherd import FSDPModule, accumulate, capturable
from sherd.comm.streams import aside, recorded
from sherd.tensor.exact_sums import sum_over_ranks
from sherd.tensor.reduction_table import sum_dtype
from sherd.train.config import InputError
from sherd.train.data import Windows
from sherd.train.mesh import RankGrid

Batch = tuple[Tensor, Tensor]  # inputs and targets, int64 [samples, context]
Compute = Callable[[Iterable[Batch]], Sequence[Tensor]]  # leaves the gradients of micro-batches, and returns figures


class Passes:
    """A model on a grid. All ranks call each method alike, each with the samples of its data rank."""

    def __init__(self, model: nn.Module, grid: RankGrid) -> None:
        self.model, self.grid = model, grid
        self.device = torch.device(grid.device_type)

    def train(self, micro_batches: Iterable[Batch], num: int) -> Tensor:
        """Compute the gradients of the mean loss of `num` micro-batches over all ranks.

        Returns the sum of this rank's losses in nats, where the device has it in float64, which adds float32 exactly.

        Gradients are reduced over `dp` after every micro-batch: unsharded ones are what sharding is there to avoid.
        """
        assert isinstance(self.model, FSDPModule), "build shards the root"
        total = self._sum()
        with accumulate(self.model, num, average=True):
            for number, (inputs, targets) in enumerate(micro_batches, 1):
                self.model.set_is_last_backward(number == num)
                with running(self.grid.tp):
                    loss = self._losses(inputs, targets).mean()
                    loss.backward()
                total += loss.detach()
        return total

    def replayed(self, compute: Compute, like: Iterable[Batch]) -> Compute:
        """Returns `compute` as a graph that is replayed, for micro-batches `like` these, which leave no gradients here.

        Gradients and figures are in the same tensors each time. The optimizer stays outside: it steps once the loss was
        looked at, by a learning rate of the host. Raises InputError, in one line, if `compute` cannot be captured.
        """
        parameters, device = list(self.model.parameters()), self.device
        own = [(inputs.to(device, copy=True), targets.to(device, copy=True)) for inputs, targets in like]

        def attempt() -> None:
            compute(own)
            for each in parameters:
                each.grad = None

        with aside(device):
            if not (report := capturable(self.model, attempt, warmup=2)):
                why = "; ".join(map(str, report.problems))
                raise InputError(f"cuda_graph = true, but a step cannot be captured: {why}")
            replay = recorded(lambda: compute(own), device)
        gradients = [each.grad for each in parameters]

        def computed(micro_batches: Iterable[Batch]) -> Sequence[Tensor]:
            for (inputs, targets), batch in zip(own, micro_batches, strict=True):
                inputs.copy_(batch[0])
                targets.copy_(batch[1])
            figures = replay()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            return figures

        return computed

    @torch.no_grad()
    def judge(self, windows: Windows, samples: int, num_windows: int | None = None) -> float:
        """Returns the mean cross-entropy of a text's bytes in nats, on any number of ranks the same.

        About `num_windows` are judged, spread evenly over the text (None: all), `samples` in one forward of one rank.
        """
        self.model.eval()
        spread = max(1, windows.num // num_windows) if num_windows else 1
        rank, num_ranks = self.grid.data_rank, self.grid.axes.num_data
        turns = -(-windows.num // (spread * samples * num_ranks))
        nats, num_bytes = torch.zeros(turns, dtype=self._sum().dtype, device=self.device), self._sum()
        for turn in range(turns):
            first = (turn * num_ranks + rank) * samples  # the last ranks may get empty windows
            inputs, targets, weights = windows.batch([n * spread for n in range(first, first + samples)])
            weights = weights.to(self.device).flatten()
            with running(self.grid.tp):
                nats[turn] = self._losses(inputs, targets) @ weights
            num_bytes += weights.sum()
        dist.all_reduce(num_bytes)
        return sum_over_ranks(nats) / float(num_bytes)

    def logits(self, tokens: Tensor) -> Tensor:
        """The logits of `tokens`, [samples, length] of any length and the same on all ranks, on every rank."""
        length = tokens.shape[1]
        # Nothing is seen of what comes later, so what fills the last part of tp up changes nothing.
        filled = F.pad(tokens.to(self.device), (0, -length % self.grid.axes.tp))
        logits = _of_all(self.model(filled), self.grid.tp)
        return (logits.full_tensor() if isinstance(logits, DTensor) else logits)[:, :length]

    def _losses(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The cross-entropy of each target, in nats, float32, flat."""
        return cross_entropy(self.model(inputs.to(self.device)), targets.to(self.device), self.grid.tp)

    def _sum(self) -> Tensor:
        return torch.zeros((), dtype=sum_dtype(torch.float32, self.device), device=self.device)


def cross_entropy(logits: Tensor, targets: Tensor, tp: DeviceMesh | None) -> Tensor:
    """Of each target, flat; `logits` are those of this rank. Call it, and its backward, in `running`."""
    losses = F.cross_entropy(_of_all(logits, tp).float().flatten(0, 1), targets.flatten(), reduction="none")
    return losses.to_local() if isinstance(losses, DTensor) else losses


def running(tp: DeviceMesh | None) -> AbstractContextManager[None]:
    """Within it, the cross-entropy of logits that are cut by vocabulary, and its backward, need not gather them."""
    return nullcontext() if tp is None else loss_parallel()


def _of_all(logits: Tensor, tp: DeviceMesh | None) -> Tensor:
    """Returns the logits as a tensor of the full vocabulary, if tp cuts it."""
    return logits if tp is None else DTensor.from_local(logits, tp, [Shard(-1)], run_check=False)
