"""Does an optimizer that holds other Parameters than the model's train the model, or say that it cannot?"""

import copy
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import sherd
from sherd.engine.state import optimizers
from sherd.errors import OptimizerError
from tests.adoption.adapters import net, plain_steps, shards, steps, text_of
from tests.support.comparing import assert_named_close
from tests.support.models import WIDTH, noise

FRONT_ENDS = ("fully_shard", "wrapper", "flat")


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.05, eps=1e-3)


def sharded(model, front_end, **options):
    if front_end == "flat":
        for at in range(2):
            model[at] = sherd.FullyShardedDataParallel(model[at], use_orig_params=False, **options)
        return sherd.FullyShardedDataParallel(model, use_orig_params=False, **options)
    return shards(model, front_end, **options)


def whole(model):
    with sherd.unsharded(model, writeback=False):
        return {name: each.detach().clone() for name, each in model.named_parameters()}


def assert_trained(model, optimizer, expected, first=0):
    """Training goes on as in one process, and the optimizer holds the model's own parameters, each once."""
    steps(model, optimizer, first=first)
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(held) == sorted(map(id, model.parameters()))
    assert_named_close(whole(model), expected, "parameter", 1e-5, 1e-6)


def plainly_trained(num_ranks, change=lambda model: None):
    model = net()
    change(model)
    plain_steps(model, adamw(model.parameters()), num_ranks)
    return {name: each.detach() for name, each in model.named_parameters()}


# Built at an odd moment


def built_before(front_end, expected):
    model = net()
    optimizer = adamw(model.parameters())
    for each in model.parameters():
        each.grad = torch.ones_like(each)  # of a pass before
    olds = list(model.parameters())
    model = sharded(model, front_end)
    for each in olds:
        each.untyped_storage().resize_(0)  # a user frees what was sharded
    assert_trained(model, optimizer, expected)


def built_inside_unsharded(front_end, expected):
    model = sharded(net(), front_end)
    with sherd.unsharded(model):
        optimizer = adamw(model.parameters())
    assert_trained(model, optimizer, expected)


def built_of_unsharded_parameters(front_end, expected):
    """Those that modules show in forward, or between unshard() and reshard()."""
    model = shards(net(), "wrapper" if front_end == "wrapper" else "fully_shard")
    kept = []
    with torch.no_grad():
        hooks = [each.register_forward_pre_hook(lambda of, _: kept.extend(of.parameters(recurse=False)))
                 for each in model.modules() if isinstance(each, nn.Linear)]  # fmt: skip
        model(noise(0, 0))
    for hook in hooks:
        hook.remove()
    assert_trained(model, adamw(kept), expected)


def built_of_old_and_new(front_end, expected):
    model = net()
    olds = dict(model.named_parameters())
    model = sharded(model, front_end)
    news = dict(model.named_parameters())
    mixed = [olds[name] if at % 2 else each for at, (name, each) in enumerate(news.items())]
    assert_trained(model, adamw(mixed), expected)


def built_of_members_and_flat_parameters(expected):
    """The members of the first block's flat parameter, and the other flat parameters; then all members, and a flat
    one."""
    model = net()
    olds = list(model[0].parameters())
    model = sharded(model, "flat")
    root, first, second = model.parameters()
    optimizer = adamw([root, *olds, second])
    twice = adamw([root, first, second, *olds])
    assert_trained(model, optimizer, expected)
    return text_of(twice.step, OptimizerError)


BUILT = {
    "before": built_before,
    "inside unsharded": built_inside_unsharded,
    "of unsharded parameters": built_of_unsharded_parameters,
}


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("built", BUILT)
def test_an_optimizer_trains_what_its_parameters_became(threads, built, front_end):
    threads(2).run(BUILT[built], front_end, plainly_trained(2))


@pytest.mark.parametrize("front_end", ["fully_shard", "wrapper"])
def test_old_and_new_parameters_may_be_in_one_optimizer(threads, front_end):
    threads(2).run(built_of_old_and_new, front_end, plainly_trained(2))


def test_members_of_one_flat_parameter_may_be_beside_others(threads):
    for said in threads(2).run(built_of_members_and_flat_parameters, plainly_trained(2)):
        assert "AdamW holds 0.0.weight, 0.0.bias, 0.2.weight, 0.2.bias twice" in said


