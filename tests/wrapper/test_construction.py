"""What may be wrapped, on which ranks and from which values, and what does a wrapped module answer to?"""

import copy
import functools
import gc
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from sherd import RaggedDTensor, fully_shard
from sherd.api.module import FSDPModule
from sherd.api.wrapper import FullyShardedDataParallel
from sherd.engine.state.flat import FlatParameter
from sherd.errors import ModuleError, PolicyTypeError, WrapperStateError
from sherd.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from tests.support.models import WIDTH, Block, build, noise
from tests.support.on_ranks import on_threads
from tests.support.ranks import RanksFailed
from tests.support.training import Recipe, train_plain
from tests.wrapper.training import (
    FULL_SHARD,
    NO_SHARD,
    SHARD_GRAD_OP,
    assert_all_trained_plainly,
    assert_trained_as,
    plain_runs,
    replace,
    seeded,
    steps_wrapped,
    train_wrapped,
    whole_values,
)

BLOCKS = ModuleWrapPolicy({Block})
both_kinds = pytest.mark.parametrize("orig", [True, False], ids=["orig", "flat"])


def by_blocks(model, **options):
    return FullyShardedDataParallel(model, auto_wrap_policy=BLOCKS, **options)


def plain_values(name="mlp"):
    return {name: each.detach() for name, each in build(name).named_parameters()}


# Values


def built_on_meta(how, orig):
    """Wrapped on the meta device; what `param_init_fn` was called with, and the whole values then."""
    called = []

    def give(module):
        called.append(type(module).__name__)
        module.to_empty(device="cpu", recurse=False)
        for each in module.parameters(recurse=False):
            nn.init.ones_(each)

    model = by_blocks(
        build("mlp", device="meta"), param_init_fn=give if how == "function" else None, use_orig_params=orig
    )
    return called, whole_values(model), steps_wrapped(model, Recipe("mlp", steps=1), 0).losses


@both_kinds
def test_a_function_gives_values_to_what_is_on_the_meta_device(threads, orig):
    for called, values, losses in threads(2).run(built_on_meta, "function", orig):
        # Each module once, the units' first.
        assert sorted(called) == sorted(type(each).__name__ for each in build("mlp").modules())
        assert all(torch.equal(each, torch.ones_like(each)) for each in values.values())
        assert len(losses) == 1


def test_reset_parameters_gives_values_to_what_is_on_the_meta_device(world):
    runs = world(2).run(built_on_meta, "method", False)
    for _, values, _ in runs:
        assert {name: each.shape for name, each in values.items()} == {n: e.shape for n, e in plain_values().items()}
        assert 0 < values["blocks.1.up.weight"].abs().max() <= WIDTH**-0.5


def built_with_other_seeds(orig, strategy):
    model = build("buffers", seed=dist.get_rank())
    model.layers[1].running_mean.fill_(dist.get_rank() + 1)
    wrapped = by_blocks(model, sync_module_states=True, use_orig_params=orig, sharding_strategy=strategy)
    return whole_values(wrapped), dict(wrapped.named_buffers())


@both_kinds
def test_all_ranks_take_the_values_of_rank_0(world, orig):
    for strategy in (FULL_SHARD, NO_SHARD):
        for values, buffers in world(2).run(built_with_other_seeds, orig, strategy):
            torch.testing.assert_close(values, plain_values("buffers"), rtol=0, atol=0)
            assert torch.equal(buffers["layers.1.running_mean"], torch.ones(WIDTH))


# Ranks


def groups_of_some():
    """Two of three ranks train together, the third alone, each with the group it is in; then with a mesh of all."""
    pair, single = dist.new_group([0, 1]), dist.new_group([2])
    group = single if dist.get_rank() == 2 else pair
    model = by_blocks(build("mlp"), process_group=group, device_id="cpu")
    of_group = steps_wrapped(model, Recipe("mlp", steps=2, max_norm=1.0), dist.get_rank(group))
    facts = (model.rank, model.world_size, model.process_group is group, model.compute_device.type)
    mesh = init_device_mesh("cpu", (3,))
    return of_group, facts, train_wrapped(Recipe("uneven", steps=2), device_mesh=mesh, device_id=torch.device("cpu"))


