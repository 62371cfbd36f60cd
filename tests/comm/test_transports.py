"""Which transport does a group get, and who is told that it cannot have the one it asked for?"""

import pytest
import torch
import torch.distributed as dist

from sherd.comm import transports
from sherd.comm.host.gloo import Gloo
from sherd.comm.host.shared_memory import SharedMemory
from sherd.comm.transport import CoalescedCalls, OneRank, SingleCalls
from sherd.comm.transports import check_transport, transport_of
from sherd.errors import MeshError, PolicyError
from sherd.policy import CommPolicy

CPU = torch.device("cpu")


def chosen(wanted: str) -> str:
    return type(transport_of(dist.group.WORLD, CPU, CommPolicy(wanted))).__name__


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("auto", SharedMemory),
        ("shared_memory", SharedMemory),
        ("gloo", Gloo),
        ("torch", SingleCalls),
        ("coalesced", CoalescedCalls),
    ],
)
def test_gloo_ranks_of_one_host_get_what_they_ask_for(world, wanted, expected):
    assert world(2).run(chosen, wanted) == [expected.__name__] * 2


def test_one_rank_has_nobody_to_send_to(world):
    assert world(1).run(chosen, "auto") == [OneRank.__name__]


def test_threads_get_torchs_own_calls(threads):
    assert threads(2).run(chosen, "auto") == [SingleCalls.__name__] * 2


def is_chosen_once() -> bool:
    group = dist.group.WORLD
    return transport_of(group, CPU, CommPolicy()) is transport_of(group, CPU, CommPolicy())


def test_a_group_meets_once(world):
    assert world(2).run(is_chosen_once) == [True, True]


def refused() -> str:
    with pytest.raises(MeshError) as caught:
        check_transport(dist.group.WORLD, CPU, CommPolicy("gloo"))
    return str(caught.value)


def test_ranks_that_are_not_on_gloo_are_told_so_without_communication(threads):
    for text in threads(2).run(refused):
        assert "serves CPU ranks on gloo" in text
        assert "leave the transport to 'auto'" in text


@pytest.mark.parametrize(
    ("backends", "device", "expected"),
    [
        ("cpu:gloo,cuda:nccl", "cpu", True),  # init_process_group() without a name
        ("cpu:gloo,cuda:gloo", "cpu", True),
        ("cpu:gloo,cuda:nccl", "cuda", False),
        ("cpu:fake", "cpu", False),
    ],
)
def test_a_group_is_on_gloo_by_what_it_has_for_the_cpu(monkeypatch, backends, device, expected):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    assert transports._is_on_gloo(None, torch.device(device)) is expected


@pytest.mark.parametrize("wanted", ["nccl", "", 3, None])
def test_a_transport_that_nobody_knows_is_refused(wanted):
    with pytest.raises(PolicyError, match="expected one of auto, torch, coalesced, gloo, shared_memory"):
        CommPolicy(wanted)
