"""Small models of many kinds, each with a batch: what is built on the device that is current."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from sherd.train.config import Config
from sherd.train.models import Decoder

VOCABULARY = 256


FIXED = {"strategy": "auto", "placement": "shard", "wrapping": "auto", "reshard": True, "checkpointing": False}
FIXED |= {"offload": "nothing", "prefetch": 1, "micro_batch": 2}
"""All settings of a plan, so that nothing is searched."""


def tokens(samples=2, length=24, vocabulary=VOCABULARY):
    return torch.zeros(samples, length, dtype=torch.int64) + vocabulary - 1


def next_token(model, batch):
    output = model(batch)
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits.float().flatten(0, 1), batch.flatten())


def sum_of_all(model, batch):
    return model(batch).float().sum()


def decoder(**fields):
    model = Config(**{"layers": 3, "width": 64, "heads": 4, "kv_heads": 2, "hidden": 96, "tied": False, **fields})
    return Decoder(model), tokens()


def tied_decoder():
    return decoder(tied=True)


def bfloat16_decoder():
    model, batch = decoder()
    return model.bfloat16(), batch


class Calls(nn.Module):
    """A module whose forward is a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def _causal_lm(config):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config), tokens()


LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
"""A small config of transformers, as it stands in a file."""


def llama():
    from transformers import LlamaConfig

    return _causal_lm(LlamaConfig(**LLAMA | {"num_hidden_layers": 3}, num_key_value_heads=2, use_cache=False))


def gpt2():
    from transformers import GPT2Config

    return _causal_lm(
        GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=3, n_head=4, n_positions=64, use_cache=False)
    )


class Perceptron(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 3 * width),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.LayerNorm(3 * width),
            nn.Linear(3 * width, width),
        )

    def forward(self, x):
        return x + self.layers(x)


class MultiHead(nn.Module):
    """torch's own layer, of a token's attention to all."""

    def __init__(self, width, dtype=None):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True, dtype=dtype)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


def perceptron():
    return nn.Sequential(Perceptron(), Perceptron(), nn.LayerNorm(48)), torch.zeros(32, 48)


def convolutions():
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3)]
    head = [nn.GroupNorm(2, 16), nn.SiLU(), nn.Flatten(), nn.Linear(16 * 7 * 7, 10)]
    return nn.Sequential(*layers, *head), torch.zeros(4, 3, 20, 20)


def encoder():
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
    layers = nn.Embedding(VOCABULARY, 32), nn.TransformerEncoder(layer, 2), nn.Linear(32, VOCABULARY)
    return nn.Sequential(*layers), tokens()


class Checkpointed(nn.Module):
    """A model whose modules of one kind are checkpointed by torch, as `options` say."""

    def __init__(self, model, kind="Block", **options):
        super().__init__()
        self.model = model
        for module in model.modules():
            if type(module).__name__ == kind:
                module.forward = partial(checkpoint, module.forward, **{"use_reentrant": False} | options)

    def forward(self, *args):
        return self.model(*args)


def checkpointed():
    model, batch = decoder()
    return Checkpointed(model), batch


def reentrant():
    model, batch = decoder()
    return Checkpointed(model, use_reentrant=True), batch


def frozen():
    model, batch = decoder()
    for block in model.blocks[:2]:
        block.requires_grad_(False)
    model.embedding.requires_grad_(False)
    return model, batch


CAUSAL = (decoder, tied_decoder, bfloat16_decoder, llama, gpt2, encoder, checkpointed, reentrant, frozen)
ALL = {each.__name__: (each, next_token) for each in CAUSAL}
ALL |= {each.__name__: (each, sum_of_all) for each in (perceptron, convolutions)}
