"""A model may change after it was sharded: frozen and thawed, other dtypes, deep copies, whole and back by hand."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from sherd import Blocks, CPUOffloadPolicy, Flat, FSDPModule, MixedPrecisionPolicy, Owned, RaggedDTensor
from tests.api.checks import assert_trains
from tests.support.comparing import assert_named_close, assert_same, whole, whole_grads, whole_params
from tests.support.meshes import mesh_of
from tests.support.models import WIDTH, Block, chain, noise
from tests.support.ranks.bodies import on_threads
from tests.support.sharding import sharded
from tests.support.suites import part
from tests.support.training import LR, made, mean_square, train_job

PLACEMENTS = {"chunks": None, "flat": Flat(), "rows": Blocks(1), "blocks": Blocks(3), "whole": Owned()}


def stack():
    return nn.Sequential(Block(), Block(WIDTH, 7), Block())


def placed(placement, **options):
    return sharded(made(stack), placement=PLACEMENTS[placement], **options)


# Frozen and thawed


def half(model):
    """One of each unit's two layers, weight and bias."""
    return [param for name, param in model.named_parameters() if "down" in name]


def freeze_and_thaw(model, ranks, cast):
    """Train; freeze half of each unit, change the dtype, train; thaw, train; each time with a new optimizer."""
    losses = []
    for phase, frozen in enumerate((False, True, False)):
        for param in half(model):
            param.requires_grad_(not frozen)
        if cast:
            model.to(torch.float64 if frozen else torch.float32)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
        for step in range(2):
            for rank in ranks:
                x = noise(10 * phase + step, rank).to(next(model.parameters()).dtype)
                loss = model(x).square().mean()
                (loss / len(ranks)).backward()
            losses.append(loss.item())
            assert all((param.grad is None) == frozen for param in half(model))
            optimizer.step()
            optimizer.zero_grad()
    return losses, whole_params(model)


@pytest.mark.parametrize(("num_ranks", "cast"), [(2, False), (3, True)], ids=["kept", "cast"])
@on_threads()
def test_half_of_a_unit_may_be_frozen_cast_trained_and_thawed(cast):
    ranks = range(dist.get_world_size())
    _, expected = freeze_and_thaw(made(stack), ranks, cast)
    for name in PLACEMENTS:
        _, found = freeze_and_thaw(placed(name), [dist.get_rank()], cast)
        assert_named_close(found, expected, f"{name}: parameter", 1e-5, 1e-6)


@on_threads(3)
def test_what_was_sharded_frozen_may_be_thawed():
    """Sharded while half was frozen, so in two plans; thawed, they have one dtype and still two."""
    for placement in PLACEMENTS.values():
        model = chain()
        for param in half(model):
            param.requires_grad_(False)
        sharded(model, placement=placement).requires_grad_(True)
        model.to(torch.float64).to(torch.float32)
        assert_trains(model, chain)


# Other dtypes and places


