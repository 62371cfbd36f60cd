"""Sampling: a model writes one byte after the other, each drawn from the odds that the model gives it."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from sherd.train.data import seeded
from sherd.train.text import SEPARATOR, VOCABULARY


@torch.no_grad()
def continued(
    logits: Callable[[Tensor], Tensor], context: int, length: int, prompt: bytes, temperature: float, seed: int
) -> Iterator[int]:
    """Yields the bytes of `prompt`, then `length` bytes that are drawn after them, as at the start of a document.

    `logits` gives [1, n, at least VOCABULARY] of int64 [1, n], the last `context` bytes. A `temperature` of 0 takes the
    likeliest byte; 1 draws as the model says, more than that more evenly. Several ranks draw the same bytes.
    """
    generator, tokens = seeded("sample", seed), [*SEPARATOR, *prompt]
    yield from prompt
    for _ in range(length):
        found = logits(torch.tensor([tokens[-context:]]))[0, -1, :VOCABULARY].cpu().double()
        # Less the largest, so that a temperature next to 0 divides 0 and not what is no number then.
        odds = torch.softmax((found - found.max()) / (temperature or 1), dim=0)
        drawn = torch.multinomial(odds, 1, generator=generator) if temperature else found.argmax()
        tokens.append(int(drawn))
        yield tokens[-1]


def readable(tokens: Iterable[int]) -> Iterator[str]:
    """`tokens` as text, in chunks: an empty line where a document begins, a U+FFFD for what is no UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        byte = bytes([token])
        yield decoder.decode(b"\n\n" if byte == SEPARATOR else byte)
    yield decoder.decode(b"", final=True)
