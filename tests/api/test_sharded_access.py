"""An operation that meets a shard in forward says which parameter it was, of which unit, and what helps."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sherd
from sherd.errors import PlacementError
from tests.api.checks import on_ranks
from tests.support.sharding import sharded


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


@pytest.mark.parametrize(
    ("way", "met"),
    [
        ("past the hooks", "body.weight, body.bias, of unit body"),
        ("in a function", "head.weight, of unit head"),
        ("in place of a head", "head.weight"),
    ],
)
@on_ranks(2)
def test_a_shard_met_in_forward_is_named_with_what_helps(way, met):
    for options in ({}, {"placements": "ddp"}, {"placement": sherd.Flat()}, {"placement": sherd.Owned()}):
        model = sharded(Net(way), **options)
        with pytest.raises((RuntimeError, PlacementError)) as caught:
            model(torch.ones(2, 6))
        text = str(caught.value)
        assert text.count("\n") == 1, f"{options}: {text}"
        _, last = text.split("\n")
        assert last.startswith("A shard was met where an unsharded parameter was needed: ")
        assert met in last
        assert last.count("module(x)") == 1
        for remedy in ("register_fsdp_forward_method", "unshard()", "to the unit that reads it"):
            assert remedy in last
        model.way = None  # and the model is as it was
        with pytest.raises(ValueError, match=r"^another mistake$"):
            model(torch.ones(2, 6))


@on_ranks(2)
def test_a_weight_that_is_unsharded_can_be_read():
    """What the text proposes works."""
    model = sharded(Net("in place of a head"))
    model.head.unshard()
    assert model(torch.ones(2, 6)).shape == (2, 4)
    model.head.reshard()
