"""Do models without elements, parameters or gradients train, and may they run at odd moments?"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.comparing import assert_named_close, form, whole_params
from tests.support.models import WIDTH, Block, noise
from tests.support.sharding import shard_children
from tests.support.training import LR, assert_trained, made, mean_square, train_job, train_job_plain


def stack():
    return nn.Sequential(Block(), Block(), Block())


# Unusual parameters


class Hollow(nn.Module):
    """Beside a real weight, parameters without an element; and without a length, so that `if module` is false."""

    def __init__(self):
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0))
        self.no_rows = nn.Parameter(torch.zeros(0, WIDTH))
        self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self.no_columns = nn.Parameter(torch.zeros(WIDTH, 0))

    def __len__(self):
        return 0

    def forward(self, x):
        return x * self.weight + self.empty.sum() + self.no_rows.sum() + (self.no_columns.sum(1) * 2)


class OnlyHollow(nn.Module):
    """Nothing but a parameter without an element."""

    def __init__(self):
        super().__init__()
        self.no_rows = nn.Parameter(torch.zeros(0, WIDTH))

    def forward(self, x):
        return torch.cat([x, self.no_rows]) + x.mean()


def hollow_stack():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Hollow(), OnlyHollow(), nn.Linear(WIDTH, WIDTH))


class Bare(nn.Module):
    """No parameters at all."""

    def forward(self, x):
        return torch.tanh(x)


def bare_stack():
    return nn.Sequential(Bare(), Block(), Bare(), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0))


def wholly_bare():
    """The root owns nothing either, and its children are all units or bare."""
    return nn.Sequential(nn.Sequential(Bare()), nn.Linear(WIDTH, WIDTH), Bare())


def frozen_units():
    """The first unit, one in the middle and the last have nothing to train."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5)))
    for index in (0, 2, 4):
        model[index].requires_grad_(False)
    return model


def train_odd(make, options, steps=3):
    return train_job(shard_children(made(make), **options), mean_square, steps)


@pytest.mark.pairs
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=["reshard", "keep"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("make", [hollow_stack, bare_stack, wholly_bare, frozen_units], ids=lambda f: f.__name__)
def test_units_without_elements_parameters_or_gradients_train(world, make, num_ranks, options):
    assert_trained(world(num_ranks).run(train_odd, make, options), make)


def wholly_frozen():
    """Only the input is trained, through frozen units; and once more with nothing to train at all."""
    model = made(stack).requires_grad_(False)
    shard_children(model)
    x = noise(0, dist.get_rank()).requires_grad_()
    model(x).square().mean().backward()
    assert all(param.grad is None for param in model.parameters())
    assert not model(noise(0, 0)).requires_grad
    assert {form(block.up) for block in model[:2]} == {"shard"}
    return x.grad


def test_a_frozen_model_passes_gradients_to_its_input(world):
    for rank, grad in enumerate(world(2).run(wholly_frozen)):
        model, x = made(stack).requires_grad_(False), noise(0, rank).requires_grad_()
        model(x).square().mean().backward()
        torch.testing.assert_close(grad, x.grad)


# Before, between and after steps


def evaluate_first(reshard):
    model = shard_children(made(stack), reshard_after_forward=reshard)
    with torch.no_grad():
        for step in range(3):
            model(noise(10 + step, 0))
    with torch.inference_mode():
        model[1](noise(9, 0))
        model(noise(9, 0))
    return train_job(model, mean_square)


@pytest.mark.parametrize("reshard", [None, True, False])
def test_a_model_may_be_evaluated_before_its_first_step(world, reshard):
    assert_trained(world(2).run(evaluate_first, reshard), stack)


def train_with_kept_parameters(keep, evaluate):
    """Unsharded parameters stay shown while the optimizer writes the shards."""
    model = shard_children(made(stack))
    if "forward" in keep:
        model.set_reshard_after_forward(False)
    if "backward" in keep:
        model.set_reshard_after_backward(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    outputs = []
    for step in range(3):
        mean_square(model, dist.get_rank(), step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if evaluate:
            with torch.no_grad():
                outputs.append(model(noise(20, 0)))
    model.eval()
    with torch.no_grad():
        outputs.append(model(noise(20, 0)))
    return outputs


@pytest.mark.parametrize("evaluate", [True, False])
@pytest.mark.parametrize("keep", ["forward", "backward", "forward_and_backward"])
def test_kept_parameters_are_fresh_after_the_optimizer_has_stepped(world, keep, evaluate):
    plain = made(stack)
    optimizer, expected = torch.optim.SGD(plain.parameters(), lr=LR), []
    for step in range(3):
        for rank in range(2):
            (mean_square(plain, rank, step) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        if evaluate or step == 2:
            expected.append(plain(noise(20, 0)).detach())
    if evaluate:
        expected.append(expected[-1])
    for outputs in world(2).run(train_with_kept_parameters, keep, evaluate):
        torch.testing.assert_close(outputs, expected)


def shards_written_by_hand():
    """No optimizer: the user updates the shards himself while unsharded parameters are kept."""
    model = shard_children(made(stack))
    shards = list(model.parameters())
    model.set_reshard_after_backward(False)
    for step in range(2):
        mean_square(model, dist.get_rank(), step).backward()
        model.reshard()
        for block in model:
            block.reshard()
        with torch.no_grad():
            for shard_ in shards:
                shard_.sub_(shard_.grad, alpha=LR)
        model.zero_grad()
    return whole_params(model)


def test_shards_may_be_written_by_hand_after_reshard(world):
    expected = train_job_plain(made(stack), mean_square, 2, steps=2)
    for params in world(2).run(shards_written_by_hand):
        assert_named_close(params, expected, "parameter", 1e-5, 1e-6)
