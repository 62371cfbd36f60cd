"""Compiles the device with g++ on first use, once for each state of its sources, the compiler and torch."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

HERE = Path(__file__).parent
SOURCES = HERE / "sources"


def cache() -> Path:
    """Returns the folder for libraries: `SIMDEVICE_CACHE`; else `.build` in a checkout; else the user's cache."""
    if given := os.environ.get("SIMDEVICE_CACHE"):
        return Path(given)
    if (HERE / "pyproject.toml").exists():
        return HERE / ".build"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "simdevice"


CACHE = cache()
UNUSED_DAYS = 7
"""A library that nobody has loaded for so long is removed. Others stay: several environments may share the folder."""

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
        with contextlib.suppress(OSError):  # a folder of another user
            os.utime(folder)
        return library
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
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


def digest(compiler: str, files: Iterable[Path] | None = None) -> str:
    """Returns a hash of the compiler, torch and `files`; without files, of all that the library depends on."""
    state = hashlib.sha256(repr((compiler, torch.__version__, sysconfig.get_config_var("SOABI"), FLAGS)).encode())
    for path in sorted(SOURCES.iterdir() if files is None else files):
        state.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return state.hexdigest()[:16]


def compile_into(folder: Path, compiler: str) -> None:
    """Compile in a folder beside `folder` and rename it when all is done: who finds `folder` finds a whole library."""
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    version = compiler_version(compiler)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(lambda source: compiled(source, compiler, version), sources()))
    library = unfinished / "sim_native.so"
    torch_libraries = Path(torch.__file__).parent / "lib"
    run([compiler, "-shared", *map(str, objects), f"-L{torch_libraries}", *LIBRARIES, "-o", str(library)])
    unfinished.rename(folder)


def compiled(source: Path, compiler: str, version: str) -> Path:
    """Returns the object of `source`: that of an earlier build if it includes the same of our headers."""
    objects = CACHE / "objects"
    objects.mkdir(exist_ok=True)
    target = objects / f"{source.stem}-{digest(version, included({source}))}.o"
    if not target.exists():
        root = Path(torch.__file__).parent
        # As system headers: what the compiler would warn of in torch's is not ours to mend.
        headers = [root / "include", root / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"])]
        includes = [part for path in headers for part in ("-isystem", str(path))]
        unfinished = target.with_suffix(".unfinished")
        run([compiler, *FLAGS, *includes, "-c", str(source), "-o", str(unfinished)])
        unfinished.rename(target)
    return target


def included(files: set[Path]) -> set[Path]:
    """Returns `files`, and the headers of ours that they include, directly or not."""
    named = {SOURCES / name for path in files for name in re.findall(r'#include "([^"]+)"', path.read_text())}
    return files if named <= files else included(files | named)


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
    """Remove libraries that are no longer used. A process that has loaded one keeps it."""
    oldest = time.time() - UNUSED_DAYS * 24 * 3600
    for path in [*CACHE.iterdir(), *CACHE.glob("objects/*")]:
        if path not in (folder, CACHE / "objects") and path.stat().st_mtime < oldest:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
