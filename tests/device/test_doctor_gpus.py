"""`sherd doctor --gpus` goes its whole way on simulated devices, and says in one line that there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpus.__main__ import PARTS
from bench.gpus.correctness import SET_UPS

ROOT = Path(__file__).parents[2]
DEVICE = "simdevice:load"


def started(*words: str, devices: int = 2) -> subprocess.CompletedProcess[str]:
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "SIM_DEVICES": str(devices)}
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, env=alone, capture_output=True, text=True, timeout=580, check=False
    )


def verdicts(folder: Path, section: str) -> dict[str, tuple[str, str]]:
    """What was found in one section of the file: (verdict, value) by name."""
    found = json.loads((folder / "gpus.json").read_text())["findings"]
    return {each["name"]: (each["verdict"], each["value"]) for each in found if each["section"] == section}


def on_devices(folder: Path, part: str, *words: str, devices: int = 2) -> dict[str, tuple[str, str]]:
    """What one part has found on simulated devices, of which nothing may be left."""
    given = ("--import", DEVICE, "--stack", "tiny", "--quick", "--out", str(folder), "--parts", part, *words)
    ended = started("bench.gpus", *given, devices=devices)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "# sherd on GPUs" in (folder / "gpus.md").read_text()
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
