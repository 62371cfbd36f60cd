"""Ranks that share memory gather and sum what arithmetic says, whatever the sizes, dtypes and order of waits."""

from __future__ import annotations

import contextlib
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
from tests.support.ranks.bodies import on_processes
from tests.support.refusals import NOTHING, refusal

KIB = 1 << 10


def met(group: dist.ProcessGroup | None = None, **options: Any) -> SharedMemory:
    transport = SharedMemory.meet(group or dist.group.WORLD, **options)
    assert transport is not None
    return transport


@on_processes(3)
def test_bfloat16_is_added_up_in_float32():
    transport = met()
    rows = torch.full((4,), [256.0, 1.0, 1.0][dist.get_rank()], dtype=torch.bfloat16)
    rest = torch.empty([2, 1, 1][dist.get_rank()])
    transport.reduce_scatter(rest, rows, [2, 1, 1], False)
    transport.all_reduce(rows, False)
    assert transport.sum_dtype(torch.bfloat16) == torch.float32
    assert transport.sum_dtype(torch.int32) == torch.int32
    assert rest.tolist() == [258.0] * len(rest)  # in bfloat16 256 + 1 is 256
    assert rows.tolist() == [258.0] * 4


@on_processes(2)
def test_what_torch_cannot_add_up_is_refused_and_what_requires_grad_travels_outside_of_autograd():
    with pytest.raises(CommError, match=r"torch cannot add up torch\.float8_e4m3fn"):
        met().all_reduce(torch.zeros(2).to(torch.float8_e4m3fn), False)
    rest = torch.nn.Parameter(torch.full((2,), float(dist.get_rank())))
    rows = torch.empty(4)
    met().all_gather(rows, rest, [2, 2], False)
    assert not rows.requires_grad
    assert rows.tolist() == [0, 0, 1, 1]


# Memory


@on_processes(2)
def test_a_rank_that_shows_nothing_does_not_hold_up_the_others():
    """Rank 0's memory is short from the fifth gather on, rank 1's never; in between they meet elsewhere."""
    transport = met(limit=64 * KIB)
    sizes = [4 * KIB, 0]
    rests = [torch.full((sizes[dist.get_rank()],), float(number)) for number in range(40)]
    rows = [torch.empty(4 * KIB) for _ in rests]
    calls = []
    for into, rest in zip(rows, rests, strict=True):
        calls.append(transport.all_gather(into, rest, sizes, True))
        dist.barrier()
    for number, (into, call) in enumerate(zip(rows, calls, strict=True)):
        call.wait()
        assert into.unique().tolist() == [number]
    assert transport.nbytes == [64 * KIB, 0][dist.get_rank()]


@on_processes(2)
def test_small_collectives_use_the_same_few_pages_again():
    transport = met()
    rows, rest = torch.empty(2000), torch.ones(1000)
    for _ in range(200):
        transport.all_gather(rows, rest, [1000, 1000], False)
        call = transport.reduce_scatter(rest, rows, [1000, 1000], True)
        call.wait()
        rest /= 2
    assert rest.unique().tolist() == [1.0]
    assert transport.nbytes <= 16 * KIB


@on_processes(2)
def test_memory_beyond_the_limit_is_given_back():
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
    assert held[0] == 1 << 20
    assert held[-1] <= 64 * KIB


@on_processes(2)
def test_a_gather_that_nobody_holds_any_more_leaves_memory_alone():
    transport = met()
    rows, kept, rest = torch.zeros(2), torch.zeros(2), torch.ones(1)
    transport.all_gather(rows, rest, [1, 1], True)  # nobody holds what it answers
    transport.all_gather(kept, rest, [1, 1], True).wait()
    own = [0.0, 0.0]
    own[dist.get_rank()] = 1.0  # copied before the call returned
    assert rows.tolist() == own
    assert kept.tolist() == [1.0, 1.0]


@on_processes(2)
def test_no_folder_holds_the_shared_memory():
    transport = met()
    transport.all_reduce(torch.ones(10), False)
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    assert "/memfd:sherd (deleted)" in files
    assert not [file for file in files if "sherd" in file and file.startswith("/dev/shm")]


# Groups


