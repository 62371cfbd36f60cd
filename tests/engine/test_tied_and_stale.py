"""Parameters are whole, and of today, wherever they are used: by several units or calls, or unsharded by hand."""

import itertools
from operator import is_
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sherd import FSDPModule, ShardingStrategy, fully_shard
from sherd.errors import GradientError, StateError
from tests.support.comparing import assert_named_close, assert_same, whole, whole_grads
from tests.support.models import Wired
from tests.support.ranks.bodies import on_threads
from tests.support.refusals import refusal
from tests.support.sharding import FRONTS, WRAPPERS, sharded
from tests.support.training import made


def matrix() -> nn.Parameter:
    return nn.Parameter(torch.randn(8, 8) / 3)


def uses_its_blocks_weight_first() -> nn.Module:
    """The root needs the block's weight in backward when the block's own backward is long over."""
    inner = Wired(lambda self, x: (x @ self.first).relu() @ self.second, first=matrix(), second=matrix())
    parts = {"before": nn.Linear(8, 8), "inner": inner, "tied": inner.first}
    return Wired(lambda self, x: self.inner((self.before(x) @ self.tied).relu()), **parts)


def borrowing() -> nn.Module:
    """The second layer has the first one's weight."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    return model


def outer() -> nn.Module:
    """Two units with one weight; the second borrows it, and one of the root's own."""
    scale, shift = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
    owner, borrower = (nn.Linear(8, 8, bias=False) for _ in range(2))
    borrower.weight = owner.weight
    last = Wired(lambda self, x: x * self.scale + self.shift, scale=scale, shift=shift)
    parts = {"scale": scale, "owner": owner, "borrower": borrower, "last": last}
    return Wired(lambda self, x: self.last(self.borrower(self.owner(x).relu()) * self.scale), **parts)


def loop(block: nn.Module) -> nn.Module:
    """One block, called again and again on its own output."""
    parts = {"before": nn.Linear(8, 8), "block": block}
    return Wired(lambda self, x: self.block(self.block(self.block(self.before(x)))), **parts)


def wrapping() -> nn.Module:
    """Its output is, untouched, that of the module inside."""
    return Wired(lambda self, x: self.inside(x * self.scale), scale=nn.Parameter(torch.ones(8)), inside=nn.Linear(8, 8))


def recursive() -> nn.Module:
    """A module that calls itself."""
    parts = {"down": nn.Linear(8, 8), "up": nn.Linear(8, 8)}
    return Wired(lambda self, x, depth=2: self.up(self(self.down(x).relu(), depth - 1)) if depth else x, **parts)


def thin() -> nn.Module:
    """Two calls of one unit with nothing in between, the first as the output of a unit around it."""
    return Wired(lambda self, x: self.around[0](self.around(x)), around=nn.Sequential(nn.Linear(8, 8)))


ALL = [("", True)]
CASES = {
    "a root before the owner": (uses_its_blocks_weight_first, ["inner"], ALL),
    "a borrower before the model": (borrowing, ["0", "1"], [("1", True), ("", True), ("1", True)]),
    "a borrower before its root": (outer, ["owner", "borrower"], [("borrower", False), ("", True)]),
    "one unit again and again": (lambda: loop(nn.Linear(8, 8)), ["block"], ALL),
    "a unit in a unit again and again": (lambda: loop(wrapping()), ["block.inside", "block"], ALL),
    "recursion below a root": (recursive, ["down", "up"], ALL),
    "a call inside and a call outside": (thin, ["around.0", "around"], ALL),
}
"""What is made, its units below the model, and which modules are called, with gradients or without."""


@pytest.mark.parametrize("front", ["shard", "flat"])
@on_threads(2)
def test_a_weight_of_several_units_or_calls_is_whole_for_each_whichever_runs_first(front):
    for (case, (make, names, calls)), has_grad in itertools.product(CASES.items(), (False, True)):
        model, plain = made(make), made(make)
        sharded(model, front, [*(model.get_submodule(name) for name in names), model])
        for name, is_trained in calls:
            with torch.set_grad_enabled(is_trained):
                x = torch.ones(4, 8, requires_grad=has_grad)
                found, expected = (each.get_submodule(name)(x) for each in (model, plain))
            assert_same(found, expected, case, rtol=None, atol=None)
            if is_trained:
                (found.square().sum() + expected.square().sum()).backward()
        assert_named_close(whole_grads(model), whole_grads(plain), f"{case}: gradient", rtol=1e-5, atol=1e-6)


