"""The models that are trained: a Llama-style decoder, dense or of experts, or any Hugging Face causal LM."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sherd.errors import reason_of
from sherd.train.config import NO_HF_CONFIG, InputError, ModelConfig
from sherd.train.data import seeded
from sherd.train.experts import MixtureOfExperts
from sherd.train.sequence import WholeSequence
from sherd.train.text import VOCABULARY

__all__ = [
    "Block",
    "Decoder",
    "Elsewhere",
    "Head",
    "HuggingFace",
    "in_one_line",
    "require_sizes",
    "rotate",
    "rotation",
]


def rotation(span: range, width: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding of the positions in `span`, each [length, width / 2], float32.

    Position p turns pair i by p * base ** (-2 i / width) radians. They are made anew in each forward: a
    buffer would hold garbage after a start on the meta device.
    """
    frequencies = base ** (-torch.arange(0, width, 2, device=device) / width)
    angles = torch.outer(torch.arange(span.start, span.stop, device=device), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + width / 2]) of `x`, [..., length, width], by its position's angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention: each key and value head serves `heads / kv_heads` query heads."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.head_width = model.width // model.heads
        self.query = nn.Linear(model.width, model.width, bias=False)
        self.key = nn.Linear(model.width, model.kv_heads * self.head_width, bias=False)
        self.value = nn.Linear(model.width, model.kv_heads * self.head_width, bias=False)
        self.out = nn.Linear(model.width, model.width, bias=False)
        self.sequence = WholeSequence()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = rotate(self._heads(self.query(x)), cos, sin)
        k = rotate(self._heads(self.key(x)), cos, sin)
        v = self._heads(self.value(x))
        mixed = self.sequence.attend(q, k, v)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        """Returns [samples, heads, length, width] of `x`, [samples, length, heads * width]."""
        return x.view(*x.shape[:2], -1, self.head_width).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: a layer whose sigmoid-weighted gate decides what of a second one passes."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(model.width, model.hidden, bias=False)
        self.up = nn.Linear(model.width, model.hidden, bias=False)
        self.down = nn.Linear(model.hidden, model.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """Attention, then feed-forward, each read from a normalised residual stream and added to it."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(model.width, eps=1e-6)
        self.attention = Attention(model)
        self.feed_forward_norm = nn.RMSNorm(model.width, eps=1e-6)
        self.feed_forward = MixtureOfExperts(model) if model.experts else FeedForward(model)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class Head(nn.Module):
    """The residual stream, [samples, length, width], to logits: products with one vector per byte.

    A tied head is no parameter of its own, it is given the embedding: one that two modules held would come apart in
    `to_empty`.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.weight = None if model.tied else nn.Parameter(torch.empty(VOCABULARY, model.width))

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        return F.linear(x, embedding if self.weight is None else self.weight)


class Elsewhere(nn.Module):
    """In the place of a module that another pipeline stage has: what came in goes on."""

    weight = None

    def forward(self, x: Tensor, *others: Tensor | None) -> Tensor:
        return x


class Decoder(nn.Module):
    """Tokens, int64 [samples, length], to logits of the next token, [samples, length, VOCABULARY].

    As a stage of a pipeline it takes, or returns, the residual stream in their place, [samples, length, width].
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.model = model
        self.embedding: nn.Module = nn.Embedding(VOCABULARY, model.width)
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.layers))
        self.norm: nn.Module = nn.RMSNorm(model.width, eps=1e-6)
        self.head: nn.Module = Head(model)
        self.sequence = WholeSequence()

    def forward(self, tokens: Tensor) -> Tensor:
        model, span = self.model, self.sequence.span(tokens.shape[1])
        x = self.embedding(tokens)
        cos, sin = rotation(span, model.width // model.heads, model.rope_base, x.device)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x), self.embedding.weight)
        return logits

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """First weights, the same for every number of ranks: a parameter's name and `seed` decide its values.

        Each is drawn whole, one at a time, and every rank keeps its own shard of it; nothing is sent.
        """
        for name, parameter in list(self.named_parameters()):
            owner, _, attribute = name.rpartition(".")
            whole = self._first_value(name, parameter.shape, seeded(seed, name))
            # A state dict of whole tensors loads under every placement, without communication.
            self.get_submodule(owner).load_state_dict({attribute: whole}, strict=False)

    def _first_value(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape)  # the norms: there is no bias
        if name.startswith(("embedding", "head")):
            std = 0.02
        else:
            std = 0.7 * shape[-1] ** -0.5
            # What is added to the residual stream starts small: its size shall not grow with the depth.
            if name.endswith(("out.weight", "down.weight", "experts.down")):
                std /= math.sqrt(2 * self.model.layers)
        return torch.randn(shape, generator=generator) * std


class HuggingFace(nn.Module):
    """A causal LM of transformers, built from a local config.json, with the same call as `Decoder`.

    It is made whole on the CPU of every rank, because only its own code knows its first weights; so it must
    fit there. The seed decides them, and the number of ranks does not.

    Raises:
        InputError: transformers is missing, the config cannot be used, its vocabulary is under 256 tokens, or it has
            positions for fewer than `context`.
    """

    def __init__(self, path: str, seed: int, context: int) -> None:
        super().__init__()
        self.path = path
        config = _hf_config(path, context)
        from transformers import AutoModelForCausalLM

        torch.manual_seed(seed)
        try:
            self.lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        except Exception as error:  # as many kinds as there are models
            raise InputError(f"model.hf = {path!r} makes no causal LM: {in_one_line(error)}") from error

    @torch.no_grad()
    def require_causal(self) -> None:
        """Raise InputError for a model whose logits depend on later tokens, as those of an encoder (BERT) do.

        transformers makes a "causal LM" of some encoders, and bits per byte of such a model mean nothing.
        """
        was_training = self.training
        self.eval()
        one = torch.arange(4).remainder(2)[None]
        other = one.clone()
        other[0, -1] = 2
        if not torch.allclose(self(one)[:, :-1], self(other)[:, :-1], rtol=1e-3, atol=1e-4):
            raise InputError(
                f"model.hf = {self.path!r} is no causal LM: its logits depend on later tokens, as an encoder's do; "
                'give a decoder\'s config, or set "is_decoder": true in it'
            )
        self.train(was_training)

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
        raise InputError("model.hf needs transformers: pip install transformers safetensors") from error
    if not Path(path).is_file():
        raise InputError(NO_HF_CONFIG.format(path))
    try:
        config = AutoConfig.from_pretrained(path)
    except Exception as error:  # of its validators, and of packages that these come from
        raise InputError(f"model.hf = {path!r} is no config: {in_one_line(error)}") from error
    require_sizes(config, f"model.hf = {path!r}")
    if config.vocab_size < VOCABULARY:
        raise InputError(f"model.hf = {path!r} has vocab_size = {config.vocab_size}; bytes need {VOCABULARY}")
    positions = getattr(config, "max_position_embeddings", None)  # GPT-2's n_positions answers to it too
    if isinstance(positions, int) and positions < context:
        raise InputError(
            f"model.hf = {path!r} has {positions} positions, fewer than data.context = {context}; choose a smaller "
            "data.context"
        )
    return config


# Configs of transformers


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


def require_sizes(config: Any, name: str) -> None:
    """Raise InputError if a size in `config` is below 1. `name` is what the message calls the config.

    transformers makes models of some such configs, and fails with other errors on the rest.
    """
    for where, field, value in _sizes(config):
        if value < 1:
            raise InputError(f"{name}: {where}{field} = {value}; expected a whole number from 1 on")


def _sizes(config: Any, where: str = "") -> Iterator[tuple[str, str, int]]:
    """Yields the sizes that configs of transformers have in common, each with the config in it and its own name."""
    for name in _SIZES:
        value = getattr(config, name, None)
        if isinstance(value, int):
            yield where, config.attribute_map.get(name, name), value
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            yield from _sizes(getattr(config, name), f"{where}{name}.")


def in_one_line(error: BaseException) -> str:
    """Returns what `error` says."""
    name = "KeyError: " if isinstance(error, KeyError) else ""  # its text is a key, and no more
    return name + reason_of(error)