def with_another_inside():
    """A user puts a Parameter in a place inside `unsharded`, and builds the optimizer there."""
    model = shards(net())
    with sherd.unsharded(model):
        model[2].bias = nn.Parameter(torch.full((WIDTH,), 0.5))
        optimizer = adamw(model.parameters())
    return model, optimizer


def trained_with_another_inside(expected):
    assert_trained(*with_another_inside(), expected)


def test_a_parameter_that_was_put_in_its_place_inside_unsharded_is_known_too(threads):
    def change(model):
        nn.init.constant_(model[2].bias, 0.5)

    threads(2).run(trained_with_another_inside, plainly_trained(2, change))


def stepped_inside():
    """Stepped within the context, so that it has state for copies that are gone."""
    model = shards(net())
    with sherd.unsharded(model, with_grads=True):
        optimizer = adamw(model[2].parameters())
        model[2](noise(0, 0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return text_of(lambda: steps(model, optimizer, num=1), OptimizerError)


def test_an_optimizer_that_has_stepped_inside_unsharded_is_refused(threads):
    for said in threads(2).run(stepped_inside):
        assert "AdamW holds state for 2.weight, 2.bias as before fully_shard, or as inside sherd.unsharded" in said
        assert "Build the optimizer after sharding" in said


# On the meta device


def fill(module):
    module.to_empty(device="cpu", recurse=False)
    with torch.no_grad():
        for each in module.parameters(recurse=False):
            each.fill_(0.1)


def built_on_meta(front_end, by_itself, expected):
    with torch.device("meta"):
        model = net()
    optimizer = adamw(model.parameters())
    if front_end == "fully_shard":
        shards(model)
        model.apply(fill)
    elif by_itself:
        with mock.patch.object(nn.Linear, "reset_parameters", fill):
            model = sharded(model, front_end)
    else:
        model = sharded(model, front_end, param_init_fn=fill)
    assert_trained(model, optimizer, expected)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("by_itself", [False, True])
def test_an_optimizer_built_on_the_meta_device_trains_what_got_memory_since(world, front_end, by_itself):
    world(2).run(built_on_meta, front_end, by_itself, plainly_trained(2, lambda model: model.apply(fill)))


# State, and strangers


def with_state(front_end):
    model = net()
    optimizer = adamw(model.parameters())
    model(noise(0, 0)).sum().backward()
    optimizer.step()
    model = sharded(model, front_end)
    texts = [text_of(lambda: steps(model, optimizer, num=1), OptimizerError) for _ in range(2)]
    assert texts[0] == texts[1]
    return texts[0]


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_an_optimizer_with_state_names_its_parameters(threads, front_end):
    for said in threads(2).run(with_state, front_end):
        assert "AdamW holds state for 0.0.weight, 0.0.bias, 0.2.weight, 0.2.bias, 1.0.weight" in said


def with_state_of_tensor_parallel_parameters():
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
    return text_of(early.step, OptimizerError)


def test_state_of_tensor_parallel_parameters_is_not_taken_for_that_of_shards(world):
    for said in world(4).run(with_state_of_tensor_parallel_parameters):
        assert "AdamW holds state for 0.weight, 0.bias, 1.weight, 1.bias" in said


def beside_strangers():
    """Parameters that have nothing to do with the model: of another one, of a copy, of a module that was dropped."""
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
    own, others = whole(model), [each.detach().clone() for each in other.parameters()]
    optimizer.step()
    assert alone.tolist() == [-0.5] * 3
    assert not torch.equal(whole(model)["0.0.weight"], own["0.0.weight"])
    for each, value in zip(twin.parameters(), before, strict=True):
        assert torch.equal(each, value)
    outside.step()
    for each, value in zip(other.parameters(), others, strict=True):
        torch.testing.assert_close(each.detach(), value - each.grad)


def test_parameters_of_other_models_are_left_alone(threads):
    threads(2).run(beside_strangers)


def looked_at():
    """How often an optimizer's groups are read."""
    model = shards(net())
    optimizer = adamw(model.parameters())
    with mock.patch.object(optimizers, "_adopt", wraps=optimizers._adopt) as read:
        steps(model, optimizer)
        counts = [read.call_count]
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        steps(model, optimizer)
        counts.append(read.call_count)
        with sherd.unsharded(model):
            pass
        steps(model, optimizer)
        counts.append(read.call_count)
    return counts


def test_an_optimizer_is_looked_at_once(world):
    assert world(2).run(looked_at) == [[1, 2, 3]] * 2