def test_some_ranks_train_by_themselves(world):
    runs = world(3).run(groups_of_some)
    recipe = Recipe("mlp", steps=2, max_norm=1.0)
    for rank, plain in enumerate((*plain_runs(recipe, 2), *plain_runs(recipe, 1))):
        assert_trained_as(runs[rank][0], plain)
    assert [run[1] for run in runs] == [(0, 2, True, "cpu"), (1, 2, True, "cpu"), (0, 1, True, "cpu")]
    assert_all_trained_plainly([run[2] for run in runs], Recipe("uneven", steps=2))


@both_kinds
def test_one_rank_trains_too(threads, orig):
    recipe = Recipe("nested", steps=2, max_norm=1.0)
    for strategy in (FULL_SHARD, SHARD_GRAD_OP, NO_SHARD):
        runs = threads(1).run(train_wrapped, recipe, sharding_strategy=strategy, use_orig_params=orig)
        assert_all_trained_plainly(runs, recipe)


# Which modules


def wrap_oddly():
    """A module list around units, no parameters at all, and a wrapper around a wrapper: each runs forward."""
    blocks = nn.ModuleList(FullyShardedDataParallel(each) for each in build("mlp").blocks)
    with pytest.warns(UserWarning, match="a ModuleList was wrapped"):
        listed = FullyShardedDataParallel(blocks)
    through = noise(0, 0)
    for block in listed:
        through = block(through)
    empty = FullyShardedDataParallel(nn.ReLU())
    twice = FullyShardedDataParallel(FullyShardedDataParallel(build("mlp")))
    outputs = [through, empty(noise(0, 0)), twice(noise(0, 0))]
    sum(each.sum() for each in outputs).backward()
    return outputs, list(twice.state_dict()), len(list(twice.parameters()))


def test_lists_empty_modules_and_wrappers_may_be_wrapped(world):  # threads share the list of what was warned of
    model, x = build("mlp"), noise(0, 0)
    expected = [model.blocks[2](model.blocks[1](model.blocks[0](x))), x.relu(), model(x)]
    for outputs, names, num_flat in world(2).run(wrap_oddly):
        torch.testing.assert_close(outputs, [each.detach() for each in expected])
        assert names == list(plain_values())
        assert num_flat == 1


def policy_over_wrapped():
    model = build("mlp")
    replace(model, model.blocks[0], FullyShardedDataParallel(model.blocks[0]))
    return by_blocks(model)


def test_a_policy_takes_no_module_that_is_wrapped_already(threads):
    with pytest.raises(RanksFailed) as failed:
        threads(2).run(policy_over_wrapped)
    for kind, text in failed.value.errors.values():
        assert kind == ModuleError.__name__
        assert "blocks.0" in text


def wrap_nothing():
    return FullyShardedDataParallel(torch.ones(2))


def test_only_modules_are_wrapped(threads):
    with pytest.raises(RanksFailed) as failed:
        threads(1).run(wrap_nothing)
    assert failed.value.errors[0] == (
        PolicyTypeError.__name__,
        "FullyShardedDataParallel expects a module, got a Tensor",
    )


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


def train_both_front_ends(recipe, wrap, orig):
    model = wrap(build(recipe.model), use_orig_params=orig)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    losses, norms = [], []
    for step in range(recipe.steps):
        loss = model.loss(model(*model.make_inputs(step, dist.get_rank())))
        loss.backward()
        losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), recipe.max_norm))
        optimizer.step()
        optimizer.zero_grad()
    norms = [each.full_tensor() if isinstance(each, DTensor) else each for each in norms]
    return losses, norms, whole_values(model)


