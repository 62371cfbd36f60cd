"""Does `iter_full_parameters` yield the unsharded parameters, bit by bit, on every rank, whatever the layout?"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import sherd
from sherd.errors import PolicyError, PolicyTypeError, StateError
from tests.checkpoint.layouts import LAYOUTS, PLACEMENTS, built, loss_of, model_in, optimizer_of, train
from tests.support.ranks import RanksFailed
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


def read_in(layout: str, bucket_bytes: int, dtype: torch.dtype | None, **options: Any) -> None:
    model = model_in(layout, **options)
    if "mesh" in options or "placements" in options:  # what was written is read, not what was sharded
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
    found = list(sherd.iter_full_parameters(model, bucket_bytes, dtype))
    expected = built()
    if "mesh" in options or "placements" in options:
        for parameter in expected.parameters():
            parameter.data.mul_(2)
    assert_same(found, plain(expected, dtype))


@pytest.mark.values
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_values_are_those_of_the_plain_model(num_ranks, layout, world):
    for bucket_bytes in BUCKETS:
        world(num_ranks).run(read_in, layout, bucket_bytes, None)
    world(num_ranks).run(read_in, layout, 300, torch.bfloat16)


@pytest.mark.values
@pytest.mark.parametrize("transport", ["torch", "gloo", "coalesced"])
@pytest.mark.parametrize("layout", PLACEMENTS)
def test_every_transport_moves_them(transport, layout, world):
    for bucket_bytes in (1, 300, 1 << 20):
        world(3).run(read_in, layout, bucket_bytes, None, comm_policy=sherd.CommPolicy(transport=transport))


def read_on_mesh(layout: str, placements: str, transport: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    policy = sherd.CommPolicy(transport=transport)
    for bucket_bytes in (1, 1 << 20):
        read_in(layout, bucket_bytes, None, mesh=mesh, placements=placements, comm_policy=policy)


@pytest.mark.pairs
@pytest.mark.parametrize("placements", ["hsdp", "hfsdp"])
@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_replicas_read_alike(transport, layout, placements, world):
    world(4).run(read_on_mesh, layout, placements, transport)


def read_zero(strategy: str) -> None:
    read_in("rows", 300, None, placements=strategy)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_strategies_that_keep_parameters_unsharded(strategy, world):
    world(2).run(read_zero, strategy)


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


def read_wrapper(use_orig_params: bool, bucket_bytes: int) -> None:
    model = Uniform()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = sherd.FullyShardedDataParallel(block, use_orig_params=use_orig_params)
    model = sherd.FullyShardedDataParallel(model, use_orig_params=use_orig_params)
    assert_same(list(sherd.iter_full_parameters(model, bucket_bytes)), plain(Uniform()))
    found = dict(sherd.iter_full_parameters(model, bucket_bytes, buffers=True))
    assert list(found)[-1] == "seen"
    assert torch.equal(found["seen"], torch.arange(3.0))


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("bucket_bytes", BUCKETS)
def test_the_wrapper_and_its_flat_parameters(use_orig_params, bucket_bytes, world):
    world(2).run(read_wrapper, use_orig_params, bucket_bytes)


def read_tensor_parallel(placement: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Uniform()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        sherd.fully_shard(block, mesh=mesh["dp"], placement=placement)
    sherd.fully_shard(model, mesh=mesh["dp"], placement=placement)
    for bucket_bytes in BUCKETS:
        assert_same(list(sherd.iter_full_parameters(model, bucket_bytes)), plain(Uniform()))


@pytest.mark.parametrize("placement", [None, sherd.Flat()])
def test_tensor_parallel_parameters_are_put_together(placement, world):
    world(4).run(read_tensor_parallel, placement)


def read_experts() -> None:
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "expert"))
    model = Uniform()
    sherd.fully_shard(model.blocks[0], mesh=whole["expert"])
    sherd.fully_shard(model.blocks[1])
    sherd.fully_shard(model)
    assert_same(list(sherd.iter_full_parameters(model, 200)), plain(Uniform()))


def test_units_on_meshes_of_their_own(world):
    world(4).run(read_experts)


def read_mixed() -> None:
    model = Uniform()
    mesh = init_device_mesh("cpu", (2,))
    model.blocks[1][0].weight = nn.Parameter(distribute_tensor(model.blocks[1][0].weight.detach(), mesh, [Replicate()]))
    sherd.fully_shard(model.blocks[0])
    found = list(sherd.iter_full_parameters(model, 200, torch.bfloat16))  # the root is not sharded
    assert_same(found, plain(Uniform(), torch.bfloat16))


def test_parameters_that_are_not_sharded_come_too(world):
    world(2).run(read_mixed)


def read_offloaded() -> None:
    read_in("rows", 300, None, offload_policy=sherd.CPUOffloadPolicy())


def test_offloaded_parameters(world):
    world(2).run(read_offloaded)


class Around(nn.Module):
    """Keeps a module as `torch.compile` does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def read_compiled() -> None:
    model = model_in("rows")
    model.blocks[0].up = Around(model.blocks[0].up)
    assert [name for name, _ in sherd.iter_full_parameters(model)] == [name for name, _ in plain(built())]


