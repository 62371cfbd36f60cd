"""`set_keep_unsharded_storage`: unsharded parameters have the same addresses in every step, for a captured graph."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor

import sherd
from sherd import Flat, MixedPrecisionPolicy
from sherd.engine import Unit
from tests.support.models import build
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.sharding import sharded
from tests.support.training import Recipe, assert_same_run, train_plain, train_sharded
from tests.support.versions import needs_torch

WIDTH = 32
OPTIONS = {
    "rows": {},
    "kept after forward": {"reshard_after_forward": False},
    "flat": {"placement": Flat()},
    "flat, kept after forward": {"placement": Flat(), "reshard_after_forward": False},
    "a part": {"reshard_after_forward": 1},
    "low precision": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "flat, low precision": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16), "placement": Flat()},
}


def stack(by=sherd, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    for layer in (model[0], model[2]):
        by.fully_shard(layer, **options)
    return by.fully_shard(model, **options)


def addresses(model, seen):
    """Has `seen` get the addresses of the layers' parameters in each forward."""
    for layer in (model[0], model[2]):
        layer.register_forward_hook(lambda layer, *_: seen.append([each.data_ptr() for each in layer.parameters()]))


def steps(model, number=4):
    seen, takes = [], []
    addresses(model, seen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(number):
        model(torch.ones(2, WIDTH)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        takes.append(torch.rand(3 * WIDTH * WIDTH))  # memory that has been freed is taken by others
    return [seen[at : at + 2] for at in range(0, len(seen), 2)]


@on_threads(2)
def test_addresses_stay_the_same_and_modules_show_shards_between_steps():
    for name, options in OPTIONS.items():
        model = stack(**options)
        model.set_keep_unsharded_storage(True)
        first, *later = steps(model)
        assert all(each == first for each in later), name
        assert all(isinstance(each, DTensor) for each in model.parameters()), name


@on_threads(2)
def test_a_model_trains_as_one_whose_memory_is_freed():
    for model in ("mlp", "uneven", "tied_inside", "checkpoint_outside"):
        for options in ({}, {"placement": Flat()}, {"reshard_after_forward": False}):
            recipe = Recipe(model)
            run = train_sharded(recipe, prepare=lambda each: each.set_keep_unsharded_storage(True), **options)
            assert_same_run(run, train_plain(recipe, 2)[dist.get_rank()])


def unsharded_bytes(model):
    buffers = [buffer for unit in Unit.below(model) for each in unit.weights for buffer in each.made.buffers]
    return sum(buffer.tensor.untyped_storage().nbytes() for buffer in buffers)


@on_threads(2)
def test_memory_is_that_of_all_unsharded_parameters_until_it_is_switched_off():
    for placement in (None, Flat()):
        model = stack(placement=placement)
        whole = 2 * (WIDTH * WIDTH + WIDTH) * 4
        model.set_keep_unsharded_storage(True)
        steps(model, 2)
        assert unsharded_bytes(model) >= whole
        model.set_keep_unsharded_storage(False, recurse=False)
        steps(model, 1)
        assert unsharded_bytes(model) >= whole, "the layers have their own"
        model.set_keep_unsharded_storage(False)
        steps(model, 1)
        assert unsharded_bytes(model) == 0


@on_threads(2)
def test_a_report_predicts_the_memory_that_is_kept():
    for placement in (None, Flat()):
        model = sharded(build("mlp"), placement=placement)
        before = sherd.memory_report(model)
        model.set_keep_unsharded_storage(True)
        inputs = model.make_inputs(0, dist.get_rank())
        for _ in range(2):
            with sherd.track_memory(model) as seen:
                model.loss(model(*inputs)).backward()
            model.zero_grad()
        after = sherd.memory_report(model)
        assert after.predicted_peak > before.predicted_peak
        assert seen.nbytes == after.predicted_peak


@needs_torch(2, 15, "torch's own fully_shard has it since then")
@on_processes(2)
def test_torchs_own_keeps_the_same():
    model = stack(fsdp)
    model.set_keep_unsharded_storage(True)
    first, *later = steps(model)
    assert all(each == first for each in later)