@both_kinds
@pytest.mark.parametrize("wrap", [wrap_below_sharded, wrap_above_sharded])
def test_wrappers_and_fully_shard_go_together(threads, wrap, orig):
    recipe = Recipe("mlp", "adamw", steps=2, max_norm=0.5)
    runs = threads(2).run(train_both_front_ends, recipe, wrap, orig)
    for (losses, norms, values), plain in zip(runs, train_plain(recipe, 2), strict=True):
        torch.testing.assert_close(losses, plain.losses)
        torch.testing.assert_close([each.item() for each in norms], plain.norms)
        torch.testing.assert_close(values, plain.params, rtol=1e-5, atol=1e-6)


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


def look_around(orig):
    model = by_blocks(seeded(Answers), use_orig_params=orig)
    chain = FullyShardedDataParallel(nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU()), use_orig_params=orig)
    with pytest.raises(AttributeError, match="'Answers' object has no attribute 'nothing'"):
        model.nothing  # noqa: B018
    with pytest.raises((TypeError, AttributeError)):
        model[0]
    return {
        "attribute": (model.answer, model.told(1), model.scale.item()),
        "module": (type(model.module), type(model.block), type(model.block.module), type(chain[0]), type(chain[1])),
        "both": isinstance(model, FSDPModule),
        "parameters": {name: type(each) for name, each in model.named_parameters()},
        "prefixed": [name for name, _ in model.block.named_parameters(prefix="over")],
        "buffers": [name for name, _ in model.named_buffers()],
        "state": list(model.state_dict()),
        "output": model(noise(0, 0), factor=2.0, extra="kept"),
        "printed": repr(model),
        "modules": [each is model for each in FullyShardedDataParallel.fsdp_modules(model)],
        "roots": [each is model for each in FullyShardedDataParallel.fsdp_modules(model, root_only=True)],
        "below": len(FullyShardedDataParallel.fsdp_modules(nn.ModuleList([model, chain]), root_only=True)),
        "is_root": (model.check_is_root(), model.block.check_is_root()),
    }


@both_kinds
def test_a_wrapper_answers_as_the_module_it_wraps(threads, orig):
    plain = seeded(Answers)
    names = [name for name, _ in plain.named_parameters()]
    for found in threads(2).run(look_around, orig):
        wrapper = FullyShardedDataParallel
        assert found["attribute"] == (42, 43, 1.0)
        assert found["module"] == (Answers, wrapper, Block, nn.Linear, nn.ReLU)
        assert found["both"]
        assert found["parameters"] == (
            dict.fromkeys(names, RaggedDTensor) if orig else {"block._flat_param": FlatParameter}
        )
        assert (
            found["prefixed"] == ["over." + n.removeprefix("block.") for n in names] if orig else ["over._flat_param"]
        )
        assert found["buffers"] == ["scale"]
        assert found["state"] == list(plain.state_dict())
        torch.testing.assert_close(found["output"]["hidden"], plain(noise(0, 0), factor=2.0)["hidden"].detach())
        assert found["output"]["extra"] == "kept"
        assert found["printed"].startswith("FullyShardedDataParallel(")
        assert "(block): FullyShardedDataParallel(" in found["printed"]
        assert "(up): Linear(in_features=8, out_features=16, bias=True)" in found["printed"]
        assert found["modules"] == [True, False]
        assert found["roots"] == [True]
        assert found["below"] == 2
        assert found["is_root"] == (True, False)


def apply_everywhere(orig):
    """Every linear module's weight is filled by `apply`; the shapes it saw."""
    seen = []

    def fill(module):
        if isinstance(module, nn.Linear):
            seen.append(tuple(module.weight.shape))
            nn.init.constant_(module.weight, 0.5)

    model = by_blocks(build("mlp"), use_orig_params=orig)
    same = model.apply(fill) is model
    values = whole_values(model)
    with FullyShardedDataParallel.summon_full_params(model), pytest.raises(WrapperStateError, match=r"apply\(\)"):
        model.apply(fill)
    return same, seen, values


@both_kinds
def test_apply_shows_whole_parameters_and_keeps_what_it_changes(threads, orig):
    for same, seen, values in threads(2).run(apply_everywhere, orig):
        plain = build("mlp")
        assert same
        assert sorted(seen) == sorted(tuple(each.weight.shape) for each in plain.modules() if hasattr(each, "weight"))
        for name, each in plain.named_parameters():
            expected = torch.full_like(each, 0.5) if name.endswith("weight") else each.detach()
            assert torch.equal(values[name], expected), name


