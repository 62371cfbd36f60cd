"""A flat parameter is right whatever a user does to it, to its gradient and to the parameters it is made of."""

import copy
import io
import pickle
import warnings
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.tensor import DTensor

from sherd import FlatParameter, FullyShardedDataParallel, RaggedDTensor, ShardingStrategy, unsharded
from sherd.errors import OptimizerError, PlacementError, SherdError, StateError
from tests.support.comparing import assert_same, whole_grads
from tests.support.models import Block, Wired
from tests.support.ranks.bodies import on_threads
from tests.support.training import made as seeded
from tests.wrapper.nets import (
    assert_close,
    assert_computes,
    assert_holds,
    backward,
    backwards,
    made,
    own,
    sharded,
    steps,
    trained,
    wholes,
    words,
)

FLAT = ("flat_param", "flat_kept", "flat_copied")
ORIGINAL = ("orig_params", "orig_kept", "orig_copied")


# What it is


def look_at_it(way):
    plain, model = made(), sharded(way)
    assert [name for name, _ in model.named_parameters()] == ["_flat_param", "block._flat_param", "frozen._flat_param"]
    for flat in model.parameters():
        for kind in (FlatParameter, RaggedDTensor, DTensor, nn.Parameter):
            assert isinstance(flat, kind)
        assert flat.is_leaf
        assert flat.dim() == 1
        assert sum(flat.numels) <= flat.numel()
    assert model._flat_param is next(model.parameters())
    assert not model.frozen._flat_param.requires_grad
    block = model.block._flat_param
    assert block.names == ("up.weight", "up.bias", "down.weight", "down.bias")
    assert block.shapes == tuple(each.shape for each in plain.block.parameters())
    assert block.numels == (30, 5, 30, 6)
    assert model._flat_param.names == ("scale", "embed.weight", "head.bias"), "a tied one once"
    for net in (own(model), own(model.block)):
        assert not any(each is not None for each in net._parameters.values())
    assert isinstance(model.block.up.weight, RaggedDTensor), "outside forward its shard is there"
    assert model.head.weight is model.embed.weight
    assert_holds(model, plain)
    return block.shard_metadata(), model._flat_param.to_local().tolist()


def test_each_unit_has_one_vector_which_knows_what_it_is_made_of(threads):
    for way in FLAT:
        ranks = threads(2).run(look_at_it, way)
        copied = way == "flat_copied"
        assert (ranks[0] == ranks[1]) == copied
        for metadata, _ in ranks:
            assert not copied or metadata.param_offsets == ((0, 29), (0, 4), (0, 29), (0, 5))


