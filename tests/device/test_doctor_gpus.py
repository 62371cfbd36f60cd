"""`sherd doctor --gpus` goes its whole way on simulated devices, and says in one line that there is none."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from bench.device.cases import TINY
from bench.device.clock import Measured
from bench.device.groups import Failed
from bench.device.rows import Result
from bench.gpus import parts
from bench.gpus.__main__ import AROUND_S, LIMIT_S, Report, try_all
from bench.gpus.correctness import SET_UPS, SetUp
from bench.gpus.limited import told
from bench.gpus.parts import PARTS, Run
from bench.ranks import Conditions
from bench.systems import System
from sherd.tools.doctor.findings import Finding

ROOT = Path(__file__).parents[2]
ON_SIM = ("--import", "simdevice:load", "--stack", "tiny", "--quick")


def started(*words: str, devices: int = 2) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT, env=with_devices(devices), capture_output=True, text=True, timeout=580, check=False,
    )  # fmt: skip


def with_devices(number: int) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "SIM_DEVICES": str(number)}


def verdicts(folder: Path, section: str) -> dict[str, tuple[str, str]]:
    """What was found in one section of the file: (verdict, value) by name."""
    found = json.loads((folder / "gpus.json").read_text())["findings"]
    return {each["name"]: (each["verdict"], each["value"]) for each in found if each["section"] == section}


def on_devices(folder: Path, part: str, *words: str, devices: int = 2) -> dict[str, tuple[str, str]]:
    """What one part has found on simulated devices, of which nothing may be left."""
    ended = started("bench.gpus", *ON_SIM, "--out", str(folder), "--parts", part, *words, devices=devices)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    page = (folder / "gpus.md").read_text()
    assert "# sherd on GPUs" in page
    assert "nothing here was measured on hardware" in page
    assert verdicts(folder, "afterwards") == {"left behind": ("ok", "nothing")}
    return verdicts(folder, part)


def test_without_a_gpu_it_says_so_in_a_line_and_ends_as_after_any_failure(tmp_path):
    ended = started("sherd", "doctor", "--gpus", "--json", "--out", str(tmp_path))
    assert ended.returncode == 2, ended.stderr
    (finding,) = json.loads(ended.stdout)["findings"]
    assert finding["value"] == "torch sees none"
    assert list(tmp_path.iterdir()) == []


def test_a_lost_rank_is_named_by_the_others(tmp_path):
    found = on_devices(tmp_path, "a lost rank")
    assert found["rank 0 says"][0] == "ok"


def test_two_devices_compute_as_one_in_every_set_up_that_two_ranks_can_have(tmp_path):
    found = on_devices(tmp_path, "correctness")
    assert set(found) == {"seconds", *(each.name for each in SET_UPS if each.fewest_ranks <= 2)}


@pytest.mark.slow
def test_four_devices_have_replicas_too(tmp_path):
    assert "HSDP" in on_devices(tmp_path, "correctness", devices=4)


@pytest.mark.slow
@pytest.mark.parametrize("part", [part for part in PARTS if part not in ("correctness", "a lost rank")])
def test_each_other_part_has_findings(part, tmp_path):
    found = on_devices(tmp_path, part)
    assert len(found) > 1
    if part == "compared with FSDP2":
        assert found["losses"][1] == "as FSDP2's"
        assert "FSDP2" in found["plain: step"][1]
    if part == "capture":
        for front_end in ("sherd", "wrapper"):
            verdict, said = found[front_end]
            assert (verdict, said.startswith("the step may be captured")) == ("ok", True), said


# Limits


class Hands:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


NEVER = 1e9
CLOCK = Hands()


def forever() -> None:
    while True:
        signal.pause()


def stuck(name: str) -> Iterator[dict[str, Any]]:
    """Tells what it has made, then hangs: a process that hangs as well, a segment and a file."""
    other = get_context("spawn").Process(target=forever, daemon=True)
    other.start()
    segment, file = Path("/dev/shm", name), Path(tempfile.gettempdir(), "file")
    segment.write_bytes(bytes(4096))
    with segment.open("r+b") as opened:
        kept = mmap.mmap(opened.fileno(), 4096)
    file.touch()
    yield {"processes": [os.getpid(), other.pid], "paths": [segment, file, file.parent], "kept": len(kept)}
    forever()


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.05)


def assert_none_is_left(made: dict[str, Any]) -> None:
    wait_until(lambda: not any(map(is_alive, made["processes"])))
    assert not any(path.exists() for path in made["paths"])


def test_work_that_reaches_its_limit_is_stopped_with_all_that_it_has_started():
    clock = Hands()
    found = told(stuck, f"{os.getpid()}-stuck", until=1.0, now=clock)
    made = next(found)
    assert all(map(is_alive, made["processes"]))
    assert all(path.exists() for path in made["paths"])
    clock.time = 1.0
    with pytest.raises(Failed, match="its time was up"):
        next(found)
    assert_none_is_left(made)


def test_so_is_work_that_nobody_listens_to_any_more():
    found = told(stuck, f"{os.getpid()}-unheard", until=NEVER)
    made = next(found)
    found.close()
    assert_none_is_left(made)


def listen(pipe: Any) -> None:
    for made in told(stuck, f"{os.getpid()}-orphan", until=NEVER):
        pipe.send(made)


def test_no_process_outlives_an_asker_that_was_killed():
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    asker = context.Process(target=listen, args=(theirs,))
    asker.start()
    made = ours.recv()
    asker.kill()
    asker.join()
    wait_until(lambda: not any(map(is_alive, made["processes"])))
    made["paths"][0].unlink()


def raises() -> Iterator[int]:
    yield 1
    raise ValueError("no such thing")


def dies() -> Iterator[int]:
    yield 1
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("work", "said"), [(raises, "ValueError: no such thing"), (dies, "its process died")])
def test_work_that_fails_says_why_behind_what_it_has_told(work, said):
    found = told(work, until=NEVER)
    assert next(found) == 1
    with pytest.raises(Failed, match=said):
        next(found)


class Last(Result):
    """The time is up once it was told."""

    def line(self) -> str:
        CLOCK.time = 7.0
        return "told"


def measures_once(run: Run, until: float) -> Iterator[Result]:
    assert until < 7.0
    measured = Measured([2.0], [1.0], [1.0], None, {"forward": 1 << 20}, loss=1.0)
    yield Last("real", run.num_ranks, "plain", TINY.title, "FSDP2", 0, [measured] * run.num_ranks)
    forever()


def is_well(run: Run, until: float) -> Iterator[Finding]:
    yield Finding("the next", "is", f"well until {until:g}")


def test_a_part_that_overruns_is_named_what_it_has_measured_is_written_and_the_next_one_goes_on(tmp_path):
    CLOCK.time = 0.0
    around = dict.fromkeys(("date", "device", "torch", "driver", "cuda", "nccl", "python", "topology"), "")
    report = Report({**around, "num_devices": 2, "cores": 1, "load": 0, "steps": 1}, tmp_path)
    tried = {"slow": (measures_once, 7.0), "the next": (is_well, 50.0)}
    try_all(Run(Conditions("sim"), 2), tried, report, 40.0, CLOCK)
    assert verdicts(tmp_path, "slow")["end"] == ("failure", "stopped: its time was up, after 7 s")
    assert verdicts(tmp_path, "compared with FSDP2")["plain: step"] == ("ok", "FSDP2 2 ms")
    assert "losses" not in verdicts(tmp_path, "compared with FSDP2")  # with nothing to compare
    assert verdicts(tmp_path, "the next")["is"] == ("ok", "well until 30")
    assert json.loads((tmp_path / "gpus.json").read_text())["results"][0]["ranks"][1]["loss"] == 1.0
    assert "Measured on" in (tmp_path / "gpus.md").read_text()


def test_all_parts_together_end_before_the_limit():
    assert sum(seconds for _, seconds in PARTS.values()) + AROUND_S <= LIMIT_S == 600


class Killed:
    """Shards nothing: the last rank is killed."""

    def __call__(self, model: nn.Module, mesh: Any) -> nn.Module:
        if mesh.get_rank() == mesh.size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return model


def correctness_with_a_killed_rank(run: Run, until: float) -> Iterator[Finding]:
    parts.SET_UPS = (SetUp("killed", System("killed", Killed())), SET_UPS[0])  # in a process of its own
    yield from parts.correctness(run, NEVER)


def test_a_rank_that_was_killed_is_named_and_the_next_set_up_has_new_processes():
    run = Run(Conditions("sim", quick=True, load="simdevice:load"), 2)
    killed, well = told(correctness_with_a_killed_rank, run, NEVER, until=NEVER)
    assert (killed.name, killed.verdict, killed.value) == ("killed", "failure", "the process died")
    assert (well.name, well.verdict) == (SET_UPS[0].name, "ok")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_which_writes_what_it_has_and_leaves_nothing(number, tmp_path):
    words = [sys.executable, "-m", "bench.gpus", *ON_SIM, "--out", str(tmp_path), "--parts", "correctness"]
    environment = {**with_devices(2), "TMPDIR": str(tmp_path / "temporary")}
    Path(environment["TMPDIR"]).mkdir()
    with subprocess.Popen(words, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "correctness ..." in process.stderr.readline()
        process.send_signal(number)
        process.stderr.read()
    assert process.returncode == 2
    assert verdicts(tmp_path, "run")["end"] == ("failure", "stopped by a signal")
    assert verdicts(tmp_path, "afterwards") == {"left behind": ("ok", "nothing")}
    assert list(Path(environment["TMPDIR"]).iterdir()) == []