@on_processes(4)
def test_groups_of_some_ranks_share_memory_side_by_side():
    rank, totals, calls = dist.get_rank(), [], []
    for ranks in ([1, 3], [2, 0], [0, 1, 2, 3]):
        group = dist.new_group(ranks)
        if rank in ranks:
            totals.append(torch.tensor([float(rank)]))
            calls.append((met(group), totals[-1]))
    for call in reversed([transport.all_reduce(total, True) for transport, total in calls]):
        call.wait()
    assert [total.item() for total in totals] == [4.0 if rank % 2 else 2.0, 6.0]


@on_processes(3, what=["no memory", "another host", "no sockets", "no connection", "another user"])
def test_where_one_rank_cannot_share_memory_none_does(what):
    fails = mock.Mock(side_effect=OSError("not here"))
    patches = {
        "no memory": mock.patch.object(shared_memory, "new_segment", return_value=None),
        "another host": mock.patch.object(neighbours, "_place", return_value=("elsewhere",)),
        "no sockets": mock.patch.object(neighbours._Rendezvous, "_socket", fails),
        "no connection": mock.patch.object(neighbours._Rendezvous, "call", fails),
        "another user": mock.patch.object(neighbours, "_credentials", return_value=(1, -1, -1)),
    }
    with patches[what] if dist.get_rank() == 1 else contextlib.nullcontext():
        assert SharedMemory.meet(dist.group.WORLD) is None


# Errors that nobody dies of


THEIRS = {
    "op": "reduce-scatter of 2,097,152 bytes of float32",
    "size": "all-gather of 80 bytes of float32",
    "dtype": "all-gather of 1,048,576 bytes of bfloat16",
    "parts": "all-gather of 2,097,152 bytes of float32 in parts of other sizes",
}


@on_processes(2, what=THEIRS)
def test_ranks_that_ask_for_different_things_are_told_so(what):
    transport, rank = met(), dist.get_rank()
    rest, rows, sizes, narrow = torch.zeros(1 << 18), torch.zeros(1 << 19), [1 << 18] * 2, torch.bfloat16
    others = {
        "op": lambda: transport.reduce_scatter(rest, rows, sizes, False),
        "size": lambda: transport.all_gather(rows[:20], rest[:10], [10, 10], False),
        "dtype": lambda: transport.all_gather(rows.to(narrow), rest.to(narrow), sizes, False),
        "parts": lambda: transport.all_gather(rows, rest[: 1 << 17], [3 << 17, 1 << 17], False),
    }
    call = others[what] if rank == 1 else lambda: transport.all_gather(rows, rest, sizes, False)
    first, again = refusal(CommError, call), refusal(CommError, call)
    assert again == first != NOTHING
    assert "ranks diverged in round 0" in first
    assert "all-gather of 2,097,152 bytes of float32" in first
    assert THEIRS[what] in first or what == "parts"
    assert f"rank {1 - rank} (process" in first


@on_processes(2)
def test_what_goes_wrong_on_one_rank_is_told_to_the_others():
    transport, said = met(), []

    def land(rank, part):
        if dist.get_rank() == 0:
            raise ValueError("no such parameter")

    for _ in range(2):
        try:
            transport.all_gather_onto(land, torch.zeros(3), [3, 3], False)
            transport.all_reduce(torch.zeros(3), False)
        except (CommError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    if dist.get_rank() == 0:
        assert said == ["ValueError: no such parameter", "CommError: [rank 0] ValueError no such parameter"]
    else:
        assert len(said) == 2
        assert all("rank 0 (process" in each and "gave up: ValueError no such parameter" in each for each in said)


@on_processes(2)
def test_a_closed_transport_says_so():
    transport = met()
    transport.all_reduce(torch.ones(1), False)
    transport.close()
    transport.close()
    with pytest.raises(CommError, match=rf"^\[rank {dist.get_rank()}\] this transport was closed$"):
        transport.all_reduce(torch.ones(1), False)
    assert transport.nbytes == 0


@on_processes(2)
def test_a_forked_child_is_refused_and_disturbs_nobody():
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
    assert f"was forked from rank {dist.get_rank()}" in said
    assert tensor.item() == 2
