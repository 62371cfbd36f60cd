"""Parameters that stay whole on every rank, in units that shard the others, train as in one process."""

import itertools
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import sherd
from sherd import CommPolicy, CPUOffloadPolicy, MixedPrecisionPolicy
from sherd._torch import imagined_ranks
from sherd.api.placements import PRESETS
from sherd.comm.host.gloo import Gloo
from sherd.comm.streams import HostStreams, RecordingStreams, use_streams
from sherd.comm.transport import SingleCalls
from sherd.errors import PlacementError, PolicyError, PolicyTypeError
from sherd.tools.plan.sharding import traffic_of
from tests.api.own_collectives import GatherByList, ReduceByAllReduce
from tests.api.test_gathers_itself import in_halves
from tests.divergence.programs import comm_errors
from tests.strategies import routed, test_experts
from tests.strategies.cases import CUTS, Case, assert_each_trains, plainly, sharded, train
from tests.support.comparing import assert_named_close, assert_refused, assert_same, whole, whole_params
from tests.support.models import build, noise
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.refusals import refusal
from tests.support.sharding import sharded as sharded_as
from tests.support.training import Recipe

BELOW = 100
"""Bytes: biases and norms are smaller, matrices larger."""
SMALL = {"replicate_below": BELOW}
ALL = {"replicate_below": 1 << 20}
TORCH = CommPolicy("torch")


def is_small(parameter):
    return parameter.nbytes < BELOW


def replicates_small(parameter):
    """As a `shard_placement_fn`."""
    return Replicate() if is_small(parameter) else None


def of(model, **words):
    """Momentum, because it is state; a clipped norm counts each gradient once."""
    return Recipe(model, "momentum", **{"max_norm": 0.1} | words)


# Under everything that shards the rest


@pytest.mark.parametrize("turn", range(2))
@on_processes(4, timeout=240)
def test_every_strategy_trains_as_one_process_under_every_cut(turn):
    cuts = list(CUTS)
    pairs = [(preset, cuts[(at + step) % len(cuts)]) for at, preset in enumerate(PRESETS) for step in range(3)]
    assert_each_trains(
        {each: Case(of("uneven"), *each, options=SMALL if each[1] != "columns" else ALL) for each in pairs[turn::2]}
    )


MODELS = {
    "tied_across": "zero3",
    "tied_to_root": "hfsdp",
    "frozen": "hsdp",
    "mixed_double": "zero2",
    "scalar_parameter": "zero3",
    "branching": "zero3",
    "adapted": "hsdp",
    "list_unit": "zero1",
    "transformer": "zero3",
}


@on_processes(4, timeout=240)
def test_models_of_every_kind_train_as_one_process():
    assert_each_trains({each: Case(of(each), MODELS[each], options=SMALL) for each in MODELS})


@on_threads(1, 2, 3)
def test_any_number_of_ranks_trains_as_one_process():
    shape = (dist.get_world_size(),)
    for cut in ("rows", "flat"):
        run = Case(of("uneven"), "zero3", cut, shape, options=SMALL).run()
        assert_named_close(run.params, plainly(of("uneven"), shape[0])[0].params, cut, 1e-5, 1e-6)


OFFLOADED = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
CHOICES = {
    "torch": ("mlp", "hfsdp", {"comm_policy": TORCH}, {}),
    "gathered one by one": ("mlp", "zero3", {"comm_policy": CommPolicy("coalesced")}, {}),
    "shared memory": ("mlp", "hsdp", {"comm_policy": CommPolicy("shared_memory")}, {}),
    "joined": ("mlp", "zero3", {"comm_policy": CommPolicy(divergence="join")}, {}),
    "offloaded": ("uneven", "hsdp", OFFLOADED, {}),
    "recomputed": ("checkpoint_outside", "zero3", {}, {}),
    "recomputed, reentrant": ("reentrant_inside", "hsdp", {}, {}),
    "shrunk": ("nested", "zero3", {"reshard_after_forward": 2}, {}),
    "kept to backward": ("nested", "hsdp", {"reshard_after_forward": False}, {}),
    "accumulated": ("mlp", "zero3", {}, {"accumulate": True}),
    "accumulated copies": ("mlp", "hsdp", {}, {"accumulate": True}),
    "stepped flat": ("mlp", "hfsdp", {}, {"flatten": True}),
    "all of a unit": ("mlp", "zero3", ALL, {}),
    "all of a unit, shrunk": ("mlp", "zero3", ALL | {"reshard_after_forward": 2}, {}),
    "by the function": ("mlp", "zero3", {"shard_placement_fn": replicates_small, "replicate_below": None}, {}),
}


