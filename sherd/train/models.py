"""The models that are trained: a Llama-style decoder, or any Hugging Face causal LM."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sherd.errors import reason_of
from sherd.train.config import NO_HF_CONFIG, Config, InputError
from sherd.train.data import seeded
from sherd.train.text import VOCABULARY

__all__ = ["Block", "Decoder", "Head", "HuggingFace", "rotate", "rotation"]

ROPE_BASE = 10000.0  # the longest wavelength of the rotary embedding, in positions / 2 pi


def rotation(length: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding of the first `length` positions, each [length, width / 2], float32.

    Position p turns pair i by p * ROPE_BASE ** (-2 i / width) radians. They are made in each forward: a buffer would
    hold garbage after a start on the meta device.
    """
    frequencies = ROPE_BASE ** (-torch.arange(0, width, 2, device=device) / width)
    angles = torch.outer(torch.arange(length, device=device), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + width / 2]) of `x`, [..., length, width], by its position's angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention: each key and value head serves `heads / kv_heads` query heads."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.kv_heads * self.head_width, bias=False)
        self.value = nn.Linear(config.width, config.kv_heads * self.head_width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = rotate(self._heads(self.query(x)), cos, sin)
        k = rotate(self._heads(self.key(x)), cos, sin)
        v = self._heads(self.value(x))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        """Returns [samples, heads, length, width] of `x`, [samples, length, heads * width]."""
        return x.view(*x.shape[:2], -1, self.head_width).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: a layer whose sigmoid-weighted gate decides what of a second one passes."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """Attention, then feed-forward, each read from a normalised residual stream and added to it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class Head(nn.Module):
    """The residual stream, [samples, length, width], to logits: products with one vector per byte.

    A tied head is no parameter of its own, it is given the embedding: one that two modules held would come apart in
    `to_empty`.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weight = None if config.tied else nn.Parameter(torch.empty(VOCABULARY, config.width))

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        return F.linear(x, embedding if self.weight is None else self.weight)


class Decoder(nn.Module):
    """Tokens, int64 [samples, length], to logits of the next token, [samples, length, VOCABULARY]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-6)
        self.head = Head(config)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        cos, sin = rotation(tokens.shape[1], self.config.width // self.config.heads, x.device)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x), self.embedding.weight)
        return logits

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """First weights, the same for every number of ranks: a parameter's name and `seed` decide its values.

        Each is drawn unsharded, one at a time, and every rank keeps its own shard of it; nothing is sent.
        """
        for name, parameter in list(self.named_parameters()):
            owner, _, attribute = name.rpartition(".")
            whole = self._first_value(name, parameter.shape, seeded(seed, name))
            # A state dict of full tensors loads under every placement, without communication.
            self.get_submodule(owner).load_state_dict({attribute: whole}, strict=False)

    def _first_value(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape)  # the norms: there is no bias
        if name.startswith(("embedding", "head")):
            std = 0.02
        else:
            std = 0.7 * shape[-1] ** -0.5
            # What is added to the residual stream starts small: its size shall not grow with the depth.
            if name.endswith(("out.weight", "down.weight")):
                std /= math.sqrt(2 * self.config.layers)
        return torch.randn(shape, generator=generator) * std


class HuggingFace(nn.Module):
    """A causal LM of transformers, built from a local config.json, with the same call as `Decoder`.

    It is made on the CPU of every rank, because only its own code knows its first weights; so it must fit there. The
    seed decides them, and the number of ranks does not. Raises InputError if the config cannot be used.
    """

    def __init__(self, path: str, seed: int, context: int) -> None:
        super().__init__()
        config = _hf_config(path, context)
        from transformers import AutoModelForCausalLM

        torch.manual_seed(seed)
        try:
            self.lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        except Exception as error:  # as many kinds as there are models
            raise InputError(f"hf = {path!r} makes no causal LM: {reason_of(error)}") from error

    @property
    def blocks(self) -> list[nn.Module]:
        """The modules transformers itself would not split: its decoder layers."""
        names = set(self.lm._no_split_modules or ())
        return [module for module in self.lm.modules() if type(module).__name__ in names]

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.lm(input_ids=tokens, use_cache=False).logits
        return logits


def _hf_config(path: str, context: int) -> Any:
    """The config at `path`, checked before its model is made, which may be large."""
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise InputError("hf needs transformers: pip install transformers safetensors") from error
    if not Path(path).is_file():
        raise InputError(NO_HF_CONFIG.format(path))
    try:
        config = AutoConfig.from_pretrained(path)
    except Exception as error:  # of its validators, and of packages that these come from
        raise InputError(f"hf = {path!r} is no config: {reason_of(error)}") from error
    if config.vocab_size < VOCABULARY:
        raise InputError(f"hf = {path!r} has vocab_size = {config.vocab_size}; bytes need {VOCABULARY}")
    positions = getattr(config, "max_position_embeddings", None)  # GPT-2's n_positions answers to it too
    if isinstance(positions, int) and positions < context:
        raise InputError(
            f"hf = {path!r} has {positions} positions, fewer than context = {context}; choose a smaller context"
        )
    return config