@on_threads(2)
def test_after_a_step_unshard_shows_what_the_optimizer_wrote_though_parameters_were_kept_whole():
    model = fully_shard(nn.Linear(8, 8, bias=False))
    model.set_reshard_after_backward(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    model.unshard()
    torch.testing.assert_close(whole(model.weight), whole(optimizer.param_groups[0]["params"][0]))


WRITES = {
    "lerp_": lambda shards, others: [shard.lerp_(other, 0.5) for shard, other in zip(shards, others, strict=True)],
    "copy_": lambda shards, others: [shard.copy_(2 * other) for shard, other in zip(shards, others, strict=True)],
    ".data": lambda shards, others: [setattr(shard, "data", torch.ones(shard.shape)) for shard in shards],
    "swap_tensors": lambda shards, others: [
        torch.utils.swap_tensors(shard, nn.Parameter(2 * other)) for shard, other in zip(shards, others, strict=True)
    ],
    "_foreach_lerp_": lambda shards, others: torch._foreach_lerp_(shards, others, 0.5),
}


@pytest.mark.parametrize("front", FRONTS)
@on_threads(2)
def test_a_unit_that_stays_whole_sees_that_its_shards_are_written_in_place(front):
    kept = (
        {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP} if front in WRAPPERS else {"reshard_after_forward": False}
    )
    # torch's own DTensors show no trace of a list operation.
    for how, write in WRITES.items() if front != "shard" else list(WRITES.items())[:-1]:
        model, plain = (made(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))) for _ in range(2))
        model = sharded(model, front, **kept)
        pairs = [list(each.parameters()) for each in (model, plain)]
        for turn in range(3):
            with torch.no_grad():
                found, expected = model(torch.ones(4, 8)), plain(torch.ones(4, 8))
                assert_same(found, expected, f"{how} {turn}", rtol=1e-5, atol=1e-6)
                for params in pairs:
                    write(params, [param + 1 for param in params])


@on_threads(2)
def test_after_a_forward_without_gradients_and_a_step_modules_show_what_the_optimizer_wrote():
    model = sharded(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(4, 8)).sum().backward()
    with torch.no_grad():
        model(torch.ones(4, 8))
    optimizer.step()
    assert all(map(is_, model.parameters(), optimizer.param_groups[0]["params"]))


@on_threads(2)
def test_a_unit_that_stays_whole_sees_a_step_that_was_made_inside_of_backward():
    for front in FRONTS:
        models = [made(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))) for _ in range(2)]
        kept: Any = {} if front in WRAPPERS else {"reshard_after_forward": False}
        models[0] = sharded(models[0], front, **kept)
        for model in models:
            if isinstance(model, FSDPModule):
                model.set_reshard_after_backward(False)
            start, optimizer = torch.ones(4, 8, requires_grad=True) * 1, torch.optim.SGD(model.parameters(), lr=0.1)
            x = start * 1
            for _ in range(2):
                model(x).square().mean().backward(retain_graph=True)
            start.register_hook(lambda _, optimizer=optimizer: optimizer.step())  # behind all of the model
            model(x).square().mean().backward()
        assert_same(models[0](torch.ones(4, 8)), models[1](torch.ones(4, 8)), front, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("foreach", [True, False])
@on_threads(2)
def test_a_loss_of_before_a_step_cannot_be_differentiated_after_it_but_what_was_not_stepped_can(foreach):
    for front in FRONTS:
        model = sharded(made(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))), front)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
        for _ in range(2):
            model(torch.ones(4, 8)).sum().backward()
        old = model(torch.ones(4, 8)).sum()
        optimizer.step()
        assert "modified by an inplace operation" in refusal(GradientError, old.backward), front
    two = Wired(
        lambda self, x, which: getattr(self, which)(x.requires_grad_()), one=nn.Linear(8, 8), two=nn.Linear(8, 8)
    )
    fully_shard(two)
    optimizer = torch.optim.SGD(two.one.parameters(), lr=0.1, foreach=foreach)
    old = two(torch.ones(4, 8), "two").sum()
    two(torch.ones(4, 8), "one").sum().backward()
    optimizer.step()
    old.backward()


