"""Does `sherd.refresh` take every change of a model into its units, with the values of one process?"""

import gc
import io
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import sherd
from sherd import fully_shard
from sherd.errors import ModuleError, RanksDifferError, StateError, UnsupportedError
from tests.adoption.adapters import (
    Adapter,
    adapt,
    assert_alike,
    inner,
    net,
    plain_steps,
    sgd,
    shards,
    steps,
    text_of,
)
from tests.support.comparing import assert_named_close, whole_params
from tests.support.models import WIDTH, noise

NEW = ("0.2.lora_A.default.weight", "0.2.lora_B.default.weight", "2.lora_A.default.weight", "2.lora_B.default.weight")


def trained_on(model, freeze=False, **options):
    """Three steps, then adapters, then three more with the same optimizer."""
    optimizer = sgd(model)
    steps(model, optimizer)
    before = {name: (id(each), each.detach().full_tensor().clone()) for name, each in model.named_parameters()}
    adapt(model, freeze=freeze)
    done = sherd.refresh(model, optimizer, **options)
    assert sorted(done.adopted) == sorted(NEW)
    assert done.dropped == done.retied == ()
    for name, each in model.named_parameters():
        was = before.get(name.replace("base_layer.", ""))
        if was is not None:
            assert id(each) == was[0]
            assert torch.equal(each.detach().full_tensor(), was[1])
    assert str(sherd.refresh(model)) == "nothing has changed"
    steps(model, optimizer, first=3)
    return whole_params(model)


def plainly_trained_on(num_ranks, freeze=False):
    model = net()
    optimizer = sgd(model)
    plain_steps(model, optimizer, num_ranks)
    adapt(model, freeze=freeze)
    new = [each for name, each in model.named_parameters() if "lora" in name]
    optimizer.add_param_group({"params": new})
    plain_steps(model, optimizer, num_ranks, first=3)
    return model


def adapters(front_end="fully_shard", mesh_shape=None, freeze=False, offload=False, flattened=False, **options):
    if mesh_shape is not None:
        options["mesh_shape"] = mesh_shape
    if offload:
        options["offload_policy"] = sherd.CPUOffloadPolicy()
    return trained_on(shards(net(), front_end, **options), freeze)


@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [
        (2, {}),
        (3, {"freeze": True}),
        (2, {"front_end": "wrapper"}),
        (2, {"placement": sherd.Flat()}),
        (2, {"placement": sherd.Flat(), "freeze": True}),
        (3, {"placement": sherd.Blocks(2)}),
        (2, {"placement": sherd.Owned()}),
        (4, {"mesh_shape": (2, 2)}),
        (4, {"mesh_shape": (2, 2), "placements": "hfsdp"}),
        (2, {"placements": "ddp"}),
        (2, {"placements": "zero2"}),
        (2, {"offload": True}),
        (1, {}),
    ],
    ids=str,
)
def test_adapters_train_as_in_one_process(world, num_ranks, settings):
    expected = plainly_trained_on(num_ranks, settings.get("freeze", False))
    assert_alike(world(num_ranks).run(adapters, **settings), expected)


def lists_as_units():
    model = net()
    sherd.fully_shard([model[0], model[1]])
    sherd.fully_shard(model)
    return trained_on(model)


def test_units_of_several_modules_adopt_too(world):
    assert_alike(world(2).run(lists_as_units), plainly_trained_on(2))


def in_low_precision(adapted_before):
    policy = sherd.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = adapt(net()) if adapted_before else net()
    model = shards(model, mp_policy=policy)
    if not adapted_before:
        adapt(model)
        sherd.refresh(model)
    steps(model, sgd(model))
    return whole_params(model)


def test_mixed_precision_holds_for_what_is_adopted(world):
    expected, found = world(2).run(in_low_precision, True), world(2).run(in_low_precision, False)
    for each, other in zip(found, expected, strict=True):
        assert_named_close(each, other, "parameter", 0, 0)


def with_own_values(synced):
    model = shards(net())
    adapt(model, seed=dist.get_rank())
    own = model[2].lora_A["default"].weight.detach().clone()
    sherd.refresh(model, sync_module_states=synced)
    return own, model[2].lora_A["default"].weight.detach().full_tensor()


