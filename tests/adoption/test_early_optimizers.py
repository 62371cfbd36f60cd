"""An optimizer that holds other Parameters than the model's trains the model, or says that it cannot."""

import copy
import itertools
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import sherd
from sherd.engine.state import optimizers
from sherd.errors import OptimizerError
from tests.adoption.adapters import net, shards, steps
from tests.support.comparing import assert_named_close, assert_refused, whole_params
from tests.support.models import WIDTH, noise
from tests.support.ranks.bodies import on_threads

FRONTS = ("shard", "wrapper", "flat wrapper")


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.05, eps=1e-3)


def assert_trained(model, optimizer, change=lambda model: None, what="parameter"):
    """Training goes on as in one process, of the model that was changed so, and the optimizer holds the model's own
    parameters, each once."""
    plain = net()
    change(plain)
    steps(plain, adamw(plain.parameters()), of_all=True)
    steps(model, optimizer)
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(held) == sorted(map(id, model.parameters())), what
    assert_named_close(whole_params(model), whole_params(plain), what, 1e-5, 1e-6)


def assert_step_refused(optimizer, *words):
    assert_refused(optimizer.step, OptimizerError, RuntimeError, *words)


# Built at an odd moment


def built_before(front):
    model = net()
    optimizer = adamw(model.parameters())
    olds = list(model.parameters())
    for each in olds:
        each.grad = torch.ones_like(each)  # of a pass before
    model = shards(model, front)
    for each in olds:
        each.untyped_storage().resize_(0)  # a user frees what was sharded
    return model, optimizer


def built_before_and_after(front):
    """Of the first block before, of all else after."""
    model = net()
    optimizer = adamw(model[0].parameters())
    model = shards(model, front)
    optimizer.add_param_group({"params": [each for name, each in model.named_parameters() if name[:2] != "0."]})
    return model, optimizer


def built_inside_unsharded(front):
    model = shards(net(), front)
    with sherd.unsharded(model):
        optimizer = adamw(model.parameters())
    return model, optimizer


def built_of_unsharded_parameters(front):
    """Those that modules show in forward, or between unshard() and reshard()."""
    model, kept = shards(net(), "wrapper" if front == "wrapper" else "shard"), []
    linears = [each for each in model.modules() if isinstance(each, nn.Linear)]
    with torch.no_grad():
        hooks = [
            each.register_forward_pre_hook(lambda of, _: kept.extend(of.parameters(recurse=False))) for each in linears
        ]
        model(noise(0, 0))
    for hook in hooks:
        hook.remove()
    return model, adamw(kept)


def built_of_old_and_new(front):
    model = net()
    olds = dict(model.named_parameters())
    model = shards(model, front)
    return model, adamw([olds[name] if at % 2 else new for at, (name, new) in enumerate(model.named_parameters())])


def built_of_members_and_flat_parameters(front):
    """The members of the first block's flat parameter, and the other flat parameters; all members and a flat one are
    refused."""
    model = net()
    olds = list(model[0].parameters())
    model = shards(model, front)
    root, first, second = model.parameters()
    optimizer, twice = adamw([root, *olds, second]), adamw([root, first, second, *olds])
    model(noise(0, 0)).sum().backward()
    assert_step_refused(twice, "AdamW holds 0.0.weight, 0.0.bias, 0.2.weight, 0.2.bias twice")
    model.zero_grad()
    return model, optimizer


def sharded_in_two_goes(front):
    """The optimizer is adopted twice, and steps in between."""
    model = net()
    optimizer = adamw(model.parameters())
    sherd.fully_shard(model[0])
    optimizer.zero_grad()
    optimizer.step()
    return sherd.fully_shard(model), optimizer


OF_EACH = [built_before, built_inside_unsharded]
BY_PARAMETERS = [*OF_EACH, built_before_and_after, built_of_unsharded_parameters, built_of_old_and_new]
BUILT = {
    "shard": [*BY_PARAMETERS, sharded_in_two_goes],
    "wrapper": BY_PARAMETERS,
    "flat wrapper": [*OF_EACH, built_of_members_and_flat_parameters],
}


@pytest.mark.front("Optimizers may come first")
@pytest.mark.parametrize("front", BUILT)
@on_threads(2)
def test_an_optimizer_trains_what_its_parameters_became(front):
    for built in BUILT[front]:
        assert_trained(*built(front), what=f"{built.__name__}: parameter")


@pytest.mark.parametrize("front", BUILT)
@on_threads(2)
def test_a_new_optimizer_built_before_sharding_gets_a_state_to_load_into(front):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    model = shards(model, front)
    state = get_optimizer_state_dict(model, optimizer)
    assert state["state"].keys() == dict(net().named_parameters()).keys()
    assert all(each["exp_avg"].shape == net().get_parameter(name).shape for name, each in state["state"].items())


@on_threads(2)
def test_a_parameter_that_was_put_in_its_place_inside_unsharded_is_known_too():
    model = shards(net())
    with sherd.unsharded(model):
        model[2].bias = nn.Parameter(torch.full((WIDTH,), 0.5))
        optimizer = adamw(model.parameters())
    assert_trained(model, optimizer, lambda plain: nn.init.constant_(plain[2].bias, 0.5))


