"""Are parameters whole, and of today, wherever they are used: shared between units, or unsharded by hand?"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sherd import Flat, fully_shard
from sherd.errors import StateError
from tests.support.comparing import assert_named_close, whole_grads


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(8, 8) / 3)
        self.second = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.first).relu() @ self.second


class UsesItsBlocksWeightFirst(nn.Module):
    """The root needs the block's weight in backward when the block's own backward is long over."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.inner = Inner()
        self.tied = self.inner.first

    def forward(self, x: Tensor) -> Tensor:
        return self.inner((self.before(x) @ self.tied).relu())


def gradients_of_a_root_that_uses_its_blocks_weight(sharded: bool) -> dict:
    torch.manual_seed(3)
    model = UsesItsBlocksWeightFirst()
    if sharded:
        fully_shard(model.inner)
        fully_shard(model)
    model(torch.ones(4, 8)).square().sum().backward()
    return whole_grads(model)


def test_a_weight_that_a_root_uses_before_the_block_that_owns_it_is_whole_until_the_roots_backward_is_over(world):
    expected = gradients_of_a_root_that_uses_its_blocks_weight(sharded=False)
    for found in world(2).run(gradients_of_a_root_that_uses_its_blocks_weight, True):
        assert_named_close(found, expected, "gradient", rtol=1e-5, atol=1e-6)


def gradients_where_a_borrower_runs_before_the_model(sharded: bool) -> dict:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    if sharded:
        for each in (*model, model):
            fully_shard(each)
    for runs in (model[1], model, model[1]):
        runs(torch.ones(4, 8)).square().sum().backward()
    return whole_grads(model)


def test_a_unit_with_a_weight_of_another_unit_may_run_before_the_model_does(world):
    expected = gradients_where_a_borrower_runs_before_the_model(sharded=False)
    for found in world(2).run(gradients_where_a_borrower_runs_before_the_model, True):
        assert_named_close(found, expected, "gradient", rtol=1e-5, atol=1e-6)


def weight_after_a_step(by: str) -> tuple[Tensor, Tensor]:
    """What the module shows after an optimizer step, and what its shards hold."""
    model = fully_shard(nn.Linear(8, 8, bias=False))
    model.set_reshard_after_backward(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    if by == "forward":
        shown: list[Tensor] = []
        model.register_forward_pre_hook(lambda module, args: shown.append(module.weight.detach().clone()))
        model(torch.ones(2, 8))
    else:
        model.unshard()
        shown = [model.weight.detach().clone()]
    return shown[0], optimizer.param_groups[0]["params"][0].full_tensor()


def test_a_forward_after_the_step_sees_what_the_optimizer_wrote_though_parameters_were_kept_whole(world):
    for shown, held in world(2).run(weight_after_a_step, "forward"):
        torch.testing.assert_close(shown, held)


def test_unshard_after_the_step_shows_what_the_optimizer_wrote_though_parameters_were_kept_whole(world):
    for shown, held in world(2).run(weight_after_a_step, "unshard"):
        torch.testing.assert_close(shown, held)


class WithAnEmptyParameter(nn.Module):
    def __init__(self, shape: tuple[int, ...], used: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.empty = nn.Parameter(torch.empty(shape))
        self.used = used

    def forward(self, x: Tensor) -> Tensor:
        output = self.linear(x)
        return output + self.empty.sum() if self.used else output


def gradient_beside_an_empty_parameter(shape: tuple[int, ...], used: bool) -> list[list[float]]:
    model = fully_shard(WithAnEmptyParameter(shape, used))
    model(torch.ones(2, 4)).sum().backward()
    return model.linear.weight.grad.full_tensor().tolist()


def test_a_parameter_without_elements_is_no_trouble_whether_it_is_used_or_not(world):
    for shape in ((0,), (0, 3), (3, 0)):
        for used in (True, False):
            found = world(2).run(gradient_beside_an_empty_parameter, shape, used)
            assert found == [[[2.0] * 4] * 4] * 2, (shape, used)


class Moves(nn.Linear):
    """Gives its weight other memory in each forward, as recurrent layers do that lay theirs side by side."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data.clone()
        return super().forward(x)


def losses_of_weights_that_move(reshards: bool | None) -> list[float]:
    """None: of the plain model."""
    torch.manual_seed(0)
    model = nn.Sequential(Moves(4, 4), nn.Linear(4, 3))
    if reshards is not None:
        for unit in (*model, model):
            fully_shard(unit, reshard_after_forward=reshards)
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


def test_a_whole_parameter_in_other_memory_is_put_back(world):
    expected = losses_of_weights_that_move(None)
    for reshards in (True, False):
        for losses in world(2).run(losses_of_weights_that_move, reshards):
            torch.testing.assert_close(losses, expected)


def change_whole_parameters(how: str) -> tuple[str, list[bool]]:
    """What is said, and whether training goes on with what the shards have."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    kept = [each.detach().clone() for each in model.parameters()]
    for unit in (*model, model):
        fully_shard(unit, reshard_after_forward=False)
    loss = model(torch.ones(2, 4)).square().sum()
    if how == "data":
        model[0].weight.data = torch.ones(4, 4)
    else:
        model[0].weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(StateError, match="changing the parameters between forward and backward") as raised:
        loss.backward()
    for _ in range(2):
        model(torch.ones(2, 4)).square().sum().backward()
    held = [each.full_tensor() for each in model.parameters()]
    return str(raised.value), [torch.equal(*each) for each in zip(held, kept, strict=True)]


@pytest.mark.parametrize("how", ["data", "variable"])
def test_other_values_for_a_whole_parameter_are_refused(world, how):
    for said, same in world(2).run(change_whole_parameters, how):
        assert "0.weight had .data set" in said
        assert "sherd.unsharded(model)" in said
        assert all(same)


class Scaled(nn.Module):
    def __init__(self, scale: nn.Parameter) -> None:
        super().__init__()
        self.scale, self.shift = scale, nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class Outer(nn.Module):
    """Two units with one weight; the second borrows it, and one of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))
        self.owner, self.borrower = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.borrower.weight = self.owner.weight
        self.last = Scaled(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.borrower(self.owner(x).relu()) * self.scale)


def borrower_before_its_root(placement: Any) -> tuple[Tensor, dict]:
    torch.manual_seed(3)
    model = Outer()
    for each in (model.owner, model.borrower, model):
        fully_shard(each, placement=placement)
    with torch.no_grad():
        alone = model.borrower(torch.ones(4, 8))
    model(torch.ones(4, 8)).square().sum().backward()
    return alone, whole_grads(model)


@pytest.mark.parametrize("placement", [None, Flat()], ids=["shard", "flat"])
def test_a_unit_that_borrows_a_parameter_may_run_before_its_root_ever_has(world, placement):
    torch.manual_seed(3)
    plain = Outer()
    plain(torch.ones(4, 8)).square().sum().backward()
    for alone, grads in world(2).run(borrower_before_its_root, placement):
        torch.testing.assert_close(alone, plain.borrower(torch.ones(4, 8)).detach())
        assert_named_close(grads, whole_grads(plain), "gradient", 1e-5, 1e-6)
