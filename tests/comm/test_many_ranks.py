"""What a rank holds and what ranks send to compare and watch does not grow with them as their own groups do."""

import json
import math
import os
import resource
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from sherd._torch import named_group
from sherd.comm.groups import group_beside
from sherd.errors import MeshError
from sherd.guard import order_check
from sherd.guard.order_check import tree_beside
from tests.support.ranks.bodies import on_processes
from tests.support.refusals import refusal


def held_and_received(num_ranks):
    """The most sockets that a rank has more after two steps, and the bytes that all ranks have received over them."""
    words = [sys.executable, "-m", "tests.comm.many", str(num_ranks)]
    done = subprocess.run(words, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow
def test_sockets_grow_with_the_logarithm_of_ranks_and_traffic_with_ranks_times_it():
    sizes = (16, 64, 256)
    found = {size: held_and_received(size) for size in sizes}
    for size, (held, _) in found.items():
        assert held <= 16 + 2 * math.log2(size), found
    first, *others = (found[size][1] / (size * math.log2(size)) for size in sizes)
    assert max(others) <= 1.25 * first, found


@on_processes(2, 3, 4)
def test_a_tree_adds_up_over_all_ranks():
    rank, size = dist.get_rank(), dist.get_world_size()
    for block in (2, 3):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(order_check, "BLOCK", block)
            place = tree_beside(dist.group.WORLD, f"in {block}s", range(size), torch.device("cpu"))
        sums = place.add_up((1, rank, -(2**62)), lambda work: work.wait())
        assert sums == (size, size * (size - 1) // 2, (-size * 2**62 + 2**63) % 2**64 - 2**63)
        assert len(place.blocks) <= math.ceil(math.log(size, block))


@on_processes(2)
def test_a_tree_waits_as_long_as_the_group_that_it_is_beside():
    patient = named_group("patient", range(2), timedelta(seconds=4321))
    assert tree_beside(patient, "patience", range(2), torch.device("cpu")).timeout_s == 4321


@on_processes(3)
def test_summands_are_zero_in_all_if_ranks_have_said_the_same_and_only_then():
    rank, place = dist.get_rank(), tree_beside(dist.group.WORLD, "summands", range(3), torch.device("cpu"))

    def total(*hashes):
        own = order_check._zero_if_alike(*hashes)
        return place.add_up((own,), lambda work: work.wait())[0]

    alike, apart = (b"\xff" * 8, range(3)), (b"\xff" * 7 + bytes([rank == 1]), range(3))
    in_twos = bytes([rank == 2]) * 8, [0, 1] if rank < 2 else [2]
    assert total(alike) == total(in_twos) == total(alike, in_twos) == total() == 0
    assert total(apart) != 0
    assert total(apart, in_twos) != 0


@on_processes(2)
def test_too_low_a_limit_of_open_files_is_named():
    _, most = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 9, most))
    try:
        said = refusal(MeshError, group_beside, dist.group.WORLD, "more", range(2), torch.device("cpu"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "the group for more needs up to 16 more" in said
    assert "ulimit -n" in said
