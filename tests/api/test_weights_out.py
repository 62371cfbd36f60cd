"""`iter_full_parameters` yields the unsharded parameters, bit by bit, on every rank, whatever the layout."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import sherd
from sherd.errors import PolicyError, PolicyTypeError, StateError
from tests.api.checks import named_mesh
from tests.checkpoint.layouts import LAYOUTS, PLACEMENTS, built, loss_of, model_in, optimizer_of, train
from tests.support.models import Wired
from tests.support.ranks import RanksFailed
from tests.support.ranks.bodies import on_processes
from tests.support.sharding import sharded
from tests.support.suites import examples

BUCKETS = (1, 300, 1 << 20)


def plain(model: nn.Module, dtype: torch.dtype | None = None) -> list[tuple[str, torch.Tensor]]:
    """The parameters by name, in `dtype`."""
    return [(name, each.detach().to(dtype or each.dtype)) for name, each in model.named_parameters()]


def assert_same(found: list[tuple[str, torch.Tensor]], expected: list[tuple[str, torch.Tensor]]) -> None:
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (name, value), (_, wanted) in zip(found, expected, strict=True):
        assert type(value) is torch.Tensor, name
        assert not value.requires_grad, name
        assert (value.dtype, value.shape, value.is_contiguous()) == (wanted.dtype, wanted.shape, True), name
        assert torch.equal(value, wanted), name


def read_in(layout: str, bucket_bytes: int, dtype: torch.dtype | None = None, **options: Any) -> None:
    model, expected = model_in(layout, **options), built()
    if layout != "plain":  # what was written is read, not what was sharded
        with torch.no_grad():
            for parameter in (*model.parameters(), *expected.parameters()):
                parameter.mul_(2)
    assert_same(list(sherd.iter_full_parameters(model, bucket_bytes, dtype)), plain(expected, dtype))


def read_in_buckets(layout: str, **options: Any) -> None:
    for bucket_bytes in BUCKETS:
        read_in(layout, bucket_bytes, **options)
    read_in(layout, 300, torch.bfloat16, **options)


@pytest.mark.values
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_values_are_those_of_the_plain_model(num_ranks, layout, world):
    world(num_ranks).run(read_in_buckets, layout)


@pytest.mark.values
@pytest.mark.parametrize("transport", ["torch", "gloo", "coalesced"])
@pytest.mark.parametrize("layout", PLACEMENTS)
def test_every_transport_moves_them(transport, layout, world):
    world(3).run(read_in_buckets, layout, comm_policy=sherd.CommPolicy(transport=transport))


@pytest.mark.pairs
@pytest.mark.parametrize("placements", ["hsdp", "hfsdp"])
@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.parametrize("transport", ["auto", "gloo"])
@on_processes(4)
def test_replicas_read_alike(transport, layout, placements):
    mesh, policy = named_mesh((2, 2), "replicate", "shard"), sherd.CommPolicy(transport=transport)
    for bucket_bytes in (1, 1 << 20):
        read_in(layout, bucket_bytes, mesh=mesh, placements=placements, comm_policy=policy)


@on_processes(2)
def test_strategies_that_keep_parameters_unsharded_or_on_the_host():
    for strategy in ("zero1", "zero2", "zero3"):
        read_in("rows", 300, placements=strategy)
    read_in("rows", 300, offload_policy=sherd.CPUOffloadPolicy())


class Uniform(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 5)) for _ in range(2))
        self.register_buffer("seen", torch.arange(3.0))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize("front", ["wrapper", "flat wrapper"])
@on_processes(2)
def test_the_wrapper_and_its_flat_parameters(front):
    model = sharded(Uniform(), front)
    for bucket_bytes in BUCKETS:
        assert_same(list(sherd.iter_full_parameters(model, bucket_bytes)), plain(Uniform()))
        found = dict(sherd.iter_full_parameters(model, bucket_bytes, buffers=True))
        assert list(found)[-1] == "seen"
        assert torch.equal(found["seen"], torch.arange(3.0))


@pytest.mark.parametrize("placement", [None, sherd.Flat()])
@on_processes(4)
def test_tensor_parallel_parameters_are_put_together(placement):
    mesh, model = named_mesh((2, 2), "dp", "tp"), Uniform()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    sharded(model, mesh=mesh["dp"], placement=placement)
    for bucket_bytes in BUCKETS:
        assert_same(list(sherd.iter_full_parameters(model, bucket_bytes)), plain(Uniform()))


@on_processes(4)
def test_units_on_meshes_of_their_own():
    model = Uniform()
    sherd.fully_shard(model.blocks[0], mesh=named_mesh((2, 2), "replicate", "expert")["expert"])
    sherd.fully_shard(model.blocks[1])
    sherd.fully_shard(model)
    assert_same(list(sherd.iter_full_parameters(model, 200)), plain(Uniform()))


@on_processes(2)
def test_parameters_that_are_not_sharded_come_too():
    model, mesh = Uniform(), named_mesh((2,))
    model.blocks[1][0].weight = nn.Parameter(distribute_tensor(model.blocks[1][0].weight.detach(), mesh, [Replicate()]))
    sherd.fully_shard(model.blocks[0])
    found = list(sherd.iter_full_parameters(model, 200, torch.bfloat16))  # the root is not sharded
    assert_same(found, plain(Uniform(), torch.bfloat16))


@on_processes(2)
def test_names_are_without_wrappers():
    model = model_in("rows")
    model.blocks[0].up = Wired(None, _orig_mod=model.blocks[0].up)  # as `torch.compile` keeps it
    assert [name for name, _ in sherd.iter_full_parameters(model)] == [name for name, _ in plain(built())]


@pytest.mark.parametrize("layout", ["rows", "columns", "flat", "whole"])
@on_processes(2)
def test_the_values_of_every_step_are_read(layout):
    model = model_in(layout)
    optimizer = optimizer_of(model)
    for step in range(2):
        train(model, optimizer, range(step, step + 1))
        found = list(sherd.iter_full_parameters(model, 300))
        with sherd.unsharded(model, writeback=False):
            assert_same(found, plain(model))


def read_with_sizes(sizes: list[int]) -> None:
    for layout in ("rows", "flat"):
        model = model_in(layout)
        for size in sizes:
            assert_same(list(sherd.iter_full_parameters(model, size)), plain(built()))


@settings(max_examples=examples(8))
@given(sizes=st.lists(st.integers(1, 4000), min_size=4, max_size=4))
def test_any_bucket_size(world, sizes):
    world(2).run(read_with_sizes, sizes)


@on_processes(1, 2)
def test_a_tensor_is_the_callers_own():
    model, first, kept = model_in("rows"), [], []
    for name, value in sherd.iter_full_parameters(model, 64):
        first.append((name, value.clone()))
        kept.append((name, value))
        gc.collect()
    assert_same(kept, first)
    for _, value in sherd.iter_full_parameters(model, 1 << 20):
        value.zero_()
    assert_same(list(sherd.iter_full_parameters(model)), plain(built()))


@on_processes(3)
def test_rank_0_alone():
    found = list(sherd.iter_full_parameters(model_in("flat"), 100, rank0_only=True))
    assert len(found) == (0 if dist.get_rank() else len(plain(built())))


@on_processes(2)
def test_the_loop_may_end_early():
    model = model_in("rows")
    for number, _ in enumerate(sherd.iter_full_parameters(model, 64)):
        if number == 2:
            break
    train(model, optimizer_of(model), range(2))
    assert len(list(sherd.iter_full_parameters(model, 64))) == len(plain(built()))


@on_processes(2)
def test_a_model_in_use_is_refused():
    model = model_in("rows")
    optimizer = optimizer_of(model)
    called = model.blocks[0].register_forward_hook(lambda *_: sherd.iter_full_parameters(model))
    with pytest.raises(StateError, match="in the middle of a forward"):
        loss_of(model, 0)
    called.remove()
    model.reset_iter_state()
    loss_of(model, 0).backward()
    with sherd.unsharded(model), pytest.raises(StateError, match="leave the context first"):
        sherd.iter_full_parameters(model)
    reading = sherd.iter_full_parameters(model, 1)
    next(reading)
    optimizer.step()
    with pytest.raises(StateError, match="written while they were read"):
        next(reading)


def leave_alone() -> None:
    for number, _ in enumerate(sherd.iter_full_parameters(model_in("rows"), 64)):
        if number == 2 and dist.get_rank() == 1:
            raise KeyError("the reader of rank 1")


def test_an_error_on_one_rank_ends_the_others(world, monkeypatch):
    monkeypatch.setattr("tests.support.ranks.GRACE_S", 0.3)  # the other one waits for what does not come
    with pytest.raises(RanksFailed) as caught:
        world(2).run(leave_alone)
    assert caught.value.errors[1][0] == "KeyError"


def test_wrong_arguments_are_refused():
    for wrong, error in (
        ({"bucket_bytes": 0}, PolicyError),
        ({"bucket_bytes": 1.5}, PolicyTypeError),
        ({"dtype": "bf16"}, PolicyTypeError),
        ({"dtype": torch.int8}, PolicyError),
        ({"to": 3.5}, PolicyTypeError),
        ({"rank0_only": 1}, PolicyTypeError),
    ):
        with pytest.raises(error, match="iter_full_parameters"):
            sherd.iter_full_parameters(built(), **wrong)
    with pytest.raises(sherd.SherdError, match="meta device"):
        sherd.iter_full_parameters(built().to("meta"))