@pytest.mark.parametrize("turn", range(2))
@on_processes(4, timeout=240)
def test_transports_offload_recomputation_resharding_and_accumulation_go_with_them(turn):
    cases = {}
    for at, (choice, (model, levels, options, how)) in enumerate(CHOICES.items()):
        recipe = of(model, micro_batches=3 if "accumulate" in how else 1)
        cases[choice] = Case(recipe, levels, ("rows", "flat", "whole")[at % 3], options=SMALL | options, how=how)
    assert_each_trains(dict(list(cases.items())[turn::2]))


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
@on_processes(4)
def test_low_precision_computes_what_it_does_without_them(reduce_dtype):
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)
    found = []
    for options in ({}, SMALL, ALL):
        model = sharded(build("mlp"), "zero3", "rows", mp_policy=policy, **options)
        found.append(train(model, of("mlp")).params)
        model.loss(model(*model.make_inputs(0, dist.get_rank()))).backward()
        assert {each.grad.dtype for each in model.parameters()} == {torch.float32}
    for params in found[1:]:
        assert_named_close(params, found[0], "parameter", 0, 1e-6 if reduce_dtype is torch.float32 else 3e-3)


# What they are


@on_threads(4, preset=("zero3", "hsdp", "hfsdp", "zero1"))
def test_each_is_a_replicated_dtensor_on_the_mesh_of_the_others_and_so_is_its_gradient(preset):
    model = sharded(build("mlp"), preset, "rows", **SMALL)
    model.loss(model(*model.make_inputs(0, dist.get_rank()))).backward()
    meshes = {each.device_mesh for each in model.parameters()}
    assert len(meshes) == 1, "torch's operations on several of them ask for one mesh"
    for name, each in model.named_parameters():
        is_whole = all(placement.is_replicate() for placement in each.placements)
        assert is_whole == is_small(each), name
        assert each.grad.placements == each.placements, name
        assert not is_whole or each.to_local().shape == each.grad.to_local().shape == each.shape, name


@on_threads(4, preset=("zero3", "hsdp", "hfsdp"), cut=("rows", "flat"))
def test_torchs_clipping_counts_each_gradient_once(preset, cut):
    model = sharded(build("mlp"), preset, cut, **SMALL)
    model.loss(model(*model.make_inputs(0, dist.get_rank()))).backward()
    norm = sherd.clip_grad_norm_(model.parameters(), 1e9)
    torch.testing.assert_close(whole(nn.utils.clip_grad_norm_(model.parameters(), 1e9)), norm)


@on_threads(2)
def test_the_function_wins_over_the_number_of_bytes_and_none_leaves_it_to_that():
    answers = {"up.weight": Replicate(), "up.bias": Shard(0)}
    block = build("mlp").blocks[0]
    by_id = {id(each): answers.get(name) for name, each in block.named_parameters()}
    sherd.fully_shard(block, shard_placement_fn=lambda each: by_id[id(each)], replicate_below=BELOW)
    placed = {name: each.placements[0] for name, each in block.named_parameters()}
    assert placed == {
        "up.weight": Replicate(),
        "up.bias": Shard(0),
        "down.weight": Shard(0),
        "down.bias": Replicate(),
    }


@on_threads(2)
def test_parameters_of_as_many_bytes_are_sharded():
    for below, placement in ((32, Shard(0)), (33, Replicate()), (0, Shard(0)), (None, Shard(0))):
        layer = sherd.fully_shard(nn.Linear(8, 8), replicate_below=below)
        assert layer.bias.placements == (placement,), below


# What travels