def metadata_by_both():
    torch.manual_seed(0)
    block = Block(6, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = torch_fsdp.FullyShardedDataParallel(copy.deepcopy(block), device_id=torch.device("cpu"))
    ours = FullyShardedDataParallel(block)
    held = ours._flat_param.shard_metadata()
    for name, (first, last) in zip(held.param_names, held.param_offsets, strict=True):
        module, attribute = name.split(".")
        assert getattr(getattr(ours, module), attribute).to_local().numel() == last - first + 1
    return tuple(theirs._handle.shard_metadata()), tuple(held)


def merged(ranks):
    """Of what each rank holds: shape, stride, contiguity and size by name, and the ranges by name."""
    fixed, ranges = {}, {}
    for names, *columns, offsets in ranks:
        for name, *told in zip(names, *columns, strict=True):
            assert fixed.setdefault(name, told) == told
        for name, offset in zip(names, offsets, strict=True):
            ranges.setdefault(name, []).append(offset)
    return fixed, ranges


def test_ranks_hold_every_element_once_and_say_so_as_torch_does(world):
    theirs, ours = zip(*world(2).run(metadata_by_both), strict=True)
    assert merged(ours)[0] == merged(theirs)[0]
    for held in (merged(ours)[1], merged(theirs)[1]):
        for name, offsets in held.items():
            assert offsets[0][0] == 0
            assert all(after[0] == before[1] + 1 for before, after in pairwise(offsets))
            assert offsets[-1][1] == merged(ours)[0][name][3] - 1


def hold_nothing():
    flat = FullyShardedDataParallel(nn.Linear(1, 1))._flat_param
    assert flat.shape[0] >= 2
    return flat.shard_metadata().param_names, flat.to_local().numel()


def test_a_rank_may_hold_nothing(threads):
    ranks = threads(4).run(hold_nothing)
    assert sorted(name for names, _ in ranks for name in names) == ["bias", "weight"]
    assert ((), 0) in ranks


@on_threads(2)
def test_padding_has_no_part_in_norms_and_is_never_trained():
    plain, model = made(), sharded("flat_param")
    assert any(sum(each.numels) < each.numel() for each in model.parameters()), "there is padding"
    optimizers = [torch.optim.AdamW(trained(each), lr=0.1, weight_decay=0.5) for each in (plain, model)]
    for seed in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backwards(plain, model, seed)
        for each in model.parameters():
            whole = each.detach().full_tensor()
            assert whole.count_nonzero() <= sum(each.numels)
        norms = [torch.nn.utils.get_total_norm([p.grad for p in trained(each)]) for each in (plain, model)]
        torch.testing.assert_close(norms[1].full_tensor(), norms[0])
        for optimizer in optimizers:
            optimizer.step()
    squares = [sum(p.detach().square().sum() for p in each.parameters()) for each in (plain, model)]
    torch.testing.assert_close(squares[1].full_tensor(), squares[0])
    assert_close(model, plain)


# What a user writes into it


DOUBLE = {
    "in_place": lambda flat: flat.mul_(2),
    "data_in_place": lambda flat: flat.data.mul_(2),
    "data": lambda flat: setattr(flat, "data", flat.data * 2),
    "whole_data": lambda flat: setattr(flat, "data", flat.detach().full_tensor() * 2),
    "local_data": lambda flat: setattr(flat, "data", flat.to_local() * 2),
}


@pytest.mark.parametrize("how", DOUBLE)
@on_threads(2, way=("flat_param", "flat_kept", "orig_params", "orig_copied"))
def test_values_written_into_it_are_computed_with(way, how):
    plain, model = made(), sharded(way)
    for seed in range(2):
        with torch.no_grad():
            for each in model.parameters():
                DOUBLE[how](each)
            for each in plain.parameters():
                each.mul_(2)
        assert_computes(model, plain, seed)
        backward(model, seed)
    assert_holds(model, plain)


@on_threads(2, way=(*FLAT, *ORIGINAL))
def test_values_written_into_the_parameters_it_is_made_of_are_computed_with(way):
    """What a user may put in a parameter's place, or into its `.data`, between steps."""
    plain, model = made(), sharded(way)
    net = own(model)
    for seed in range(2):
        whole = torch.full((5, 6), 0.1 + seed)
        net.block.up.weight.data = whole
        plain.block.up.weight.data = whole
        bias = net.block.up.bias
        bias.data = 2 * bias.to_local().detach()
        plain.block.up.bias.data.mul_(2)
        net.head.weight.data = torch.ones(11, 6)
        plain.head.weight.data = torch.ones(11, 6)
        assert_computes(model, plain, seed)
        backward(model, seed)
    assert_holds(model, plain)
    with pytest.raises(PlacementError, match=r"\.data = a tensor of shape \(7,\): this one is \(5, 6\)"):
        net.block.up.weight.data = torch.ones(7)
    assert_holds(model, plain)


@on_threads(2, way=(*FLAT, *ORIGINAL))
def test_a_parameter_put_in_place_is_taken_up_at_the_next_forward(way):
    plain, model = made(), sharded(way)
    before = [id(each) for each in model.parameters()]
    for seed in range(2):
        whole = torch.full((6, 5), 0.1 + seed)
        local = torch.full_like(own(model).block.up.bias.to_local(), 0.3)
        own(model).block.down.weight = nn.Parameter(whole.clone())
        own(model).block.up.bias = nn.Parameter(local)
        own(model).head.weight = nn.Parameter(torch.ones(11, 6))
        plain.block.down.weight = nn.Parameter(whole)
        plain.block.up.bias.data.fill_(0.3)
        plain.head.weight.data = torch.ones(11, 6)
        assert_computes(model, plain, seed)
        backward(model, seed)
    assert_holds(model, plain)
    assert [id(each) for each in model.parameters()] == before, "the optimizer's are the model's still"
    own(model).block.up.weight = nn.Parameter(torch.ones(7))
    with pytest.raises(PlacementError, match=r"up.weight was replaced by a tensor of shape \(7,\); it is \(5, 6\)"):
        model(words())


@pytest.mark.parametrize("seen_by", ["forward", "context"])
@on_threads(2)
def test_the_check_for_replaced_parameters_can_be_switched_off(monkeypatch, seen_by):
    monkeypatch.setenv("FSDP_SKIP_WRITEBACK_CHECK", "1")
    plain, model = made(), sharded("orig_params")
    model.block.up.bias = nn.Parameter(torch.ones(5))
    if seen_by == "forward":
        assert_computes(model, plain)
        assert isinstance(model.block.up.bias, DTensor), "the shard is back in its place"
    with unsharded(model, writeback=False):
        assert_same(model.block.up.bias.detach(), plain.block.up.bias.detach())
    assert_holds(model, plain)


# Gradients


@pytest.mark.parametrize("way", ["flat_param", "flat_kept", "orig_params", "orig_copied"])
@on_threads(2)
def test_gradients_may_be_changed_replaced_dropped_and_zeroed(way):
    plain, model = made(), sharded(way)
    optimizers = [torch.optim.SGD(trained(each), lr=0.1, momentum=0.9) for each in (plain, model)]
    for seed in range(4):
        backwards(plain, model, seed)
        for each in (*trained(plain), *trained(model)):
            if seed == 0:
                each.grad.mul_(0.5)  # read and scaled in place
            elif seed == 1:
                each.grad = each.grad * 2  # another tensor
            elif seed == 2:
                each.grad = None
        if seed == 2:
            backwards(plain, model, 7)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=seed % 2 == 0)
        for each in trained(model):
            assert each.grad is None if seed % 2 == 0 else not each.grad.full_tensor().any()
    assert_close(model, plain)


