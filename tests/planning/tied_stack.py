"""Blocks between an embedding and a head that share a weight, sharded by either front end."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sherd
from sherd.api.blocks import evenly_spread
from tests.support.models import Block

WIDTH, VOCABULARY, LENGTH, SAMPLES = 64, 96, 32, 8


class Stack(nn.Module):
    """Computes so large a share of its blocks again."""

    def __init__(self, checkpoints=0.0):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, 3 * WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.checkpoints = checkpoints

    def forward(self, tokens, scale=None):
        x = self.embedding(tokens)
        for block in self.blocks:
            again = block in evenly_spread(self.blocks, self.checkpoints)
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        return self.head(x if scale is None else x * scale)


def composed(checkpoints=0.0, **options):
    torch.manual_seed(0)
    model = Stack(checkpoints)
    for each in (*model.blocks, model):
        sherd.fully_shard(each, **options)
    return model


def wrapped(use_orig_params=True, checkpoints=0.0, **options):
    torch.manual_seed(0)
    return sherd.FullyShardedDataParallel(
        Stack(checkpoints),
        auto_wrap_policy=lambda module, recurse, **_: recurse or type(module) is Block,
        use_orig_params=use_orig_params,
        **options,
    )


def tokens(samples=SAMPLES):
    return torch.arange(samples * LENGTH).view(samples, LENGTH) % VOCABULARY
