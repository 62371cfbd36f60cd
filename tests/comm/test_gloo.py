"""The gloo transport gives every rank the right bytes and sums, however it waits, and an error if a rank dies."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from sherd.comm.host.gloo import Gloo
from sherd.errors import CommError
from tests.comm.numbers import GATHERED, bits, numbers, splits
from tests.comm.test_shared_memory_deaths import ends
from tests.support.ranks.bodies import on_processes
from tests.support.refusals import NOTHING, refusal

# Above two of the smallest pieces (256 KiB), so a part takes several rounds of the slots.
MANY_PIECES = 300_000


def finish(pending: object, async_op: bool) -> None:
    assert (pending is not None) == async_op
    if pending is not None:
        pending.wait()
        pending.wait()


@pytest.mark.pairs
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("ahead", [0, 8 << 20])
@on_processes()
def test_several_gathers_at_once_small_and_large(async_op, ahead):
    gloo, rank, size = Gloo(dist.group.WORLD, ahead), dist.get_rank(), dist.get_world_size()
    for dtype in GATHERED:
        sizes = list(splits(size))
        given = [[numbers(each, numel, dtype) for each, numel in enumerate(of_ranks)] for of_ranks in sizes]
        rows = [torch.zeros(sum(of_ranks), dtype=dtype) for of_ranks in sizes]
        own = [each[rank] for each in given]
        own[0] = rows[0][5 * rank : 5 * rank + 5].copy_(own[0])  # one that is there
        finish(gloo.all_gather_several(rows, own, sizes, async_op), async_op)
        for found, parts_of in zip(rows, given, strict=True):
            assert torch.equal(bits(found), bits(torch.cat(parts_of))), dtype
    assert len(sizes) == 11


@on_processes(2)
def test_the_users_messages_and_a_second_transport_of_the_group_stay_apart():
    gloo, peer = Gloo(dist.group.WORLD, ahead=1), 1 - dist.get_rank()
    other = Gloo(dist.group.WORLD)
    received = torch.empty(2)
    users = [dist.irecv(received[:1], src=peer)]
    total, rows, small = torch.empty(MANY_PIECES), torch.ones(2 * MANY_PIECES), torch.empty(2)
    large = gloo.reduce_scatter(total, rows, [MANY_PIECES] * 2, True)
    gathered = other.all_gather(small, torch.ones(1), [1, 1], True)
    users += [dist.isend(torch.tensor([number]), dst=peer) for number in (5.0, 6.0)]
    users.append(dist.irecv(received[1:], src=peer))
    for each in (gathered, large, *users):
        each.wait()
    assert total.eq(2).all()
    assert received.tolist() == [5, 6]
    assert small.tolist() == [1, 1]


@on_processes(3)
def test_torchs_detailed_debug_mode_finds_nothing_wrong_with_uneven_parts():
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        group = dist.new_group()
        gloo, rank = Gloo(group, ahead=1), dist.get_rank()
        sizes = [MANY_PIECES, 0, 1]
        gloo.all_gather(torch.empty(sum(sizes)), torch.ones(sizes[rank]), sizes, False)
        rest = torch.empty(sizes[rank])
        gloo.reduce_scatter(rest, torch.ones(sum(sizes)), sizes, False)
        assert rest.eq(3).all()
        total = torch.ones(1)
        gloo.all_reduce(total, False)
        assert total.item() == 3
    finally:
        dist.set_debug_level(before)


@on_processes(2)
def test_the_order_of_calls_does_not_keep_a_destroyed_group():
    group = dist.new_group()
    seen = weakref.ref(group)
    Gloo(group).all_gather(torch.empty(2), torch.ones(1), [1, 1], False)
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert seen() is None


class NewMemory(TorchDispatchMode):
    """Counts the bytes of the storages that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = [*args, *(kwargs or {}).values()]
        known = {each.untyped_storage().data_ptr() for each in given if isinstance(each, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in known:
            self.nbytes += result.untyped_storage().nbytes()
        return result


@on_processes(2, 3, numel=[1 << 20, 10])
def test_a_gather_needs_no_memory_and_a_reduce_scatter_no_more_than_it_may_have(numel):
    ahead, size = 2 << 20, dist.get_world_size()
    gloo = Gloo(dist.group.WORLD, ahead=ahead)
    rows, rest = torch.ones(numel * size), torch.ones(numel)
    with NewMemory() as gathered:
        gloo.all_gather(rows, rest, [numel] * size, True).wait()
    with NewMemory() as reduced:
        gloo.reduce_scatter(rest, rows, [numel] * size, True).wait()
    assert gathered.nbytes == 0
    if numel == 10:
        assert reduced.nbytes == 4 * 10 * (1 if size == 2 else size)
    else:
        assert 0.99 * ahead < reduced.nbytes <= ahead


@on_processes(2)
def test_a_rank_that_never_comes_is_named_each_time_one_waits_for_it():
    gloo = Gloo(dist.new_group(timeout=timedelta(seconds=0.5)))
    if dist.get_rank() == 1:
        return
    pending = gloo.reduce_scatter(torch.empty(4), torch.ones(8), [4, 4], True)
    once, again = refusal(CommError, pending.wait), refusal(CommError, pending.wait)
    assert once == again != NOTHING
    assert "reduce-scatter of 32 bytes over gloo among ranks [0, 1] failed on rank 0 with rank 1" in once
    assert "longer timeout" in once


def loses_rank_1(tell: Callable[[Any], None], collective: str) -> None:
    """A rank of three, of which one is killed in the middle of a collective; the others raise what they are told."""
    gloo, numel, store = Gloo(dist.group.WORLD), 1 << 20, dist.distributed_c10d._get_default_store()
    rows, rest, sizes = torch.ones(3 * numel), torch.ones(numel), [numel] * 3
    gloo.all_gather(rows, rest, sizes, False)
    store.set(f"connected {dist.get_rank()}", "")
    if dist.get_rank() == 1:
        store.wait(["connected 0", "connected 2"])  # the gather before is not what is to fail
        tell("killed")
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if collective == "all-gather":
            gloo.all_gather(rows, rest, sizes, True).wait()
        elif collective == "reduce-scatter":
            gloo.reduce_scatter(rest, rows, sizes, True).wait()
        else:
            gloo.all_reduce(rows, True).wait()
    except CommError as error:
        tell(str(error))
    time.sleep(60)  # the others must not take our end for the first one


@pytest.mark.parametrize("collective", ["all-gather", "reduce-scatter", "all-reduce"])
def test_a_killed_rank_ends_the_collective_of_the_others_with_an_error_that_names_it(collective):
    told = ends(3, loses_rank_1, collective)
    for rank in (0, 2):
        assert f"{collective} of " in told[rank].said
        assert f"bytes over gloo among ranks [0, 1, 2] failed on rank {rank}" in told[rank].said
        assert "last checkpoint" in told[rank].said
        if collective == "reduce-scatter":
            assert "with rank 1: " in told[rank].said
