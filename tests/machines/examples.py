"""What a cluster would start, given our examples: their own commands, with stubs for the parts of a cluster."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SLURM, KUBERNETES = EXAMPLES / "slurm.sbatch", EXAMPLES / "kubernetes.yaml"
PYTORCHJOB = EXAMPLES / "pytorchjob.yaml"

# A program that writes down what it was called with.
RECORDER = """#!{python}
import json, os, sys
with open({file!r}, "a") as file:
    file.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
"""
# Slurm's: the same command on every machine, each with its number.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for SLURM_NODEID in 0 1; do SLURM_NODEID=$SLURM_NODEID "$@" || exit; done
exit {code}
"""


class Stubs:
    """Programs in `folder` that stand in front of all others of their names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def put(self, name: str, text: str) -> None:
        """A program of that name."""
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)

    def record(self, name: str) -> None:
        """A program that only writes down its words."""
        self.put(name, RECORDER.format(python=sys.executable, file=str(self.folder / "calls")))

    def calls(self) -> list[list[str]]:
        """What the recorded ones were called with, in order."""
        return [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]

    def run(self, words: list[str], environment: Mapping[str, str]) -> int:
        """The exit code of a command that finds the stubs."""
        path = f"{self.folder}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(words, env={"PATH": path, **environment}, check=False).returncode


def slurm(
    folder: Path, code: int = 0, restarts: int = 0, nodes: str = "node7\\nnode9", **chosen: str
) -> tuple[int, list[list[str]]]:
    """What the batch script does on two machines: its exit code, and its calls of torchrun and `scontrol requeue`.

    `code` is what srun returns, `restarts` how often the job was started before.
    """
    stubs = Stubs(folder)
    stubs.record("torchrun")
    stubs.put("srun", SRUN.format(code=code))
    recorder = RECORDER.format(python=sys.executable, file=str(folder / "calls"))
    stubs.put("scontrol.py", recorder)
    stubs.put(
        "scontrol",
        f'#!/bin/bash\nif [[ $1 == show ]]; then printf "{nodes}\\n"; else exec {sys.executable} '
        f'{folder}/scontrol.py "$@"; fi\n',
    )
    environment = {
        "SLURM_JOB_ID": "41",
        "SLURM_JOB_NODELIST": "node[7,9]",
        "SLURM_NNODES": "2",
        "SLURM_RESTART_COUNT": str(restarts),
        "SLURM_SUBMIT_DIR": "/shared",
    }
    return stubs.run(["bash", str(SLURM)], {**environment, **chosen}), stubs.calls()


def kubernetes_documents(path: Path = KUBERNETES) -> list[dict[str, Any]]:
    """What a manifest holds."""
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all(path.read_text()))


def kubernetes(folder: Path, **chosen: str) -> list[list[str]]:
    """The call of torchrun in each pod."""
    _, job = kubernetes_documents()
    (container,) = job["spec"]["template"]["spec"]["containers"]
    environment = {each["name"]: each["value"] for each in container["env"]}
    stubs = Stubs(folder)
    stubs.record("torchrun")
    for index in range(job["spec"]["completions"]):
        pod = {**environment, "JOB_COMPLETION_INDEX": str(index), **chosen}
        assert stubs.run([*container["command"], *container["args"]], pod) == 0
    return stubs.calls()