@pytest.mark.parametrize("synced", [False, True])
def test_values_are_each_ranks_part_or_rank_0s(world, synced):
    (first, found), (second, _) = world(2).run(with_own_values, synced)
    assert not torch.equal(first, second)
    assert torch.equal(found, first if synced else torch.cat((first.chunk(2)[0], second.chunk(2)[1])))


def stepped_in_the_place_of_dropped_parameters():
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Sequential(*(nn.Linear(4, 4) for _ in range(100)))))
    places = {id(each) for each in model[1].parameters()}
    model[1] = nn.Identity()
    assert len(sherd.refresh(model).dropped) == 200
    gc.collect()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    made = [nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)])) for _ in range(2000)]
    in_their_place = [each for each in made if id(each) in places]
    assert in_their_place, "no parameter was made where a dropped one had been"
    for each in in_their_place:
        each.grad = torch.ones_like(each)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.optim.SGD(in_their_place, lr=0.5).step()
    return [each.to_local() for each in in_their_place]


def test_parameters_that_get_the_ids_of_dropped_ones_are_not_taken_for_them(world):
    for found in world(2).run(stepped_in_the_place_of_dropped_parameters):
        assert all(torch.equal(each, torch.full((2,), 0.5)) for each in found)


def swapped():
    model = shards(net())
    optimizer = sgd(model)
    steps(model, optimizer)
    torch.manual_seed(5)
    model[2] = nn.Linear(WIDTH, 7)
    model[1] = nn.Identity()
    done = sherd.refresh(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        steps(model, optimizer, num=2)
    said = [str(each.message) for each in said]
    assert set(done.adopted) == {"2.weight", "2.bias"}
    assert {"2.weight", "2.bias", "1.0.weight", "1.2.bias"} <= set(done.dropped)
    again = sherd.refresh(model, optimizer)
    assert str(again) == "nothing has changed"
    for each in model[2].parameters():
        assert all(each is not other for group in optimizer.param_groups for other in group["params"])
    optimizer.add_param_group({"params": list(model[2].parameters())})
    steps(model, optimizer, first=3)
    return said, whole_params(model)


def test_a_swapped_head_and_a_removed_block_are_named(world):
    plain = net()
    optimizer = sgd(plain)
    plain_steps(plain, optimizer, 2)
    torch.manual_seed(5)
    plain[2] = nn.Linear(WIDTH, 7)
    plain[1] = nn.Identity()
    plain_steps(plain, optimizer, 2, num=2)
    optimizer.add_param_group({"params": list(plain[2].parameters())})
    plain_steps(plain, optimizer, 2, first=3)
    found = world(2).run(swapped)
    assert_alike([params for _, params in found], plain)
    for said, _ in found:
        assert len(said) == 2
        assert "SGD steps a model that has got parameters since, and has none of these: 2.weight, 2.bias" in said[0]
        assert "SGD holds parameters that its model has no more: 2.weight, 2.bias" in said[1]


def cleared():
    model = shards(net())
    optimizer = sgd(model)
    steps(model, optimizer)
    old = list(model[2].parameters())
    model[2] = nn.Linear(WIDTH, 7)
    sherd.refresh(model, optimizer)
    held = [each for group in optimizer.param_groups for each in group["params"]]
    assert {id(each) for each in held} == {id(each) for each in model.parameters()}
    assert not any(each in optimizer.state for each in old)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(model, optimizer)


def test_an_optimizer_that_is_given_has_the_new_ones_and_not_the_old(world):
    world(2).run(cleared)


def thawed(front_end, use_orig_params):
    model = net()
    model[0].requires_grad_(False)
    if front_end == "wrapper":
        for at in range(2):
            model[at] = sherd.FullyShardedDataParallel(model[at], use_orig_params=use_orig_params)
        model = sherd.FullyShardedDataParallel(model, use_orig_params=use_orig_params)
    else:
        shards(model)
    steps(model, sgd(model))
    inner(model)[0].requires_grad_(True)
    inner(model)[1].requires_grad_(False)
    done = sherd.refresh(model)
    assert done.thawed
    assert all(name.startswith("0.") for name in done.thawed)
    assert done.frozen
    assert all(name.startswith("1.") for name in done.frozen)
    steps(model, sgd(model), first=3)
    with sherd.unsharded(model):
        return {name: each.detach().clone() for name, each in model.named_parameters()}


@pytest.mark.parametrize(("front_end", "use_orig"), [("fully_shard", True), ("wrapper", True), ("wrapper", False)])
def test_thawed_and_frozen_layers_train_as_in_one_process(world, front_end, use_orig):
    plain = net()
    plain[0].requires_grad_(False)
    plain_steps(plain, sgd(plain), 2)
    plain[0].requires_grad_(True)
    plain[1].requires_grad_(False)
    plain_steps(plain, sgd(plain), 2, first=3)
    assert_alike(world(2).run(thawed, front_end, use_orig), plain)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def tie_weights(self):
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x).relu())


