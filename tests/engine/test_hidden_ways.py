"""A gradient is reduced, and by the right factor, when it comes on a way that passes no output of its unit."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sherd import FSDPModule, fully_shard
from tests.support.comparing import Named, assert_named_close, whole_grads, whole_params
from tests.support.models import WIDTH, Block, Wired, noise
from tests.support.ranks.bodies import on_threads
from tests.support.sharding import sharded
from tests.support.training import LR, assert_trained, made, mean_square, train_job


class Envelope:
    """A class of the user's own around a tensor, which no container walk knows."""

    __slots__ = ("inside", "words")

    def __init__(self, inside: Any) -> None:
        self.inside = inside
        self.words = "none"


class Letter:
    def __init__(self, inside: Any) -> None:
        self.envelope, self.itself = Envelope(inside), self


class Mailed(Block):
    def forward(self, letter: Letter) -> Letter:
        return Letter(super().forward(letter.envelope.inside))


def post():
    """Its units, and it itself, take and give objects."""
    return nn.Sequential(Mailed(), Mailed())


def by_letter(model, rank, step):
    return model(Letter(noise(step, rank))).envelope.inside.square().mean()


class Routed(nn.Module):
    """It leaves a loss on itself, made after its output and of weights that backward must read."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.gate, self.scores = Block(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.main(x)
        self.balance = [self.scores(self.gate(x).tanh()).square().mean()]
        return y


def routed():
    return nn.Sequential(Routed(), Routed(), nn.Linear(WIDTH, WIDTH))


def with_side_losses(model, rank, step):
    return mean_square(model, rank, step) + model[0].balance[0] + model[1].balance[0]


def of_a_side_loss_alone(model, rank, step):
    model(noise(step, rank))
    return model[0].balance[0]


def tied():
    """Of two units with one weight the one that owns it never runs."""
    owner, user = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
    user.weight = owner.weight
    return Wired(lambda self, x: self.user(x), owner=owner, user=user)


def stack():
    return nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH))


def by_its_weight(model, rank, step):
    """A head that is used past its forward, as a fused loss does; backward frees it."""
    head = model[1]
    hidden = model[0](noise(step, rank))
    if isinstance(head, FSDPModule):
        head.unshard()
    return (hidden @ head.weight.T).square().mean()


def mapped(model, rank, step):
    return torch.func.vmap(model)(noise(step, rank)).square().mean()


def differentiated(model, rank, step):
    """A transform that runs a backward of its own through the model, before the ordinary one."""
    torch.func.grad(lambda x: model(x).square().mean())(noise(step, rank))
    return mean_square(model, rank, step)


class Forces(nn.Module):
    """The gradient of what a unit returns, computed again in backward, where it is differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(Block(), Block())

    def of(self, x: Tensor) -> Tensor:
        with torch.enable_grad():  # a reentrant checkpoint has none in forward
            return torch.autograd.grad(self.energy(x).square().mean(), x, create_graph=True)[0]

    def forward(self, x: Tensor, use_reentrant: bool) -> Tensor:
        return checkpoint(self.of, x, use_reentrant=use_reentrant)


def of_forces(model, rank, step):
    return model(noise(step, rank).requires_grad_(), use_reentrant=False).square().sum()


def of_forces_again(model, rank, step):
    return model(noise(step, rank).requires_grad_(), use_reentrant=True).square().sum()


WAYS = [
    (post, by_letter),
    (routed, with_side_losses),
    (routed, of_a_side_loss_alone),
    (tied, mean_square),
    (stack, by_its_weight),
    (stack, mapped),
    (stack, differentiated),
    (Forces, of_forces),
    (Forces, of_forces_again),
]


@pytest.mark.parametrize(("make", "job"), WAYS, ids=[f"{make.__name__}-{job.__name__}" for make, job in WAYS])
def test_what_backward_reaches_unseen_is_trained_as_in_one_process(threads, make, job):
    assert_trained(threads(2).run(lambda: train_job(sharded(made(make)), job)), make, job)


def gradients_of_a_penalty(model: nn.Module) -> Named:
    x = noise(0, 0).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    slope.square().sum().backward()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return whole_grads(model)


@on_threads(2)
def test_the_gradient_of_a_gradient_is_reduced_where_parameters_stay_whole():
    model = sharded(made(stack), reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    assert_named_close(gradients_of_a_penalty(model), gradients_of_a_penalty(made(stack)), "gradient", 1e-5, 1e-6)


@on_threads(2)
def test_a_parameter_frozen_between_forward_and_backward_gets_no_gradient():
    grads = []
    for model in (sharded(made(stack)), made(stack)):
        loss = mean_square(model, 0, 0)
        model[0].requires_grad_(False)
        loss.backward()
        grads.append(whole_grads(model))
    assert_named_close(*grads, "gradient", 1e-5, 1e-6)


# Hooks that users put on parameters


def hooked(model: nn.Module, shard: Any = None) -> nn.Module:
    """Gradients are doubled by a hook; each parameter is stepped by another, as soon as it has its gradient. The model
    is sharded once it has them."""
    optimizers: dict[int, torch.optim.Optimizer] = {}

    def step(parameter: Tensor) -> None:
        if id(parameter) not in optimizers:
            optimizers[id(parameter)] = torch.optim.AdamW([parameter], lr=LR)
        optimizers[id(parameter)].step()
        optimizers[id(parameter)].zero_grad()

    gone = [parameter.register_hook(lambda gradient: gradient * 1000) for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 2)
        parameter.register_post_accumulate_grad_hook(step)
    if shard is not None:
        shard(model)
    for handle in gone:
        handle.remove()
    return model


def trained_by_hooks(model: nn.Module, ranks: list[int]) -> Named:
    for number in range(2):
        torch.stack([mean_square(model, rank, number) for rank in ranks]).mean().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
    return whole_params(model)


@pytest.mark.parametrize("when", ["before", "after"])
@on_threads(2)
def test_hooks_on_parameters_see_the_reduced_gradients_and_may_step(when):
    """They are put there before the model is sharded, or after that."""
    model = hooked(made(stack), sharded) if when == "before" else hooked(sharded(made(stack)))
    expected = trained_by_hooks(hooked(made(stack)), [0, 1])
    assert_named_close(trained_by_hooks(model, [dist.get_rank()]), expected, "parameter", 1e-5, 1e-6)


@on_threads(2)
def test_a_hook_that_returns_no_dtensor_is_named():
    model = fully_shard(made(stack))
    model[1].bias.register_hook(lambda gradient: gradient.to_local())
    with pytest.raises(RuntimeError, match=r"1\.bias: a hook on its gradient returned a Tensor"):
        mean_square(model, 0, 0).backward()
