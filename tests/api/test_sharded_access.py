"""Does an operation that meets a shard in forward say which parameter it was, of which unit, and what helps?"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sherd
from sherd.errors import PlacementError


def loss_of(hidden, weight):
    return F.linear(hidden, weight).sum()


class Net(nn.Module):
    """`way` says past which hooks it goes."""

    def __init__(self, way):
        super().__init__()
        self.body, self.head, self.way = nn.Linear(6, 6), nn.Linear(6, 4), way

    def forward(self, x):
        if self.way == "past the hooks":
            return self.head(self.body.forward(x))
        hidden = self.body(x)
        if self.way == "in a function":
            return loss_of(hidden, self.head.weight)
        if self.way == "in place of a head":
            return F.linear(hidden, self.head.weight)
        raise ValueError("another mistake")


def fully_sharded(model, **options):
    for each in (model.body, model.head):
        sherd.fully_shard(each, **options)
    return sherd.fully_shard(model, **options)


SHARDED = {
    "Shard(0)": fully_sharded,
    "ddp": partial(fully_sharded, placements="ddp"),
    "Flat": partial(fully_sharded, placement=sherd.Flat()),
    "Whole": partial(fully_sharded, placement=sherd.Owned()),
}


def said(way):
    texts = {}
    for name, shard in SHARDED.items():
        model = shard(Net(way))
        with pytest.raises((RuntimeError, PlacementError)) as caught:
            model(torch.ones(2, 6))
        texts[name] = str(caught.value)
        model.way = None  # and the model is as it was
        with pytest.raises(ValueError, match=r"^another mistake$"):
            model(torch.ones(2, 6))
    return texts


@pytest.mark.parametrize(
    ("way", "met"),
    [
        ("past the hooks", "body.weight, body.bias, of unit body"),
        ("in a function", "head.weight, of unit head"),
        ("in place of a head", "head.weight"),
    ],
)
def test_a_shard_met_in_forward_is_named_with_what_helps(world, way, met):
    for texts in world(2).run(said, way):
        for name, text in texts.items():
            assert text.count("\n") == 1, f"{name}: {text}"
            _, last = text.split("\n")
            assert last.startswith("A shard was met where an unsharded parameter was needed: ")
            assert met in last
            assert last.count("module(x)") == 1
            for remedy in ("register_fsdp_forward_method", "unshard()", "to the unit that reads it"):
                assert remedy in last


def helped():
    """What the text proposes works."""
    model = fully_sharded(Net("in place of a head"))
    model.head.unshard()
    found = model(torch.ones(2, 6))
    model.head.reshard()
    return found.shape


def test_a_weight_that_is_unsharded_can_be_read(world):
    assert world(2).run(helped) == [(2, 4)] * 2
