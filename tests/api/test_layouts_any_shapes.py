"""Do any shapes, cut in any mixture of ways on any number of ranks, get plain gradients, norms and updates?"""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from sherd import Blocks, Flat, Owned, RaggedDTensor, fully_shard
from sherd.errors import PlacementError
from tests.support.suites import examples
from tests.support.training import LR

shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.float32, torch.float64])
placements = st.sampled_from([None, Flat(), Owned(), Blocks(1), Blocks(3), Shard(0), Shard(1), Shard(-1)])
tensors = st.lists(st.tuples(shapes, dtypes, placements, st.booleans()), min_size=1, max_size=8)


class Held(nn.Module):
    """Parameters of given shapes and dtypes; some are frozen. Values are the same in every thread."""

    def __init__(self, described):
        super().__init__()
        for index, (shape, dtype, _, trained) in enumerate(described):
            value = torch.linspace(-1, 1, math.prod(shape), dtype=dtype).view(shape)
            self.register_parameter(f"p{index}", nn.Parameter(value, requires_grad=trained))

    def forward(self, factor):
        """The gradient of each element depends on where it is and on the rank."""
        return sum(
            ((param * torch.linspace(1, 2, param.numel()).view(param.shape) + factor) ** 2).sum().float()
            for param in self.parameters()
        )


def fitting(placement, shape):
    """None where the shape has no such dim."""
    if isinstance(placement, Shard) and not -len(shape) <= placement.dim < len(shape):
        return None
    return placement


def train(model, ranks, steps=2):
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=LR, momentum=0.9) if trained else None
    noted = []
    for step in range(steps):
        for rank in ranks:
            loss = model(torch.tensor(float(rank + step)))
            if trained:
                (loss / len(ranks)).backward()
        noted.append([whole(param.grad) for param in model.parameters()])
        if trained:
            noted.append([whole(nn.utils.clip_grad_norm_(trained, 1.0))])
            optimizer.step()
            optimizer.zero_grad()
    return [*noted, [whole(param) for param in model.parameters()]]


def whole(value):
    if value is None:
        return None
    return (value.detach().full_tensor() if isinstance(value, DTensor) else value.detach()).clone()


def train_sharded(described):
    model = Held(described)
    asked = {
        id(param): fitting(placement, shape)
        for param, (shape, _, placement, _) in zip(model.parameters(), described, strict=True)
    }
    fully_shard(model, shard_placement_fn=lambda param: asked[id(param)])
    for param, (shape, _, placement, _) in zip(model.parameters(), described, strict=True):
        is_run = isinstance(placement, (Flat, Owned, Blocks))
        assert isinstance(param, RaggedDTensor) == is_run, (shape, placement)
        if isinstance(placement, Owned):
            assert param.to_local().numel() in (0, param.numel())
    return train(model, [dist.get_rank()])


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(described=tensors, num_ranks=st.integers(1, 5))
def test_any_mixture_of_shapes_and_placements_trains_as_in_one_process(threads, described, num_ranks):
    expected = train(Held(described), range(num_ranks))
    for found in threads(num_ranks).run(train_sharded, described):
        for ours, theirs in zip(found, expected, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert (one is None) == (other is None)
                if one is not None:
                    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


# Optimizers and what comes with them


def stack():
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6))


def made():
    model = stack()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.linspace(-1, 1, param.numel()).view(param.shape))
    return model


def step(model, optimizer, rank, num_ranks=1):
    (model(torch.full((2, 6), 0.1 * (rank + 1))).square().mean() / num_ranks).backward()


PLACEMENTS = [None, Flat(), Blocks(1), Owned()]


def built_before():
    """The optimizer holds the plain parameters, which are sharded then."""
    results = []
    for placement in PLACEMENTS:
        model = made()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-3)
        fully_shard(model, placement=placement)
        for _ in range(2):
            step(model, optimizer, dist.get_rank())
            optimizer.step()
            optimizer.zero_grad()
        results.append([whole(param) for param in model.parameters()])
    return results


def test_an_optimizer_made_before_sharding_trains_every_placement(threads):
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-3)
    for _ in range(2):
        for rank in range(3):
            step(model, optimizer, rank, 3)
        optimizer.step()
        optimizer.zero_grad()
    for results in threads(3).run(built_before):
        for params in results:
            for one, other in zip(params, model.parameters(), strict=True):
                torch.testing.assert_close(one, other.detach(), rtol=1e-4, atol=1e-5)


def trained(placement):
    model = made()
    fully_shard(model, placement=placement)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-3)
    step(model, optimizer, dist.get_rank())
    optimizer.step()
    return model, optimizer


def optimizer_states_exchanged():
    """`optimizer.load_state_dict` of every layout into every layout: the moments after the next step, or an error."""
    for placement, other in itertools.product(PLACEMENTS, PLACEMENTS):
        _, source = trained(other)
        model, optimizer = trained(placement)
        loaded = [whole(state["exp_avg"]) for state in source.state.values()]
        optimizer.load_state_dict(source.state_dict())
        optimizer.zero_grad()
        step(model, optimizer, dist.get_rank())
        grads = [whole(param.grad) for param in model.parameters()]
        try:
            optimizer.step()
        except PlacementError:
            assert placement != other
            continue
        for param, before, grad in zip(model.parameters(), loaded, grads, strict=True):
            torch.testing.assert_close(whole(optimizer.state[param]["exp_avg"]), 0.9 * before + 0.1 * grad)


def test_an_optimizer_takes_the_state_of_another_layout_or_says_why_not(threads):
    threads(3).run(optimizer_states_exchanged)


def clipped_by_value():
    for placement in PLACEMENTS:
        model = made()
        fully_shard(model, placement=placement)
        step(model, None, dist.get_rank())
        grads = [whole(param.grad) for param in model.parameters()]
        total = nn.utils.get_total_norm([param.grad for param in model.parameters()])
        torch.testing.assert_close(whole(total), torch.cat([grad.flatten() for grad in grads]).norm())
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        for param, grad in zip(model.parameters(), grads, strict=True):
            torch.testing.assert_close(whole(param.grad), grad.clamp(-0.01, 0.01))
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.001, total)


def test_gradients_are_clipped_by_value_and_by_a_known_norm(threads):
    threads(3).run(clipped_by_value)


@pytest.mark.parametrize("placement", [Flat(), Blocks(2), Owned()], ids=str)
def test_a_list_of_modules_is_one_unit_of_one_placement(threads, placement):
    def one_unit():
        model = made()
        fully_shard([model[0], model[1]], placement=placement)
        fully_shard(model)
        assert all(isinstance(param, RaggedDTensor) for param in model.parameters())
        step(model, None, dist.get_rank())
        return [whole(param.grad) for param in model.parameters()]

    plain = made()
    for rank in range(2):
        step(plain, None, rank, 2)
    for grads in threads(2).run(one_unit):
        for one, other in zip(grads, plain.parameters(), strict=True):
            torch.testing.assert_close(one, other.grad)
