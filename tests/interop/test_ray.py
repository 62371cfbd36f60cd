"""The example for Ray Train has the numbers of one process, also where it goes on after a worker has failed."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop.clients import ROOT, loss_after_six_steps

pytest.importorskip("ray.train", reason="ray[train] is in the extra ray")

# Ray waits half a minute for its own servers, which a busy machine may not start in time.
PATIENT = {"RAY_raylet_start_wait_time_s": "300", "RAY_gcs_rpc_server_reconnect_timeout_s": "300"}


@pytest.fixture
def place() -> Iterator[str]:
    """A folder for what Ray's servers write, sockets too, whose names are short. No process outlives it."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield folder
        for process in started_with(f"RAY_TMPDIR={folder}"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def started_with(setting: str) -> list[int]:
    """The processes that have this in their environment, as all have that Ray starts."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if setting in environment.read_text(errors="replace").split("\0"):
                found.append(int(environment.parent.name))
    return found


def test_two_workers_train_and_save_as_one_process_trains(tmp_path, place):
    assert trained(tmp_path, place, fails_at=0) == (1, pytest.approx(loss_after_six_steps(), rel=1e-4))


@pytest.mark.slow
def test_workers_go_on_from_the_last_checkpoint_after_one_has_failed(tmp_path, place):
    assert trained(tmp_path, place, fails_at=5) == (5, pytest.approx(loss_after_six_steps(), rel=1e-4))


def trained(folder: Path, place: str, fails_at: int) -> tuple[int, float]:
    """The step at which the example began last, and its last loss. At that step a worker fails once; 0: none does."""
    program = (ROOT / "examples/ray_train.py").read_text()
    settings = "STEPS, SAVE_EVERY, FAILS_AT = 6, 2, "
    assert f"{settings}5\n" in program
    (folder / "program.py").write_text(program.replace(f"{settings}5\n", f"{settings}{fails_at}\n"))
    ours = {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": place}
    with (
        (folder / "output").open("w") as said,
        (folder / "errors").open("w") as warned,
    ):  # Ray's servers hold pipes open
        subprocess.run(
            [sys.executable, "program.py"],
            cwd=folder,
            env={**os.environ, **PATIENT, **ours},
            stdout=said,
            stderr=warned,
            check=False,
        )
    output = (folder / "output").read_text()
    found = re.search(r"^began again at step (\d+), loss (\S+) at step 6$", output, re.MULTILINE)
    assert found, (folder / "errors").read_text()
    return int(found[1]), float(found[2])