@on_threads(2)
def test_a_gradient_dropped_for_one_parameter_starts_anew_and_the_others_add_up():
    plain, model = made(), sharded("orig_params")
    for seed in range(2):
        backwards(plain, model, seed)
        if seed == 0:
            model.block.up.weight.grad = plain.block.up.weight.grad = None
            model.module.scale.grad = torch.zeros_like(model.scale)
            plain.scale.grad = torch.zeros(1)
    assert_same(whole_grads(model), whole_grads(plain), rtol=None, atol=None)


@pytest.mark.parametrize("way", ["flat_param", "flat_kept", "orig_params", "orig_copied"])
@on_threads(2)
def test_parameters_may_be_frozen_and_thawed_between_steps(way):
    plain, model = made(), sharded(way)
    optimizers = [torch.optim.SGD([*each.parameters()], lr=0.1) for each in (plain, model)]
    for seed in range(4):
        wanted = seed in (0, 3)
        plain.block.requires_grad_(wanted)
        if "flat" in way:
            model.block._flat_param.requires_grad_(wanted)
        else:
            model.block.requires_grad_(wanted)
        backwards(plain, model, seed)
        assert all((each.grad is None) != wanted for each in model.block.parameters())
        assert model._flat_param.grad is not None if "flat" in way else model.scale.grad is not None
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_close(model, plain)


@on_threads(2)
def test_one_of_many_may_be_frozen_for_a_step():
    plain, model = made(), sharded("orig_params")
    for seed, wanted in enumerate((False, True)):
        for each in (plain, model):
            each.block.up.weight.requires_grad_(wanted)
        backwards(plain, model, seed)
        assert (model.block.up.weight.grad is None) != wanted
    assert_same(whole_grads(model), whole_grads(plain), rtol=None, atol=None)