@pytest.mark.parametrize("front", ["shard", "wrapper"])
@on_threads(2)
def test_a_parameter_that_is_trained_again_after_a_backward_that_raised_has_gradients_in_the_next_step(front):
    for of_model in (True, False):
        model = sharded(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), front)
        held = list(model.parameters())
        held[-1].requires_grad_(False)
        model(torch.ones(4, 8)).sum().backward()
        loss = model(torch.ones(4, 8))
        loss.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.sum().backward()
        for param in model.parameters() if of_model else held:
            param.requires_grad_(True)
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(4, 8)).sum().backward()
            assert held[-1].grad is not None, of_model


def with_an_empty_parameter(shape: tuple[int, ...], used: bool) -> nn.Module:
    parts = {"linear": nn.Linear(4, 4), "empty": nn.Parameter(torch.empty(shape))}
    return Wired(lambda self, x: self.linear(x) + (self.empty.sum() if used else 0), **parts)


@on_threads(2)
def test_a_parameter_without_elements_is_no_trouble_whether_it_is_used_or_not():
    for shape in ((0,), (0, 3), (3, 0)):
        for used in (True, False):
            model = fully_shard(with_an_empty_parameter(shape, used))
            model(torch.ones(2, 4)).sum().backward()
            assert torch.equal(whole(model.linear.weight.grad), torch.full((4, 4), 2.0)), (shape, used)


class Moves(nn.Linear):
    """Gives its weight other memory in each forward, as recurrent layers do that lay theirs side by side."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data.clone()
        return super().forward(x)


def losses_of_weights_that_move(reshards: bool | None) -> list[float]:
    """None: of the plain model."""
    model = made(lambda: nn.Sequential(Moves(4, 4), nn.Linear(4, 3)))
    if reshards is not None:
        sharded(model, reshard_after_forward=reshards)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for _ in range(3):
        loss = model(torch.ones(2, 4)).square().sum()
        if not reshards:
            model[1].weight.data = model[1].weight.data.clone()
            model[1].bias = nn.Parameter(model[1].bias.detach().clone()) if reshards is False else model[1].bias
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@on_threads(2)
def test_a_whole_parameter_in_other_memory_is_put_back():
    for reshards in (True, False):
        torch.testing.assert_close(losses_of_weights_that_move(reshards), losses_of_weights_that_move(None))


def set_data(linear: Any) -> None:
    linear.weight.data = torch.ones(4, 4)


def set_variable(linear: Any) -> None:
    linear.weight = nn.Parameter(torch.ones(4, 4))


@on_threads(2)
def test_a_frozen_parameter_may_come_back_from_a_sum_but_for_rounding():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    expected = model(torch.ones(2, 4))
    kept = whole(model[0].weight)
    sharded(model, reshard_after_forward=False)
    for factor in (1.0, 1.5):
        loss = model(torch.ones(2, 4))
        torch.testing.assert_close(loss, expected)
        model[0].weight = nn.Parameter(model[0].weight.detach() * factor + 7.1 - 7.1, requires_grad=False)
        assert not torch.equal(model[0].weight, kept)
        if factor == 1:
            loss.sum().backward()
            continue
        with pytest.raises(StateError, match=r"0\.weight had"):
            loss.sum().backward()
    assert torch.equal(whole(model[0].weight), kept)


@pytest.mark.parametrize("change", [set_data, set_variable])
@on_threads(2)
def test_other_values_for_a_whole_parameter_are_refused_and_training_goes_on_with_what_the_shards_have(change):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    kept = [whole(each) for each in model.parameters()]
    sharded(model, reshard_after_forward=False)
    loss = model(torch.ones(2, 4)).square().sum()
    change(model[0])
    with pytest.raises(StateError, match="changing the parameters between forward and backward") as raised:
        loss.backward()
    for word in ("0.weight had .data set", "sherd.unsharded(model)"):
        assert word in str(raised.value)
    for _ in range(2):
        model(torch.ones(2, 4)).square().sum().backward()
    assert all(torch.equal(whole(each), value) for each, value in zip(model.parameters(), kept, strict=True))
