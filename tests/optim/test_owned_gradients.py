"""Gradients that go to one rank as a whole, of parameters that are cut: `gradient=Owned()`, the default of Muon."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import sherd
from sherd import Blocks, Flat, Muon, Owned, Placements
from sherd._torch import local_tensor
from sherd.errors import PlacementError, StateError
from sherd.policy import MixedPrecisionPolicy, OffloadPolicy
from tests.support.comparing import whole_params
from tests.support.meshes import mesh_of
from tests.support.ranks.bodies import on_threads
from tests.support.refusals import refusal


def stack() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(seed))


def owning(parameter, **options) -> nn.Sequential:
    """Returns a stack of units whose whole gradients go to owners."""
    model = stack()
    placements = Placements(parameter, Owned(), Owned())
    for unit in (model[0], model[2], model):
        sherd.fully_shard(unit, placements=placements, **options)
    return model


def assert_gradients(model: nn.Module, plain: nn.Module, **tolerance: float) -> None:
    for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            parameter.grad.full_tensor(), expected.grad, msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )


@on_threads(2, 3, 4, parameter=[Shard(0), Shard(-1), Flat(), Blocks(2)])
def test_the_whole_gradient_of_a_matrix_is_on_one_rank(parameter):
    plain, model = stack(), owning(parameter)
    for seed in range(3):  # the first backwards teach the order of gradients
        model.zero_grad()
        plain.zero_grad()
        for each in (plain, model):
            each(batch(seed)).square().mean().backward()
    assert_gradients(model, plain)
    for shard, whole in zip(model.parameters(), plain.parameters(), strict=True):
        numels = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(numels, local_tensor(shard.grad).numel())
        if whole.ndim > 1:
            assert sorted(numels)[-1] == sum(numels) == whole.numel()
        else:
            assert local_tensor(shard.grad).shape == local_tensor(shard).shape
    norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.01) for each in (plain, model)]
    torch.testing.assert_close(norms[1].full_tensor(), norms[0])
    assert_gradients(model, plain)


@on_threads(4)
def test_replicas_have_the_gradient_on_each_owner():
    copy_, whole, mesh = Replicate(), Owned(), mesh_of((2, 2))
    plain, model = stack(), stack()
    placements = Placements([copy_, Shard(0)], [copy_, whole], [copy_, whole])
    for unit in (model[0], model[2], model):
        sherd.fully_shard(unit, mesh=mesh, placements=placements)
    for each in (plain, model):
        each(batch()).square().mean().backward()
    assert_gradients(model, plain)
    across = Placements([copy_, Shard(0)], [copy_, whole], [whole, whole])
    assert "gradients go to owners (gradient=Owned()) where parameters are sharded over one axis" in refusal(
        PlacementError, lambda: sherd.fully_shard(stack(), mesh=mesh, placements=across)
    )


@on_threads(2)
def test_micro_batches_add_up_at_the_owner():
    plain, model = stack(), owning(Shard(0))
    for seed in range(2):
        plain(batch(seed)).square().mean().backward()
    with_last = [False, True]
    for seed, is_last in enumerate(with_last):
        model.set_requires_gradient_sync(is_last)
        model(batch(seed)).square().mean().backward()
    assert_gradients(model, plain)
    model.zero_grad()
    for seed in range(2):
        model(batch(seed)).square().mean().backward()
    assert_gradients(model, plain)


@on_threads(2)
def test_they_are_reduced_in_another_dtype_and_rest_in_host_memory():
    plain, model = stack(), owning(Shard(0), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    for each in (plain, model):
        each(batch()).square().mean().backward()
    assert_gradients(model, plain, rtol=0.1, atol=0.02)


@on_threads(2)
def test_a_parameter_that_is_not_used_has_zeros_or_none_as_elsewhere():
    """The gradient of a matrix that one rank has not used is that of the others."""
    model = owning(Shard(0))
    plain = stack()
    plain[2].requires_grad_(False)
    model[2].requires_grad_(False)
    for each in (plain, model):
        each(batch()).square().mean().backward()
    assert model[2].weight.grad is None
    torch.testing.assert_close(model[0].weight.grad.full_tensor(), plain[0].weight.grad)


@on_threads(2)
def test_unsharded_copies_show_them_and_a_deep_copy_has_the_same_owners():
    plain, model = stack(), owning(Shard(0))
    for each in (plain, model):
        each(batch()).square().mean().backward()
    with sherd.unsharded(model, with_grads=True):
        for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, expected.grad)
            parameter.grad.mul_(2)
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad * 2)
    model.zero_grad()
    copied = copy.deepcopy(model)
    for each in (model, copied):
        each(batch()).square().mean().backward()
    for one, other in zip(model.parameters(), copied.parameters(), strict=True):
        assert one.grad.placements == other.grad.placements


@on_threads(2)
def test_other_optimizers_refuse_them_and_say_what_to_do():
    for below, foreach in itertools.product((None, 150), (True, False)):
        model = owning(Shard(0), replicate_below=below)
        model(batch()).square().mean().backward()
        told = refusal(PlacementError, torch.optim.AdamW(model.parameters(), foreach=foreach).step)
        assert "for another optimizer shard with placement=Shard(0)" in told


@on_threads(2)
def test_muon_takes_them_where_the_user_gave_no_placement():
    model = stack()
    for unit in (model[0], model[2], model):
        sherd.fully_shard(unit)
    model(batch()).square().mean().backward()
    assert "make it before the first backward, or after zero_grad()" in refusal(StateError, lambda: Muon(model))
    model.zero_grad()
    optimizer = Muon(model)
    plain = stack()
    for each in (plain, model):
        each(batch()).square().mean().backward()
    assert_gradients(model, plain)
    assert "backward reduces gradients there" in repr(optimizer)
    before = whole_params(model)
    optimizer.step()
    momentum = optimizer.state[model[0].weight]["momentum_buffer"]
    assert momentum.placements == model[0].weight.grad.placements
    assert all(not torch.equal(value, before[name]) for name, value in whole_params(model).items() if "1" not in name)


def test_what_cannot_be_placed_so_is_refused():
    for parameter, gradient, optimizer in (
        (Shard(0), Shard(1), Shard(1)),
        (Shard(0), Owned(), Shard(0)),
        (Shard(0), Shard(0), Owned()),
        (Shard(0), Flat(), Flat()),
    ):
        assert "Placements cut in different ways" in refusal(
            PlacementError, lambda placed=(parameter, gradient, optimizer): Placements(*placed)
        )
    assert Placements(Replicate(), Owned(), Owned()).cut == Owned()
    assert not Placements(Replicate(), Owned(), Owned()).owns_gradients


@pytest.mark.parametrize("offload", [sherd.CPUOffloadPolicy(pin_memory=False), OffloadPolicy()])
@on_threads(2)
def test_offload_takes_them_to_host_memory(offload):
    model, plain = owning(Shard(0), offload_policy=offload), stack()
    for each in (plain, model):
        each(batch()).square().mean().backward()
    assert_gradients(model, plain)


@on_threads(2)
def test_the_wrapper_places_them_so():
    placements = Placements(Flat(), Owned(), Owned())
    told = refusal(
        sherd.errors.PolicyError, lambda: sherd.FullyShardedDataParallel(stack(), sharding_strategy=placements)
    )
    assert "pass use_orig_params=True" in told
    plain, model = stack(), stack()
    model = sherd.FullyShardedDataParallel(model, sharding_strategy=placements, use_orig_params=True)
    for each in (plain, model):
        each(batch()).square().mean().backward()
    assert_gradients(model, plain)


@on_threads(2, placement=[None, Shard(0)])
def test_each_unit_may_be_stepped_within_backward(placement):
    given = {} if placement is None else {"placement": placement}
    trained, planned = [], []
    for in_backward in (False, True):
        model = stack()
        for unit in (model[0], model[2], model[4], model):
            sherd.fully_shard(unit, **given)
        optimizer = Muon(model, lr=0.02, ns_dtype=torch.float32)
        if in_backward:
            sherd.step_in_backward(model, optimizer)
        for seed in range(3):
            model(batch(seed)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append(whole_params(model))
        planned.append(len(optimizer._plans))
    assert planned == [1, 4]  # units, of which the last has no matrix; nothing is left
    for name, expected in trained[0].items():
        torch.testing.assert_close(trained[1][name], expected, msg=lambda text, name=name: f"{name}: {text}")