def branches():
    """Two linear layers of which a rank may leave one out."""
    return Wired(lambda self, x, which: getattr(self, which)(x), left=nn.Linear(3, 3), right=nn.Linear(3, 3))


@on_threads(
    2,
    orig=(True, False),
    strategy=(ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD),
    chosen=(("left", "left"), ("left", "right")),
)
def test_parameters_may_be_unused_on_all_or_on_some_ranks(orig, strategy, chosen):
    plain = seeded(branches)
    model = FullyShardedDataParallel(seeded(branches), use_orig_params=orig, sharding_strategy=strategy)
    x = torch.ones(2, 3, requires_grad=True)
    model(x, chosen[dist.get_rank()]).sum().backward()
    for each in chosen:
        (plain(x, each).sum() / 2).backward()
    expected = whole_grads(plain)
    if orig:
        assert_same(whole_grads(model), expected, rtol=1e-5, atol=1e-6)
    else:  # one vector has one gradient: zero where plain training has none
        with unsharded(model, with_grads=True, writeback=False):
            for name, each in model.named_parameters():
                other = torch.zeros_like(each) if expected[name] is None else expected[name]
                torch.testing.assert_close(each.grad, other)


@on_threads(2)
def test_a_gradient_of_another_kind_is_refused_by_name():
    """Of another kind than the parameter: named, with the remedy, and on all ranks."""
    model = sharded("flat_param")
    model._flat_param.grad = torch.zeros(model._flat_param.shape)
    with pytest.raises(SherdError, match=r"embed.weight|scale.* its .grad is a Tensor, not a DTensor"):
        backward(model)
    model.zero_grad()
    backward(model)


# Optimizers

