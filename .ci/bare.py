"""Tries what a newcomer has after `pip install .`: torch, and nothing that torch does not bring along itself.

The programs of README, docs/learn/first_steps.md and examples/ run on 2 ranks. `sherd train` makes a few steps, and
goes on by --resume; what was trained is used, and a training planned.
"""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
TINY = ["layers=1", "width=32", "heads=2", "kv_heads=1", "hidden=32", "context=32"]
TINY += ["batch=4", "micro_batch=2", "every=2"]


def main() -> None:
    for name in ("numpy", "plotly", "rich", "transformers", "pytest"):
        assert importlib.util.find_spec(name) is None, f"{name} is installed, so this shows nothing"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Without it gloo asks the resolver for this machine's name, which fails where there is no network.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # so that the installed package is imported, not the folder of its sources
        Path("tiny.py").write_text(program(ROOT / "README.md"))
        run("torchrun", "--nproc-per-node", "2", "tiny.py")
        Path("steps.py").write_text(program(ROOT / "docs/learn/first_steps.md"))
        run("torchrun", "--nproc-per-node", "2", "steps.py")
        for example in sorted((ROOT / "examples").glob("*.py")):
            said, others = example.read_text(), r"^(?:import|from) (?:lightning|ray)\b"
            if not re.search(others, said, re.MULTILINE):
                commands = re.findall(r"^ *((?:\w+=\S+ )*)torchrun (.*) examples/", said, re.MULTILINE)
                assert commands, f"{example} says how it is run"
                for variables, words in commands:
                    os.environ.update(each.split("=") for each in variables.split())
                    run("torchrun", "--standalone", *words.split(), str(example))
        train = ("sherd", "train", "--nproc", "2", "--out", "run")
        run(*train, "--data", str(ROOT / "docs"), "--steps", "4", *TINY)
        assert "going on after step 4" in run(*train, "--resume", "--steps", "6"), "resumed"
        assert run("sherd", "generate", "run", "--prompt", "def ", "--length", "4").startswith("def "), "written"
        assert "bits per byte" in run("sherd", "eval", "run", "--nproc", "2"), "judged on two ranks"
        run("sherd", "convert", "run", "model.pt", "--model-only")
        if sys.version_info < (3, 11):
            return  # reads no TOML without tomli
        planned = run("sherd", "train", "--dry-run", "--nproc", "2", "--data", str(ROOT / "docs"), *TINY)
        assert "CPU cores" in planned, "planned with a cluster that is in the wheel"


def program(page: Path) -> str:
    """The blocks of Python in `page`, as one file."""
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert blocks, f"{page} has a program"
    return "\n".join(blocks)


def run(command: str, *words: str) -> str:
    """What a command of the environment prints. Raises if it fails."""
    print("$", command, *words, flush=True)
    done = subprocess.run([BIN / command, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout, flush=True)
    done.check_returncode()
    return done.stdout


if __name__ == "__main__":
    main()
