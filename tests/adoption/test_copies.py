"""A deep copy of a sharded model is a model of its own."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import sherd
from sherd import fully_shard
from sherd.errors import ModuleError, ShardedAccessError, StateError
from tests.adoption.adapters import LAYOUTS, Tied, adapt, assert_alike, net, sgd, shards, steps
from tests.support.comparing import assert_same, whole_params
from tests.support.models import noise
from tests.support.ranks.bodies import on_threads
from tests.support.sharding import sharded


@pytest.mark.parametrize(
    ("num_ranks", "outside", "options"), [(2, True, {}), *((number, False, each) for number, each in LAYOUTS)], ids=str
)
def test_a_copy_trains_by_itself(threads, num_ranks, outside, options):
    def copied():
        """A model, trained; a copy of it, trained further by itself; and the first, trained further after that."""
        model, plain, calls = shards(net(), **options), net(), []
        model.register_forward_hook(lambda *_: calls.append(None))
        optimizer, plain_optimizer = sgd(model), sgd(plain)
        steps(model, optimizer)
        steps(plain, plain_optimizer, of_all=True)
        holder = copy.deepcopy(nn.ModuleList([model]) if outside else [model])
        twin, plain_twin = holder[0], copy.deepcopy(plain)
        assert type(twin) is type(model)
        before = whole_params(model)
        assert_same(whole_params(twin), before)
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert one is not other
            assert one.placements == other.placements
            assert not one.to_local().numel() or one.to_local().data_ptr() != other.to_local().data_ptr()
        steps(twin, sgd(twin), first=3)
        steps(plain_twin, sgd(plain_twin), first=3, of_all=True)
        assert_alike(twin, plain_twin)
        assert_same(whole_params(model), before)
        assert len(calls) == 6  # the user's own hooks are copied
        steps(model, optimizer, first=6)
        steps(plain, plain_optimizer, first=6, of_all=True)
        assert_alike(twin, plain_twin)
        assert_alike(model, plain)
        gone = weakref.ref(twin)
        del holder, twin, one, other
        gc.collect()
        assert gone() is None

    threads(num_ranks).run(copied)


@on_threads(2)
def test_ties_and_methods_are_copied():
    model = Tied().tie_weights()
    model.embed.weight.kind = "tied"
    sharded(model)
    sherd.register_fsdp_forward_method(model, "encode")
    with pytest.raises(ModuleError, match="cannot be deep-copied by itself"):
        copy.deepcopy(model.head)
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.embed.weight
    assert twin.head.weight is not model.head.weight
    assert twin.embed.weight.kind == "tied"
    assert_same(twin.encode(noise(0, 0)), model.encode(noise(0, 0)))


@pytest.mark.parametrize("placement", [None, sherd.Flat(), sherd.Owned()], ids=str)
def test_a_module_inside_of_a_unit_is_copied_with_its_shards_and_says_that_no_unit_gathers_them(threads, placement):
    def copied():
        model = fully_shard(nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 4))), placement=placement)
        for when in ("before", "with gradients"):
            first, inner = model[0], model[1]
            for twin, original in zip(copy.deepcopy([first, inner]), (first, inner), strict=True):
                assert_same(whole_params(twin), whole_params(original))
                for one, other in zip(twin.parameters(), original.parameters(), strict=True):
                    assert type(one) is type(other)
                    assert isinstance(one, nn.Parameter), when
                    assert one.placements == other.placements
                    assert one.grad is None  # as of a plain Parameter
                    one.data.zero_()
                    assert other.full_tensor().abs().sum() > 0
                with pytest.raises(ShardedAccessError, match=r"a deep copy of a module inside of unit Sequential"):
                    twin(torch.ones(2, next(original.parameters()).shape[1]))
            model(torch.ones(2, 4)).sum().backward()
        gradient = first.weight.grad.clone().requires_grad_()
        gradient.grad = gradient.detach() * 2
        assert_same(copy.deepcopy(gradient).grad.full_tensor(), gradient.grad.full_tensor())

    threads(2).run(copied)


@on_threads(2)
def test_units_of_several_modules_are_copied_together():
    """A block alone, units of several modules, a copy before the first step, a copy that is changed."""
    model, plain = net(), net()
    sharded(model, units=[[model[0], model[1]], model])
    twin = copy.deepcopy(model)
    steps(twin, sgd(twin))
    block = copy.deepcopy(model[0])
    assert block is not model[0]
    third = copy.deepcopy(twin)
    adapt(third)
    assert sherd.refresh(third).adopted
    steps(third, sgd(third))
    steps(plain, sgd(plain), of_all=True)
    assert_alike(twin, plain)


@on_threads(2)
def test_flat_parameters_and_models_that_are_lent_are_refused():
    with pytest.raises(ModuleError, match="use_orig_params=True"):
        copy.deepcopy(sherd.FullyShardedDataParallel(net()))
    model = shards(net())
    with sherd.unsharded(model), pytest.raises(StateError, match="unshard context"):
        copy.deepcopy(model)
