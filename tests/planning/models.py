"""Small models of many kinds, each with a batch: what is built on the device that is current."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from sherd.train.config import Model
from sherd.train.models import Decoder

VOCABULARY = 256


def tokens(samples=2, length=24, vocabulary=VOCABULARY):
    return torch.zeros(samples, length, dtype=torch.int64) + vocabulary - 1


def next_token(model, batch):
    output = model(batch)
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits.float().flatten(0, 1), batch.flatten())


def sum_of_all(model, batch):
    return model(batch).float().sum()


def decoder(**fields):
    model = Model(**{"layers": 3, "width": 64, "heads": 4, "kv_heads": 2, "hidden": 96, "tied": False, **fields})
    return Decoder(model), tokens()


def tied_decoder():
    return decoder(tied=True)


def bfloat16_decoder():
    model, batch = decoder()
    return model.bfloat16(), batch


def _causal_lm(config):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config), tokens()


def llama():
    from transformers import LlamaConfig

    return _causal_lm(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
    )


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


def perceptron():
    return nn.Sequential(Perceptron(), Perceptron(), nn.LayerNorm(48)), torch.zeros(32, 48)


def convolutions():
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3)]
    head = [nn.GroupNorm(2, 16), nn.SiLU(), nn.Flatten(), nn.Linear(16 * 7 * 7, 10)]
    return nn.Sequential(*layers, *head), torch.zeros(4, 3, 20, 20)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens)))


def encoder():
    return Encoder(), tokens()


class Checkpointed(nn.Module):
    """A decoder that keeps the inputs of its blocks only."""

    def __init__(self, model, use_reentrant=False):
        super().__init__()
        self.model, self.use_reentrant = model, use_reentrant
        for block in model.blocks:
            forward = block.forward
            block.forward = lambda *args, f=forward: checkpoint(f, *args, use_reentrant=use_reentrant)

    def forward(self, tokens):
        return self.model(tokens)


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


CAUSAL = {
    each.__name__: each
    for each in (*(decoder, tied_decoder, bfloat16_decoder, llama, gpt2, encoder, checkpointed, reentrant, frozen),)
}
OTHERS = {each.__name__: each for each in (perceptron, convolutions)}
ALL = {name: (build, next_token) for name, build in CAUSAL.items()} | {
    name: (build, sum_of_all) for name, build in OTHERS.items()
}
