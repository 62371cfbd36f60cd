"""The example for Ray Train goes on after a worker has failed, with the numbers of one process that did not."""

import os
import re
import subprocess
import sys

import pytest

from tests.interop.clients import ROOT, loss_after_six_steps

pytest.importorskip("ray.train", reason="ray[train] is in the extra ray")


@pytest.mark.slow
def test_workers_go_on_from_the_last_checkpoint_after_one_has_failed(tmp_path):
    # Ray waits half a minute for its own servers, which a busy machine may not start in time.
    patient = {"RAY_raylet_start_wait_time_s": "300", "RAY_gcs_rpc_server_reconnect_timeout_s": "300"}
    environment = {**os.environ, **patient, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "examples/ray_train.py"]
    output, errors = tmp_path / "output", tmp_path / "errors"
    with output.open("w") as said, errors.open("w") as warned:  # no pipes, which Ray's servers would hold open
        subprocess.run(command, cwd=ROOT, env=environment, stdout=said, stderr=warned, check=False)
    found = re.search(r"^began again at step 5, loss (\S+) at step 6$", output.read_text(), re.MULTILINE)
    assert found, errors.read_text()
    assert float(found[1]) == pytest.approx(loss_after_six_steps(), rel=1e-4)
