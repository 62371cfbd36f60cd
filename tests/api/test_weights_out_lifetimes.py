"""Tensors of `iter_full_parameters` stay the reader's own, however it goes through them, with buckets so large that
they go straight into place; and they take two buckets, the largest parameter and what is sent of a bucket."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import sherd
from bench.peak import live_bytes
from sherd.errors import CommError, StateError
from tests.api.test_weights_out import assert_same, plain
from tests.support.ranks.bodies import on_processes
from tests.support.sharding import sharded

BUCKET = 11 << 20
"""Two layers, which is more than gloo's transport takes for small."""


def layers(seed: int = 0) -> nn.Sequential:
    """Five layers of 5 MiB; the rows of some do not divide by two ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Linear(1024, 1280 + index % 2) if index % 2 else nn.Linear(1281, 1024) for index in range(5))
    )


def cut(transport: str, placement: object = None, seed: int = 0, mesh: DeviceMesh | None = None) -> nn.Sequential:
    policy = sherd.CommPolicy(transport=transport)
    return sharded(layers(seed), placement=placement, comm_policy=policy, mesh=mesh)


every_transport = pytest.mark.parametrize("transport", ["auto", "gloo", "torch"])
every_placement = pytest.mark.parametrize("placement", [None, sherd.Flat()])


@pytest.mark.pairs
@every_transport
@every_placement
@pytest.mark.parametrize("num_ranks", [2, 3])
@on_processes()
def test_all_may_be_kept(placement, transport):
    model = cut(transport, placement)
    for _ in range(2):
        assert_same(list(sherd.iter_full_parameters(model, BUCKET)), plain(layers()))
    half = list(sherd.iter_full_parameters(model, BUCKET // 2, torch.bfloat16))
    assert_same(half, plain(layers(), torch.bfloat16))
    kept = []
    for number, (name, value) in enumerate(sherd.iter_full_parameters(model, BUCKET)):
        if number % 3 == 0:
            kept.append((name, value))
        else:
            value.fill_(7)  # it is the reader's: nobody else sees it
    assert_same(kept, plain(layers())[::3])
    assert_same(list(sherd.iter_full_parameters(model, BUCKET)), plain(layers()))


@every_transport
@every_placement
@on_processes(2)
def test_a_trained_model_is_read(placement, transport):
    """Shards lie in one buffer once a model has run, and are sent from there."""
    model = cut(transport, placement)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for layer in model:
            layer(torch.ones(2, layer.in_features)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found = list(sherd.iter_full_parameters(model, BUCKET))
        with sherd.unsharded(model, writeback=False):
            assert_same(found, plain(model))


def memories(values: Iterator[tuple[str, torch.Tensor]]) -> set[int]:
    return {value.untyped_storage().data_ptr() for _, value in values if value.nbytes > 1 << 20}


@pytest.mark.parametrize(("transport", "most"), [("auto", 2), ("gloo", 3), ("torch", 3)])
@on_processes(2)
def test_buffers_of_a_reader_that_keeps_nothing_are_used_again(transport, most):
    model = cut(transport)
    found = memories(sherd.iter_full_parameters(model, BUCKET))
    assert len(found) <= most, len(found)
    kept = [value for _, value in sherd.iter_full_parameters(model, BUCKET)]
    assert len({value.untyped_storage().data_ptr() for value in kept}) >= 3


def read_and_raise(model: nn.Module, at: int) -> None:
    for number, _ in enumerate(sherd.iter_full_parameters(model, BUCKET)):
        if number == at:
            raise KeyError("the reader of all ranks")


@every_transport
@on_processes(2)
def test_all_ranks_may_stop_or_raise_behind_any_tensor(transport):
    model = cut(transport)
    for at in (0, 1, 5, 9):
        for number, _ in enumerate(sherd.iter_full_parameters(model, BUCKET)):
            if number == at:
                break
        with pytest.raises(KeyError):
            read_and_raise(model, at)
        never_begun = sherd.iter_full_parameters(model, BUCKET)
        del never_begun
        assert_same(list(sherd.iter_full_parameters(model, BUCKET)), plain(layers()))


@every_transport
@on_processes(2)
def test_two_models_are_read_at_once(transport):
    first, second = cut(transport), cut(transport, sherd.Flat(), seed=1)
    both = zip(sherd.iter_full_parameters(first, BUCKET), sherd.iter_full_parameters(second, BUCKET // 2), strict=True)
    ones, others = zip(*both, strict=True)
    assert_same(list(ones), plain(layers()))
    assert_same(list(others), plain(layers(1)))


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "gloo"])
@on_processes(2)
def test_a_rank_that_stops_alone_is_waited_for_no_longer_than_the_timeout(transport):
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=2)), "cpu")
    reading = sherd.iter_full_parameters(cut(transport, mesh=mesh), BUCKET // 2)
    next(reading)
    if dist.get_rank() == 1:
        reading.close()
    else:
        with pytest.raises(CommError, match=r"all-gather|gathers .* elements"):
            list(reading)
    dist.barrier()


@every_transport
@on_processes(2)
def test_no_bucket_is_shown_that_an_optimizer_may_have_written(transport):
    model = cut(transport)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0](torch.ones(2, 1281)).sum().backward()
    for num_read in (1, 8):  # in the first bucket, and in the last but one
        reading = sherd.iter_full_parameters(model, BUCKET)
        for _ in range(num_read):
            next(reading)
        optimizer.step()
        with pytest.raises(StateError, match="written while they were read"):
            list(reading)
    with sherd.unsharded(model, writeback=False):
        expected = [(name, value.clone()) for name, value in plain(model)]
    assert_same(list(sherd.iter_full_parameters(model, BUCKET)), expected)


# How much is taken

WIDTH = 64
NUM_LAYERS = 12
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


@pytest.mark.pairs
@pytest.mark.parametrize("transport", ["shared_memory", "gloo", "torch"])
@pytest.mark.parametrize("placement", [None, sherd.Flat()], ids=["rows", "flat"])
@pytest.mark.parametrize(("layers_a_bucket", "large"), [(1, WIDTH), (3, WIDTH), (2, 8 * WIDTH)])
@on_processes(2)
def test_two_buckets_and_the_largest_parameter(layers_a_bucket, large, placement, transport):
    bucket, largest = layers_a_bucket * LAYER_BYTES, 4 * large * WIDTH
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)), nn.Linear(WIDTH, large))
    sharded(model, placement=placement, comm_policy=sherd.CommPolicy(transport=transport))
    peaks = []
    with live_bytes(torch.device("cpu")) as live:
        for _ in range(2):
            gc.collect()
            live.forget_peak()
            before = live.peak
            for _, weight in sherd.iter_full_parameters(model, bucket):
                assert weight.numel()
            del weight
            peaks.append(live.peak - before)
    sent, slack = max(bucket, largest) // 2, 8192  # views, padding and texts
    if transport != "shared_memory":
        slack += bucket  # a thread of gloo lets go of the rows somewhat later than its collective ends
    assert 0 < peaks[-1] <= 2 * bucket + largest + sent + slack
    assert peaks[-1] < NUM_LAYERS * LAYER_BYTES or large > WIDTH