@on_threads(3)
def test_pieces_stay_the_same_in_every_dtype():
    """Every way to change a dtype, and `.to("cpu")`; each piece stays where it was."""
    for name in PLACEMENTS:
        model = placed(name)
        mean_square(model, dist.get_rank(), 0).backward()
        model.zero_grad()
        before = [(param.to_local().clone(), param.placements) for param in model.parameters()]
        for change, dtype in (
            (lambda m: m.half(), torch.float16),
            (lambda m: m.float(), torch.float32),
            (lambda m: m.bfloat16(), torch.bfloat16),
            (lambda m: m.double(), torch.float64),
            (lambda m: m.to("cpu"), torch.float64),
        ):
            change(model)
            for param, (local, placements) in zip(model.parameters(), before, strict=True):
                assert param.dtype == param.to_local().dtype == dtype
                assert param.placements == placements
                assert isinstance(param, RaggedDTensor) == (name != "chunks")
                torch.testing.assert_close(param.to_local().float(), local, rtol=1e-2, atol=1e-2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        model(noise(0, 0).double()).square().mean().backward()
        assert {param.grad.dtype for param in model.parameters()} == {torch.float64}
        optimizer.step()


@on_threads(2)
def test_parameters_may_be_deep_copied():
    """A copy is nobody's shard: stepping it moves nothing."""
    for name in PLACEMENTS:
        model = placed(name)
        before = whole_params(model)
        copies = copy.deepcopy(list(model.parameters()))
        for param, each in zip(model.parameters(), copies, strict=True):
            assert type(each) is type(param)
            assert isinstance(each, nn.Parameter)
            torch.testing.assert_close(each.to_local(), param.to_local(), rtol=0, atol=0)
            each.grad = torch.ones_like(each)
        torch.optim.SGD(copies, lr=1.0).step()
        assert_named_close(whole_params(model), before, "parameter", 0, 0)


# Whole and back, by hand


@on_threads(1, 3)
def test_whole_parameters_are_read_by_hand():
    plain = made(stack)
    for name in PLACEMENTS:
        model = placed(name)
        for again in range(2):
            model[1].unshard()
            for ours, theirs in zip(model[1].parameters(), plain[1].parameters(), strict=True):
                assert not isinstance(ours, DTensor)
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
                assert ours.is_contiguous()
                assert ours.data_ptr() % 16 == 0 or name == "chunks"
            handle = model[0].unshard(async_op=True)
            handle.wait()
            torch.testing.assert_close(model[0].up.weight, plain[0].up.weight, rtol=0, atol=0)
            model[0].reshard()
            model[1].reshard()
            assert all(isinstance(param, DTensor) for param in model.parameters()), again


# Policies


def with_policies(model, ranks, norm_types):
    """Accumulation without sync, clipping by every norm, scaled loss; norms, last gradients whole, and parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    norms, grads = [], {}
    for step, norm_type in enumerate(norm_types):
        for micro in range(2):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(micro == 1)
            for rank in ranks:
                loss = mean_square(model, rank, 10 * step + micro) / len(ranks)
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type, foreach=(None, True, False)[step % 3])
        norms.append(whole(norm).item())
        if step == len(norm_types) - 1:  # what those before were is in the parameters
            grads = whole_grads(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 4.0 * 2 ** (len(norm_types) // 2)
    return norms, grads, whole_params(model)


def mixture(parameter):
    """By shape: `Owned` and columns for matrices, `Flat` or rows for vectors."""
    if parameter.dim() == 2:
        return Owned() if parameter.shape[0] == WIDTH else Shard(1)
    return Flat() if parameter.shape[0] == WIDTH else None


OPTIONS = {
    "plain": {},
    "kept": {"reshard_after_forward": False},
    "to pairs": {"reshard_after_forward": 2},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "replicated": {"mesh": (2, 2)},
}


# Without options under each of them, else under every other one, and under the others with the next option.
POLICIES = [
    (options, name)
    for number, options in enumerate(OPTIONS)
    for name in part((*PLACEMENTS, "mixture"), number, 2 if OPTIONS[options] else 1)
]


def trained_under_policies(options, name, norm_types):
    options = dict(OPTIONS[options])
    if "mesh" in options:
        options["mesh"] = mesh_of(options["mesh"])
    placement = {"shard_placement_fn": mixture} if name == "mixture" else {"placement": PLACEMENTS[name]}
    expected = with_policies(made(stack), range(dist.get_world_size()), norm_types)
    found = with_policies(sharded(made(stack), **placement, **options), [dist.get_rank()], norm_types)
    assert_same(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("options", "name"), POLICIES)
def test_accumulating_scaling_and_clipping_by_every_norm(threads, options, name):
    norm_types = (2.0, 1.0, float("inf"), float("-inf"), 0.5, 3.0, 0.0) if options == "plain" else (2.0, float("inf"))
    num_ranks = 4 if options in ("to pairs", "replicated") else 3
    threads(num_ranks).run(trained_under_policies, options, name, norm_types)


def in_low_precision(name):
    """bfloat16 compute, float32 reduction, over a mixture of units."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    model = placed(name, mp_policy=policy)
    seen = []
    model[1].register_forward_pre_hook(lambda module, args: seen.append((args[0].dtype, module.up.weight.dtype)))
    params = train_job(model, mean_square, 1)
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    return params


@on_threads(2)
def test_low_precision_gives_the_same_under_every_placement():
    expected = in_low_precision("chunks")
    for name in ("flat", "rows", "blocks", "whole"):
        assert_same(in_low_precision(name), expected, name)
