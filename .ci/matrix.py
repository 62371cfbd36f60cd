"""Tries the wheel under several versions of torch and Python, and writes which into docs/look_up/support.md.

    python .ci/matrix.py --torch 2.12.0 2.13.0 --python 3.10 3.13

Each pair gets an environment with torch and the wheel alone, in which `.ci/bare.py` does what a newcomer does. Then
pytest, hypothesis and numpy are added, and the quick cases of TESTS, or of FEW with `--few`, run against the wheel. pip
decides which build of torch it takes.
"""

import argparse
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/look_up/support.md"
FEW = ("tests/test_torch_names.py", "tests/layout", "tests/schedule")
TESTS = (*FEW, "tests/engine", "tests/api", "tests/wrapper", "tests/checkpoint")
NEEDED = ("pytest", "pytest-xdist", "hypothesis", "numpy")
HEAD = "| torch | Python | README's program, `sherd train` | tests | date |\n|---|---|---|---|---|\n"
TABLE = re.compile(r"(?<=<!-- support -->\n).*?(?=<!-- /support -->)", re.DOTALL)
Row = tuple[str, ...]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python .ci/matrix.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--torch", nargs="+", required=True, metavar="VERSION", help="as 2.13.0")
    parser.add_argument("--python", nargs="+", required=True, metavar="VERSION", help="as 3.13: python3.13 is on PATH")
    parser.add_argument("--few", action="store_true", help="the tests of FEW, not of TESTS")
    asked = parser.parse_args()
    pairs = [(torch, python) for torch in asked.torch for python in asked.python]
    with tempfile.TemporaryDirectory(prefix="sherd-matrix-") as folder:
        sources, wheel = build(Path(folder))
        rows = [try_pair(torch, python, sources, wheel, FEW if asked.few else TESTS) for torch, python in pairs]
    sys.exit(any("fail" in "".join(row) for row in rows))


def build(folder: Path) -> tuple[Path, Path]:
    """The sources of HEAD without the package, and the wheel that they make."""
    sources = folder / "sources"
    sources.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(["tar", "x", "-C", sources], input=archive, check=True)
    make = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, sources]
    subprocess.run(make, check=True)
    shutil.rmtree(sources / "sherd")
    pins = (sources / "constraints.txt").read_text()
    (sources / "constraints.txt").write_text(re.sub(r"^torch==.*\n", "", pins, flags=re.MULTILINE))
    (wheel,) = folder.glob("*.whl")
    return sources, wheel


def try_pair(torch: str, python: str, sources: Path, wheel: Path, tests: tuple[str, ...]) -> Row:
    """A row of the table, which is written as soon as it is known. The environment takes gigabytes, so it goes."""
    with tempfile.TemporaryDirectory(prefix="sherd-pair-") as folder:
        subprocess.run([f"python{python}", "-m", "venv", folder], check=True)
        run = Path(folder, "bin/python")
        pip = [run, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
        subprocess.run([*pip, f"torch=={torch}", wheel], check=True)
        ask = "import platform, torch; print(torch.__version__, platform.python_version())"
        found = subprocess.run([run, "-c", ask], stdout=subprocess.PIPE, text=True, check=True).stdout.split()
        bare = subprocess.run([run, sources / ".ci/bare.py"])
        subprocess.run([*pip, "-c", sources / "constraints.txt", *NEEDED], check=True)
        row = (*found, "failed" if bare.returncode else "passed", tested(run, sources, tests), str(date.today()))
        print("|", *row, "|", flush=True)
        write(row)
    return row


def tested(python: Path, sources: Path, tests: tuple[str, ...]) -> str:
    """What pytest says in the end, in words of the table."""
    command = [python, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider", *tests]
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=sources, env=alone, stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    said = re.search(r"((?:\d+ \w+, )*\d+ \w+) in [\d.]+s", done.stdout)
    few = "" if tests == TESTS else " (few)"
    return (said[1] if said else "failed to start") + few


def write(row: Row) -> None:
    """Puts `row` into the table, in the place of the one with the same minor versions."""
    with PAGE.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        text = file.read()
        rows = {minors(each): each for each in [*rows_of(text), row]}
        lines = [f"| {' | '.join(rows[key])} |\n" for key in sorted(rows)]
        file.seek(0)
        file.write(TABLE.sub(lambda _: HEAD + "".join(lines), text))
        file.truncate()


def rows_of(text: str) -> list[Row]:
    """The rows of the table in the page `text`."""
    return [tuple(line.strip("| ").split(" | ")) for line in TABLE.findall(text)[0].splitlines()[2:]]


def minors(row: Row) -> tuple[int, ...]:
    """The minor versions of torch and Python, as (2, 13, 3, 11)."""
    return tuple(int(part) for version in row[:2] for part in version.split(".")[:2])


if __name__ == "__main__":
    main()
