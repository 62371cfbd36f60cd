"""The bench's command for an accelerator goes its whole way on a simulated one, from its ranks to its page."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from bench.device import page, simulated
from bench.device.cases import CASES
from bench.device.lines import read
from bench.device.rows import rows_of

ROOT = Path(__file__).parents[2]
SYSTEMS = ["FSDP1", "FSDP2", "sherd", "Flat", "wrapper"]


def bench(folder: Path, *options: str) -> tuple[Path, Path]:
    """Run the command on a tiny stack; returns the lines and the page that it wrote."""
    lines, target = folder / "lines", folder / "page.md"
    target.write_text(f"{page.BEGIN}\n{page.END}\n")
    command = [sys.executable, "-m", "bench", "--import", "simdevice:load", "--device", "sim", "--quick"]
    command += ["--stack", "tiny", "--rounds", "2", "--minutes", "3", "--lines", str(lines), "--write", str(target)]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([*command, *options], cwd=ROOT, env=alone, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return lines, target


def test_cases_are_measured_on_fake_ranks_and_one_that_cannot_be_is_a_row(tmp_path):
    chosen = ("accumulate", "graph")
    lines, target = bench(tmp_path, "--groups", "fake", "--cases", *chosen)
    results = read([lines])[1]
    assert [(each.num_ranks, each.case, each.system) for each in results] == [
        (8, case, system) for case in CASES if case in chosen for system in SYSTEMS
    ]
    for each in results:
        if each.case == "graph":
            assert each.why == "torch has no graphs for sim"
            continue
        assert not each.why, f"{each.case}, {each.system}: {each.why}"
        (rank,) = each.ranks
        assert len(rank.step_ms) == 2
        assert all(taken > 0 for taken in (*rank.step_ms, *rank.host_ms))
        assert list(rank.allocated) == list(rank.requested) == ["forward", "backward", "optimizer"]
        assert all(0 < rank.requested[phase] <= rank.allocated[phase] <= rank.reserved for phase in rank.allocated)
    assert "| accumulate: step " in target.read_text()
    assert "torch has no graphs for sim" in target.read_text()


def test_a_peak_above_the_machines_memory_is_remarked():
    setting = simulated.SETTINGS[0]
    found = [simulated.Found(name, 1000, 10, 10, 60, peak, 0) for name, peak in (("DDP", 132.3), ("FSDP2", 58.6))]
    remarks = {row.figure: row.remark for row in simulated.rows_of(setting, found) if row.remark}
    assert remarks == {"8 B, 8 ranks, plain: peak": "above the 79.1 GiB of h100: DDP"}


@pytest.mark.slow
def test_two_devices_are_two_ranks_that_train_alike_and_show_what_communication_costs(tmp_path):
    if "sim" not in dist.Backend.default_device_backend_map:
        pytest.skip("the simulated device has no collectives")
    lines, _ = bench(tmp_path, "--groups", "real", "--cases", "plain")
    results = read([lines])[1]
    assert [(each.kind, each.system) for each in results] == [
        (kind, system) for kind in ("real", "silent") for system in SYSTEMS
    ]
    for each in results:
        assert not each.why, f"{each.kind}, {each.system}: {each.why}"
        assert len(each.ranks) == 2
    first = results[0].ranks
    assert first[0].loss != first[1].loss, "ranks have batches of their own"
    for each in results[:5]:
        assert [rank.loss for rank in each.ranks] == pytest.approx([rank.loss for rank in first], rel=0.02)
    # The page has the ratio only if FSDP2's step has taken longer than without communication.
    assert any(row.figure.endswith("exposed communication") for row in rows_of(results))
