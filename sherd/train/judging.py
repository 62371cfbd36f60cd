"""How well a model predicts a text: the mean cross-entropy of its bytes, in nats, in bits, and as a perplexity."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from sherd.tensor.reduction_table import sum_dtype
from sherd.train.data import Windows
from sherd.train.passes import Passes

__all__ = ["Score", "judge"]


@dataclass(frozen=True)
class Score:
    """The mean cross-entropy of a text's bytes. A token is a byte, so bits per byte are bits per token too."""

    nats: float

    @property
    def bits(self) -> float:
        """Per byte: what the text would take, packed with the model's help."""
        return self.nats / math.log(2)

    @property
    def perplexity(self) -> float:
        """The number of equally likely bytes among which the model would be as unsure; infinite beyond floats."""
        return math.exp(self.nats) if self.nats < 700 else math.inf

    def __str__(self) -> str:
        return f"{self.bits:.3f} bits per byte ({self.nats:.3f} nats, perplexity {self.perplexity:,.2f})"


@torch.no_grad()
def judge(passes: Passes, windows: Windows, samples: int, num_windows: int | None = None) -> Score:
    """Returns the score of the model on a text, the same on all ranks up to the rounding of sums. All ranks call it.

    About `num_windows` are judged, spread evenly over the text (None: all), `samples` in one forward of one rank.
    """
    passes.model.eval()
    spread = max(1, windows.num // num_windows) if num_windows else 1
    chosen = range(0, windows.num, spread)
    rank = passes.grid.data_rank
    share = -(-len(chosen) // passes.grid.axes.num_data)  # of each rank; the last ones may get empty windows
    mine = [n * spread for n in range(rank * share, (rank + 1) * share)]
    total = torch.zeros(2, dtype=sum_dtype(torch.float32, passes.device), device=passes.device)  # nats, bytes
    for at in range(0, share, samples):
        inputs, targets, weights = windows.batch(mine[at : at + samples])
        weights = passes.part(weights).flatten()
        total += torch.stack([passes.losses(inputs, targets) @ weights, weights.sum()])
    dist.all_reduce(total)
    return Score(float(total[0] / total[1]))
