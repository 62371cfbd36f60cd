"""What ranks leave behind when they part, die or wait for one that does not come; and who is named."""

from __future__ import annotations

import ctypes
import io
import itertools
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from sherd._torch import imagined_ranks
from sherd.engine.run.runtime import Runtime
from sherd.engine.run.unit import Unit
from sherd.errors import CommError
from sherd.guard import flight
from sherd.guard.board import board_of
from sherd.guard.flight import FOLDER, NUM_RECENT
from sherd.tools.doctor.flight import judged, read
from tests.comm.test_shared_memory_deaths import ends
from tests.divergence.programs import comm_errors, joined, sharded, step, wrapped
from tests.support.ranks import RanksFailed
from tests.support.versions import set_group_timeout

TIMEOUT_S = 4.0


def recorded_in(folder: Path | str) -> dict[int, dict[str, Any]]:
    """The records in `folder`, by rank."""
    found = [json.loads(file.read_text()) for file in Path(folder).glob("sherd-flight-*.json")]
    return {each["rank"]: each for each in found}


def faults(folder: Path) -> list[tuple[str, str]]:
    """The ranks that the doctor blames, and for what."""
    return [(each.name, each.value) for each in judged(read([folder])) if each.verdict == "failure"]


# What is kept


def log_of_steps(make: Callable[[], Any], num_steps: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The first seven collectives of a model, and all that the log says after some steps of it."""
    model = make()
    (monitor,) = Runtime.of(Unit.of(model), model).monitors
    before = monitor._log.newest  # of other tests' models
    for _ in range(num_steps):
        step(model)
    record = monitor._log.record()
    record["collectives"] = [each for each in record["collectives"] if each["number"] > before]
    return record["collectives"][:7], record


@pytest.mark.parametrize("make", [sharded, joined])
def test_the_log_has_each_collective_with_unit_phase_bytes_and_state(world, make):
    for first, record in world(2).run(log_of_steps, make, 2):
        assert record["ranks"] == (0, 1)
        assert (record["waits_s"], record["wants"]) == (0.0, "")
        gathers = [each["unit"] for each in first if each["phase"] == "forward"]
        assert sorted(gathers) == sorted(["Chain", "blocks.0", "blocks.1", "blocks.2"])
        assert [each["number"] - first[0]["number"] for each in first] == list(range(7))
        block = next(each for each in first if each["unit"] == "blocks.1")
        assert block["what"] == "gathers unit blocks.1"
        assert block["bytes"] == (8 * 8 + 8) // 2 * 4
        reduced = [each for each in record["collectives"] if each["what"].startswith("reduces")]
        assert len(reduced) == 2 * 4
        assert reduced[0]["what"] == "reduces the gradients of unit blocks.2"
        assert reduced[0]["bytes"] == (8 * 8 + 8) * 4
        assert {each["phase"] for each in reduced} == {"backward"}
        assert {each["state"] for each in record["collectives"]} == {"finished"}


def test_ranks_give_a_collective_one_number_and_remember_the_last_thousand(world):
    (_, one), (_, other) = world(2).run(log_of_steps, sharded, 100)
    assert len(one["collectives"]) == len(other["collectives"]) == NUM_RECENT
    for key in ("number", "what"):
        assert [each[key] for each in one["collectives"]] == [each[key] for each in other["collectives"]]


def test_trust_keeps_no_log():
    with imagined_ranks(2):
        model = sharded(divergence="trust")
        assert not Runtime.of(Unit.of(model), model).monitors


# Ranks that part


def one_goes_elsewhere(folder: str, make: Callable[[], Any]) -> None:
    _write_into(folder)
    model = make()
    for _ in range(4):
        step(model)
    for _ in range(2):
        step(model, *((0, 2) if dist.get_rank() == 1 else ()))


def _write_into(folder: str) -> None:
    """As SHERD_FLIGHT_DIR does, which the recorder of a rank reads when it is made."""
    os.environ[FOLDER] = folder
    world = dist.group.WORLD
    board = board_of(world) if isinstance(world, dist.ProcessGroup) else None
    assert board is not None, "ranks of a pool have a store"
    board.recorder._folder = folder
    # What an earlier test had written, and the numbers in which its ranks had parted.
    board.recorder._written = ""
    for log in board.recorder.logs():
        log.started.clear()
        log._numbers = itertools.count(1)


@pytest.mark.parametrize("make", [sharded, wrapped])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_that_part_write_what_they_did_and_the_doctor_names_the_one_that_left(world, tmp_path, make, num_ranks):
    for text in comm_errors(world(num_ranks), one_goes_elsewhere, str(tmp_path), make):
        assert f"sherd doctor {tmp_path}" in text
        assert "has not come" not in text
        assert "has not answered" not in text
    records = recorded_in(tmp_path)
    assert sorted(records) == list(range(num_ranks))
    assert all(each["failed"] for each in records.values())
    assert len({each["job"] for each in records.values()}) == 1
    ((name, why),) = faults(tmp_path)
    assert name == "rank 1"
    assert re.search("it (gathers|reduces the gradients of) unit blocks", why)
    assert "programs.py:" in why


def differ_in_the_first_step(folder: str) -> None:
    _write_into(folder)
    step(sharded(), *((0, 2) if dist.get_rank() == 1 else ()))


def test_of_three_ranks_that_compare_the_one_that_differs_is_named(world, tmp_path):
    comm_errors(world(3), differ_in_the_first_step, str(tmp_path))
    assert [name for name, _ in faults(tmp_path)] == ["rank 1"]


def test_no_folder_writes_nothing_and_one_that_cannot_be_written_hides_no_error(world, tmp_path):
    for text in comm_errors(world(2), one_goes_elsewhere, "", sharded):
        assert "sherd doctor" not in text
    (tmp_path / "file").write_text("")
    for text in comm_errors(world(2), one_goes_elsewhere, str(tmp_path / "file"), sharded):
        assert "ranks are about to start different collectives" in text
        assert "could not be written" in text


# Ranks that do not come


def wait_for_the_reader() -> None:
    """Returns late."""
    time.sleep(60)


def does_not_come(tell: Callable[[Any], None], folder: str, transport: str, how: str, divergence: str) -> str:
    os.environ[FOLDER] = folder
    set_group_timeout(timedelta(seconds=TIMEOUT_S if how != "dies" else 600))
    model = sharded(transport, divergence)
    for _ in range(4):
        step(model)
    if dist.get_rank() == 1:
        tell(how)
        if how == "dies":
            os._exit(1)
        if how == "blocks its interpreter":
            ctypes.PyDLL(None).sleep(60)
        if how == "calls another collective":
            dist.barrier()
        wait_for_the_reader()
    step(model)
    return "it went on"


def texts(folder: Path, transport: str, how: str, divergence: str) -> list[str]:
    """What ranks 0 and 2 say when rank 1 does not come."""
    found = ends(3, does_not_come, str(folder), transport, how, divergence)
    return [found[0].said, found[2].said]


CASES = list(itertools.product(("shared_memory", "gloo", "torch"), ("error", "join")))


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "divergence"), CASES)
def test_a_rank_that_is_stuck_is_named_with_its_stack(tmp_path, transport, divergence):
    for text in texts(tmp_path, transport, "is stuck", divergence):
        assert "Rank 1 has not come: it is at" in text
        assert "wait_for_the_reader()" in text
        assert "time.sleep(60)" in text
        assert "Rank 0 has" not in text
        assert "Rank 2 has" not in text
    assert sorted(recorded_in(tmp_path)) == [0, 1, 2]
    ((name, why),) = faults(tmp_path)
    assert name == "rank 1"
    assert "has not come to collective" in why
    assert "time.sleep(60)" in why


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "divergence"), CASES)
def test_a_rank_that_died_is_named_at_once(tmp_path, transport, divergence):
    """Not after the timeout of ten minutes."""
    for text in texts(tmp_path, transport, "dies", divergence):
        assert "Rank 1 has not answered" in text
        assert "Rank 0 has" not in text
        assert "Rank 2 has" not in text
    assert sorted(recorded_in(tmp_path)) == [0, 2]
    ((name, why),) = faults(tmp_path)
    assert name == "rank 1"
    assert "it has left no record" in why


@pytest.mark.slow
def test_a_rank_whose_interpreter_is_blocked_is_named(tmp_path):
    for text in texts(tmp_path, "gloo", "blocks its interpreter", "error"):
        assert "Rank 1 has not answered" in text
    assert sorted(recorded_in(tmp_path)) == [0, 2]


@pytest.mark.slow
def test_a_rank_in_a_collective_of_the_users_own_is_named_with_that_line(tmp_path):
    for text in texts(tmp_path, "shared_memory", "calls another collective", "error"):
        assert "Rank 1 has not come: it" in text
        assert "dist.barrier()" in text


def two_axes_stuck(tell: Callable[[Any], None], folder: str) -> str:
    """Of two by two ranks, with a unit on the second axis alone, the last one does not come."""
    os.environ[FOLDER] = folder
    set_group_timeout(timedelta(seconds=TIMEOUT_S))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model, other = sharded(mesh=mesh), sharded(mesh=mesh["shards"])
    for _ in range(3):
        step(model)
        step(other)
    if dist.get_rank() == 3:
        tell("is stuck")
        wait_for_the_reader()
    step(model)
    return "it went on"


@pytest.mark.slow
def test_over_two_axes_and_several_meshes_the_stuck_rank_alone_is_named(tmp_path):
    for text in [each.said for each in ends(4, two_axes_stuck, str(tmp_path))][:3]:
        assert "Rank 3 has not come" in text
    assert {name for name, _ in faults(tmp_path)} == {"rank 3"}


def watchers() -> int:
    return sum(thread.name == "sherd board" for thread in threading.enumerate())


def ends_its_group(tell: Callable[[Any], None]) -> str:
    """Returns how many threads watched before and after."""
    step(sharded())
    before = watchers()
    dist.destroy_process_group()
    deadline = time.monotonic() + 20
    while watchers() and time.monotonic() < deadline:
        time.sleep(0.02)
    return f"{before} {watchers()}"


def test_nobody_asks_the_store_once_the_group_is_destroyed():
    assert [each.said for each in ends(2, ends_its_group)] == ["1 0"] * 2


def killed_beside_a_child(transport: str, folder: str) -> None:
    model, raised = sharded(transport), Path(folder, "raised")
    step(model)
    if dist.get_rank() == 1:
        if not os.fork():
            deadline = time.monotonic() + 20
            while not raised.exists() and time.monotonic() < deadline:
                time.sleep(0.02)  # with the sockets of its parent
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CommError, match="rank 1 has died"):
        step(model)
    raised.touch()


@pytest.mark.values
@pytest.mark.parametrize("transport", ["shared_memory", "gloo", "torch"])
def test_a_killed_rank_is_named_though_a_child_keeps_its_sockets(world, tmp_path, transport):
    with pytest.raises(RanksFailed, match="rank 1 died"):
        world(2).run(killed_beside_a_child, transport, str(tmp_path))
    assert (tmp_path / "raised").exists()


def ends_early(tell: Callable[[Any], None], transport: str, error: str) -> str:
    """Rank 0 has one batch less, or raises."""
    model = sharded(transport)
    for _ in range(3 + dist.get_rank()):
        step(model)
    if error and dist.get_rank() == 0:
        raise SystemExit(3)
    return "at its end"


def test_a_rank_that_has_ended_is_not_called_dead_unless_an_error_has_ended_it():
    for transport, error in (("gloo", ""), ("torch", ""), ("gloo", "raises")):
        text = ends(2, ends_early, transport, error)[1].said
        assert ("did it have fewer batches?" in text) is not bool(error), text
        assert "Exception raised from" not in text, text


def waits_long() -> str:
    """Returns what rank 1 prints while rank 0 is at work elsewhere."""
    model, printed = sharded(), io.StringIO()
    step(model)
    with mock.patch.object(flight, "NOTE_AFTER_S", 1.0), mock.patch.object(sys, "stderr", printed):
        if dist.get_rank() == 0:
            time.sleep(6)
        step(model)
    return printed.getvalue()


def test_a_rank_that_waits_long_says_for_whom_and_writes_no_record(world, tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    _, printed = world(2).run(waits_long)
    assert "rank 1 has been waiting for other ranks for" in printed
    assert "Rank 0 has not come: it is at" in printed
    assert "time.sleep(6)" in printed
    assert not list(tmp_path.iterdir())
