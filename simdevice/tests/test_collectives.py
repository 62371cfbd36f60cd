"""Collectives of the simulated device: the values of gloo, the order of NCCL, and ranks that disagree are named."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.tensor import Shard, distribute_tensor

import simdevice
from simdevice.ranks import RanksFailed
from simdevice.tests.collective_programs import ON_GLOO_TOO, ONLY_AS_NCCL, SIZE, Ranks, gather_single, scatter_single
from simdevice.tests.comparing import assert_same

T = TypeVar("T")
PAUSES = {"pause_us": 1500, "pause_percent": 30}


def on_device(program: Callable[[Ranks], Iterable[T]], is_async: bool) -> list[T]:
    simdevice.host_waits()
    found = list(program(Ranks("sim", is_async)))
    assert not simdevice.host_waits(), program.__name__
    return found


def agree_with_gloo_or_with_what_is_right(is_async: bool) -> None:
    for name, program in ON_GLOO_TOO.items():
        found = [each.cpu() for each in on_device(program, is_async)]
        assert_same(found, list(program(Ranks("cpu", False))), name)
    for name, program in ONLY_AS_NCCL.items():
        for found, expected in on_device(program, is_async):
            assert_same(found.cpu(), expected, name)


@pytest.mark.parametrize("is_async", [False, True], ids=["on the current stream", "on the group's"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_values_are_those_of_gloo_or_where_it_has_no_such_collective_right(num_ranks, is_async, sim_world):
    for seed in (1, 2):
        sim_world(num_ranks, seed=seed, **PAUSES).run(agree_with_gloo_or_with_what_is_right, is_async)


# Order


def gather_behind_a_busy_stream(is_async: bool) -> tuple[bool, torch.Tensor]:
    out = torch.empty(2 * SIZE, device="sim")
    mine = torch.full((SIZE,), 1.0 + dist.get_rank(), device="sim")
    gate = simdevice.closed_gate()
    mine.mul_(2)
    work = gather_single(out, mine, async_op=is_async)
    if work is not None:
        assert not work.is_completed()
        work.wait()
    result = out + 1
    is_behind = not torch.accelerator.current_stream().query()
    gate.open()
    return is_behind, result


def test_host_waits_for_no_collective(sim_world):
    for is_async in (False, True):
        found = sim_world(2).run(gather_behind_a_busy_stream, is_async)
        for is_behind, result in found.values:
            assert is_behind, "the host was back while the stream was busy"
            assert result.tolist() == [3.0] * SIZE + [5.0] * SIZE
        assert not any(found.host_waits)


def gather_without_wait(how: str) -> torch.Tensor:
    out, mine = torch.empty(2 * SIZE, device="sim"), torch.ones(SIZE, device="sim")
    work = gather_single(out, mine, async_op=True)
    if how == "another stream waits":
        with torch.Stream(device="sim"):
            work.wait()
    elif how == "the future":
        work.get_future().wait()
    elif how == "work.wait()":
        work.wait()
    result = out + 1
    work.wait()
    return result


def test_wait_that_is_missing_is_named(sim_world):
    for how in ("nobody waits", "another stream waits"):
        on_each = sim_world(2).observe(gather_without_wait, how).races
        for races in on_each:
            (race,) = races
            assert "write-read: all_gather" in race, how
            assert "add" in race.partition("unordered")[2], how
    for how in ("work.wait()", "the future"):
        sim_world(2, seed=1, **PAUSES).run(gather_without_wait, how)


def send_without_wait(waits: bool) -> torch.Tensor:
    mine, other = torch.ones(SIZE, device="sim"), 1 - dist.get_rank()
    theirs = torch.empty(SIZE, device="sim")
    works = [dist.isend(mine, other), dist.irecv(theirs, other)]
    if waits:
        for work in works:
            work.wait()
    mine.zero_()
    return theirs + 1


def test_messages_run_beside_compute(sim_world):
    races = " ".join(sim_world(2).observe(send_without_wait, False).all_races)
    assert "send" in races
    assert "recv" in races
    assert all(value.tolist() == [2.0] * SIZE for value in sim_world(2, **PAUSES).run(send_without_wait, True).values)


def drop_what_is_under_way(waits: bool) -> torch.Tensor:
    """A collective's input is dropped at once, and its memory asked for again."""
    total = torch.zeros(2 * SIZE, device="sim")
    for turn in range(4):
        out = torch.empty(2 * SIZE, device="sim")
        work = gather_single(out, torch.full((SIZE,), float(turn), device="sim"), async_op=True)
        again = [torch.full((SIZE,), -1.0, device="sim") for _ in range(3)]
        if waits:
            work.wait()
            total += out
        del out, work, again
    return total


def test_tensors_live_until_somebody_waits(sim_world):
    for seed in (1, 2):
        found = sim_world(2, seed=seed, **PAUSES).run(drop_what_is_under_way, True)
        assert all(value.tolist() == [6.0] * 2 * SIZE for value in found.values)
        sim_world(2, seed=seed, **PAUSES).run(drop_what_is_under_way, False)


