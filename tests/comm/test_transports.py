"""Which transport a group gets, and who is told that it cannot have the one it asked for."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from sherd.comm import transports
from sherd.comm.host.gloo import Gloo
from sherd.comm.host.shared_memory import SharedMemory
from sherd.comm.transport import CoalescedCalls, LargeCoalesced, OneRank, PartByPart, SingleCalls
from sherd.comm.transports import check_transport, transport_of
from sherd.errors import MeshError, PolicyError
from sherd.policy import CommPolicy
from tests.support.ranks.bodies import on_threads
from tests.support.refusals import refusal

CPU = torch.device("cpu")


def chosen(wanted: str) -> str:
    transport = transport_of(dist.group.WORLD, CPU, CommPolicy(wanted))
    assert transport is transport_of(dist.group.WORLD, CPU, CommPolicy(wanted)), "a group meets once"
    return type(transport).__name__


@pytest.mark.front("A CPU is enough to develop")
def test_ranks_get_what_they_ask_for_if_they_can(world, threads):
    kinds = {"auto": SharedMemory, "shared_memory": SharedMemory, "gloo": Gloo, "torch": SingleCalls}
    for wanted, expected in (kinds | {"coalesced": CoalescedCalls}).items():
        assert world(2).run(chosen, wanted) == [expected.__name__] * 2, wanted
    assert world(1).run(chosen, "auto") == [OneRank.__name__]
    assert threads(2).run(chosen, "auto") == [SingleCalls.__name__] * 2


@on_threads(2)
def test_ranks_that_are_not_on_gloo_are_told_so_without_communication():
    with pytest.raises(MeshError, match=r"serves CPU ranks on gloo.*leave the transport to 'auto'"):
        check_transport(dist.group.WORLD, CPU, CommPolicy("gloo"))


def test_a_group_is_on_gloo_by_what_it_has_for_the_cpu(monkeypatch):
    for backends, device, expected in (
        ("cpu:gloo,cuda:nccl", "cpu", True),  # init_process_group() without a name
        ("cpu:gloo,cuda:gloo", "cpu", True),
        ("cpu:gloo,cuda:nccl", "cuda", False),
        ("cpu:gloo,cuda:nccl2", "cpu", True),
        ("cpu:gloo,cuda:nccl-lazy", "cuda", False),
        ("cpu:fake", "cpu", False),
    ):
        monkeypatch.setattr(dist, "get_backend_config", lambda group, backends=backends: backends)
        assert transports._is_on_gloo(None, torch.device(device)) is expected, backends


def test_on_an_accelerator_gloo_is_asked_for_parts_and_others_for_what_a_policy_says(monkeypatch):
    group = SimpleNamespace(all_gather_single=print, reduce_scatter_single=print)
    for backends, wanted, expected in (
        ("cpu:gloo,cuda:gloo", "auto", PartByPart),
        ("cpu:gloo,cuda:gloo", "coalesced", PartByPart),
        ("cpu:gloo,cuda:nccl", "auto", LargeCoalesced),
        ("cpu:gloo,cuda:nccl", "torch", SingleCalls),
        ("cpu:gloo,cuda:nccl", "coalesced", CoalescedCalls),
        ("cpu:gloo,cuda:nccl2", "auto", LargeCoalesced),
        ("cuda:other", "auto", SingleCalls),
    ):
        monkeypatch.setattr(transports, "coalesces", lambda *_, backends=backends: "nccl" in backends)
        monkeypatch.setattr(dist, "get_backend_config", lambda group, backends=backends: backends)
        assert type(transports._made(group, torch.device("cuda"), wanted)) is expected, (backends, wanted)


def test_a_transport_that_nobody_knows_is_refused():
    for wanted in ("nccl", "", 3, None):
        said = refusal(PolicyError, CommPolicy, wanted)
        assert "expected one of auto, torch, coalesced, gloo, shared_memory" in said, wanted
