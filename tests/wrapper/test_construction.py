"""What may be wrapped, on which ranks and from which values, and what a wrapped module answers to."""

import copy
import functools
import gc
import pickle
import weakref
from dataclasses import replace as with_other

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from sherd import RaggedDTensor, fully_shard
from sherd.api.module import FSDPModule
from sherd.engine.state.flat import FlatParameter
from sherd.errors import ModuleError, WrapperStateError
from sherd.fsdp1.arguments import WrapperArguments
from sherd.fsdp1.wrapper import FullyShardedDataParallel
from sherd.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from tests.support.comparing import assert_same, whole_params
from tests.support.models import WIDTH, Block, build, noise
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.sharding import replace
from tests.support.training import Recipe, made, steps_sharded, train_plain
from tests.wrapper.training import (
    BOTH_KINDS,
    FULL_SHARD,
    NO_SHARD,
    SHARD_GRAD_OP,
    assert_all_trained_plainly,
    assert_trained_as,
    steps_wrapped,
    train_wrapped,
    wrap_blocks,
)

# Values


@pytest.mark.parametrize(("device", "asked", "depth"), [("cpu", False, 0), ("cpu", True, 1), ("cuda", False, 1)])
def test_forward_runs_ahead_if_it_is_asked_to_or_computes_on_a_device_that_the_host_is_ahead_of(device, asked, depth):
    choices = WrapperArguments(device_id=torch.device(device), forward_prefetch=asked)
    assert choices.prefetch.forward_depth == depth


@BOTH_KINDS
@on_threads(2)
def test_a_function_gives_values_to_what_is_on_the_meta_device(orig):
    called = []

    def give(module):
        called.append(type(module).__name__)
        module.to_empty(device="cpu", recurse=False)
        for each in module.parameters(recurse=False):
            nn.init.ones_(each)

    model = wrap_blocks(build("mlp", device="meta"), param_init_fn=give, use_orig_params=orig)
    # Each module once, the units' first.
    assert sorted(called) == sorted(type(each).__name__ for each in build("mlp").modules())
    assert all(torch.equal(each, torch.ones_like(each)) for each in whole_params(model).values())
    steps_wrapped(model, Recipe("mlp", steps=1), 0)


@on_threads(2)
def test_reset_parameters_gives_values_to_what_is_on_the_meta_device():
    values = whole_params(wrap_blocks(build("mlp", device="meta")))
    assert {name: each.shape for name, each in values.items()} == {
        name: each.shape for name, each in build("mlp").named_parameters()
    }
    assert 0 < values["blocks.1.up.weight"].abs().max() <= WIDTH**-0.5


@BOTH_KINDS
@on_threads(2, strategy=(FULL_SHARD, NO_SHARD))
def test_all_ranks_take_the_values_of_rank_0(orig, strategy):
    model = build("buffers", seed=dist.get_rank())
    model.layers[1].running_mean.fill_(dist.get_rank() + 1)
    wrapped = wrap_blocks(model, sync_module_states=True, use_orig_params=orig, sharding_strategy=strategy)
    assert_same(whole_params(wrapped), whole_params(build("buffers")))
    assert torch.equal(dict(wrapped.named_buffers())["layers.1.running_mean"], torch.ones(WIDTH))


# Ranks


@on_threads(3)
def test_some_ranks_train_by_themselves():
    """Two of three ranks train together, the third alone, each with the group it is in; then with a mesh of all."""
    rank = dist.get_rank()
    pair, single = dist.new_group([0, 1]), dist.new_group([2])
    group = single if rank == 2 else pair
    model = wrap_blocks(build("mlp"), process_group=group, device_id="cpu")
    assert (model.rank, model.world_size) == [(0, 2), (1, 2), (0, 1)][rank]
    assert model.process_group is group
    assert model.compute_device.type == "cpu"
    recipe = Recipe("mlp", steps=2, max_norm=1.0)
    assert_trained_as(steps_wrapped(model, recipe, model.rank), train_plain(recipe, model.world_size)[model.rank])
    recipe, mesh = Recipe("uneven", steps=2), init_device_mesh("cpu", (3,))
    run = train_wrapped(recipe, device_mesh=mesh, device_id=torch.device("cpu"))
    assert_trained_as(run, train_plain(recipe, 3)[rank])