@on_threads(2)
def test_an_optimizer_that_has_stepped_inside_unsharded_has_state_for_copies_that_are_gone_and_is_refused():
    model = shards(net())
    with sherd.unsharded(model, with_grads=True):
        optimizer = adamw(model[2].parameters())
        model[2](noise(0, 0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(noise(0, 0)).sum().backward()
    said = "AdamW holds state for 2.weight, 2.bias as before fully_shard, or as inside sherd.unsharded"
    assert_step_refused(optimizer, said, "Build the optimizer after sharding")


@pytest.mark.parametrize("as_shard", [True, False])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@on_threads(2)
def test_an_optimizer_built_of_what_was_put_in_a_shards_place_trains_the_shard(device, as_shard):
    """Another Parameter is put there before the first forward."""
    value = torch.arange(float(WIDTH**2)).view(WIDTH, WIDTH) / WIDTH**2

    def change(plain):
        fill_all(plain)
        plain[2].weight = nn.Parameter(value.clone())

    with torch.device(device):
        model = net()
    shards(model)
    place = model[2].weight.device_mesh, model[2].weight.placements
    if device == "meta":
        for block in model[:2]:
            block.to_empty(device="cpu")
        model[2].bias = nn.Parameter(torch.full((WIDTH,), 0.1))
    with torch.no_grad():
        for name, each in model.named_parameters():
            if name != "2.weight":
                each.fill_(0.1)
    model[2].weight = nn.Parameter(distribute_tensor(value, *place) if as_shard else value)
    assert_trained(model, adamw(model.parameters()), change)


# On the meta device


@torch.no_grad()
def fill_all(model):
    for each in model.parameters():
        each.fill_(0.1)


def fill(module):
    module.to_empty(device="cpu", recurse=False)
    with torch.no_grad():
        for each in module.parameters(recurse=False):
            each.fill_(0.1)


def built_on_meta(front, by_itself):
    with torch.device("meta"):
        model = net()
    optimizer = adamw(model.parameters())
    if front == "shard":
        shards(model).apply(fill)
    elif by_itself:
        with mock.patch.object(nn.Linear, "reset_parameters", fill):
            model = shards(model, front)
    else:
        model = shards(model, front, param_init_fn=fill)
    assert_trained(model, optimizer, fill_all)


@pytest.mark.parametrize(("front", "by_itself"), [("shard", False), *itertools.product(FRONTS[1:], (False, True))])
def test_an_optimizer_built_on_the_meta_device_trains_what_got_memory_since(world, front, by_itself):
    world(2).run(built_on_meta, front, by_itself)


# State, and strangers


@pytest.mark.parametrize("front", FRONTS)
@on_threads(2)
def test_an_optimizer_with_state_names_its_parameters(front):
    model = net()
    optimizer = adamw(model.parameters())
    model(noise(0, 0)).sum().backward()
    optimizer.step()
    model = shards(model, front)
    for _ in range(2):
        model(noise(0, 0)).sum().backward()
        said = "AdamW holds state for 0.0.weight, 0.0.bias, 0.2.weight, 0.2.bias"
        assert_step_refused(optimizer, said, "Build the optimizer after sharding", "set_optimizer_state_dict")


@on_threads(4)
def test_state_of_tensor_parallel_parameters_is_not_taken_for_that_of_shards():
    """DTensors before they are sharded and after, but cut otherwise."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    early, late = adamw(model.parameters()), adamw(model.parameters())
    model(noise(0, 0)).sum().backward()
    early.step()
    sherd.fully_shard(model, mesh=mesh["dp"])
    model(noise(0, 0)).sum().backward()
    before = model[0].weight.full_tensor()
    late.step()
    assert not torch.equal(model[0].weight.full_tensor(), before)
    assert_step_refused(early, "AdamW holds state for 0.weight, 0.bias, 1.weight, 1.bias")


@on_threads(2)
def test_a_weight_that_a_module_outside_every_unit_still_shows_raises_at_the_step():
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    model[1].weight = model[0].weight
    sherd.fully_shard(model[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert_step_refused(optimizer, "SGD holds weight twice", "tied weights?", "a module that contains both")


@on_threads(2)
def test_parameters_that_have_nothing_to_do_with_the_model_are_left_alone():
    """Of another one, of a copy, of a module that was dropped."""
    model, other = net(), net()
    twin = copy.deepcopy(model)
    alone = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters(), *twin.parameters(), alone], lr=0.5)
    outside = torch.optim.SGD(other.parameters(), lr=0.5)
    model = shards(model, unmanaged="ignore")
    model[2] = nn.Linear(WIDTH, WIDTH)
    before = [each.detach().clone() for each in twin.parameters()]
    for each in (model, other):
        each(noise(0, 0)).square().mean().backward()
    alone.grad = torch.ones(3)
    own, others = whole_params(model), [each.detach().clone() for each in other.parameters()]
    optimizer.step()
    assert alone.tolist() == [-0.5] * 3
    assert not torch.equal(whole_params(model)["0.0.weight"], own["0.0.weight"])
    for each, value in zip(twin.parameters(), before, strict=True):
        assert torch.equal(each, value)
    outside.step()
    for each, value in zip(other.parameters(), others, strict=True):
        torch.testing.assert_close(each.detach(), value - each.grad)


def test_an_optimizer_is_looked_at_once(threads):
    """How often an optimizer's groups are read."""

    def looked_at():
        model = shards(net())
        optimizer = adamw(model.parameters())
        steps(model, optimizer)
        counts = [read.call_count]
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        steps(model, optimizer)
        counts.append(read.call_count)
        with sherd.unsharded(model):
            pass
        steps(model, optimizer)
        return [*counts, read.call_count]

    with mock.patch.object(optimizers, "_adopt", wraps=optimizers._adopt) as read:
        assert threads(1).run(looked_at) == [[1, 2, 3]]
