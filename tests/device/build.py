"""Compiles the simulated device with g++, once for each state of its sources; the library lies in `.device-build`."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

HERE = Path(__file__).parent
SOURCES = HERE / "sources"
CACHE = HERE.parents[1] / ".device-build"

# Hardly optimized: the device's own code is short, and what computes lies in torch.
FLAGS = [
    *("-std=c++20", "-O1", "-g0", "-fPIC", "-fvisibility=hidden"),
    *("-Wall", "-Wno-sign-compare", "-Wno-unknown-pragmas"),
    *("-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"),
]
LIBRARIES = ["-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]


class CannotBuild(RuntimeError):
    """The simulated device cannot be built on this machine; the text says why."""


def build() -> Path:
    """Returns the compiled library. Processes that ask at once wait for the one that compiles."""
    compiler = os.environ.get("CXX", "g++")
    folder = CACHE / digest(compiler_version(compiler))
    library = folder / "sim_native.so"
    if library.exists():
        return library
    try:
        CACHE.mkdir(exist_ok=True)
        with (CACHE / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                compile_into(folder, compiler)
                remove_others(folder)
    except OSError as error:
        raise CannotBuild(f"the folder for builds cannot be used: {error}") from error
    return library


def compiler_version(compiler: str) -> str:
    try:
        return run([compiler, "--version"])
    except FileNotFoundError:
        raise CannotBuild(f"there is no compiler: {compiler} is not found; install g++, or set CXX") from None


def digest(compiler: str) -> str:
    """Returns a hash of all that the library depends on."""
    state = hashlib.sha256(repr((compiler, torch.__version__, sysconfig.get_config_var("SOABI"), FLAGS)).encode())
    for path in sorted(SOURCES.iterdir()):
        state.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return state.hexdigest()[:16]


def compile_into(folder: Path, compiler: str) -> None:
    """Compile in a folder beside `folder` and rename it when all is done: who finds `folder` finds a whole library."""
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    root = Path(torch.__file__).parent
    # As system headers: what the compiler would warn of in torch's is not ours to mend.
    headers = [root / "include", root / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"])]
    includes = [part for path in headers for part in ("-isystem", str(path))]
    objects = [unfinished / f"{source.stem}.o" for source in sources()]

    def compile_one(source: Path, target: Path) -> None:
        run([compiler, *FLAGS, *includes, "-c", str(source), "-o", str(target)])

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(compile_one, sources(), objects))
    library = unfinished / "sim_native.so"
    run([compiler, "-shared", *map(str, objects), f"-L{root / 'lib'}", *LIBRARIES, "-o", str(library)])
    for each in objects:
        each.unlink()
    unfinished.rename(folder)


def sources() -> list[Path]:
    """Returns the files to compile; those that include most of torch first, as they take longest."""
    return sorted(SOURCES.glob("*.cpp"), key=lambda path: (path.stem not in LONGEST, path.stem))


LONGEST = ("autocast", "module", "collectives", "fallback")


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise CannotBuild(f"{Path(command[-3]).name if '-c' in command else command[0]}: " + "\n".join(lines[:5]))
    return done.stdout


def remove_others(folder: Path) -> None:
    """Remove the libraries of earlier sources. A process that has loaded one keeps it."""
    for path in CACHE.iterdir():
        if path.is_dir() and path != folder:
            shutil.rmtree(path, ignore_errors=True)