OPTIMIZERS = {
    "sgd": lambda each: torch.optim.SGD(each, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=False),
    "sgd_foreach": lambda each: torch.optim.SGD(each, lr=0.1, momentum=0.9, foreach=True),
    "adamw": lambda each: torch.optim.AdamW(each, lr=0.1, eps=1e-2),
    "adamw_foreach": lambda each: torch.optim.AdamW(each, lr=0.1, eps=1e-2, foreach=True),
    "adamw_fused": lambda each: torch.optim.AdamW(each, lr=0.1, eps=1e-2, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_threads(2, way=("flat_param", "orig_params"), early=(False, True))
def test_optimizers_built_before_or_after_wrapping_step_as_plain_ones(way, early, name):
    """With a scheduler, but for one of them."""
    plain, model = made(), made()
    if not early:
        model = sharded(way, model)
    optimizers = [OPTIMIZERS[name](trained(each)) for each in (plain, model)]
    if early:
        model = sharded(way, model)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(each, lambda epoch: 0.5**epoch) for each in optimizers]
    for seed in range(3):
        steps(plain, model, optimizers, [seed])
        for scheduler in schedulers if name != "adamw_foreach" else ():
            scheduler.step()
    assert_close(model, plain)
    held = [parameter for group in optimizers[1].param_groups for parameter in group["params"]]
    assert {id(each) for each in held} == {id(each) for each in trained(model)}
    assert len(held) == len(trained(model)) == len(optimizers[1].state)
    assert optimizers[1].param_groups[0]["lr"] == optimizers[0].param_groups[0]["lr"]
    saved = FullyShardedDataParallel.optim_state_dict(model, optimizers[1])
    assert set(saved["state"]) == {name for name, each in plain.named_parameters() if each.requires_grad}
    again = OPTIMIZERS[name](trained(model))
    again.load_state_dict(optimizers[1].state_dict())
    backward(model, 9)
    again.step()


@on_threads(2)
def test_an_early_optimizer_with_a_group_for_each_unit_keeps_its_groups():
    """One group for each unit, with other hyper-parameters, and names."""
    plain, net = made(), made()
    optimizers = []
    for each in (plain, net):
        named = [(name, parameter) for name, parameter in each.named_parameters() if parameter.requires_grad]
        block = [pair for pair in named if pair[0].startswith("block.")]
        rest = [pair for pair in named if not pair[0].startswith("block.")]
        optimizers.append(torch.optim.SGD([{"params": block, "lr": 0.3}, {"params": rest}], lr=0.1))
    model = sharded("flat_param", net)
    early = FullyShardedDataParallel.optim_state_dict(model, optimizers[1])
    assert [len(group["params"]) for group in early["param_groups"]] == [4, 3]
    steps(plain, model, optimizers, range(2))
    assert_close(model, plain)
    groups = optimizers[1].param_groups
    assert [group["params"] for group in groups] == [[model.block._flat_param], [model._flat_param]]
    assert [len(group["param_names"]) for group in groups] == [1, 1]


@on_threads(2)
def test_an_early_optimizer_of_some_members_or_with_members_in_several_groups_steps_these_by_themselves():
    def decayed(net):
        named = [(name, each) for name, each in net.named_parameters() if each.requires_grad]
        biases = [each for name, each in named if name.endswith("bias")]
        return [{"params": [each for name, each in named if not name.endswith("bias")]}, {"params": biases, "lr": 0.2}]

    for chosen in (decayed, lambda net: list(net.block.up.parameters())):
        plain, net = made(), made()
        optimizers = [torch.optim.SGD(chosen(each), lr=0.1, momentum=0.9) for each in (plain, net)]
        model = sharded("flat_param", net)
        steps(plain, model, optimizers, range(3))
        assert_close(model, plain)


@on_threads(2)
def test_an_early_optimizer_with_the_flat_parameter_as_well_or_with_state_is_told_so():
    net = made()
    optimizer = torch.optim.Adam(trained(net))
    model = sharded("flat_param", net)
    optimizer.add_param_group({"params": [model.block._flat_param]})
    with pytest.raises(OptimizerError, match=r"Adam holds .*twice: as before sharding, and as the shard or in a flat"):
        optimizer.step()
    net = made()
    optimizer = torch.optim.Adam(trained(net))
    backward(net, 0)
    optimizer.step()
    model = sharded("flat_param", net)
    backward(model)
    with pytest.raises(OptimizerError, match=r"Adam holds state for .*set_optimizer_state_dict"):
        optimizer.step()


# Copies and conversions


@pytest.mark.filterwarnings("ignore:a sharded tensor is pickled")
@on_threads(2)
def test_a_copy_or_what_comes_out_of_a_file_is_a_vector_like_it():
    model = sharded("flat_param")
    flat = model._flat_param
    file = io.BytesIO()
    torch.save(flat, file)
    file.seek(0)
    for other in (copy.deepcopy(flat), pickle.loads(pickle.dumps(flat)), torch.load(file)):
        assert isinstance(other, FlatParameter)
        assert isinstance(other, nn.Parameter)
        torch.testing.assert_close(other.to_local(), flat.to_local())
        with torch.no_grad():
            other.add_(1)
        with pytest.raises(StateError, match="this FlatParameter is a copy"):
            other.shard_metadata()
    assert flat.shard_metadata().param_names, "it knows still"


@on_threads(2, way=("flat_param", "orig_params", "flat_copied"))
def test_a_wrapped_model_may_be_converted(way):
    plain, model = made(), sharded(way)
    backward(model)
    model.zero_grad()
    kept = list(model.parameters())
    optimizers = [torch.optim.SGD(trained(each), lr=0.1) for each in (plain, model)]
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float64):
        plain.to(dtype)
        assert model.to(dtype) is model
        assert all(new is old for new, old in zip(model.parameters(), kept, strict=True)), "the optimizer has them"
        assert {each.dtype for each in model.parameters()} == {dtype}
        assert_holds(model, plain)
        if way == "flat_param":
            assert all(isinstance(each, FlatParameter) for each in kept)
            assert model.block._flat_param.shard_metadata().param_names
        if dtype is torch.float64:
            steps(plain, model, optimizers, [1])
            assert_close(model, plain)
            plain.load_state_dict(wholes(model))
