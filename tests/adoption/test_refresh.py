"""`sherd.refresh` takes every change of a model into its units, with the values of one process."""

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
from sherd.tensor.ragged import as_dtensor
from tests.adoption.adapters import LAYOUTS, Adapter, Tied, adapt, assert_alike, inner, net, sgd, shards, steps
from tests.support.comparing import assert_same, whole, whole_params
from tests.support.models import WIDTH, noise
from tests.support.ranks.bodies import on_threads
from tests.support.sharding import sharded

NEW = ("0.2.lora_A.default.weight", "0.2.lora_B.default.weight", "2.lora_A.default.weight", "2.lora_B.default.weight")


def train_on(model, freeze=False):
    """Three steps, then adapters, then three more with the same optimizer, as in one process."""
    optimizer, plain = sgd(model), net()
    plain_optimizer = sgd(plain)
    steps(model, optimizer)
    before = {name: (id(each), whole(each)) for name, each in model.named_parameters()}
    adapt(model, freeze=freeze)
    done = sherd.refresh(model, optimizer)
    assert sorted(done.adopted) == sorted(NEW)
    assert done.dropped == done.retied == ()
    for name, each in model.named_parameters():
        was = before.get(name.replace("base_layer.", ""))
        if was is not None:
            assert id(each) == was[0]
            assert torch.equal(whole(each), was[1])
    assert str(sherd.refresh(model)) == "nothing has changed"
    steps(model, optimizer, first=3)
    steps(plain, plain_optimizer, of_all=True)
    adapt(plain, freeze=freeze)
    new = [each for name, each in plain.named_parameters() if "lora" in name]
    plain_optimizer.add_param_group({"params": new})
    steps(plain, plain_optimizer, first=3, of_all=True)
    assert_alike(model, plain)


@pytest.mark.parametrize(
    ("num_ranks", "freeze", "options"),
    [(1, False, {}), (3, True, {}), (2, True, {"front": "flat"}), *((number, False, each) for number, each in LAYOUTS)],
    ids=str,
)
def test_adapters_train_as_in_one_process(threads, num_ranks, freeze, options):
    threads(num_ranks).run(lambda: train_on(shards(net(), **options), freeze))


@on_threads(2)
def test_units_of_several_modules_adopt_too():
    model = net()
    train_on(sharded(model, units=[[model[0], model[1]], model]))


@on_threads(2)
def test_mixed_precision_holds_for_what_is_adopted():
    policy = sherd.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    late, early = adapt(shards(net(), mp_policy=policy)), shards(adapt(net()), mp_policy=policy)
    sherd.refresh(late)
    for model in (late, early):
        steps(model, sgd(model))
    assert_same(whole_params(late), whole_params(early))


@pytest.mark.parametrize("synced", [False, True])
def test_values_are_each_ranks_part_or_rank_0s(threads, synced):
    def with_own_values():
        model = shards(net())
        adapt(model, seed=dist.get_rank())
        own = whole(model[2].lora_A["default"].weight)
        sherd.refresh(model, sync_module_states=synced)
        return own, whole(model[2].lora_A["default"].weight)

    (first, found), (second, _) = threads(2).run(with_own_values)
    assert not torch.equal(first, second)
    assert torch.equal(found, first if synced else torch.cat((first.chunk(2)[0], second.chunk(2)[1])))


def stepped_in_the_place_of_dropped_parameters():
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Sequential(*(nn.Linear(4, 4) for _ in range(100)))))
    places = {id(each) for each in model[1].parameters()}
    model[1] = nn.Identity()
    assert len(sherd.refresh(model).dropped) == 200
    gc.collect()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    stock = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    # Of the class that shards have, or their memory does not fit.
    new = [nn.Parameter(as_dtensor(torch.ones_like(stock.to_local()), stock._spec)) for _ in range(2000)]
    in_their_place = [each for each in new if id(each) in places]
    assert in_their_place, "no parameter was made where a dropped one had been"
    for each in in_their_place:
        each.grad = torch.ones_like(each)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.optim.SGD(in_their_place, lr=0.5).step()
    return [each.to_local() for each in in_their_place]


def test_parameters_that_get_the_ids_of_dropped_ones_are_not_taken_for_them(world):
    (found,) = world(1).run(stepped_in_the_place_of_dropped_parameters)
    assert all(torch.equal(each, torch.full((4,), 0.5)) for each in found)