class Travels:
    """The collectives of torch's transport: what they do, and how many elements of rows they move."""

    def __init__(self):
        self.seen = []

    def __enter__(self):
        self._patches = ExitStack()
        for name, at in (("all_gather", 0), ("reduce_scatter", 1), ("all_reduce", 0)):
            original = getattr(SingleCalls, name)

            def noted(transport, *args, name=name, at=at, original=original):
                self.seen.append((name, args[at].numel()))
                return original(transport, *args)

            self._patches.enter_context(mock.patch.object(SingleCalls, name, noted))
        return self

    def __exit__(self, *_):
        self._patches.close()

    def taken(self):
        seen, self.seen = self.seen, []
        return seen


def numels(parameters):
    return sum(each.numel() for each in parameters)


@on_processes(2, preset=("zero3", "hsdp"))
def test_they_are_never_gathered_and_reduced_in_one_message_with_the_units_own(preset):
    """A norm and a bias, and two matrices with a long bias, of one unit. Flags travel with gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8))
    small, large = ([each for each in model.parameters() if is_small(each) == which] for which in (True, False))
    num_small, num_large = numels(small), numels(large)
    mesh = None if preset == "zero3" else init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    sherd.fully_shard(model, mesh=mesh, comm_policy=TORCH, **SMALL)
    model.set_reshard_after_forward(True)
    for _ in range(2):
        with Travels() as travels:
            model(noise(0, dist.get_rank())).sum().backward()
        seen = travels.taken()
        assert seen[:2] == [("all_gather", num_large)] * 2
        assert [name for name, _ in seen[2:]] == ["all_reduce", "reduce_scatter"]
        reduced = dict(seen)
        assert num_small < reduced["all_reduce"] < num_large <= reduced["reduce_scatter"]


@on_processes(2)
def test_accumulation_and_unsynchronised_backwards_send_them_once():
    for placements in (None, "zero3"):
        model = sherd.fully_shard(nn.Linear(8, 16), comm_policy=TORCH, placements=placements, **SMALL)
        for quietly in (True, False):
            with Travels() as travels, sherd.accumulate(model, 3) if quietly else ExitStack():
                for micro in range(3):
                    model.set_requires_gradient_sync(quietly or micro == 2)
                    model(noise(micro, dist.get_rank())).sum().backward()
            assert [name for name, _ in travels.taken()].count("all_reduce") == 1, (placements, quietly)


# What else a model does


@on_threads(2, front=("shard", "flat"))
def test_they_are_lent_saved_once_and_loaded(front):
    """Full and sharded state dicts; into a model that shards them."""
    model, other = (sharded_as(build("mlp", seed), front, **options) for seed, options in ((0, SMALL), (1, {})))
    with sherd.unsharded(model), torch.no_grad():
        for each in model.parameters():
            assert not isinstance(each, DTensor)
            each.mul_(2)
    doubled = {name: 2 * value for name, value in build("mlp").state_dict().items()}
    assert_same(whole(model.state_dict()), doubled)
    other.load_state_dict(whole(model.state_dict()))
    assert_same(whole(other.state_dict()), doubled)
    model.load_state_dict(build("mlp").state_dict())
    assert_same(whole_params(model), dict(build("mlp").state_dict()))


def save_once(folder):
    sherd.save(folder, {"layer": sherd.fully_shard(nn.Linear(128, 512), **ALL)}, step=1)


def test_one_rank_writes_each(world, tmp_path):
    world(4).run(save_once, tmp_path)
    nbytes = sum(each.stat().st_size for each in tmp_path.rglob("*.safetensors"))
    assert nbytes < 1.5 * sum(each.nbytes for each in nn.Linear(128, 512).parameters())


@on_threads(2)
def test_muon_and_averages_step_them_as_in_one_process():
    """Matrices, too."""
    plain, model = build("mlp"), sharded_as(build("mlp"), replicate_below=300)
    averages = []
    for each, ranks in ((plain, range(2)), (model, [dist.get_rank()])):
        optimizer, average = sherd.Muon(each, lr=0.02, ns_dtype=torch.float32), sherd.Ema(each, decay=0.5)
        for step in range(2):
            for rank in ranks:
                (each.loss(each(*each.make_inputs(step, rank))) / len(ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update()
        with average.applied():
            averages.append(whole_params(each))
    assert_named_close(averages[1], averages[0], "average", 1e-4, 1e-5)


@on_processes(2)
def test_a_step_in_backward_is_that_after_backward():
    found = []
    for in_backward in (True, False):
        model = sharded_as(build("mlp"), **SMALL)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if in_backward:
            sherd.step_in_backward(model, optimizer)
        for step in range(2):
            model.loss(model(noise(step, dist.get_rank()))).backward()
            assert any(each.grad is not None for each in model.parameters()) is not in_backward
            optimizer.step()
            optimizer.zero_grad()
        found.append(whole_params(model))
    assert_named_close(found[0], found[1], "parameter", 1e-6, 1e-7)


class Skips(nn.Module):
    """Rank 1 runs no gain."""

    def __init__(self):
        super().__init__()
        self.layer, self.gain = nn.Linear(8, 8), nn.Linear(1, 8, bias=False)

    def forward(self, x):
        return self.layer(x) + (self.gain(x[:, :1]) if dist.get_rank() == 0 else 0)


@on_threads(2)
def test_some_ranks_may_leave_them_unused():
    for told in (True, False):  # flags tell as well
        model = sherd.fully_shard(Skips(), **SMALL)
        model.set_reduce_scatter_unused_params(told)
        model(torch.ones(2, 8)).sum().backward()
        assert model.gain.weight.placements == (Replicate(),)
        torch.testing.assert_close(model.gain.weight.grad.to_local(), torch.ones(8, 1))


@on_processes(2)
def test_a_users_collectives_carry_the_others_alone():
    model, gather, reduce = (
        sherd.fully_shard(nn.Linear(8, 32), replicate_below=200),
        GatherByList(),
        ReduceByAllReduce(),
    )
    model.set_custom_all_gather(gather)
    model.set_custom_reduce_scatter(reduce)
    model(noise(0, dist.get_rank())).sum().backward()
    assert [whole for whole, *_ in gather.calls] == [8 * 32] * len(gather.calls)
    assert len(reduce.calls) == 1
    assert_refused(lambda: model.set_all_reduce_hook(print), PolicyError, ValueError, "differ in dtype", "mesh")


@on_threads(2)
def test_setters_change_what_is_cut_alone():
    model = sharded_as(build("mlp"), **SMALL)
    for setting in (True, 2, False):
        model.set_reshard_after_forward(setting)
        model.set_separate_reduce_scatter_group()
        model.loss(model(noise(0, dist.get_rank()))).backward()
    with torch.no_grad():
        model(noise(0, 0))
    model.blocks[0].unshard()
    assert not isinstance(model.blocks[0].down.bias, DTensor)
    model.blocks[0].reshard()
    assert model.blocks[0].down.bias.placements == (Replicate(),)


# Experts on a mesh of their own


@pytest.mark.parametrize("as_dtensor", [True, False])
@on_processes(4)
def test_beside_experts_and_as_experts_they_train_as_in_one_process(as_dtensor):
    plain = test_experts.trained(routed.built(), range(4), None, whole)[2]
    for cut, below in ((None, 200), (Replicate(), None)):
        model, mesh = test_experts.sharded(as_dtensor, cut, replicate_below=below)
        assert (model.dense.bias.placements == (Replicate(),)) == (below is not None)
        found = test_experts.trained(model, [dist.get_rank()], None, whole)[2]
        experts = found["experts.weight"]
        if not as_dtensor:
            parts = [torch.empty_like(experts) for _ in range(2)]
            dist.all_gather(parts, experts, group=mesh["ep"].get_group())
            found["experts.weight"] = torch.cat(parts)
        assert_same(found, plain, rtol=1e-5, atol=1e-5)


# What it costs


@pytest.mark.parametrize(("preset", "cut", "dtype"), [("zero3", "rows", None), ("hfsdp", "flat", torch.bfloat16)])
@on_processes(4)
def test_the_peak_of_a_step_is_predicted_with_them(preset, cut, dtype):
    policy = MixedPrecisionPolicy(dtype, torch.float32)
    model = sharded(build("mlp"), preset, cut, mp_policy=policy, comm_policy=TORCH, **SMALL)
    for _ in range(2):
        with sherd.track_memory(model):
            model.loss(model(noise(0, dist.get_rank()))).backward()
        model.zero_grad()
    report = sherd.memory_report(model)
    assert report.predicted_peak == pytest.approx(report.measured_peak, rel=0.02)


@on_processes(4)
def test_sums_travel_between_replicas_in_the_dtype_of_the_reduction_whatever_the_transport_adds_up_in():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    sent, plain = [], Gloo.all_reduce

    def noted(self, tensor, async_op):
        sent.append(tensor.dtype)
        return plain(self, tensor, async_op)

    for wide in (torch.bfloat16, torch.float32):
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        precision = MixedPrecisionPolicy(torch.bfloat16, wide)
        sherd.fully_shard(model, mesh=mesh, mp_policy=precision, comm_policy=CommPolicy("gloo"))
        with mock.patch.object(Gloo, "all_reduce", noted):
            model(noise(0, dist.get_rank(), 4, 8)).sum().backward()
        assert model.weight.grad.dtype == torch.float32
    assert sent == [torch.bfloat16, torch.float32]


class LlamaBlock(nn.Module):
    """The parameters of a block of Llama 3 8B, without data."""

    def __init__(self):
        super().__init__()
        with torch.device("meta"):
            sizes = [(4096, wide) for wide in (4096, 1024, 1024, 4096, 14336, 14336)] + [(14336, 4096)]
            self.norms = nn.ModuleList(nn.RMSNorm(4096) for _ in range(2))
            self.matrices = nn.ModuleList(nn.Linear(*each, bias=False) for each in sizes)


def test_a_plan_counts_the_messages_and_bytes_that_the_page_of_layouts_names():
    """By host order, where large matrices travel alone, and by streams, where the unit is one message."""
    bf16, alone = MixedPrecisionPolicy(torch.bfloat16, torch.float32), CommPolicy(part_bytes=None)
    found = []
    for streams, below in itertools.product((HostStreams, RecordingStreams), (None, 1 << 20)):
        with imagined_ranks(8), use_streams(streams()):
            block = sherd.fully_shard(LlamaBlock(), mp_policy=bf16, comm_policy=alone, replicate_below=below)
            traffic = list(traffic_of(sherd.fully_shard.state(block)))
        counts = [sum(getattr(each, kind) > 0 for each in traffic) for kind in ("gathered", "reduced", "all_reduced")]
        found.append((2 * counts[0], 2 * sum(each.gathered for each in traffic), *counts[1:]))
    assert found == [(16, 872_448_000, 8, 0), (14, 872_415_232, 7, 1), (2, 872_448_000, 1, 0), (2, 872_415_232, 1, 1)]


# Mistakes


def test_what_is_no_number_of_bytes_is_refused_and_the_model_left_as_it_was():
    with imagined_ranks(2):
        layer = nn.Linear(4, 4)
        for value, kind in (
            (-1, PolicyError),
            (True, PolicyTypeError),
            (1e3, PolicyTypeError),
            ("1k", PolicyTypeError),
        ):
            told = refusal(kind, sherd.fully_shard, layer, replicate_below=value)
            assert f"replicate_below={value!r}" in told
        told = refusal(PlacementError, sherd.fully_shard, layer, shard_placement_fn=lambda _: Replicate)
        assert "Replicate()" in told
        assert not isinstance(layer, sherd.FSDPModule)


@on_threads(2)
def test_a_tensor_that_gathers_itself_may_be_one():
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(in_halves(torch.ones(4, 4)))
    sherd.fully_shard(layer, shard_placement_fn=lambda _: Replicate())
    layer(torch.full((1, 4), 1.0 + dist.get_rank())).sum().backward()
    assert layer.weight.placements == (Replicate(),)


def begin(alike):
    torch.manual_seed(0 if alike else dist.get_rank())
    model = sherd.fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), **SMALL)
    model(torch.ones(2, 8)).sum().backward()


def test_copies_that_begin_with_other_values_are_named(world):
    for text in comm_errors(world(2), begin, False):
        assert "replicas hold different values: ranks [0] and ranks [1] differ" in text
    world(2).run(begin, True)


def replicate_on_rank_0():
    answer = Replicate() if dist.get_rank() == 0 else None
    sherd.fully_shard(nn.Linear(8, 8), shard_placement_fn=lambda _: answer)(torch.ones(2, 8)).sum().backward()


def test_ranks_that_replicate_others_are_told(world):
    for text in comm_errors(world(2), replicate_on_rank_0):
        assert "placed Replicate()" in text
