"""Any shapes, cut in any mixture of ways on any number of ranks, get plain gradients, norms and updates."""

import itertools
import math
from functools import partial

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Shard

from sherd import Blocks, Flat, Owned, RaggedDTensor, fully_shard
from sherd.errors import PlacementError
from tests.support.comparing import assert_same, whole
from tests.support.ranks.bodies import on_threads
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
    found, expected = train(model, [dist.get_rank()]), train(Held(described), range(dist.get_world_size()))
    assert_same(found, expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(described=tensors, num_ranks=st.integers(1, 5))
def test_any_mixture_of_shapes_and_placements_trains_as_in_one_process(threads, described, num_ranks):
    threads(num_ranks).run(train_sharded, described)


# Optimizers and what comes with them


def made():
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.linspace(-1, 1, param.numel()).view(param.shape))
    return model


def step(model, optimizer, ranks):
    for rank in ranks:
        (model(torch.full((2, 6), 0.1 * (rank + 1))).square().mean() / len(ranks)).backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def values(model):
    return [whole(param) for param in model.parameters()]


def grads(model):
    return [whole(param.grad) for param in model.parameters()]


PLACEMENTS = [None, Flat(), Blocks(1), Owned()]


def trained_by_an_optimizer_made_before(shard, ranks):
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-3)
    shard(model)
    for _ in range(2):
        step(model, optimizer, ranks)
    return values(model)


@on_threads(3)
def test_an_optimizer_made_before_sharding_trains_every_placement():
    """The optimizer holds the plain parameters, which are sharded then."""
    expected = trained_by_an_optimizer_made_before(lambda model: model, range(3))
    for placement in PLACEMENTS:
        found = trained_by_an_optimizer_made_before(partial(fully_shard, placement=placement), [dist.get_rank()])
        assert_same(found, expected, str(placement), rtol=1e-4, atol=1e-5)


def trained(placement):
    model = fully_shard(made(), placement=placement)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-3)
    step(model, optimizer, [dist.get_rank()])
    return model, optimizer


@on_threads(3)
def test_an_optimizer_takes_the_state_of_another_layout_or_says_why_not():
    """`optimizer.load_state_dict` of every layout into every layout: the moments after the next step, or an error."""
    for placement, other in itertools.product(PLACEMENTS, PLACEMENTS):
        _, source = trained(other)
        model, optimizer = trained(placement)
        loaded = [whole(state["exp_avg"]) for state in source.state.values()]
        optimizer.load_state_dict(source.state_dict())
        step(model, None, [dist.get_rank()])
        try:
            optimizer.step()
        except PlacementError:
            assert placement != other
            continue
        for param, before, grad in zip(model.parameters(), loaded, grads(model), strict=True):
            torch.testing.assert_close(whole(optimizer.state[param]["exp_avg"]), 0.9 * before + 0.1 * grad)


@on_threads(3)
def test_gradients_are_clipped_by_value_and_by_a_known_norm():
    for placement in PLACEMENTS:
        model = fully_shard(made(), placement=placement)
        step(model, None, [dist.get_rank()])
        before = grads(model)
        total = nn.utils.get_total_norm([param.grad for param in model.parameters()])
        torch.testing.assert_close(whole(total), torch.cat([grad.flatten() for grad in before]).norm())
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        clipped = [grad.clamp(-0.01, 0.01) for grad in before]
        assert_same(grads(model), clipped, rtol=1e-5, atol=1e-6)
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.001, total)
        scale = min(1.0, 0.001 / (whole(total).item() + 1e-6))
        assert_same(grads(model), [grad * scale for grad in clipped], rtol=1e-5, atol=1e-6)


@on_threads(2)
def test_a_list_of_modules_is_one_unit_of_one_placement():
    plain = made()
    step(plain, None, range(2))
    for placement in (Flat(), Blocks(2), Owned()):
        model = made()
        fully_shard([model[0], model[1]], placement=placement)
        fully_shard(model)
        assert all(isinstance(param, RaggedDTensor) for param in model.parameters())
        step(model, None, [dist.get_rank()])
        assert_same(grads(model), grads(plain), str(placement), rtol=1e-5, atol=1e-6)
