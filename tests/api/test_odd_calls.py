"""Odd inputs and outputs, units alone and models side by side train as in one process."""

import gc
import weakref
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from sherd import FSDPModule
from tests.api.checks import assert_trains, explode_in
from tests.support.comparing import assert_named_close, whole_params
from tests.support.models import WIDTH, Block, build, chain, noise
from tests.support.ranks import RanksFailed
from tests.support.ranks.bodies import on_threads
from tests.support.sharding import sharded
from tests.support.training import LR, made, mean_square, train_job_plain


def stack():
    return chain(3)


# Outputs and inputs


class Changes(nn.Sequential):
    """The caller changes each block's output in place: a view, a leaf of nothing, one used twice."""

    def forward(self, x):
        x = self[0](x)
        x += 1
        y = self[1](x)
        y[0].mul_(2)
        y.add_(x)
        z = self[2](y)
        z[:, 1:] *= 0.5
        return z


class Flat(Block):
    """Its output is a part of a larger tensor."""

    def forward(self, x):
        wide = torch.cat([super().forward(x), x], dim=1)
        return wide[:, :WIDTH]


class NewView(torch.autograd.Function):
    """Gives back a view of a tensor that autograd does not know, as `DTensor.to_local()` does."""

    @staticmethod
    def forward(ctx, x):
        return x.detach().view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class EndsInNewView(nn.Linear):
    """Its output's base has no gradient function, it has."""

    def forward(self, x):
        return NewView.apply(super().forward(x))


class Nones(nn.Sequential):
    """One unit gives nothing, one something beside nothing."""

    def forward(self, x):
        quiet, pairs = self
        assert quiet(x) is None
        nothing, out = pairs(None, x + quiet.seen)
        assert nothing is None
        return out


class Quiet(nn.Linear):
    """Returns None, and takes no part in the loss."""

    def forward(self, x):
        self.seen = super().forward(x).detach().mean()


class Pairs(Block):
    """Takes None and gives None beside a tensor."""

    def forward(self, nothing, x):
        return nothing, super().forward(x)


class ByName(nn.Sequential):
    """Every input by name, some of them missing."""

    def forward(self, *, x, scale=None):
        return self[1](x=self[0](x=x, scale=scale))


class Named(Block):
    """Takes its input by name only."""

    def forward(self, *, x, scale=None):
        return super().forward(x if scale is None else x * scale)


def by_name(model, rank, step):
    return model(x=noise(step, rank), scale=torch.tensor(0.5)).square().mean()


class Generators(nn.Sequential):
    """Blocks take an OrderedDict and a generator, and one gives a list of two."""

    def forward(self, batch):
        from_dict, sums, yields = self
        x = from_dict(OrderedDict(batch))["x"]
        return sum(yields(sums(part for part in (x, x * 2))))


class FromDict(Block):
    """A dictionary in and out, with what is no tensor."""

    def forward(self, batch):
        return {**batch, "x": super().forward(batch["x"]) * batch["rate"]}


class Sums(Block):
    """Consumes a generator."""

    def forward(self, parts):
        return super().forward(sum(parts))


class Yields(Block):
    """Both parts are results."""

    def forward(self, x):
        return [super().forward(x), super().forward(2 * x)]


def by_dict(model, rank, step):
    return model({"x": noise(step, rank).requires_grad_(), "rate": 0.5, "words": ["a"]}).square().mean()


class Loss(nn.Sequential):
    """A root whose output is a tuple of a loss and something without gradient, the second not used."""

    def forward(self, x):
        hidden = self[0](x)
        return F.mse_loss(self[1](hidden), torch.zeros_like(x)), hidden.detach(), 3.0


def first_of_three(model, rank, step):
    loss, _, _ = model(noise(step, rank))
    return loss


def changed_by_the_caller(model, rank, step):
    output = model(noise(step, rank))
    output += 1
    output[0] *= 2
    return output.square().mean()