def test_names_are_without_wrappers(world):
    world(2).run(read_compiled)


def read_in_training(layout: str) -> None:
    model = model_in(layout)
    optimizer = optimizer_of(model)
    for step in range(2):
        train(model, optimizer, range(step, step + 1))
        found = list(sherd.iter_full_parameters(model, 300))
        with sherd.unsharded(model, writeback=False):
            assert_same(found, plain(model))


@pytest.mark.parametrize("layout", ["rows", "columns", "flat", "whole"])
def test_the_values_of_every_step_are_read(layout, world):
    world(2).run(read_in_training, layout)


def read_with_sizes(sizes: list[int]) -> None:
    for layout in ("rows", "flat"):
        model = model_in(layout)
        for size in sizes:
            assert_same(list(sherd.iter_full_parameters(model, size)), plain(built()))


@settings(max_examples=examples(8))
@given(sizes=st.lists(st.integers(1, 4000), min_size=4, max_size=4))
def test_any_bucket_size(pools, sizes):
    pools.world(2).run(read_with_sizes, sizes)


def held_and_changed() -> None:
    model, first = model_in("rows"), []
    kept = []
    for name, value in sherd.iter_full_parameters(model, 64):
        first.append((name, value.clone()))
        kept.append((name, value))
        gc.collect()
    assert_same(kept, first)
    for _, value in sherd.iter_full_parameters(model, 1 << 20):
        value.zero_()
    assert_same(list(sherd.iter_full_parameters(model)), plain(built()))


def test_a_tensor_is_the_callers_own(world):
    for num_ranks in (1, 2):
        world(num_ranks).run(held_and_changed)


def read_on_rank_0() -> int:
    return len(list(sherd.iter_full_parameters(model_in("flat"), 100, rank0_only=True)))


def test_rank_0_alone(world):
    assert world(3).run(read_on_rank_0) == [len(plain(built())), 0, 0]


def stop_early() -> None:
    model = model_in("rows")
    for number, _ in enumerate(sherd.iter_full_parameters(model, 64)):
        if number == 2:
            break
    optimizer = optimizer_of(model)
    train(model, optimizer, range(2))
    assert len(list(sherd.iter_full_parameters(model, 64))) == len(plain(built()))


def test_the_loop_may_end_early(world):
    world(2).run(stop_early)


def misuse() -> None:
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
    dist.barrier()


def test_a_model_in_use_is_refused(world):
    world(2).run(misuse)


def leave_alone() -> None:
    model = model_in("rows")
    for number, _ in enumerate(sherd.iter_full_parameters(model, 64)):
        if number == 2 and dist.get_rank() == 1:
            raise KeyError("the reader of rank 1")


def test_an_error_on_one_rank_ends_the_others(world):
    with pytest.raises(RanksFailed) as caught:
        world(2).run(leave_alone)
    assert caught.value.errors[1][0] == "KeyError"


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"bucket_bytes": 0}, PolicyError),
        ({"bucket_bytes": 1.5}, PolicyTypeError),
        ({"dtype": "bf16"}, PolicyTypeError),
        ({"dtype": torch.int8}, PolicyError),
        ({"to": 3.5}, PolicyTypeError),
        ({"rank0_only": 1}, PolicyTypeError),
    ],
)
def test_wrong_arguments(wrong, error):
    with pytest.raises(error, match="iter_full_parameters"):
        sherd.iter_full_parameters(built(), **wrong)
    with pytest.raises(sherd.SherdError, match="meta device"):
        sherd.iter_full_parameters(built().to("meta"))
