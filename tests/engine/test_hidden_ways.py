"""Is a gradient reduced, and by the right factor, when it comes on a way that passes no output of its unit?"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sherd import FSDPModule, fully_shard
from tests.support.comparing import assert_named_close, whole_grads, whole_params
from tests.support.models import WIDTH, Block, noise
from tests.support.sharding import shard_children
from tests.support.training import LR, Job, assert_trained, made, mean_square, train_job


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


class Post(nn.Module):
    """Its units, and it itself, take and give objects."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Mailed(), Mailed()

    def forward(self, letter: Letter) -> Letter:
        return self.second(self.first(letter))


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


class Tied(nn.Module):
    """Of two units with one weight the one that owns it never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.owner, self.user = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.user.weight = self.owner.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.user(x)


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


WAYS = [
    (Post, by_letter),
    (routed, with_side_losses),
    (routed, of_a_side_loss_alone),
    (Tied, mean_square),
    (stack, by_its_weight),
    (stack, mapped),
    (stack, differentiated),
]


def train_on_a_hidden_way(make: Any, job: Job) -> Any:
    return train_job(shard_children(made(make)), job)


@pytest.mark.parametrize(("make", "job"), WAYS, ids=[f"{make.__name__}-{job.__name__}" for make, job in WAYS])
def test_what_backward_reaches_unseen_is_trained_as_in_one_process(world, make, job):
    assert_trained(world(2).run(train_on_a_hidden_way, make, job), make, job)


def penalty(model: nn.Module) -> None:
    x = noise(0, 0).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    slope.square().sum().backward()


def gradients_of_a_penalty() -> Any:
    model = shard_children(made(stack), reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    penalty(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return whole_grads(model)


def test_the_gradient_of_a_gradient_is_reduced_where_parameters_stay_whole(world):
    plain = made(stack)
    penalty(plain)
    for found in world(2).run(gradients_of_a_penalty):
        assert_named_close(found, whole_grads(plain), "gradient", 1e-5, 1e-6)


def gradients_when_frozen_in_between(model: nn.Module) -> Any:
    loss = mean_square(model, 0, 0)
    model[0].requires_grad_(False)
    loss.backward()
    return whole_grads(model)


def test_a_parameter_frozen_between_forward_and_backward_gets_no_gradient(world):
    expected = gradients_when_frozen_in_between(made(stack))
    for found in world(2).run(sharded_and_frozen_in_between):
        assert found.keys() == expected.keys()
        assert_named_close(found, expected, "gradient", 1e-5, 1e-6)


def sharded_and_frozen_in_between() -> Any:
    return gradients_when_frozen_in_between(shard_children(made(stack)))


# Hooks that users put on parameters


def hooked(model: nn.Module, when: str) -> list[torch.optim.Optimizer]:
    """Gradients are doubled by a hook; each parameter is stepped by another, as soon as it has its gradient."""
    optimizers: dict[int, torch.optim.Optimizer] = {}

    def step(parameter: Tensor) -> None:
        optimizer = torch.optim.AdamW([parameter], lr=LR) if id(parameter) not in optimizers else None
        optimizer = optimizers.setdefault(id(parameter), optimizer) if optimizer else optimizers[id(parameter)]
        optimizer.step()
        optimizer.zero_grad()

    gone = [parameter.register_hook(lambda gradient: gradient * 1000) for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 2)
        parameter.register_post_accumulate_grad_hook(step)
    if when == "before":
        shard_children(model)
    for handle in gone:
        handle.remove()
    return list(optimizers.values())


def trained_by_hooks(when: str, sharded: bool = True) -> Any:
    model = made(stack)
    if sharded and when == "after":
        shard_children(model)
    hooked(model, when if sharded else "never")
    for number in range(2):
        ranks = [dist.get_rank()] if sharded else [0, 1]
        torch.stack([mean_square(model, rank, number) for rank in ranks]).mean().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
    return whole_params(model)


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_on_parameters_see_the_reduced_gradients_and_may_step(world, when):
    expected = trained_by_hooks("never", sharded=False)
    for found in world(2).run(trained_by_hooks, when):
        assert_named_close(found, expected, "parameter", 1e-5, 1e-6)


def hook_that_returns_a_plain_tensor() -> str:
    model = made(stack)
    fully_shard(model)
    model[1].bias.register_hook(lambda gradient: gradient.to_local())
    try:
        mean_square(model, 0, 0).backward()
    except RuntimeError as error:
        return str(error)
    return "nothing raised"


def test_a_hook_that_returns_no_dtensor_is_named(world):
    for said in world(2).run(hook_that_returns_a_plain_tensor):
        assert "1.bias: a hook on its gradient returned a Tensor" in said
