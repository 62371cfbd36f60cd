"""Does a call at the wrong moment say what to do instead, and leave the model usable?"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sherd import (
    fully_shard,
    register_fsdp_forward_method,
)
from sherd.errors import (
    ModuleError,
    OptimizerError,
    ShardedAccessError,
    StateError,
)
from tests.support.comparing import assert_refused
from tests.support.models import WIDTH, Block, build, noise, shard
from tests.support.sharding import shard_children
from tests.support.training import Recipe, assert_all_same, assert_trained, made, mean_square, steps_sharded, train_job


def stack():
    return nn.Sequential(Block(), Block())


# Moments


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


def methods_outside_forward():
    model, x = made(Scores), noise(0, 0)
    expected = model.score(x).item()
    fully_shard(model)
    assert_refused(
        lambda: model.score(x),
        ShardedAccessError,
        RuntimeError,
        "Scores.score()",
        "register_fsdp_forward_method",
        "'score'",
        "unshard()",
    )
    assert model.size() == WIDTH * WIDTH + WIDTH
    assert model.double(2) == 4
    with pytest.raises(RuntimeError, match=r"^the user's own$"):
        model.wrong_in_itself()
    model.unshard()
    assert model.score(x).item() == pytest.approx(expected, rel=1e-5)
    model.reshard()
    register_fsdp_forward_method(model, "score")
    assert model.score(x).item() == pytest.approx(expected, rel=1e-5)
    assert_refused(lambda: register_fsdp_forward_method(model, "absent"), ModuleError, ValueError, "Scores", "'absent'")
    assert_refused(lambda: register_fsdp_forward_method(model, "training"), ModuleError, ValueError, "'training'")


def test_a_method_that_needs_whole_parameters_outside_forward_is_told_the_two_remedies(world):
    world(2).run(methods_outside_forward)


class Reads(nn.Module):
    """A module that is no unit, below one; its own forward is called past the unit's."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.inner(x)


def inner_module_alone():
    model = made(lambda: nn.Sequential(Reads(), Reads()))
    fully_shard(model)
    x = noise(0, dist.get_rank())
    with pytest.raises(ShardedAccessError, match=r"0\.inner\.weight"):
        model[0].inner(x)
    return train_job(model, mean_square)


def two_readers():
    return nn.Sequential(Reads(), Reads())


def test_a_module_called_past_its_unit_raises_and_the_model_stays_usable(world):
    assert_trained(world(2).run(inner_module_alone), two_readers)


def unit_after_a_failed_backward():
    model, rank = shard(build("mlp")), dist.get_rank()

    def explode(*_):
        raise ZeroDivisionError

    hook = model.blocks[1].down.register_forward_hook(lambda _, __, output: output.register_hook(explode) and None)
    with pytest.raises(ZeroDivisionError):
        model.loss(model(*model.make_inputs(0, rank))).backward()
    hook.remove()
    for call in (
        lambda: model.blocks[0](noise(0, rank)),
        lambda: model.blocks[1].unshard() or model.blocks[2](noise(0, rank)),
    ):
        assert_refused(call, StateError, RuntimeError, "blocks.", "Mlp", "reset_iter_state")
    model.zero_grad()
    return steps_sharded(model, Recipe("mlp", steps=2), rank)


def test_a_unit_does_not_run_alone_after_a_failed_backward(world):
    assert_all_same(world(2).run(unit_after_a_failed_backward), Recipe("mlp", steps=2))


def saved_in_the_middle():
    model, rank = shard(build("mlp")), dist.get_rank()
    # Of the root, which is whole at that moment, and of the block that runs.
    for owner, other in ((model, model), (model, model.blocks[1])):
        hook = owner.blocks[1].up.register_forward_hook(lambda *_, m=other: m.state_dict() and None)
        assert_refused(
            lambda: model(*model.make_inputs(0, rank)),
            StateError,
            RuntimeError,
            "forward",
            "state_dict",
            "before or after",
        )
        hook.remove()
    hook = model.blocks[1].up.register_forward_hook(lambda *_: model.to(torch.float64) and None)
    assert_refused(lambda: model(*model.make_inputs(0, rank)), StateError, RuntimeError, ".to()")
    hook.remove()
    return steps_sharded(model, Recipe("mlp", steps=2), rank)


def test_shards_are_not_to_be_had_in_the_middle_of_a_forward(world):
    assert_all_same(world(2).run(saved_in_the_middle), Recipe("mlp", steps=2))


def new_root_in_the_middle():
    """A unit's forward is under way; inside it a module around the unit becomes a root."""
    inner = made(Block)
    fully_shard(inner)
    outer = nn.Sequential(inner)
    fully_shard(outer)
    x = noise(0, dist.get_rank())
    entered = []

    def call_the_outer_one(*_):
        if not entered:
            entered.append(True)
            outer(x)

    hook = inner.register_forward_pre_hook(call_the_outer_one)
    assert_refused(lambda: inner(x), StateError, RuntimeError, "Block", "Sequential", "reset_iter_state")
    hook.remove()
    with torch.no_grad():
        return outer(x)


def test_a_unit_at_work_is_not_taken_under_a_new_root(world):
    for rank, output in enumerate(world(2).run(new_root_in_the_middle)):
        torch.testing.assert_close(output, made(Block)(noise(0, rank)).detach())


# Optimizers


def stale_optimizer():
    model = made(stack)
    optimizer = torch.optim.Adam(model.parameters())
    mean_square(model, 0, 0).backward()
    optimizer.step()
    shard_children(model)
    mean_square(model, dist.get_rank(), 0).backward()
    assert_refused(optimizer.step, OptimizerError, RuntimeError, "Adam", "up.weight", "after sharding")


def test_an_optimizer_that_has_state_of_replaced_parameters_says_what_to_do(world):
    world(2).run(stale_optimizer)
