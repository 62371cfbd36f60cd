"""Models without elements, parameters or gradients train, and models may run at odd moments."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.api.checks import assert_trains
from tests.support.comparing import assert_named_close, form, whole_params
from tests.support.models import WIDTH, Block, Wired, chain, noise
from tests.support.ranks.bodies import on_threads
from tests.support.sharding import sharded
from tests.support.training import LR, made, mean_square, train_job_plain

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


def only_hollow():
    """Nothing but parameters without an element."""
    parts = {"no_rows": nn.Parameter(torch.zeros(0, WIDTH)), "no_columns": nn.Parameter(torch.zeros(3, 0))}
    return Wired(lambda self, x: torch.cat([x, self.no_rows]) + x.mean() + self.no_columns.sum(), **parts)


def hollow_stack():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Hollow(), only_hollow(), nn.Linear(WIDTH, WIDTH))


def bare_stack():
    return nn.Sequential(nn.Tanh(), Block(), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0))


def wholly_bare():
    """The root owns nothing either, and its children are all units or bare."""
    return nn.Sequential(nn.Sequential(nn.Tanh()), nn.Linear(WIDTH, WIDTH), nn.Tanh())


def frozen_units():
    """The first unit, one in the middle and the last have nothing to train."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5)))
    for index in (0, 2, 4):
        model[index].requires_grad_(False)
    return model


@pytest.mark.pairs
@pytest.mark.parametrize("reshard", [None, False], ids=["reshard", "keep"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("make", [hollow_stack, bare_stack, wholly_bare, frozen_units], ids=lambda f: f.__name__)
@on_threads()
def test_units_without_elements_parameters_or_gradients_train(make, reshard):
    assert_trains(sharded(made(make), reshard_after_forward=reshard), make)


@on_threads(2)
def test_a_frozen_model_passes_gradients_to_its_input():
    """Only the input is trained, through frozen units; and once more with nothing to train at all."""
    model, plain, rank = sharded(chain(3).requires_grad_(False)), chain(3).requires_grad_(False), dist.get_rank()
    found, expected = noise(0, rank).requires_grad_(), noise(0, rank).requires_grad_()
    for each, x in ((model, found), (plain, expected)):
        each(x).square().mean().backward()
    torch.testing.assert_close(found.grad, expected.grad)
    assert all(param.grad is None for param in model.parameters())
    assert not model(noise(0, 0)).requires_grad
    assert {form(block.up) for block in model[:2]} == {"shard"}


# Before, between and after steps


@on_threads(2)
def test_a_model_may_be_evaluated_before_its_first_step():
    for reshard in (None, True, False):
        model = sharded(chain(3), reshard_after_forward=reshard)
        with torch.no_grad():
            for step in range(3):
                model(noise(10 + step, 0))
        with torch.inference_mode():
            model[1](noise(9, 0))
            model(noise(9, 0))
        assert_trains(model, lambda: chain(3))


def outputs_of_a_training(model, ranks, evaluate):
    """Of one input after each step, if `evaluate`, and at the end."""
    optimizer, outputs = torch.optim.SGD(model.parameters(), lr=LR), []
    for step in range(3):
        for rank in ranks:
            (mean_square(model, rank, step) / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if evaluate or step == 2:
            with torch.no_grad():
                outputs.append(model(noise(20, 0)))
    model.eval()
    with torch.no_grad():
        return [*outputs, model(noise(20, 0))]


@pytest.mark.parametrize("evaluate", [True, False])
@pytest.mark.parametrize("keep", ["forward", "backward", "forward_and_backward"])
@on_threads(2)
def test_kept_parameters_are_fresh_after_the_optimizer_has_stepped(keep, evaluate):
    """Unsharded parameters stay shown while the optimizer writes the shards."""
    model = sharded(chain(3))
    if "forward" in keep:
        model.set_reshard_after_forward(False)
    if "backward" in keep:
        model.set_reshard_after_backward(False)
    found = outputs_of_a_training(model, [dist.get_rank()], evaluate)
    torch.testing.assert_close(found, outputs_of_a_training(chain(3), range(2), evaluate))


@on_threads(2)
def test_shards_may_be_written_by_hand_after_reshard():
    """No optimizer: the user updates the shards himself while unsharded parameters are kept."""
    model = sharded(chain(3))
    shards = list(model.parameters())
    model.set_reshard_after_backward(False)
    for step in range(2):
        mean_square(model, dist.get_rank(), step).backward()
        for unit in (model, *model):
            unit.reshard()
        with torch.no_grad():
            for shard in shards:
                shard.sub_(shard.grad, alpha=LR)
        model.zero_grad()
    assert_named_close(whole_params(model), train_job_plain(chain(3), mean_square, 2, 2), "parameter", 1e-5, 1e-6)


@on_threads(2)
def test_a_frozen_model_may_be_sharded_and_run_in_inference_mode():
    for front in ("shard", "flat"):
        model, plain = (made(bare_stack).requires_grad_(False) for _ in range(2))
        with torch.inference_mode():
            model = sharded(model, front)
            for _ in range(2):
                torch.testing.assert_close(model(noise(0, 0)), plain(noise(0, 0)))
