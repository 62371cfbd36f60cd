"""Which cores make the steps of a rank on the host."""

import os
import threading

import torch

from sherd import steps_on_thread
from sherd.comm import cores


def test_the_share_of_a_rank_is_equal_and_what_the_user_has_set_holds(monkeypatch):
    torchrun = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "a"}
    for num_ranks, own, now, variables, expected in (
        (1, 8, 8, {}, 8),
        (4, 8, 8, {}, 2),
        (16, 8, 8, {}, 1),
        (4, 2, 2, {}, 2),  # bound by the launcher
        (4, 8, 1, {}, 1),  # by torch.set_num_threads
        (4, 8, 8, {"OMP_NUM_THREADS": "8"}, 8),
        (4, 8, 1, {"OMP_NUM_THREADS": "1"}, 1),
        (4, 8, 1, torchrun, 2),
        (1, 8, 1, torchrun, 1),
    ):
        with monkeypatch.context() as patch:
            for name in torchrun:
                patch.delenv(name, raising=False)
            for name, value in variables.items():
                patch.setenv(name, value)
            patch.setattr(cores, "own_cores", lambda own=own: set(range(own)))
            patch.setattr(os, "cpu_count", lambda: 8)
            patch.setattr(torch, "get_num_threads", lambda now=now: now)
            assert cores.threads_of_steps(num_ranks) == expected, (num_ranks, own, now, variables)


class Device:
    pci_domain_id, pci_bus_id, pci_device_id = 0, 0x1B, 0

    @staticmethod
    def get_device_properties(device):
        return Device


def test_the_cores_near_a_device_are_those_of_its_numa_node(monkeypatch, tmp_path):
    device, bus = torch.device("cuda", 0), tmp_path / "0000:1b:00.0"
    monkeypatch.setattr(cores, "_DEVICES", tmp_path)
    monkeypatch.setattr(cores, "_NODES", tmp_path)
    monkeypatch.setattr(cores, "own_cores", lambda: set(range(12)))
    assert (cores.node_of(device), cores.cores_near(device)) == (None, set(range(12)))
    monkeypatch.setattr(torch, "get_device_module", lambda device: Device)
    bus.mkdir()
    (tmp_path / "node1").mkdir()
    for node, listed, expected in (
        ("1", "4-7,10,100-103", {4, 5, 6, 7, 10}),
        ("1", "20-31", set(range(12))),  # none of ours
        ("-1", "4-7", set(range(12))),
    ):
        (bus / "numa_node").write_text(node + "\n")
        (tmp_path / "node1" / "cpulist").write_text(listed + "\n")
        assert cores.cores_near(device) == expected, (node, listed)


def test_the_thread_has_its_own_number_of_threads_and_cores(monkeypatch):
    before, own = torch.get_num_threads(), cores.own_cores()
    some = {min(own)}
    steps_on_thread._thread.cache_clear()
    monkeypatch.setattr(steps_on_thread, "threads_of_steps", lambda num_ranks: before + 1)
    monkeypatch.setattr(steps_on_thread, "own_cores", lambda: some)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    thread = steps_on_thread._thread()
    assert thread.submit(torch.get_num_threads).result() == before + 1
    assert thread.submit(os.sched_getaffinity, 0).result() == some
    assert (torch.get_num_threads(), os.sched_getaffinity(0)) == (before, own)
    found = []
    another = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    another.start()
    another.join()
    assert found == [before]
    thread.shutdown()
    steps_on_thread._thread.cache_clear()
