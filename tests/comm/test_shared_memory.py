"""Ranks that share memory gather and sum what arithmetic says, whatever the sizes, dtypes and order of waits."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from sherd.comm.host import neighbours, shared_memory
from sherd.comm.host.shared_memory import SharedMemory
from sherd.errors import CommError

KIB = 1 << 10


def met(group: dist.ProcessGroup | None = None, **options: Any) -> SharedMemory:
    transport = SharedMemory.meet(group or dist.group.WORLD, **options)
    assert transport is not None
    return transport


def half_sums() -> tuple[Any, ...]:
    transport = met()
    rows = torch.full((4,), [256.0, 1.0, 1.0][dist.get_rank()], dtype=torch.bfloat16)
    rest = torch.empty([2, 1, 1][dist.get_rank()])
    transport.reduce_scatter(rest, rows, [2, 1, 1], False)
    transport.all_reduce(rows, False)
    return transport.sum_dtype(torch.bfloat16), transport.sum_dtype(torch.int32), rest.tolist(), rows.tolist()


def test_bfloat16_is_added_up_in_float32(world):
    # In bfloat16 256 + 1 is 256.
    in_rest = [[258.0, 258.0], [258.0], [258.0]]
    expected = [(torch.float32, torch.int32, rest, [258.0] * 4) for rest in in_rest]
    assert world(3).run(half_sums) == expected


def sums_float8_and_gathers_a_parameter() -> list[float]:
    with pytest.raises(CommError, match=r"torch cannot add up torch\.float8_e4m3fn"):
        met().all_reduce(torch.zeros(2).to(torch.float8_e4m3fn), False)
    rest = torch.nn.Parameter(torch.full((2,), float(dist.get_rank())))
    rows = torch.empty(4)
    met().all_gather(rows, rest, [2, 2], False)
    assert not rows.requires_grad
    return rows.tolist()


def test_what_torch_cannot_add_up_is_refused_and_what_requires_grad_travels_outside_of_autograd(world):
    assert world(2).run(sums_float8_and_gathers_a_parameter) == [[0, 0, 1, 1]] * 2


# Memory


def one_shows_all(num_gathers: int) -> int:
    """Rank 0's memory is short from the fifth gather on, rank 1's never; in between they meet elsewhere."""
    transport = met(limit=64 * KIB)
    sizes = [4 * KIB, 0]
    rests = [torch.full((sizes[dist.get_rank()],), float(number)) for number in range(num_gathers)]
    rows = [torch.empty(4 * KIB) for _ in rests]
    calls = []
    for into, rest in zip(rows, rests, strict=True):
        calls.append(transport.all_gather(into, rest, sizes, True))
        dist.barrier()
    for number, (into, call) in enumerate(zip(rows, calls, strict=True)):
        call.wait()
        assert into.unique().tolist() == [number]
    return transport.nbytes


def test_a_rank_that_shows_nothing_does_not_hold_up_the_others(world):
    assert world(2).run(one_shows_all, 40) == [64 * KIB, 0]


def small_rounds(num_rounds: int) -> int:
    transport = met()
    rows, rest = torch.empty(2000), torch.ones(1000)
    for _ in range(num_rounds):
        transport.all_gather(rows, rest, [1000, 1000], False)
        call = transport.reduce_scatter(rest, rows, [1000, 1000], True)
        call.wait()
        rest /= 2
    assert rest.unique().tolist() == [1.0]
    return transport.nbytes


def test_small_collectives_use_the_same_few_pages_again(world):
    assert max(world(2).run(small_rounds, 200)) <= 16 * KIB


def more_than_the_limit() -> list[int]:
    transport = met(limit=64 * KIB)
    held = []
    for numel in (1 << 18, 10, 10, 10):
        rest = torch.full((numel,), float(dist.get_rank()))
        into: dict[int, float] = {}
        transport.all_gather_onto(
            lambda rank, part, into=into: into.update({rank: part.mean().item()}), rest, [numel] * 2, False
        )
        assert into == {0: 0.0, 1: 1.0}
        held.append(transport.nbytes)
    return held


def test_memory_beyond_the_limit_is_given_back(world):
    for held in world(2).run(more_than_the_limit):
        assert held[0] == 1 << 20
        assert held[-1] <= 64 * KIB


def dropped() -> list[float]:
    transport = met()
    rows, kept = torch.zeros(2), torch.zeros(2)
    rest = torch.ones(1)
    transport.all_gather(rows, rest, [1, 1], True)  # nobody holds what it answers
    transport.all_gather(kept, rest, [1, 1], True).wait()
    return [*rows.tolist(), *kept.tolist()]


def test_a_gather_that_nobody_holds_any_more_leaves_memory_alone(world):
    for rank, result in enumerate(world(2).run(dropped)):
        own = [0.0, 0.0]
        own[rank] = 1.0  # copied before the call returned
        assert result == [*own, 1.0, 1.0]


def mapped_files() -> list[str]:
    transport = met()
    transport.all_reduce(torch.ones(10), False)
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    return sorted(file for file in files if "sherd" in file or file.startswith("/dev/shm"))


def test_no_folder_holds_the_shared_memory(world):
    for files in world(2).run(mapped_files):
        assert "/memfd:sherd (deleted)" in files
        assert not [file for file in files if "sherd" in file and file.startswith("/dev/shm")]


# Groups


def sum_in_subgroups() -> dict[str, float]:
    rank = dist.get_rank()
    sums = {}
    transports = {}
    for ranks in ([1, 3], [2, 0], [0, 1, 2, 3]):
        group = dist.new_group(ranks)
        if rank in ranks:
            transports[str(ranks)] = met(group), torch.tensor([float(rank)])
    calls = [transport.all_reduce(tensor, True) for transport, tensor in transports.values()]
    for call in reversed(calls):
        call.wait()
    for name, (_, tensor) in transports.items():
        sums[name] = tensor.item()
    return sums


def test_groups_of_some_ranks_share_memory_side_by_side(world):
    even, odd = {"[2, 0]": 2.0, "[0, 1, 2, 3]": 6.0}, {"[1, 3]": 4.0, "[0, 1, 2, 3]": 6.0}
    assert world(4).run(sum_in_subgroups) == [even, odd, even, odd]


def meet_with_one_that_cannot(what: str) -> bool:
    fails = mock.Mock(side_effect=OSError("not here"))
    patches = {
        "no memory": mock.patch.object(shared_memory, "new_segment", return_value=None),
        "another host": mock.patch.object(neighbours, "_place", return_value=("elsewhere",)),
        "no sockets": mock.patch.object(neighbours._Rendezvous, "_socket", fails),
        "no connection": mock.patch.object(neighbours._Rendezvous, "call", fails),
        "another user": mock.patch.object(neighbours, "_credentials", return_value=(1, -1, -1)),
    }
    if dist.get_rank() == 1:
        with patches[what]:
            return SharedMemory.meet(dist.group.WORLD) is None
    return SharedMemory.meet(dist.group.WORLD) is None


def test_where_one_rank_cannot_share_memory_none_does(world):
    for what in ("no memory", "another host", "no sockets", "no connection", "another user"):
        assert world(3).run(meet_with_one_that_cannot, what) == [True] * 3, what


# Errors that nobody dies of


def asked_differently(what: str) -> list[str]:
    transport, rank = met(), dist.get_rank()
    rest, rows = torch.zeros(1 << 18), torch.zeros(1 << 19)
    sizes = [1 << 18] * 2

    def call() -> None:
        if what == "op" and rank == 1:
            transport.reduce_scatter(rest, rows, sizes, False)
        elif what == "size" and rank == 1:
            transport.all_gather(rows[:20], rest[:10], [10, 10], False)
        elif what == "dtype" and rank == 1:
            transport.all_gather(rows.to(torch.bfloat16), rest.to(torch.bfloat16), sizes, False)
        elif what == "parts" and rank == 1:
            transport.all_gather(rows, rest[: 1 << 17], [3 << 17, 1 << 17], False)
        else:
            transport.all_gather(rows, rest, sizes, False)

    said = []
    for _ in range(2):
        with pytest.raises(CommError) as caught:
            call()
        said.append(str(caught.value))
    return said


THEIRS = {
    "op": "reduce-scatter of 2.0 MiB (2,097,152 bytes) of float32",
    "size": "all-gather of 80 bytes of float32",
    "dtype": "all-gather of 1.0 MiB (1,048,576 bytes) of bfloat16",
    "parts": "all-gather of 2.0 MiB (2,097,152 bytes) of float32 in parts of other sizes",
}


def test_ranks_that_ask_for_different_things_are_told_so(world):
    for what, theirs in THEIRS.items():
        for rank, (first, again) in enumerate(world(2).run(asked_differently, what)):
            assert "ranks diverged in round 0" in first, what
            assert "all-gather of 2.0 MiB (2,097,152 bytes) of float32" in first, what
            assert theirs in first or "other sizes" in theirs, what
            assert f"rank {1 - rank} (process" in first, what
            assert again == first, what


def landing_fails() -> list[str]:
    transport, said = met(), []

    def land(rank: int, part: torch.Tensor) -> None:
        if dist.get_rank() == 0:
            raise ValueError("no such parameter")

    for _ in range(2):
        try:
            transport.all_gather_onto(land, torch.zeros(3), [3, 3], False)
            transport.all_reduce(torch.zeros(3), False)
        except (CommError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_what_goes_wrong_on_one_rank_is_told_to_the_others(world):
    first, second = world(2).run(landing_fails)
    assert first == ["ValueError: no such parameter", "CommError: [rank 0] ValueError no such parameter"]
    assert len(second) == 2
    assert all("rank 0 (process" in each and "gave up: ValueError no such parameter" in each for each in second)


def used_after_close() -> None:
    transport = met()
    transport.all_reduce(torch.ones(1), False)
    transport.close()
    transport.close()
    with pytest.raises(CommError, match=rf"^\[rank {dist.get_rank()}\] this transport was closed$"):
        transport.all_reduce(torch.ones(1), False)
    assert transport.nbytes == 0


def test_a_closed_transport_says_so(world):
    world(2).run(used_after_close)


def used_by_a_forked_child() -> list[str]:
    transport = met()
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that forking beside threads may go wrong
        child = os.fork()
    if not child:
        try:
            transport.all_reduce(torch.ones(1), False)
        except CommError as error:
            os.write(writing, str(error).encode())
        del transport  # closes what the child has, and nothing else
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with open(reading) as pipe:
        said = pipe.read()
    tensor = torch.ones(1)
    transport.all_reduce(tensor, False)
    return [said, str(tensor.item())]


def test_a_forked_child_is_refused_and_disturbs_nobody(world):
    for rank, (said, total) in enumerate(world(2).run(used_by_a_forked_child)):
        assert f"was forked from rank {rank}" in said
        assert total == "2.0"
