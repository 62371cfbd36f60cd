"""Sampling: a model writes one byte after the other, each drawn from the odds that the model gives it."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sherd.train.data import seeded
from sherd.train.text import SEPARATOR, VOCABULARY

__all__ = ["Draw", "continued", "readable"]


@dataclass(frozen=True)
class Draw:
    """The choice of the next byte.

    Attributes:
        temperature: 0 takes the likeliest byte; 1 draws as the model says, more than that more evenly.
        top_k: only the likeliest `top_k` bytes are drawn from; 0: all.
        seed, number: decide what is drawn; `number` counts the samples of one seed.
    """

    temperature: float
    top_k: int = 0
    seed: int = 0
    number: int = 0

    def generator(self) -> torch.Generator:
        """The source of chance of one sample."""
        return seeded("sample", self.seed, *([self.number] if self.number else []))

    def next(self, logits: Tensor, generator: torch.Generator) -> int:
        """The byte after those that gave `logits`, [at least VOCABULARY]."""
        logits = logits[:VOCABULARY].cpu().double()
        if not self.temperature:
            return int(logits.argmax())
        if self.top_k:
            least = logits.topk(min(self.top_k, VOCABULARY)).values[-1]
            logits = logits.masked_fill(logits < least, -torch.inf)
        # Less the largest, so that a temperature next to 0 divides 0 and not what is no number then.
        odds = torch.softmax((logits - logits.max()) / self.temperature, dim=0)
        return int(torch.multinomial(odds, 1, generator=generator))


@torch.no_grad()
def continued(
    logits: Callable[[Tensor], Tensor], prompt: bytes, length: int, context: int, draw: Draw, device: torch.device
) -> Iterator[int]:
    """Yields the bytes of `prompt`, then `length` bytes that the model draws after them, as at the start of a document.

    Several ranks iterate together, and draw the same bytes.

    Args:
        logits: from tokens, int64 [1, n], to [1, n, at least VOCABULARY].
        prompt: the bytes before those that are drawn.
        length: how many bytes are drawn.
        context: how many bytes the model reads; earlier ones are left out.
        draw: how a byte is drawn from logits, and the seed.
        device: where the tokens of a forward are.
    """
    generator, tokens = draw.generator(), [*SEPARATOR, *prompt]
    yield from prompt
    for _ in range(length):
        seen = torch.tensor([tokens[-context:]], device=device)
        tokens.append(draw.next(logits(seen)[0, -1], generator))
        yield tokens[-1]


def readable(tokens: Iterable[int]) -> Iterator[str]:
    """`tokens` as text, piece by piece: an empty line where a document begins, a U+FFFD for what is no UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        byte = bytes([token])
        yield decoder.decode(b"\n\n" if byte == SEPARATOR else byte)
    yield decoder.decode(b"", final=True)
