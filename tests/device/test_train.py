"""`sherd train` runs on a device that a package outside torch brings, and computes there what it does on a CPU.

The commands know nothing of the simulated device: torch loads it in each of their processes, by the entry point
`torch.backends` of an installed package.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks.forked import sherd as forked
from tests.support.ranks.forked import start

ROOT = Path(__file__).parent.parent.parent
LOAD = """
import simdevice

def load():
    simdevice.load()
    simdevice.configure(pause_us=50, races="raise")
"""
MODEL = ("layers=2", "width=32", "heads=2", "kv_heads=1", "hidden=64", "context=32")
SHORT = ("--steps", "6", "batch=8", "warmup=2", "every=3")
TRAIN = ("train", "--quiet", "--data", "text.txt", *MODEL, *SHORT)
PARAMETERS = 26_784 * 4  # bytes


class Machine:
    """A machine where a package that brings the device "sim" is installed."""

    def __init__(self, folder):
        self.folder = folder
        package = folder / "installed"
        about = package / "brings_sim-1.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: brings-sim\nVersion: 1\n")
        (about / "entry_points.txt").write_text("[torch.backends]\nsim = brings_sim:load\n")
        (package / "brings_sim.py").write_text(LOAD)
        path = [str(ROOT), str(package), os.environ.get("PYTHONPATH", "")]
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "OMP_NUM_THREADS": "1"}
        (folder / "text.txt").write_text("some words, and some more of them. " * 3000)

    def sherd(self, *words, code=0):
        """The process of `sherd` with these words, ended."""
        command = [sys.executable, "-m", "sherd", *map(str, words)]
        done = subprocess.run(
            command, cwd=self.folder, env=self._environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == code, done.stderr[-4000:]
        return done

    def sherd_on_cpu(self, *words):
        """The same of `sherd` where no device is wanted: a fork of the server that has torch imported."""
        said = self.folder / f"said by {words[0]} on the CPU"
        process = start(forked, list(map(str, words)), {}, folder=self.folder, output=said)
        process.join(300)
        assert process.exitcode == 0, said.with_suffix(".err").read_text()[-4000:]
        return said.read_text()

    def records(self, out, event="step"):
        """What a run has written of these events, by the step."""
        lines = (self.folder / out / "metrics.jsonl").read_text().splitlines()
        return {each["step"]: each for each in map(json.loads, lines) if each["event"] == event}


@pytest.fixture(scope="module")
def machine(loaded, tmp_path_factory):
    """The device is built before the commands need it: they are not to wait for one another."""
    return Machine(tmp_path_factory.mktemp("machine"))


@pytest.fixture(scope="module")
def trained(machine):
    """The same run on the device, which is taken unasked with a rank for each, and on the CPU."""
    machine.sherd(*TRAIN, "--out", "device")
    machine.sherd_on_cpu(*TRAIN, "--out", "cpu", "--nproc", "2", "device=cpu")
    return machine.records("device"), machine.records("cpu")


def require_same(these, those):
    assert these.keys() == those.keys()
    for number, step in these.items():
        for name in ("loss", "gradient_norm"):
            assert step[name] == pytest.approx(those[number][name], rel=1e-4), (number, name)


def test_a_run_on_the_device_has_the_losses_of_the_cpu_and_the_peak_of_the_devices_memory(trained):
    on_device, on_cpu = trained
    assert list(on_device) == [1, 2, 3, 4, 5, 6]
    require_same(on_device, on_cpu)
    # At least the two sharded states of AdamW, the shards and their gradients; a process is at 300 MiB.
    assert 2 * PARAMETERS < on_device[6]["peak_bytes"] < 2**22
    assert on_cpu[6]["peak_bytes"] > 100 * 2**20


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_also_from_one_saved_on_a_cpu(machine, trained):
    again = machine.folder / "again"
    shutil.copytree(machine.folder / "cpu", again)
    shutil.rmtree(again / "checkpoints" / "step-00000006")
    machine.sherd("train", "--quiet", "--resume", "--out", again, "device=sim")
    assert list(machine.records(again, "start")) == [0, 3]
    require_same(machine.records(again), trained[1])


@pytest.mark.slow
@pytest.mark.usefixtures("trained")
def test_what_was_trained_writes_the_same_on_two_devices_and_on_the_cpu(machine):
    words = ("generate", "device", "--length", "8", "--temperature", "0", "--device")
    assert machine.sherd(*words, "sim", "--nproc", "2").stdout == machine.sherd_on_cpu(*words, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["true", "state", "state:0.5", "step", "step:0.5", "everything:0.5", "activations"])
def test_what_rests_in_host_memory_trains_with_the_same_losses_and_goes_on(machine, trained, offload):
    out = f"offloaded {offload}"
    machine.sherd(*TRAIN, "--out", out, "device=sim", f"offload={offload}")
    require_same(machine.records(out), trained[1])
    shutil.rmtree(machine.folder / out / "checkpoints" / "step-00000006")
    machine.sherd("train", "--quiet", "--resume", "--out", out, "device=sim")
    assert list(machine.records(out, "start")) == [0, 3]
    require_same(machine.records(out), trained[1])


def test_what_this_machine_has_no_device_for_is_refused_in_a_line(machine):
    for words, said in (
        ((*TRAIN, "device=cuda"), "device = 'cuda', but torch sees no cuda here; available: cpu, sim"),
        ((*TRAIN, "--nproc", "4"), "4 ranks on a machine of 2 sim devices; start one per device"),
    ):
        done = machine.sherd(*words, code=2)
        assert done.stdout == "", words
        (line,) = [line for line in done.stderr.splitlines() if "Warning: No backend of type" not in line]  # torch's
        assert said in line
