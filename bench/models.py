"""What is trained: four models, each with its blocks (the units) and the batches it eats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_RANKS_MOST = 4096


class Model(nn.Module):
    """A model whose `forward(*batch)` returns the loss, a scalar, and whose `blocks` become units."""

    blocks: nn.ModuleList


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and its data. `batch(seed)` gives the same tensors for the same seed, on every system."""

    title: str
    build: Callable[[], Model]
    batch: Callable[[int], tuple[Tensor, ...]]


def num_bytes(model: nn.Module) -> int:
    """Bytes of all parameters, each counted once; the unit `N` of the traffic figures."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def token_batch(seed: int, num_rows: int, num_tokens: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Random tokens and their successors, both `(num_rows, num_tokens)`, int64."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (num_rows, num_tokens + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


class Attention(nn.Module):
    """Causal attention without rotary embedding: four square weights, and no more arithmetic than needed."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            project(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class GPTBlock(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class NarrowBlock(nn.Module):
    """Twelve small parameters: so little arithmetic that what is measured is the engine around it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.in1, self.out1, self.in2, self.out2 = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out1(F.gelu(self.in1(self.norm1(x))))
        return x + self.out2(F.gelu(self.in2(self.norm2(x))))


class LanguageModel(Model):
    """Embedding, blocks, norm, untied head; the loss is cross-entropy in nats per token.

    There is no table of positions: the tokens are random, and order has nothing to teach.
    """

    def __init__(self, vocab: int, width: int, blocks: list[nn.Module], norm: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)
        self.blocks, self.norm = nn.ModuleList(blocks), norm(width)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class BottleneckBlock(nn.Module):
    """Three parameters whose dim 0 is 4,096: they divide by every rank count asked for, without padding."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(width, rank) / width**0.5)
        self.up = nn.Parameter(torch.randn(width, rank) / rank**0.5)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(x @ self.down, self.up) * self.scale


class BottleneckStack(Model):
    """Blocks of next to no arithmetic on one row of 4,096 numbers."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BottleneckBlock(NUM_RANKS_MOST, rank=4) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class LlamaBlock(nn.Module):
    """The nine parameters of a Llama layer: seven weights and two norms."""

    def __init__(self, width: int, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, num_heads)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class ExpertsBlock(nn.Module):
    """A Llama layer with experts in three weights. Each expert picks its tokens, so that shapes are known before."""

    def __init__(self, width: int, hidden: int, num_heads: int, num_experts: int, experts_per_token: int) -> None:
        super().__init__()
        self.experts_per_token = experts_per_token
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, num_heads)
        self.router = nn.Linear(width, num_experts, bias=False)
        self.gate, self.up = (nn.Parameter(torch.randn(num_experts, width, hidden) / width**0.5) for _ in range(2))
        self.down = nn.Parameter(torch.randn(num_experts, hidden, width) / hidden**0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x).flatten(0, -2)
        scores = self.router(y).softmax(-1).t()
        weights, chosen = scores.topk(len(y) * self.experts_per_token // len(scores))
        picked = y[chosen]
        found = torch.bmm(F.silu(picked @ self.gate) * (picked @ self.up), self.down) * weights.unsqueeze(-1)
        return x + torch.zeros_like(y).index_add(0, chosen.flatten(), found.flatten(0, 1)).view_as(x)


def gpt(num_rows: int, num_tokens: int, num_blocks: int = 12) -> Workload:
    """At 12 blocks 42 M parameters, 160 MiB in fp32; batches of `num_rows` x `num_tokens` tokens a rank."""

    def build() -> Model:
        return LanguageModel(4096, 512, [GPTBlock(512, num_heads=8) for _ in range(num_blocks)], nn.LayerNorm)

    title = f"GPT, {round(4.2 + 3.15 * num_blocks)} M"
    return Workload(title, build, lambda seed: token_batch(seed, num_rows, num_tokens, vocab=4096))


def deep_narrow(num_rows: int, num_tokens: int, num_blocks: int = 125) -> Workload:
    """At 125 blocks 1,504 parameters of at most 16,384 numbers, 2.1 M in all."""

    def build() -> Model:
        return LanguageModel(256, 64, [NarrowBlock(64) for _ in range(num_blocks)], nn.LayerNorm)

    title = f"deep narrow, {12 * num_blocks + 4:,} tensors"
    return Workload(title, build, lambda seed: token_batch(seed, num_rows, num_tokens, vocab=256))


def bottleneck(num_blocks: int) -> Workload:
    """`num_blocks` blocks of 36,864 numbers, nearly free to compute."""

    def batch(seed: int) -> tuple[Tensor]:
        return (torch.randn(1, NUM_RANKS_MOST, generator=torch.Generator().manual_seed(seed)),)

    return Workload("bottlenecks", lambda: BottleneckStack(num_blocks), batch)


def llama(num_layers: int) -> Model:
    """Shaped like Llama 7 B at 32 layers, but for the rotary embedding. It is sharded, never trained."""
    blocks: list[nn.Module] = [LlamaBlock(4096, 11008, num_heads=32) for _ in range(num_layers)]
    return LanguageModel(32000, 4096, blocks, nn.RMSNorm)