@BOTH_KINDS
def test_one_rank_trains_too(threads, orig):
    recipe = Recipe("nested", steps=2, max_norm=1.0)
    for strategy in (FULL_SHARD, SHARD_GRAD_OP, NO_SHARD):
        runs = threads(1).run(train_wrapped, recipe, sharding_strategy=strategy, use_orig_params=orig)
        assert_all_trained_plainly(runs, recipe)


# Which modules


@on_processes(2)  # threads share the list of what was warned of
def test_lists_empty_modules_and_wrappers_may_be_wrapped():
    """A module list around units, no parameters at all, and a wrapper around a wrapper: each runs forward."""
    plain, x = build("mlp"), noise(0, 0)
    with pytest.warns(UserWarning, match="a ModuleList was wrapped"):
        listed = FullyShardedDataParallel(nn.ModuleList(FullyShardedDataParallel(each) for each in build("mlp").blocks))
    through = x
    for block in listed:
        through = block(through)
    twice = FullyShardedDataParallel(FullyShardedDataParallel(build("mlp")))
    outputs = [through, FullyShardedDataParallel(nn.ReLU())(x), twice(x)]
    torch.testing.assert_close(outputs, [plain.blocks[2](plain.blocks[1](plain.blocks[0](x))), x.relu(), plain(x)])
    sum(each.sum() for each in outputs).backward()
    assert list(twice.state_dict()) == list(plain.state_dict())
    assert len(list(twice.parameters())) == 1


# Both front ends in one model


def wrap_below_sharded(model, **options):
    """Blocks are wrapped, what is around them is sharded by `fully_shard`."""
    for block in list(model.blocks):
        replace(model, block, FullyShardedDataParallel(block, **options))
    return fully_shard(model)


def wrap_above_sharded(model, **options):
    """Blocks are sharded by `fully_shard`, what is around them is wrapped."""
    for block in model.blocks:
        fully_shard(block)
    return FullyShardedDataParallel(model, **options)


@BOTH_KINDS
@pytest.mark.parametrize("wrap", [wrap_below_sharded, wrap_above_sharded])
@on_threads(2)
def test_wrappers_and_fully_shard_go_together(wrap, orig):
    recipe, rank = Recipe("mlp", "adamw", steps=2, max_norm=0.5), dist.get_rank()
    run = steps_sharded(wrap(build("mlp"), use_orig_params=orig), recipe, rank)
    assert_trained_as(run if orig else with_other(run, grads=[]), train_plain(recipe, 2)[rank])


# What a wrapper answers to


class Answers(nn.Module):
    """Has an attribute, a method and a buffer of its own."""

    answer = 42

    def __init__(self):
        super().__init__()
        self.block = Block()
        self.register_buffer("scale", torch.ones(1))

    def told(self, x):
        return x + self.answer

    def forward(self, x, *, factor=1.0, **more):
        return {"hidden": self.block(x) * factor * self.scale, **more}