def inner_calls(method):
    model = by_blocks(build("mlp"))
    model(noise(0, 0))
    inner = model.blocks[1]
    if method == "no_sync":
        with inner.no_sync():
            pass
    else:
        inner.clip_grad_norm_(1.0)


@pytest.mark.parametrize("method", ["no_sync", "clip_grad_norm_"])
def test_an_inner_unit_refuses_what_is_the_roots(threads, method):
    with pytest.raises(RanksFailed) as failed:
        threads(2).run(inner_calls, method)
    for kind, text in failed.value.errors.values():
        assert kind == WrapperStateError.__name__
        assert f"`{method}()` on inner FSDP instances is not supported" in text
        assert "blocks.1" in text


# The optimizer


def optimizer_built_before(orig):
    model = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = by_blocks(model, use_orig_params=orig)
    wrapped.loss(wrapped(noise(0, dist.get_rank()))).backward()
    optimizer.step()
    return whole_values(wrapped)


@pytest.mark.parametrize("orig", [True, False], ids=["orig", "flat"])
def test_an_optimizer_built_before_takes_over_what_its_parameters_became(threads, orig):
    recipe = Recipe("mlp", optimizer="sgd", steps=1)
    for values, plain in zip(threads(2).run(optimizer_built_before, orig), train_plain(recipe, 2), strict=True):
        torch.testing.assert_close(values, plain.params, rtol=1e-5, atol=1e-6)


# Copies


@on_threads(2)
def test_a_wrapper_is_neither_copied_nor_pickled():
    model = by_blocks(build("mlp"))
    for each in (model, nn.Sequential(model)):
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(ModuleError, match=r"cannot be (deep-copied|pickled).*state_dict"):
                duplicate(each if duplicate is not copy.copy else model)


def modules_left(policy, orig):
    """The modules that are still there when a trained model was deleted, before any garbage collection."""
    gc.collect()
    gc.disable()
    try:
        model = FullyShardedDataParallel(build("mlp"), auto_wrap_policy=policy, use_orig_params=orig)
        for _ in range(2):
            model.loss(model(noise(0, 0))).backward()
        whole_values(model)
        modules = {name: weakref.ref(each) for name, each in model.named_modules()}
        del model
        return [name for name, ref in modules.items() if ref() is not None]
    finally:
        gc.enable()


@both_kinds
def test_a_deleted_model_is_gone_at_once(threads, orig):
    for policy in (BLOCKS, functools.partial(size_based_auto_wrap_policy, min_num_params=100)):
        assert threads(1).run(modules_left, policy, orig) == [[]]


def doubled(orig):
    """Cast after wrapping, and again after the first step."""
    model = by_blocks(build("mlp"), use_orig_params=orig)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for dtype in (torch.float64, torch.float32):
        owned = [id(each) for each in model.parameters()]
        model.to(dtype)
        assert owned == [id(each) for each in model.parameters()]
        model.loss(model(noise(0, dist.get_rank()).to(dtype))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole_values(model)


@both_kinds
def test_a_wrapped_model_may_be_cast(threads, orig):
    plain = build("mlp")
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        for rank in range(2):
            (plain.loss(plain(noise(0, rank))) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for values in threads(2).run(doubled, orig):
        torch.testing.assert_close(values, {name: each.detach() for name, each in plain.named_parameters()})


# Compilation


def train_compiled(recipe, orig):
    model = build(recipe.model)
    for block in model.blocks:
        block.compile(fullgraph=True, backend="eager")
    return steps_wrapped(by_blocks(model, use_orig_params=orig), recipe, dist.get_rank())


@both_kinds
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_wrapped_blocks_may_be_compiled(world, orig):
    recipe = Recipe("mlp", steps=2)
    assert_all_trained_plainly(world(2).run(train_compiled, recipe, orig), recipe)
