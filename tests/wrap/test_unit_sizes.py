"""Does `auto_shard` make larger and smaller units by a word, and do they train as the plain model?"""

import functools

import pytest
import torch
from torch import nn

from sherd.api.auto_shard import auto_shard
from sherd.errors import PolicyError
from tests.wrap.against_torch import tiny_llama
from tests.wrap.test_auto_shard import alone, sharded


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


def stack(**options):
    torch.manual_seed(0)
    return Stack(**options)


BLOCKS = [f"blocks.{at}" for at in range(5)]
PAIRS = [("blocks.0", "blocks.1"), ("blocks.2", "blocks.3"), ("blocks.4",)]
PARTS = [f"{block}.{part}" for block in BLOCKS for part in ("up", "more.0")]


@pytest.mark.parametrize(
    ("word", "options", "expected"),
    [
        ("auto", {}, alone("", *BLOCKS)),
        ("pairs", {}, [(("",), None), *((pair, None) for pair in PAIRS)]),
        ("parts", {}, alone("", *BLOCKS, *PARTS)),
        ("ends", {}, alone("", *BLOCKS, "embedding", "head")),
        ("ends", {"is_tied": True}, alone("", *BLOCKS)),
        ("pairs", {"num_blocks": 1}, alone("", "blocks.0")),
    ],
)
def test_a_word_makes_units_larger_or_smaller(world, word, options, expected):
    for found in world(2).run(sharded, functools.partial(stack, **options), word):
        assert found == sorted(expected)


def test_a_word_changes_only_the_blocks_of_a_model_that_describes_itself(world):
    for found in world(2).run(sharded, tiny_llama, "pairs"):
        assert [names for names, _ in found] == [
            ("",),
            ("model.embed_tokens",),
            ("model.layers.0", "model.layers.1"),
            ("model.norm", "lm_head"),
        ]


def trained_by_words():
    batches = [torch.randint(40, (4, 6), generator=torch.Generator().manual_seed(at)) for at in range(3)]
    found = []
    for make in (None, "auto", "pairs", "parts", "ends"):
        model = stack()
        if make is not None:
            auto_shard(model, make, reshard_after_forward=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for batch in batches:
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append(losses)
    return found


def test_units_of_all_sizes_train_as_the_plain_model(world):
    for plain, *others in world(2).run(trained_by_words):
        for each in others:
            assert each == pytest.approx(plain, rel=1e-5)


class Two(nn.Module):
    """It describes itself, and repeats no blocks."""

    _no_split_modules = ("Bilinear",)

    def __init__(self):
        super().__init__()
        self.block, self.head = nn.Bilinear(8, 8, 8), nn.Linear(8, 8)


def test_a_word_that_is_none_or_is_not_for_the_model_is_refused():
    with pytest.raises(PolicyError, match="expected a policy, or one of auto, pairs, parts, ends"):
        auto_shard(stack(), "triples")
    with pytest.raises(PolicyError, match=r"policy='pairs'.* is for repeated blocks, and Two has none"):
        auto_shard(Two(), "pairs")
