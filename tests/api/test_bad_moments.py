"""A call at the wrong moment says what to do instead, and leaves the model usable."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from sherd import Flat, Owned, fully_shard, register_fsdp_forward_method
from sherd.errors import ModuleError, OptimizerError, PlacementError, ShardedAccessError, StateError
from tests.api.checks import assert_refuses, assert_trains, explode_in
from tests.support.models import WIDTH, Block, build, chain, noise
from tests.support.ranks.bodies import on_threads
from tests.support.sharding import sharded
from tests.support.training import made, mean_square


class Scores(nn.Module):
    """A method that uses weights, one that does not, and a static one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(x)

    def score(self, x):
        return (self.layer(x) * self.layer.weight.sum()).sum()

    def size(self):
        return sum(param.numel() for param in self.parameters())

    def wrong_in_itself(self):
        raise RuntimeError("the user's own")

    @staticmethod
    def double(x):
        return 2 * x


@on_threads(2)
def test_a_method_that_needs_whole_parameters_outside_forward_is_told_the_two_remedies():
    model, x = made(Scores), noise(0, 0)
    expected = model.score(x).item()
    fully_shard(model)
    remedies = ("register_fsdp_forward_method", "'score'", "unshard()")
    assert_refuses(lambda: model.score(x), ShardedAccessError, "Scores.score()", *remedies)
    assert model.size() == WIDTH * WIDTH + WIDTH
    assert model.double(2) == 4
    with pytest.raises(RuntimeError, match=r"^the user's own$"):
        model.wrong_in_itself()
    model.unshard()
    assert model.score(x).item() == pytest.approx(expected, rel=1e-5)
    model.reshard()
    register_fsdp_forward_method(model, "score")
    assert model.score(x).item() == pytest.approx(expected, rel=1e-5)
    assert_refuses(lambda: register_fsdp_forward_method(model, "absent"), ModuleError, "Scores", "'absent'")
    assert_refuses(lambda: register_fsdp_forward_method(model, "training"), ModuleError, "'training'")


@on_threads(2)
def test_a_module_called_past_its_unit_raises_and_the_model_stays_usable():
    model = fully_shard(chain())
    with pytest.raises(ShardedAccessError, match=r"0\.up\.weight"):
        model[0].up(noise(0, dist.get_rank()))
    assert_trains(model, chain)


def loss_of(hidden, weight):
    return F.linear(hidden, weight).sum()


class Bypassing(nn.Module):
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
@on_threads(2)
def test_a_shard_met_in_forward_is_named_with_what_helps(way, met):
    for options in ({}, {"placements": "ddp"}, {"placement": Flat()}, {"placement": Owned()}):
        model = sharded(Bypassing(way), **options)
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


@on_threads(2)
def test_a_weight_that_is_unsharded_can_be_read():
    """What the text proposes works."""
    model = sharded(Bypassing("in place of a head"))
    model.head.unshard()
    assert model(torch.ones(2, 6)).shape == (2, 4)
    model.head.reshard()


@on_threads(2)
def test_a_unit_does_not_run_alone_after_a_failed_backward():
    model, rank = sharded(build("mlp")), dist.get_rank()
    hook = explode_in(model.blocks[1].down, "backward")
    with pytest.raises(ZeroDivisionError):
        mean_square(model, rank, 0).backward()
    hook.remove()
    for call in (
        lambda: model.blocks[0](noise(0, rank)),
        lambda: model.blocks[1].unshard() or model.blocks[2](noise(0, rank)),
    ):
        assert_refuses(call, StateError, "blocks.", "Mlp", "reset_iter_state")
    model.zero_grad()
    assert_trains(model, partial(build, "mlp"))


@on_threads(2)
def test_shards_are_not_to_be_had_in_the_middle_of_a_forward():
    model, x = sharded(build("mlp")), noise(0, dist.get_rank())
    for ask, *words in (
        (model.state_dict, "state_dict"),  # the root is whole at that moment
        (model.blocks[1].state_dict, "state_dict", "unit blocks.1"),
        (partial(model.load_state_dict, {}, strict=False),),
        (partial(model.to, torch.float64), ".to()"),
    ):
        hook = model.blocks[1].up.register_forward_hook(lambda *_, ask=ask: ask() and None)
        assert_refuses(lambda: model(x), StateError, *words, "in the middle of a forward", "do it before or after")
        hook.remove()
    assert_trains(model, partial(build, "mlp"))


@on_threads(2)
def test_a_unit_at_work_is_not_taken_under_a_new_root():
    """A unit's forward is under way; inside it a module around the unit becomes a root."""
    inner, x = fully_shard(made(Block)), noise(0, dist.get_rank())
    outer = fully_shard(nn.Sequential(inner))
    entered = []

    def call_the_outer_one(*_):
        if not entered:
            entered.append(True)
            outer(x)

    hook = inner.register_forward_pre_hook(call_the_outer_one)
    assert_refuses(lambda: inner(x), StateError, "Block", "Sequential", "reset_iter_state")
    hook.remove()
    with torch.no_grad():
        torch.testing.assert_close(outer(x), made(Block)(x))


@on_threads(2)
def test_an_optimizer_that_has_state_of_replaced_parameters_says_what_to_do():
    model = chain()
    optimizer = torch.optim.Adam(model.parameters())
    mean_square(model, 0, 0).backward()
    optimizer.step()
    mean_square(sharded(model), dist.get_rank(), 0).backward()
    assert_refuses(optimizer.step, OptimizerError, "Adam holds state", "up.weight", "after sharding")
