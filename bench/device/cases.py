"""What is measured on an accelerator: stacks of blocks, cases of training, and the systems that are tried in each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..models import ExpertsBlock, LanguageModel, LlamaBlock, Model
from ..systems import (
    FLAT,
    FSDP1,
    FSDP1_FLAT,
    FSDP2,
    MEGATRON,
    SHERD,
    SHERD_COALESCED,
    WRAPPER,
    WRAPPER_FLAT,
    System,
)


@dataclass(frozen=True, slots=True)
class Stack:
    """Llama blocks on one row of tokens, without rotary embedding and grouped keys.

    `num_experts`: a block has that many feed-forwards, and a token goes to `experts_per_token` of them on average.
    """

    name: str
    num_layers: int
    width: int
    hidden: int
    num_heads: int
    vocab: int
    num_tokens: int
    num_experts: int = 0
    experts_per_token: int = 0

    @property
    def title(self) -> str:
        """As a row is called."""
        return f"{self.num_layers} layers of width {self.width:,}, {self.num_tokens:,} tokens"

    def on(self, device: torch.device, dtype: torch.dtype) -> Model:
        """Built where it will be sharded: in host memory it would take minutes."""
        with torch.device(device):
            blocks: list[nn.Module] = [self._block().to(dtype) for _ in range(self.num_layers)]
            return LanguageModel(self.vocab, self.width, blocks, nn.RMSNorm).to(dtype)

    def _block(self) -> nn.Module:
        if not self.num_experts:
            return LlamaBlock(self.width, self.hidden, self.num_heads)
        return ExpertsBlock(self.width, self.hidden, self.num_heads, self.num_experts, self.experts_per_token)

    def batch(self, seed: int) -> tuple[Tensor, Tensor]:
        """One row of random tokens and the row of their successors, on the host."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(self.vocab, (1, self.num_tokens + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]


LARGE = Stack("large", num_layers=8, width=4096, hidden=14336, num_heads=32, vocab=128256, num_tokens=4096)
"""Eight layers of Llama 3 8 B: 3.2 B parameters."""
SMALLER = Stack("smaller", num_layers=4, width=2048, hidden=7168, num_heads=16, vocab=32000, num_tokens=2048)
TINY = Stack("tiny", num_layers=2, width=64, hidden=128, num_heads=4, vocab=128, num_tokens=16)
"""For a dry run: it shows that a case can be measured, not what it costs."""
STACKS = {stack.name: stack for stack in (LARGE, SMALLER, TINY)}


@dataclass(frozen=True, slots=True)
class Case:
    """One way to train. `what` says what it is, for the reader of the table.

    `compiled`: the mode that `torch.compile` is given for each block, or None. `graphed`: forward and backward are
    replayed as one graph of the device. `largest`: the largest stack that it is measured with.
    """

    name: str
    what: str
    num_micro_batches: int = 1
    mixed: bool = False
    recomputed: bool = False
    offload: bool = False
    compiled: str | None = None
    graphed: bool = False
    largest: Stack = LARGE

    def stack_for(self, wanted: Stack) -> Stack:
        """Returns `wanted`, or this case's largest stack where that is smaller."""
        order = list(STACKS.values())
        return order[max(order.index(wanted), order.index(self.largest))]


PLAIN = Case("plain", "parameters, gradients and AdamW's state in bfloat16")
CASES = {
    case.name: case
    for case in (
        PLAIN,
        Case("mixed", "float32 shards, computed in bfloat16, gradients reduced in float32", mixed=True),
        Case("recompute", "every block's activations are recomputed in backward", recomputed=True),
        Case("accumulate", "two micro-batches a step; only the second reduces gradients", num_micro_batches=2),
        Case("compile", "torch.compile of each block, before it is sharded", compiled="default"),
        Case("graph", "forward and backward captured once, then replayed as one graph", graphed=True),
        Case("offload", "shards and AdamW in host memory; one CPU thread steps", offload=True, largest=SMALLER),
        Case(
            "compile graphs",
            'each block compiled with mode="reduce-overhead", which replays a graph per block',
            compiled="reduce-overhead",
        ),
    )
}

MOST = (FSDP1, FSDP1_FLAT, FSDP2, SHERD, SHERD_COALESCED, FLAT, WRAPPER, WRAPPER_FLAT, MEGATRON)
"""In the plain case. Megatron-FSDP is left out where it is not installed."""
SOME = (FSDP1, FSDP2, SHERD, FLAT, WRAPPER)
"""In the other cases, and with `--quick`."""


def systems_for(case: Case, quick: bool, has_megatron: bool) -> list[System]:
    """Returns the systems to measure, in the order of the columns."""
    chosen = MOST if case is PLAIN and not quick else SOME
    return [system for system in chosen if system is not MEGATRON or has_megatron]
