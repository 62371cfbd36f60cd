"""Models of odd units train under every placement: no elements, more ranks than elements, tied, nested, mixed."""

import itertools
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from sherd import Blocks, Flat, Owned, RaggedDTensor, fully_shard
from tests.api.checks import assert_trains
from tests.api.test_odd_use import Hollow, only_hollow
from tests.support.comparing import assert_same, whole_params
from tests.support.models import WIDTH, Block, Wired, build
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.sharding import units_of
from tests.support.suites import part
from tests.support.training import made


def in_turns(*placements):
    """Placements in the order in which parameters are met; no dim 1 where there is none."""
    turns = itertools.cycle(placements)

    def placement_of(parameter):
        chosen = next(turns)
        return None if isinstance(chosen, Shard) and parameter.dim() < 2 else chosen

    return placement_of


PLACEMENTS = {
    "flat": lambda: {"placement": Flat()},
    "rows": lambda: {"placement": Blocks(1)},
    "blocks": lambda: {"placement": Blocks(5)},
    "whole": lambda: {"placement": Owned()},
    "columns": lambda: {"placement": Blocks(2), "shard_placement_fn": in_turns(Shard(1), None)},
    "all": lambda: {"shard_placement_fn": in_turns(Flat(), Shard(1), Owned(), None, Blocks(2))},
}
"""By name, the arguments of `fully_shard`; made anew for each unit, so that each begins its turns anew."""


def placed(model, name):
    for unit in units_of(model):
        fully_shard(unit, **PLACEMENTS[name]())
    return model


def scalars():
    """Scalars alone; fewer elements than ranks."""
    gain, shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(0.25))
    return Wired(lambda self, x: x * self.gain + self.shift, gain=gain, shift=shift)


def one_element():
    """One parameter of one element, in three dims."""
    return Wired(lambda self, x: x * self.gain[0], gain=nn.Parameter(torch.full((1, 1, 1), 0.75)))


class TwoDtypes(nn.Module):
    """Single and double precision, in turns, beside a frozen weight."""

    def __init__(self):
        super().__init__()
        self.narrow = nn.Linear(WIDTH, 5)
        self.wide = nn.Linear(5, WIDTH, dtype=torch.float64)
        self.fixed = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
        self.gain = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x):
        return x + (self.wide(self.narrow(x).double()) * self.gain).float() + torch.tanh(x @ self.fixed)


def tied():
    """Three units with one weight, and one with two of its own."""
    first, second, third = (nn.Linear(WIDTH, WIDTH, bias=bias) for bias in (True, True, False))
    second.weight = third.weight = first.weight
    parts = {"first": first, "block": Block(), "second": second, "third": third}
    return Wired(lambda self, x: self.third(torch.tanh(self.second(self.block(torch.tanh(self.first(x)))))), **parts)


def hollow():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Hollow(), only_hollow(), nn.Dropout(0.0), nn.Linear(WIDTH, WIDTH))


def tiny():
    return nn.Sequential(scalars(), nn.Linear(WIDTH, WIDTH), one_element(), scalars(), nn.LayerNorm(WIDTH))


def two_dtypes():
    return nn.Sequential(TwoDtypes(), Block(), TwoDtypes())


def thin():
    """Each matrix has fewer rows than there may be ranks, or one row or column."""
    return nn.Sequential(nn.Linear(WIDTH, 1), nn.Linear(1, 2), nn.Linear(2, 3), nn.Linear(3, WIDTH))


MODELS = [hollow, tiny, two_dtypes, thin, tied]


def assert_all_train(cases):
    for make, name in cases:
        assert_trains(placed(made(make), name), make, steps=2)


@pytest.mark.parametrize(("number", "num_ranks"), [(0, 1), (1, 2), (2, 4)])
def test_odd_units_train_under_every_placement(threads, number, num_ranks):
    """Every third placement, others for the next model and number of ranks, so that each model meets all of them."""
    turns = ((make, part(PLACEMENTS, turn + number, 3)) for turn, make in enumerate(MODELS))
    threads(num_ranks).run(assert_all_train, [(make, name) for make, names in turns for name in names])


@pytest.mark.parametrize("make", [tiny, thin])
@on_threads(6)
def test_odd_units_train_on_more_ranks_than_elements(make):
    assert_all_train((make, name) for name in PLACEMENTS)


# Different placements side by side


@on_threads(3)
def test_nested_units_may_have_different_placements():
    """Each nested unit has another placement; `first` says which one the innermost has."""
    for first in range(5):
        model = build("nested")
        kinds = itertools.islice(itertools.cycle([Flat(), None, Owned(), Blocks(3), Shard(0)]), first, None)
        for unit, placement in zip(model.units(), kinds, strict=False):
            fully_shard(unit, placement=placement)
        assert_trains(model, partial(build, "nested"))


@on_threads(2)
def test_a_tied_weight_is_cut_as_its_first_unit_says():
    """The weight belongs to the first unit, whatever the others say."""
    for owner, user in ((Flat(), Owned()), (None, Flat()), (Owned(), None), (Blocks(3), Flat())):
        model = made(tied)
        fully_shard(model.first, placement=owner)
        for unit in (model.second, model.third, model):
            fully_shard(unit, placement=user)
        assert model.first.weight is model.second.weight is model.third.weight
        assert isinstance(model.third.weight, RaggedDTensor) == (owner is not None)
        assert_trains(model, tied)


# Without memory, and given it


def small():
    return nn.Sequential(scalars(), nn.Linear(WIDTH, 5), Block(5, 7), nn.Linear(5, WIDTH))


@pytest.mark.parametrize("how", ["load", "copy"])
@on_threads(3)
def test_models_without_memory_are_given_it_and_train(how):
    for name in PLACEMENTS:
        with torch.device("meta"):
            model = small()
        placed(model, name)
        assert all(each.is_meta and each.to_local().is_meta for each in model.parameters())
        model.to_empty(device="cpu")
        if how == "load":
            model.load_state_dict(made(small).state_dict())
        else:
            for theirs, ours in zip(made(small).parameters(), model.parameters(), strict=True):
                with torch.no_grad():
                    ours.copy_(theirs if isinstance(ours, RaggedDTensor) else placed_like(theirs, ours))
        assert_trains(model, small, steps=2)


def placed_like(value, shard):
    return distribute_tensor(value.detach(), shard.device_mesh, shard.placements)


def resettable():
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.LayerNorm(5), nn.Linear(5, WIDTH), nn.Embedding(7, 3))


@on_processes(2)
def test_layers_reset_themselves_to_what_one_process_would_draw():
    """Each rank draws the numbers of the whole tensor: what the same seed gives a plain model."""
    for name in ("flat", "rows", "whole"):
        with torch.device("meta"):
            model = resettable()
        fully_shard(model, **PLACEMENTS[name]())
        model.to_empty(device="cpu")
        torch.manual_seed(3)
        for module in model:
            module.reset_parameters()
        assert_same(whole_params(model), whole_params(made(resettable, 3)))