def barriers() -> dict[str, int]:
    group = dist.new_group(backend="sim:simccl")
    device = dist.get_rank()
    simdevice.host_waits()
    dist.barrier(group, device_ids=[device])
    dist.barrier(group, async_op=True, device_ids=[device]).wait()
    return simdevice.host_waits()


def test_host_waits_for_a_barrier(sim_world):
    assert sim_world(2).run(barriers).values == [{"barrier": 2}] * 2


# Coalescing


def coalesced(is_async: bool, by_device: bool) -> list[torch.Tensor]:
    """All-gathers, reductions and sums, three of each at once."""
    mine = [torch.full((SIZE,), 1.0 + dist.get_rank() + i, device="sim") for i in range(3)]
    wholes = [torch.empty(2 * SIZE, device="sim") for _ in mine]
    parts = [torch.empty(SIZE // 2, device="sim") for _ in mine]
    calls: list[Callable[[int], object]] = [
        lambda i: gather_single(wholes[i], mine[i], async_op=is_async),
        lambda i: scatter_single(parts[i], mine[i], async_op=is_async),
        lambda i: dist.all_reduce(mine[i], async_op=is_async),
    ]
    for call in calls:
        if by_device:  # each call reaches the backend, which waits for the end
            manager = _coalescing_manager(device=torch.device("sim", dist.get_rank()), async_ops=is_async)
        else:  # the manager makes one call of all
            manager = _coalescing_manager(async_ops=is_async)
        with manager as pending:
            for i in range(3):
                call(i)
        if is_async:
            pending.wait()
    return [each + 0 for each in (*wholes, *parts, *mine)]


def test_coalesced_calls(sim_world):
    for is_async, by_device in itertools.product((False, True), (False, True)):
        found = sim_world(2, seed=1, **PAUSES).run(coalesced, is_async, by_device)
        wholes = [[1.0 + i] * SIZE + [2.0 + i] * SIZE for i in range(3)]
        sums = [[3.0 + 2 * i] * numel for numel in (SIZE // 2, SIZE) for i in range(3)]
        for value in found.values:
            assert [each.tolist() for each in value] == wholes + sums, (is_async, by_device)
        assert not any(found.host_waits), (is_async, by_device)


def batch_of_messages() -> list[torch.Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    theirs = {other: torch.empty(SIZE, device="sim") for other in range(size) if other != rank}
    mine = {other: torch.full((SIZE,), 10.0 * rank + other, device="sim") for other in theirs}
    ops = [dist.P2POp(dist.irecv, tensor, other) for other, tensor in theirs.items()]  # receives first, on all ranks
    ops += [dist.P2POp(dist.isend, tensor, other) for other, tensor in mine.items()]
    (work,) = dist.batch_isend_irecv(ops)
    work.wait()
    return [theirs[other] + 0 for other in sorted(theirs)]


def test_messages_of_a_batch_do_not_wait_for_one_another(sim_world):
    found = sim_world(4, seed=1, **PAUSES).run(batch_of_messages)
    for rank, values in enumerate(found.values):
        others = [other for other in range(4) if other != rank]
        assert [value[0].item() for value in values] == [10.0 * other + rank for other in others]


# Groups


def two_axes(rounds: int) -> list[float]:
    """Sums over the rows and over the columns of a mesh, begun in another order on every other rank."""
    mesh = init_device_mesh("sim", (2, 2), mesh_dim_names=("rows", "columns"))
    groups = [mesh.get_group("rows"), mesh.get_group("columns")]
    found = []
    for turn in range(rounds):
        x, y = (torch.full((SIZE,), float(dist.get_rank() + turn), device="sim") for _ in groups)
        order = [(groups[0], x), (groups[1], y)]
        works = [
            dist.all_reduce(tensor, group=group, async_op=True)
            for group, tensor in (order if dist.get_rank() % 2 else reversed(order))
        ]
        for work in works:
            work.wait()
        found += [x, y]
    return [each[0].item() for each in found]


def test_groups_that_overlap(sim_world):
    found = sim_world(4, seed=3, **PAUSES).run(two_axes, 10)
    for rank, values in enumerate(found.values):
        row, column = divmod(rank, 2)
        for turn in range(10):
            assert values[2 * turn] == (column + turn) + (2 + column + turn)
            assert values[2 * turn + 1] == 4 * row + 1 + 2 * turn


def groups_of_all_kinds() -> list[float]:
    dist.group.WORLD.bound_device_id = torch.device("sim", dist.get_rank())
    try:
        pairs = [dist.new_group([0, 1], group_desc="low"), dist.new_group([2, 3])]
        mine = pairs[dist.get_rank() // 2]
        of_sim = dist.new_group(backend="sim:simccl", timeout=timedelta(seconds=7))
        its_timeout = of_sim._get_backend(torch.device("sim")).options._timeout  # torch 2.14 gives it the part's below
        part = dist.split_group(of_sim, [[0, 2], [1, 3]])
    finally:
        dist.group.WORLD.bound_device_id = None
    assert its_timeout == timedelta(seconds=7)
    assert mine.group_name
    assert part.group_name not in ("", mine.group_name)
    assert sorted(dist.get_process_group_ranks(part)) == [dist.get_rank() % 2, dist.get_rank() % 2 + 2]
    found = []
    for group in (mine, of_sim, part):
        x = torch.full((SIZE,), float(dist.get_rank()), device="sim")
        dist.all_reduce(x, group=group)
        found.append(x[0].item())
    return found


def test_groups_are_made_and_split(sim_world):
    expected = [[1.0, 6.0, 2.0], [1.0, 6.0, 4.0], [5.0, 6.0, 2.0], [5.0, 6.0, 4.0]]
    assert sim_world(4).run(groups_of_all_kinds).values == expected


def as_torch_uses_it() -> list[torch.Tensor]:
    """Functional collectives, DTensor and the collectives of objects."""
    x = torch.full((SIZE,), 1.0 + dist.get_rank(), device="sim")
    summed = functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD)) + 0
    mesh = init_device_mesh("sim", (2,))
    whole = distribute_tensor(torch.arange(6.0, device="sim").view(3, 2), mesh, [Shard(0)]).full_tensor()
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": dist.get_rank()})
    assert objects == [{"rank": 0}, {"rank": 1}]
    return [summed, whole.flatten()]


def test_what_torch_builds_on_it(sim_world):
    for summed, whole in sim_world(2, seed=1, **PAUSES).run(as_torch_uses_it).values:
        assert summed.tolist() == [3.0] * SIZE
        assert whole.tolist() == [0, 1, 2, 3, 4, 5]


# Failures


def disagree(about: str) -> None:
    rank = dist.get_rank()
    x = torch.ones(SIZE, device="sim")
    calls = {
        "sizes": lambda: dist.all_reduce(x[: SIZE - rank]),
        "calls": lambda: dist.broadcast(x, 0) if rank else dist.all_reduce(x),
        "reductions": lambda: dist.all_reduce(x, op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM),
        "dtypes": lambda: dist.all_reduce(x.bfloat16() if rank else x),
        "parts": lambda: dist.all_to_all_single(x, x.clone(), [2, 4], [4, 2] if rank else [2, 4]),
    }
    calls[about]()
    torch.accelerator.synchronize()


BOTH_SIDES = {
    "sizes": ("rank 0 called all_reduce SUM of float32 [6]", "rank 1 called all_reduce SUM of float32 [5]"),
    "calls": ("rank 0 called all_reduce", "rank 1 called broadcast from rank 0"),
    "reductions": ("all_reduce SUM", "all_reduce MAX"),
    "dtypes": ("of float32", "of bfloat16"),
    "parts": ("rank 0 sends 4 elements to rank 1", "rank 1, which expects 2"),
}


@pytest.mark.parametrize("about", BOTH_SIDES)
def test_ranks_that_disagree_are_named_on_both(about, sim_world):
    with pytest.raises(RanksFailed) as failure:
        sim_world(2).run(disagree, about)
    assert set(failure.value.errors) == {0, 1}
    for _, message in failure.value.errors.values():
        for side in BOTH_SIDES[about]:
            assert side in message


def one_stays_away() -> None:
    group = dist.new_group()
    dist.all_reduce(torch.ones(SIZE, device="sim"), group=group)
    torch.accelerator.synchronize()
    # All others come at once from here on, however busy the machine is.
    group._get_backend(torch.device("sim")).set_timeout(timedelta(seconds=3))
    if dist.get_rank() != 1:
        dist.all_reduce(torch.ones(SIZE, device="sim"), group=group)
    torch.accelerator.synchronize()


def test_rank_that_stays_away_is_named(sim_world):
    with pytest.raises(RanksFailed) as failure:
        sim_world(4).run(one_stays_away)
    assert set(failure.value.errors) == {0, 2, 3}
    for _, message in failure.value.errors.values():
        assert "rank 1 did not come" in message
        assert "within 3000 ms" in message


def files_in_use() -> list[str]:
    dist.all_reduce(torch.ones(1 << 16, device="sim"))
    with open("/proc/self/maps") as maps:
        return sorted({line.split(maxsplit=5)[5].strip() for line in maps if "simccl" in line})


def one_is_killed() -> None:
    dist.all_reduce(torch.ones(1 << 16, device="sim"))
    if dist.get_rank() == 1:
        torch.accelerator.synchronize()
        os.kill(os.getpid(), 9)
    dist.all_reduce(torch.ones(1 << 16, device="sim"))


def test_killed_rank_leaves_no_file(sim_world):
    """Files without a name go with the last process that has them open."""
    with pytest.raises(RanksFailed):
        sim_world(2).run(one_is_killed)
    assert sim_world(2).run(files_in_use).values == [["/memfd:simccl (deleted)"]] * 2