ODD_CALLS = {
    "changes": (lambda: Changes(Flat(), Flat(), Flat()), mean_square),
    "changes_by_the_caller": (lambda: Changes(Flat(), Flat(), Flat()), changed_by_the_caller),
    "own_output_changed": (stack, changed_by_the_caller),
    "new_views": (lambda: nn.Sequential(*(EndsInNewView(WIDTH, WIDTH) for _ in range(3))), mean_square),
    "nones": (lambda: Nones(Quiet(WIDTH, WIDTH), Pairs()), mean_square),
    "by_name": (lambda: ByName(Named(), Named()), by_name),
    "generators": (lambda: Generators(FromDict(), Sums(), Yields()), by_dict),
    "loss_beside_other_things": (lambda: Loss(Block(), nn.Linear(WIDTH, WIDTH)), first_of_three),
}


@pytest.mark.parametrize("reshard", [None, False], ids=["reshard", "keep"])
@pytest.mark.parametrize("name", ODD_CALLS)
@on_threads(2)
def test_odd_inputs_and_outputs_train(name, reshard):
    make, job = ODD_CALLS[name]
    assert_trains(sharded(made(make), reshard_after_forward=reshard), make, job)


# Several models, units alone, deletion


def one_job(model, rank, step):
    return mean_square(model, rank, step) + mean_square(model, rank, step + 100)


def two_job(model, rank, step):
    return mean_square(model, rank, step + 50)


@on_threads(2)
def test_two_models_may_be_interleaved():
    """Two models step by step in turns, forwards and backwards crossed; then one feeds the other."""
    one, two = sharded(chain()), sharded(chain(), reshard_after_forward=False)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=LR)
    rank = dist.get_rank()
    for step in range(3):
        first, second = mean_square(one, rank, step), two_job(two, rank, step)
        mean_square(one, rank, step + 100).backward()
        (second + first).backward() if step % 2 else (first.backward(), second.backward())
        optimizer.step()
        optimizer.zero_grad()
    for model, job in ((one, one_job), (two, two_job)):
        assert_named_close(whole_params(model), train_job_plain(chain(), job, 2), "parameter", 1e-5, 1e-6)


def middle_block():
    return build("mlp").blocks[1]


@pytest.mark.parametrize("used", [True, False], ids=["after_a_step", "fresh"])
@on_threads(2)
def test_a_block_may_outlive_its_root(used):
    model = sharded(build("mlp"))
    if used:
        mean_square(model, dist.get_rank(), 0).backward()
        model.zero_grad()
    block, gone = model.blocks[1], weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert isinstance(block, FSDPModule)
    block.set_reshard_after_forward(True)
    block.unshard()
    block.reshard()
    block.state_dict()
    assert_trains(block, middle_block)


def unit_alone_before_the_root(model, rank, step):
    before = model[1](noise(step + 30, rank)).square().mean()
    return before + mean_square(model, rank, step)


def unit_alone_after_the_root(model, rank, step):
    whole = mean_square(model, rank, step)
    return whole + model[2](noise(step + 60, rank)).square().mean()


def unit_alone_before_later_roots(model, rank, step):
    """The root runs first of all."""
    return (unit_alone_before_the_root if step else mean_square)(model, rank, step)


@pytest.mark.parametrize("reshard", [None, False])
@pytest.mark.parametrize("job", [unit_alone_before_the_root, unit_alone_after_the_root, unit_alone_before_later_roots])
@on_threads(2)
def test_a_unit_may_run_alone_beside_its_root_in_one_backward(job, reshard):
    assert_trains(sharded(stack(), reshard_after_forward=reshard), stack, job)


def raise_on_one_rank(where):
    model = sharded(chain())
    explode_in(model[1].up, where, rank=1)
    mean_square(model, dist.get_rank(), 0).backward()


@pytest.mark.parametrize(("where", "ranks"), [("forward", "world"), ("forward", "threads"), ("backward", "threads")])
def test_one_ranks_exception_reaches_the_test_and_no_rank_hangs(request, where, ranks):
    with pytest.raises(RanksFailed) as failed:
        request.getfixturevalue(ranks)(2).run(raise_on_one_rank, where, timeout=30)
    assert failed.value.errors[1] == ("ZeroDivisionError", "the user's own mistake")
