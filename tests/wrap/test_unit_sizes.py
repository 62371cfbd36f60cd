"""Plans make larger and smaller units by a word, and they train as the plain model."""

import pytest
import torch
from torch import nn

from sherd import auto_shard
from sherd.errors import PolicyError, PolicyTypeError
from sherd.tools.plan.axes import auto_units
from tests.support.ranks.bodies import on_threads
from tests.support.training import assert_trained, made, train_job
from tests.wrap.against_torch import needs_transformers, tiny_llama
from tests.wrap.test_auto_shard import alone, units


class Halves(nn.Module):
    """A block: two large modules, one of them in a list, and a small one."""

    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 16)
        self.more = nn.ModuleList([nn.Linear(16, 8)])

    def forward(self, x):
        return x + self.more[0](torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks between an embedding and a head, whose weight may be the embedding's."""

    def __init__(self, num_blocks=5, is_tied=False):
        super().__init__()
        self.embedding = nn.Embedding(40, 8)
        self.blocks = nn.ModuleList(Halves() for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 40, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


BLOCKS = [f"blocks.{at}" for at in range(5)]
PAIRS = [("blocks.0", "blocks.1"), ("blocks.2", "blocks.3"), ("blocks.4",)]
PARTS = [f"{block}.{part}" for block in BLOCKS for part in ("up", "more.0")]


@on_threads(2)
def test_a_word_makes_units_larger_or_smaller():
    for word, options, expected in (
        ("auto", {}, alone("", *BLOCKS)),
        ("pairs", {}, [(("",), None), *((pair, None) for pair in PAIRS)]),
        ("parts", {}, alone("", *BLOCKS, *PARTS)),
        ("ends", {}, alone("", *BLOCKS, "embedding", "head")),
        ("ends", {"is_tied": True}, alone("", *BLOCKS)),
        ("pairs", {"num_blocks": 1}, alone("", "blocks.0")),
    ):
        assert units(auto_units(Stack(**options), word)) == sorted(expected), (word, options)


class TwoLists(Stack):
    """A stack that names its blocks as units, behind a list of other modules of their size."""

    _no_split_modules = ("Halves",)

    def __init__(self):
        super().__init__()
        self.blocks, blocks = nn.ModuleList(nn.Linear(8, 32) for _ in range(2)), self.blocks
        self.later = blocks


@on_threads(2)
def test_a_list_before_the_blocks_whose_modules_are_no_units_does_not_count():
    expected = alone("", *(f"later.{at}" for at in range(5)), "blocks.0", "blocks.1", "embedding", "head")
    assert units(auto_units(TwoLists(), "ends")) == sorted(expected)


@needs_transformers
@on_threads(2)
def test_a_word_changes_only_the_blocks_of_a_model_that_describes_itself():
    names = [names for names, _ in units(auto_units(tiny_llama(), "pairs"))]
    pair = ("model.layers.0", "model.layers.1")
    assert names == [("",), ("model.embed_tokens",), pair, ("model.norm", "lm_head")]


def mean_square(model, rank, step):
    return model(torch.randint(40, (4, 6), generator=torch.Generator().manual_seed(10 * step + rank))).square().mean()


@pytest.mark.parametrize("word", ["auto", "pairs", "parts", "ends"])
def test_units_of_all_sizes_train_as_the_plain_model(threads, word):
    found = threads(2).run(lambda: train_job(auto_units(made(Stack), word, reshard_after_forward=True), mean_square))
    assert_trained(found, Stack, mean_square)


class Two(nn.Module):
    """It describes itself, and repeats no blocks."""

    _no_split_modules = ("Bilinear",)

    def __init__(self):
        super().__init__()
        self.block, self.head = nn.Bilinear(8, 8, 8), nn.Linear(8, 8)


def test_a_word_that_is_not_for_the_model_is_refused_and_auto_shard_takes_none():
    with pytest.raises(PolicyError, match=r"wrapping='pairs' is for repeated blocks, and Two has none"):
        auto_units(Two(), "pairs")
    with pytest.raises(PolicyTypeError, match="expected a policy, got 'pairs'; pass ModuleWrapPolicy"):
        auto_shard(Stack(), "pairs")
