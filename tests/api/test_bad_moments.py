"""A call at the wrong moment says what to do instead, and leaves the model usable."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sherd import fully_shard, register_fsdp_forward_method
from sherd.errors import ModuleError, OptimizerError, ShardedAccessError, StateError
from tests.api.checks import assert_trains, on_ranks, refused
from tests.support.models import WIDTH, Block, build, chain, noise
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


@on_ranks(2)
def test_a_method_that_needs_whole_parameters_outside_forward_is_told_the_two_remedies():
    model, x = made(Scores), noise(0, 0)
    expected = model.score(x).item()
    fully_shard(model)
    remedies = ("register_fsdp_forward_method", "'score'", "unshard()")
    refused(lambda: model.score(x), ShardedAccessError, "Scores.score()", *remedies)
    assert model.size() == WIDTH * WIDTH + WIDTH
    assert model.double(2) == 4
    with pytest.raises(RuntimeError, match=r"^the user's own$"):
        model.wrong_in_itself()
    model.unshard()
    assert model.score(x).item() == pytest.approx(expected, rel=1e-5)
    model.reshard()
    register_fsdp_forward_method(model, "score")
    assert model.score(x).item() == pytest.approx(expected, rel=1e-5)
    refused(lambda: register_fsdp_forward_method(model, "absent"), ModuleError, "Scores", "'absent'")
    refused(lambda: register_fsdp_forward_method(model, "training"), ModuleError, "'training'")


@on_ranks(2)
def test_a_module_called_past_its_unit_raises_and_the_model_stays_usable():
    model = fully_shard(chain())
    with pytest.raises(ShardedAccessError, match=r"0\.up\.weight"):
        model[0].up(noise(0, dist.get_rank()))
    assert_trains(model, chain)


@on_ranks(2)
def test_a_unit_does_not_run_alone_after_a_failed_backward():
    model, rank = sharded(build("mlp")), dist.get_rank()

    def explode(*_):
        raise ZeroDivisionError

    hook = model.blocks[1].down.register_forward_hook(lambda _, __, output: output.register_hook(explode) and None)
    with pytest.raises(ZeroDivisionError):
        mean_square(model, rank, 0).backward()
    hook.remove()
    for call in (
        lambda: model.blocks[0](noise(0, rank)),
        lambda: model.blocks[1].unshard() or model.blocks[2](noise(0, rank)),
    ):
        refused(call, StateError, "blocks.", "Mlp", "reset_iter_state")
    model.zero_grad()
    assert_trains(model, partial(build, "mlp"))


@on_ranks(2)
def test_shards_are_not_to_be_had_in_the_middle_of_a_forward():
    model, x = sharded(build("mlp")), noise(0, dist.get_rank())
    for ask, words in (
        (model.state_dict, ("forward", "state_dict", "before or after")),  # the root is whole at that moment
        (model.blocks[1].state_dict, ("forward", "state_dict", "before or after")),
        (partial(model.to, torch.float64), (".to()",)),
    ):
        hook = model.blocks[1].up.register_forward_hook(lambda *_, ask=ask: ask() and None)
        refused(lambda: model(x), StateError, *words)
        hook.remove()
    assert_trains(model, partial(build, "mlp"))


@on_ranks(2)
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
    refused(lambda: inner(x), StateError, "Block", "Sequential", "reset_iter_state")
    hook.remove()
    with torch.no_grad():
        torch.testing.assert_close(outer(x), made(Block)(x))


@on_ranks(2)
def test_an_optimizer_that_has_state_of_replaced_parameters_says_what_to_do():
    model = chain()
    optimizer = torch.optim.Adam(model.parameters())
    mean_square(model, 0, 0).backward()
    optimizer.step()
    mean_square(sharded(model), dist.get_rank(), 0).backward()
    refused(optimizer.step, OptimizerError, "Adam", "up.weight", "after sharding")
