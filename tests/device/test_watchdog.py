"""The device waits for a rank that does not come, and the host goes on: that rank is named soon, and processes end.

The ranks are processes of their own: those of `sim_world` are killed together as soon as one has died. The collectives
of the simulated device would give up later than any test here, as a backend without a timeout.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

import simdevice
from sherd._torch import backend_of
from sherd.comm.streams import Queued
from sherd.errors import CommError
from sherd.guard.flight import FOLDER
from sherd.guard.watchdog import EXIT_CODE, TEAR_DOWN
from tests.divergence.programs import sharded, step, wrapped
from tests.divergence.test_flight import faults, recorded_in
from tests.support.ranks import MAX_PROCESSES, warm_up

BACKENDS_TIMEOUT = timedelta(seconds=600)
TIMEOUT_S = 120
SOON_S = TIMEOUT_S / 4
"""How soon a lost rank is named: seconds on an idle machine, and on a busy one still long before the timeout."""
Make = Callable[..., Any]


@dataclass(frozen=True)
class End:
    """A process's exit code, what it wrote to stderr, and its value if it came to its end."""

    code: int
    said: str
    value: str


def live(
    rank: int, num_ranks: int, port: int, folder: Path, timeout_s: float, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    file = os.open(folder / f"stderr{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.environ.update({"RANK": str(rank), "SIM_DEVICES": str(MAX_PROCESSES), FOLDER: str(folder)})
    simdevice.load()
    torch.accelerator.set_device_index(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    distributed_c10d.default_pg_timeout = BACKENDS_TIMEOUT
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("cpu:gloo,sim:simccl", store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    backend_of(dist.group.WORLD, torch.device("sim")).set_timeout(BACKENDS_TIMEOUT)
    value = fn(*args)
    (folder / f"value{rank}").write_text(str(value))
    (folder / f"done{rank}").write_text("")
    # None may end, and be missed, while another is still looked at.
    while not all((folder / f"done{each}").exists() for each in range(num_ranks)):
        time.sleep(0.02)


def ends(folder: Path, num_ranks: int, timeout_s: float, fn: Callable[..., Any], *args: Any) -> list[End]:
    """How `fn(*args)` ends on each of new processes. Those that are stuck when the others have ended are killed."""
    warm_up()
    context = multiprocessing.get_context("forkserver")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        context.Process(target=live, args=(rank, num_ranks, store.port, folder, timeout_s, fn, args))
        for rank in range(num_ranks)
    ]
    try:
        for process in processes:
            process.start()
        deadline = time.monotonic() + TIMEOUT_S - 20
        for rank, process in enumerate(processes):
            if rank != 1:
                process.join(max(0.0, deadline - time.monotonic()))
        processes[1].join(0.5)
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    found = []
    for rank, code in enumerate(codes):
        value = folder / f"value{rank}"
        said = (folder / f"stderr{rank}").read_text()
        found.append(End(-99 if code is None else code, said, value.read_text() if value.exists() else ""))
    return found


def on_device(make: Make, **more: Any) -> Any:
    mesh = init_device_mesh("sim", (dist.get_world_size(),))
    return make(**({"device_mesh": mesh} if make is wrapped else {"mesh": mesh}), **more)


def trained(make: Make = sharded, **more: Any) -> Any:
    """Returns a model on the device after three steps."""
    model = on_device(make, **more)
    for _ in range(3):
        step(model)
    torch.accelerator.synchronize()
    return model


def step_and_wait(model: Any) -> None:
    step(model)
    torch.accelerator.synchronize()


def wait_for_the_reader() -> None:
    """Returns late."""
    time.sleep(60)


def one_does_not_come(how: str, make: Make, more: dict[str, Any]) -> None:
    model = trained(make, **more)
    dist.barrier()
    if dist.get_rank() == 1:
        if how == "is killed":
            (Path(os.environ[FOLDER]) / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for_the_reader()
    step_and_wait(model)


WAYS: list[tuple[Make, dict[str, Any]]] = [
    (sharded, {}),
    (sharded, {"divergence": "join"}),
    (wrapped, {"use_orig_params": True}),
    (wrapped, {"use_orig_params": False}),
]


@pytest.mark.parametrize(("make", "more"), WAYS, ids=lambda each: getattr(each, "__name__", str(each)))
def test_a_rank_that_is_killed_is_named_in_seconds_by_all_others(tmp_path, make, more):
    found = ends(tmp_path, 3, TIMEOUT_S, one_does_not_come, "is killed", make, more)
    assert found[1].code == -signal.SIGKILL
    for each in (found[0], found[2]):
        assert each.code == 1
        assert "CommError: " in each.said
        if "divergence" not in more:  # there it is the host that waits, and gloo that raises
            assert "rank 1 has died, or left the group" in each.said
        assert not any(f"rank {rank} has died" in each.said for rank in (0, 2)), each.said
    records, killed = recorded_in(tmp_path), float((tmp_path / "killed").read_text())
    assert sorted(records) == [0, 2]
    assert max(each["time"] for each in records.values()) - killed < SOON_S
    assert [name for name, _ in faults(tmp_path)] == ["rank 1"]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "more"), WAYS[:3], ids=lambda each: getattr(each, "__name__", str(each)))
def test_a_rank_that_is_stuck_is_named_with_its_line_within_the_timeout(tmp_path, make, more):
    found = ends(tmp_path, 3, 4, one_does_not_come, "is stuck", make, more)
    for each in (found[0], found[2]):
        # Where the host waits in gloo, the group's timeout brings it out, unless the watchdog ends the process before.
        assert each.code in ((1, EXIT_CODE) if "divergence" in more else (1,))
        last = each.said[each.said.rindex("CommError: ") :]
        assert "Rank 1 has not come: it is at" in last
        assert "wait_for_the_reader()" in last
        assert "time.sleep(60)" in last
        assert not any(f"Rank {rank} has" in last for rank in (0, 2)), last
    assert sorted(recorded_in(tmp_path)) == [0, 1, 2]
    ((name, why),) = faults(tmp_path)
    assert name == "rank 1"
    assert "time.sleep(60)" in why


SLOW = {"long compute on all ranks": 4, "long compute on one": 5, "one is late": 5, "one blocks its interpreter": 40}
"""How ranks are slow, and the timeout in seconds."""


def goes_on(how: str) -> str:
    """Ranks are slow, and all come in time."""
    model, rank = trained(), dist.get_rank()
    if how == "long compute on all ranks":
        simdevice.sleep(6_000_000)
    if how == "long compute on one" and rank == 1:
        simdevice.sleep(1_800_000)
    if how == "one is late" and rank == 1:
        time.sleep(1.8)
    if how == "one blocks its interpreter" and rank == 1:
        ctypes.PyDLL(None).sleep(6)
    step_and_wait(model)
    return "done"


@pytest.mark.slow
@pytest.mark.parametrize("how", SLOW)
def test_ranks_that_are_slow_are_left_alone(tmp_path, how):
    for each in ends(tmp_path, 2, SLOW[how], goes_on, how):
        assert (each.code, each.said, each.value) == (0, "", "done")
    assert recorded_in(tmp_path) == {}


def left_by_rank_1() -> Any:
    """Returns a model that all ranks have trained before rank 1 has died."""
    model = trained()
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(3)
    return model


def does_not_come_out() -> None:
    model = left_by_rank_1()
    step(model)
    ctypes.CDLL(None).sleep(60)


@pytest.mark.slow
def test_a_process_whose_main_thread_does_not_come_out_ends(tmp_path):
    found = ends(tmp_path, 3, 120, does_not_come_out)
    for each in (found[0], found[2]):
        assert each.code == EXIT_CODE
        assert "rank 1 has died" in each.said
        assert "the main thread has not come out" in each.said


def looks_on() -> str:
    os.environ[TEAR_DOWN] = "0"
    model = left_by_rank_1()
    step(model)
    time.sleep(9)
    print("it went on", file=sys.stderr)
    os._exit(0)


@pytest.mark.slow
def test_the_process_is_left_alone_if_the_user_wants_it(tmp_path):
    (end, _) = ends(tmp_path, 2, 120, looks_on)
    assert end.code == 0
    assert "rank 1 has died" in end.said
    assert "it went on" in end.said


def cleans_up() -> str:
    model = left_by_rank_1()
    try:
        with pytest.raises(CommError) as first:
            step_and_wait(model)
        with pytest.raises(CommError) as again:
            step(model)
    finally:
        dist.destroy_process_group()
    assert str(again.value) == str(first.value)
    time.sleep(6)
    (Path(os.environ[FOLDER]) / "value0").write_text("cleaned up")
    os._exit(0)


@pytest.mark.slow
def test_a_program_may_catch_the_error_and_clean_up_for_as_long_as_it_takes(tmp_path):
    (end, _) = ends(tmp_path, 2, 120, cleans_up)
    assert (end.code, end.value) == (0, "cleaned up"), end.said


def what_is_left(divergence: str) -> tuple[int, int, int]:
    """Watching threads before and after the group is destroyed, and events that are known after."""
    model = trained(divergence=divergence)
    time.sleep(0.5)
    before = watchers()
    dist.barrier()
    dist.destroy_process_group()
    deadline = time.monotonic() + 20
    while watchers() and time.monotonic() < deadline:
        time.sleep(0.02)
    events = sum(len(lane) for each in gc.get_objects() if type(each) is Queued for lane in each._by_lane.values())
    del model
    return before, watchers(), events


def watchers() -> int:
    return sum(thread.name == "sherd board" for thread in threading.enumerate())


@pytest.mark.parametrize("divergence", ["error", "join"])
def test_threads_and_events_go_with_the_group(tmp_path, divergence):
    for each in ends(tmp_path, 2, 120, what_is_left, divergence):
        assert (each.code, each.value) == (0, "(1, 0, 0)"), each.said


def the_store_dies_with_its_process() -> None:
    """Rank 0 has the store of the default group, as where the environment names it and torchrun does not keep it."""
    rank, num_ranks, folder = dist.get_rank(), dist.get_world_size(), Path(os.environ[FOLDER])
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (folder / "port.part").write_text(str(store.port))
        (folder / "port.part").rename(folder / "port")
    else:
        while not (folder / "port").exists():
            time.sleep(0.02)
        store = dist.TCPStore("127.0.0.1", int((folder / "port").read_text()), is_master=False)
    dist.init_process_group("cpu:gloo,sim:simccl", store=store, rank=rank, world_size=num_ranks)
    model = trained()
    time.sleep(1)  # the threads look
    dist.barrier()
    if rank == 0:
        (folder / "killed").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    step_and_wait(model)


@pytest.mark.slow
def test_the_rank_that_has_the_store_is_named_like_any_other(tmp_path):
    found = ends(tmp_path, 3, TIMEOUT_S, the_store_dies_with_its_process)
    assert found[0].code == -signal.SIGKILL
    assert "rank 0 has died, or left the group" in found[2].said
    assert found[2].code == 1
    assert recorded_in(tmp_path)[2]["time"] - float((tmp_path / "killed").read_text()) < SOON_S


# Without new processes


def test_nothing_is_noted_under_trust_and_the_host_never_waits(sim_world):
    world = sim_world(2)
    found = world.run(steps_and_waits, "error")
    plain = world.run(steps_and_waits, "trust")
    assert found.host_waits == plain.host_waits
    assert [noted for noted, _ in plain.values] == [0, 0]
    assert all(noted > 0 for noted, _ in found.values)
    assert [sums for _, sums in found.values] == [sums for _, sums in plain.values]


def steps_and_waits(divergence: str) -> tuple[int, tuple[float, ...]]:
    """How many collectives the lanes noted, and sums of the shards."""
    noted = 0
    add = Queued.add

    def count(self: Queued, *args: Any) -> None:
        nonlocal noted
        noted += 1
        add(self, *args)

    model = on_device(sharded, divergence=divergence)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Queued, "add", count)
        for _ in range(3):
            step(model)
            time.sleep(0.1)  # the thread looks
    return noted, tuple(parameter.to_local().sum().item() for parameter in model.parameters())