@BOTH_KINDS
@on_threads(2)
def test_a_wrapper_answers_as_the_module_it_wraps(orig):
    plain, wrapper = made(Answers), FullyShardedDataParallel
    model = wrap_blocks(made(Answers), use_orig_params=orig)
    chain = wrapper(nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU()), use_orig_params=orig)
    with pytest.raises(AttributeError, match="'Answers' object has no attribute 'nothing'"):
        model.nothing  # noqa: B018
    with pytest.raises((TypeError, AttributeError)):
        model[0]
    assert (model.answer, model.told(1), model.scale.item()) == (42, 43, 1.0)
    modules = (model.module, model.block, model.block.module, chain[0], chain[1])
    assert [type(each) for each in modules] == [Answers, wrapper, Block, nn.Linear, nn.ReLU]
    assert isinstance(model, FSDPModule)
    names = [name for name, _ in plain.named_parameters()]
    kinds = dict.fromkeys(names, RaggedDTensor) if orig else {"block._flat_param": FlatParameter}
    assert {name: type(each) for name, each in model.named_parameters()} == kinds
    below = ["over." + name.removeprefix("block.") for name in names] if orig else ["over._flat_param"]
    assert [name for name, _ in model.block.named_parameters(prefix="over")] == below
    assert [name for name, _ in model.named_buffers()] == ["scale"]
    assert list(model.state_dict()) == list(plain.state_dict())
    output = model(noise(0, 0), factor=2.0, extra="kept")
    torch.testing.assert_close(output["hidden"], plain(noise(0, 0), factor=2.0)["hidden"])
    assert output["extra"] == "kept"
    assert repr(model).startswith("FullyShardedDataParallel(")
    assert "(block): FullyShardedDataParallel(" in repr(model)
    assert "(up): Linear(in_features=8, out_features=16, bias=True)" in repr(model)
    assert [each is model for each in wrapper.fsdp_modules(model)] == [True, False]
    assert [each is model for each in wrapper.fsdp_modules(model, root_only=True)] == [True]
    assert len(wrapper.fsdp_modules(nn.ModuleList([model, chain]), root_only=True)) == 2
    assert (model.check_is_root(), model.block.check_is_root()) == (True, False)


@BOTH_KINDS
@on_threads(2)
def test_apply_shows_whole_parameters_and_keeps_what_it_changes(orig):
    """Every linear module's weight is filled by `apply`."""
    seen = []

    def fill(module):
        if isinstance(module, nn.Linear):
            seen.append(tuple(module.weight.shape))
            nn.init.constant_(module.weight, 0.5)

    plain, model = build("mlp"), wrap_blocks(build("mlp"), use_orig_params=orig)
    assert model.apply(fill) is model
    assert sorted(seen) == sorted(tuple(each.weight.shape) for each in plain.modules() if hasattr(each, "weight"))
    assert_same(whole_params(model), whole_params(plain.apply(fill)))
    with FullyShardedDataParallel.summon_full_params(model), pytest.raises(WrapperStateError, match=r"apply\(\)"):
        model.apply(fill)


# Copies


@on_threads(2)
def test_a_wrapper_is_neither_copied_nor_pickled():
    model = wrap_blocks(build("mlp"))
    for each in (model, nn.Sequential(model)):
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(ModuleError, match=r"cannot be (deep-copied|pickled).*state_dict"):
                duplicate(each if duplicate is not copy.copy else model)


@BOTH_KINDS
@on_threads(1, policy=(ModuleWrapPolicy({Block}), functools.partial(size_based_auto_wrap_policy, min_num_params=100)))
def test_a_deleted_model_is_gone_at_once(orig, policy):
    """Before any garbage collection, after it was trained."""
    gc.collect()
    gc.disable()
    try:
        model = FullyShardedDataParallel(build("mlp"), auto_wrap_policy=policy, use_orig_params=orig)
        for _ in range(2):
            model.loss(model(noise(0, 0))).backward()
        whole_params(model)
        modules = {name: weakref.ref(each) for name, each in model.named_modules()}
        del model
        assert [name for name, ref in modules.items() if ref() is not None] == []
    finally:
        gc.enable()


# Compilation


@BOTH_KINDS
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@on_processes(2)
def test_wrapped_blocks_may_be_compiled(orig):
    model, recipe, rank = build("mlp"), Recipe("mlp", steps=2), dist.get_rank()
    for block in model.blocks:
        block.compile(fullgraph=True, backend="eager")
    run = steps_wrapped(wrap_blocks(model, use_orig_params=orig), recipe, rank)
    assert_trained_as(run, train_plain(recipe, 2)[rank])