@on_threads(1)  # which alone may record warnings
def test_a_swapped_head_and_a_removed_block_are_named():
    model, plain = shards(net()), net()
    optimizer, plain_optimizer = sgd(model), sgd(plain)
    steps(model, optimizer)
    steps(plain, plain_optimizer)
    for each in (model, plain):
        torch.manual_seed(5)
        each[2] = nn.Linear(WIDTH, 7)
        each[1] = nn.Identity()
    done = sherd.refresh(model)
    assert set(done.adopted) == {"2.weight", "2.bias"}
    assert {"2.weight", "2.bias", "1.0.weight", "1.2.bias"} <= set(done.dropped)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        steps(model, optimizer, num=2)
    new, old = (str(each.message) for each in said)
    assert "SGD steps a model that has got parameters since, and has none of these: 2.weight, 2.bias" in new
    assert "SGD holds parameters that its model has no more: 2.weight, 2.bias" in old
    steps(plain, plain_optimizer, num=2)
    assert str(sherd.refresh(model, optimizer)) == "nothing has changed"
    for each in model[2].parameters():
        assert all(each is not other for group in optimizer.param_groups for other in group["params"])
    for each, its in ((model, optimizer), (plain, plain_optimizer)):
        its.add_param_group({"params": list(each[2].parameters())})
        steps(each, its, first=3)
    assert_alike(model, plain)


@on_threads(2)
def test_an_optimizer_that_is_given_has_the_new_ones_and_not_the_old():
    model = shards(net())
    optimizer = sgd(model)
    steps(model, optimizer)
    old = list(model[2].parameters())
    model[2] = nn.Linear(WIDTH, 7)
    sherd.refresh(model, optimizer)
    held = [each for group in optimizer.param_groups for each in group["params"]]
    assert {id(each) for each in held} == {id(each) for each in model.parameters()}
    assert not any(each in optimizer.state for each in old)
    steps(model, optimizer)


@pytest.mark.parametrize("front", ["shard", "wrapper", "flat wrapper"])
@on_threads(2)
def test_thawed_and_frozen_layers_train_as_in_one_process(front):
    model, plain = net(), net()
    for each in (model, plain):
        each[0].requires_grad_(False)
    model = shards(model, front)
    steps(model, sgd(model))
    steps(plain, sgd(plain), of_all=True)
    for each in (inner(model), plain):
        each[0].requires_grad_(True)
        each[1].requires_grad_(False)
    done = sherd.refresh(model)
    for names, begin in ((done.thawed, "0."), (done.frozen, "1.")):
        assert names
        assert all(name.startswith(begin) for name in names)
    steps(model, sgd(model), first=3)
    steps(plain, sgd(plain), first=3, of_all=True)
    assert_alike(model, plain)


@pytest.mark.parametrize("in_two_units", [False, True])
@on_threads(2)
def test_weights_that_are_tied_after_materialisation_are_one(in_two_units):
    plain = Tied().tie_weights()
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
    model.load_state_dict(whole(plain.state_dict()))
    steps(model, sgd(model))
    steps(plain, sgd(plain), of_all=True)
    assert model.head.weight is model.embed.weight
    assert_alike(model, plain)


@on_threads(2)
def test_a_unit_on_the_meta_device_adopts_what_is_there_too():
    with torch.device("meta"):
        model = shards(net())
        model[2] = Adapter(model[2])
    sherd.refresh(model)
    model[0][2] = Adapter(model[0][2])  # has values, the unit has none
    said = r"0\.2\.lora_A\.default\.weight is not on the meta device, the parameters of unit 0 are"
    with pytest.raises(ModuleError, match=said):
        sherd.refresh(model)
    model[0][2] = model[0][2].base_layer
    model.to_empty(device="cpu")
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    steps(model, sgd(model))


@on_threads(4)
def test_tensor_parallel_ones_are_adopted():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, plain = net(), net()
    for block in model[:2]:
        parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    shards(model, mesh=mesh["dp"])
    for each in (model, plain):
        torch.manual_seed(9)
        each[0].append(nn.Linear(WIDTH, WIDTH)).append(nn.Linear(WIDTH, WIDTH))
    parallelize_module(model[0], mesh["tp"], {"3": ColwiseParallel(), "4": RowwiseParallel()})
    assert len(sherd.refresh(model).adopted) == 4
    optimizer, plain_optimizer = sgd(model), sgd(plain)
    for step in range(3):
        model(noise(step, mesh["dp"].get_local_rank())).square().mean().backward()
        torch.stack([plain(noise(step, rank)).square().mean() for rank in range(2)]).mean().backward()
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()
    assert_alike(model, plain)