def filled(model):
    torch.manual_seed(3)
    with torch.no_grad():
        for each in dict.fromkeys(model.parameters()):
            each.copy_(torch.randn(each.shape) / 8)


def tied_late(in_two_units):
    with torch.device("meta"):
        model = Tied()
    if in_two_units:
        sherd.fully_shard(model.embed, placement=sherd.Flat())
    sherd.fully_shard(model)
    model.to_empty(device="cpu")
    model.tie_weights()
    done = sherd.refresh(model)
    assert done.retied == ("head.weight = embed.weight",)
    assert done.dropped == ("head.weight",)
    plain = Tied()
    plain.tie_weights()
    filled(plain)
    model.load_state_dict({name: each.clone() for name, each in plain.state_dict().items()})
    steps(model, sgd(model))
    assert model.head.weight is model.embed.weight
    return whole_params(model)


@pytest.mark.parametrize("in_two_units", [False, True])
def test_weights_that_are_tied_after_materialisation_are_one(world, in_two_units):
    plain = Tied()
    plain.tie_weights()
    filled(plain)
    plain_steps(plain, sgd(plain), 2)
    assert_alike(world(2).run(tied_late, in_two_units), plain)


def on_meta():
    with torch.device("meta"):
        model = shards(net())
        model[2] = Adapter(model[2])
    sherd.refresh(model)
    model[0][2] = Adapter(model[0][2])  # has values, the unit has none
    said = text_of(lambda: sherd.refresh(model), ModuleError)
    model[0][2] = model[0][2].base_layer
    model.to_empty(device="cpu")
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    steps(model, sgd(model))
    return said


def test_a_unit_on_the_meta_device_adopts_what_is_there_too(world):
    for said in world(2).run(on_meta):
        assert "0.2.lora_A.default.weight is not on the meta device, the parameters of unit 0 are" in said