# Checkpoints


def saved_and_loaded(folder, front):
    model = adapt(shards(net(), front))
    sherd.refresh(model)
    steps(model, sgd(model))
    trained = whole_params(model)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    other = shards(adapt(net(), seed=99), front)
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(other, state["model"])
    assert_same(whole_params(other), trained)
    # The adapters alone, as PEFT keeps them, into a model that gets them late.
    third = adapt(shards(net(), front), seed=98)
    sherd.refresh(third)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert dist.get_rank() or sorted(full) == sorted(trained)
    buffer = io.BytesIO()
    torch.save({name: each for name, each in full.items() if "lora" in name}, buffer)
    sent = [buffer.getvalue()]
    dist.broadcast_object_list(sent, src=0)
    adapters = torch.load(io.BytesIO(sent[0]))
    assert not third.load_state_dict(adapters, strict=False).unexpected_keys
    assert sorted(adapters) == sorted(NEW)
    found = whole_params(third)
    assert_same({name: found[name] for name in NEW}, {name: trained[name] for name in NEW})


@pytest.mark.parametrize("front", ["shard", "wrapper"])
def test_checkpoints_work_after_a_refresh(world, tmp_path, front):
    world(2).run(saved_and_loaded, str(tmp_path), front)


# Refused


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("shape", f"new 2.lora_A.default.weight (3, {WIDTH}) torch.float32 in Sequential only on ranks [0]"),
        ("name", f"new 2.lora_A.default.weight (3, {WIDTH}) torch.float32 in Sequential only on ranks [1]"),
        ("error", "ModuleError: 0.own has no shape yet"),
        ("grid", "only on ranks [3]"),
    ],
)
def test_ranks_that_differ_all_raise_the_same(threads, how, said):
    def differing():
        model, rank = shards(net(), mesh_shape=(2, 2) if how == "grid" else None), dist.get_rank()
        if how in ("shape", "grid"):
            model[2] = Adapter(model[2], rank=3 + (rank == dist.get_world_size() - 1))
        elif how == "name" and rank:
            model[2] = Adapter(model[2])
        elif how == "error" and rank:
            model[0].register_parameter("own", nn.parameter.UninitializedParameter())
        with pytest.raises(RanksDifferError) as raised:
            sherd.refresh(model)
        return str(raised.value)

    found = threads(4 if how == "grid" else 2).run(differing)
    assert len(set(found)) == 1
    assert said in found[0]


@on_threads(2)
def test_a_flat_parameter_cannot_grow():
    model = shards(net(), "flat wrapper")
    added = Adapter(inner(model)[2])
    inner(model)[2] = added
    said = r"2\.lora_A\.default\.weight, 2\.lora_B\.default\.weight changed in unit.*use_orig_params=True"
    with pytest.raises(UnsupportedError, match=said):
        sherd.refresh(model)
    added.lora_A = sherd.FullyShardedDataParallel(added.lora_A["default"])  # by itself


@on_threads(2)
def test_it_is_refused_when_it_cannot_be_served():
    model = shards(net())
    with pytest.raises(ModuleError, match="nothing below Sequential is sharded"):
        sherd.refresh(net())
    model.set_requires_gradient_sync(False)
    model(noise(0, 0)).sum().backward()
    with pytest.raises(StateError, match="wait for their reduction"):
        sherd.refresh(model)
    model.zero_grad()
    with sherd.unsharded(model), pytest.raises(StateError, match="unshard context"):
        sherd.refresh(model)
    model[2].register_forward_hook(lambda *_: sherd.refresh(model))
    with pytest.raises(StateError, match=r"in the middle of a forward|under way"):
        model(noise(0, 0))


@on_threads(2)
def test_an_optimizer_of_their_own_is_enough():
    model = adapt(shards(net()), freeze=False)
    base = torch.optim.SGD([p for n, p in model.named_parameters() if "lora" not in n], lr=0.1)
    sherd.refresh(model)
    late = torch.optim.SGD([p for n, p in model.named_parameters() if "lora" in n], lr=0.1)
    model(noise(0, 0)).sum().backward()
    late.step()
    base.step()