def beside_tensor_parallelism():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = net()
    for at in range(2):
        parallelize_module(model[at], mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        sherd.fully_shard(model[at], mesh=mesh["dp"])
    sherd.fully_shard(model, mesh=mesh["dp"])
    torch.manual_seed(9)
    model[0].append(nn.Linear(WIDTH, WIDTH)).append(nn.Linear(WIDTH, WIDTH))
    parallelize_module(model[0], mesh["tp"], {"3": ColwiseParallel(), "4": RowwiseParallel()})
    done = sherd.refresh(model)
    assert len(done.adopted) == 4
    optimizer = sgd(model)
    for step in range(3):
        model(noise(step, mesh["dp"].get_local_rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole_params(model)


def test_tensor_parallel_ones_are_adopted(world):
    plain = net()
    torch.manual_seed(9)
    plain[0].append(nn.Linear(WIDTH, WIDTH)).append(nn.Linear(WIDTH, WIDTH))
    plain_steps(plain, sgd(plain), 2)
    assert_alike(world(4).run(beside_tensor_parallelism), plain)


# Checkpoints


def saved_and_loaded(folder, front_end):
    model = shards(net(), front_end)
    adapt(model)
    sherd.refresh(model)
    steps(model, sgd(model))
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    only = {name: each for name, each in get_model_state_dict(model).items() if "lora" in name}
    other = shards(adapt(net(), seed=99), front_end)
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(other, state["model"])
    assert_named_close(whole_params(other), whole_params(model), "parameter", 0, 0)
    # The adapters alone, as PEFT keeps them, into a model that gets them late.
    third = adapt(shards(net(), front_end), seed=98)
    sherd.refresh(third)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    buffer = io.BytesIO()
    torch.save({name: each for name, each in full.items() if "lora" in name}, buffer)
    sent = [buffer.getvalue()]
    dist.broadcast_object_list(sent, src=0)
    found = third.load_state_dict(torch.load(io.BytesIO(sent[0])), strict=False)
    assert not found.unexpected_keys
    assert len(only) == 4
    return whole_params(model), whole_params(third), sorted(full)


@pytest.mark.parametrize("front_end", ["fully_shard", "wrapper"])
def test_checkpoints_work_after_a_refresh(world, tmp_path, front_end):
    for rank, (trained, third, names) in enumerate(world(2).run(saved_and_loaded, str(tmp_path), front_end)):
        assert rank or names == sorted(trained)
        for name in NEW:
            assert torch.equal(trained[name], third[name])


# Refused


def differing(how):
    model = shards(net())
    rank = dist.get_rank()
    if how == "shape":
        model[2] = Adapter(model[2], rank=3 + rank)
    elif how == "name" and rank:
        model[2] = Adapter(model[2])
    elif how == "error" and rank:
        model[0].register_parameter("own", nn.parameter.UninitializedParameter())
    return text_of(lambda: sherd.refresh(model), RanksDifferError)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("shape", f"new 2.lora_A.default.weight (3, {WIDTH}) torch.float32 in Sequential only on ranks [0]"),
        ("name", f"new 2.lora_A.default.weight (3, {WIDTH}) torch.float32 in Sequential only on ranks [1]"),
        ("error", "ModuleError: 0.own has no shape yet"),
    ],
)
def test_ranks_that_differ_all_raise_the_same(world, how, said):
    found = world(2).run(differing, how)
    assert found[0] == found[1]
    assert said in found[0]


def one_rank_of_a_grid():
    model = shards(net(), mesh_shape=(2, 2))
    model[2] = Adapter(model[2], rank=3 + (dist.get_rank() == 3))
    return text_of(lambda: sherd.refresh(model), RanksDifferError)


def test_one_rank_of_a_grid_that_differs_is_named_on_all(world):
    found = world(4).run(one_rank_of_a_grid)
    assert len(set(found)) == 1
    assert "only on ranks [3]" in found[0]


def flat():
    model = net()
    for at in range(2):
        model[at] = sherd.FullyShardedDataParallel(model[at])
    model = sherd.FullyShardedDataParallel(model)
    added = Adapter(inner(model)[2])
    inner(model)[2] = added
    said = text_of(lambda: sherd.refresh(model), UnsupportedError)
    added.lora_A = sherd.FullyShardedDataParallel(added.lora_A["default"])  # by itself
    return said


def test_a_flat_parameter_cannot_grow(world):
    for said in world(2).run(flat):
        assert "2.lora_A.default.weight, 2.lora_B.default.weight changed in unit" in said
        assert "use_orig_params=True" in said


def at_the_wrong_time():
    model = shards(net())
    plain = text_of(lambda: sherd.refresh(net()), ModuleError)
    model.set_requires_gradient_sync(False)
    model(noise(0, 0)).sum().backward()
    waiting = text_of(lambda: sherd.refresh(model), StateError)
    model.zero_grad()
    with sherd.unsharded(model):
        lent = text_of(lambda: sherd.refresh(model), StateError)
    model[2].register_forward_hook(lambda *_: sherd.refresh(model))
    within = text_of(lambda: model(noise(0, 0)), StateError)
    return plain, waiting, lent, within


def test_it_is_refused_when_it_cannot_be_served(world):
    for plain, waiting, lent, within in world(2).run(at_the_wrong_time):
        assert "nothing below Sequential is sharded" in plain
        assert "wait for their reduction" in waiting
        assert "unshard context" in lent
        assert "in the middle of a forward" in within or "under way" in within


def two_optimizers():
    model = adapt(shards(net()), freeze=False)
    base = torch.optim.SGD([p for n, p in model.named_parameters() if "lora" not in n], lr=0.1)
    sherd.refresh(model)
    late = torch.optim.SGD([p for n, p in model.named_parameters() if "lora" in n], lr=0.1)
    model(noise(0, 0)).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        late.step()
        base.step()


def test_an_optimizer_of_their_own_is_enough(world):
    world(2).run(two_optimizers)
