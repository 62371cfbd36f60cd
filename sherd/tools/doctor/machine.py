"""The machine as one process sees it: versions, environment variables, cores, memory, limits, accelerators."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from sherd import __version__
from sherd._torch import NEWEST_TORCH, OLDEST_TORCH, minor_of_torch
from sherd.comm.accelerator import accelerator, backend
from sherd.comm.cores import node_of, own_cores, threads_of_steps
from sherd.tools.doctor.findings import Finding, failed, warned

OLDEST_PYTHON = (3, 10)
GIB, MIB = 2**30, 2**20
LITTLE_SHM = 512 * MIB


def of_the_machine(num_ranks: int, threads: int) -> Iterator[Finding]:
    """Yields findings on this machine, which has `num_ranks` ranks with `threads` each."""
    yield from versions()
    yield from variables(os.environ)
    yield from cores(num_ranks, threads)
    yield from memory(num_ranks)
    yield from devices(num_ranks)
    yield from backends()


def versions() -> Iterator[Finding]:
    python = platform.python_version()
    old = "" if sys.version_info >= OLDEST_PYTHON else "sherd needs Python 3.10 or newer"
    yield failed("environment", "python", python, old)
    oldest, newest = (f"{major}.{minor}" for major, minor in (OLDEST_TORCH, NEWEST_TORCH))
    minor = minor_of_torch()
    if minor < OLDEST_TORCH:
        yield failed("environment", "torch", torch.__version__, f"sherd needs torch {oldest} or newer")
    else:
        remedy = f"sherd was tried with torch {oldest} to {newest}; if something fails, try one of these"
        yield warned("environment", "torch", torch.__version__, remedy if minor > NEWEST_TORCH else "")
    yield Finding("environment", "sherd", __version__)
    system = f"{platform.system()} {platform.release()} {platform.machine()} on {socket.gethostname()}"
    remedy = "" if sys.platform == "linux" else "sherd was tested on Linux only; ranks share no memory here"
    yield warned("environment", "system", system, remedy)


def _is_on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "off", "no")


def _unless(is_good: Callable[[str], bool], remedy: str) -> Callable[[str], str]:
    return lambda value: "" if is_good(value) else remedy


def _off(remedy: str) -> Callable[[str], str]:
    return _unless(lambda value: not _is_on(value), f"{remedy}; unset it")


def _interface(value: str) -> str:
    known = [name for _, name in socket.if_nameindex()]
    wanted = value.removeprefix("^").removeprefix("=").split(",")
    # NCCL takes prefixes of names.
    if value.startswith("^") or all(any(name.startswith(each) for name in known) for each in wanted):
        return ""
    return f"there is no such interface, so ranks will not meet; there are {', '.join(known)}"


VARIABLES: Mapping[str, Callable[[str], str]] = {
    "GLOO_SOCKET_IFNAME": _interface,
    "NCCL_SOCKET_IFNAME": _interface,
    "TORCH_DISTRIBUTED_DEBUG": _unless(
        lambda value: value.upper() != "DETAIL", "ranks compare each call: slow; unset it"
    ),
    "CUDA_LAUNCH_BLOCKING": _off("every kernel waits for the last one, and nothing overlaps"),
    "TORCH_NCCL_BLOCKING_WAIT": _off("the host waits for every collective, and nothing overlaps"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": _unless(_is_on, "ranks hang when another one has died; unset it"),
    "NCCL_P2P_DISABLE": _off("devices of one machine do not read each other's memory"),
    "NCCL_SHM_DISABLE": _off("ranks of one machine talk through the network"),
    "NCCL_IB_DISABLE": _off("InfiniBand is not used; that is right only where there is none"),
    "CUDA_DEVICE_MAX_CONNECTIONS": _unless(lambda value: value != "1", "gathers wait for compute; unset it"),
    "PYTHONOPTIMIZE": _off("assertions do not run"),
    "CUDA_VISIBLE_DEVICES": lambda value: "" if value else "it hides all devices; unset it to use them",
    "OMP_NUM_THREADS": _unless(str.isdigit, "it should be a number"),
}
"""By variable, a function of its value that returns what is wrong and the remedy, or an empty text."""


def variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    for name, judge in VARIABLES.items():
        if name in environment:
            yield warned("environment", name, environment[name] or "(empty)", judge(environment[name]))
    missing = [name for name in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if "RANK" in environment and missing:
        remedy = f"{', '.join(missing)} is missing, although RANK is set: start with torchrun, or unset RANK"
        yield warned("environment", "RANK", environment["RANK"], remedy)


def cores(num_ranks: int, threads: int) -> Iterator[Finding]:
    usable = len(own_cores())
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if quota and quota[0].isdigit():
        usable = min(usable, max(1, int(quota[0]) // int(quota[1])))
    are_enough = num_ranks == 1 or num_ranks * threads <= usable
    remedy = "" if are_enough else f"set OMP_NUM_THREADS={max(1, usable // num_ranks)}, or start fewer ranks"
    of_steps = threads_of_steps(num_ranks)
    value = f"{usable} usable; {num_ranks} rank(s) with {threads} thread(s) each, {of_steps} for steps on the host"
    # On an accelerator the host's threads have little to do.
    yield warned("environment", "cores", value, remedy if accelerator() is None else "")
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    remedy = "other processes want these cores (see top): end them, or all times are theirs, too, and ranks may be late"
    every = os.cpu_count() or usable  # the load is that of the entire machine
    yield warned("environment", "load", f"{load:.1f} on {every} cores", remedy if load > 1.25 * every else "")


def memory(num_ranks: int) -> Iterator[Finding]:
    free, total = host_memory()
    if total:
        remedy = (
            "" if free > total / 10 else "end other processes: a rank that finds no memory is killed without a word"
        )
        yield warned("memory", "host", f"{free / GIB:.1f} of {total / GIB:.1f} GiB free", remedy)
    if Path("/dev/shm").is_dir():
        shm = shutil.disk_usage("/dev/shm")
        remedy = "" if shm.free >= LITTLE_SHM else (
            "data loaders' workers and NCCL need it (sherd's own shared memory does not): docker run --shm-size=8g"
        )  # fmt: skip
        yield warned("memory", "/dev/shm", f"{shm.free / GIB:.1f} of {shm.total / GIB:.1f} GiB free", remedy)
    yield from limits(num_ranks)


def host_memory() -> tuple[int, int]:
    """Returns the free and total bytes of host memory, or of a container's lower limit; zeros if they are unknown."""
    fields = {line.split(":")[0]: line.split()[1] for line in _read("/proc/meminfo").splitlines()}
    free, total = (int(fields.get(name, 0)) * 1024 for name in ("MemAvailable", "MemTotal"))
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        free, total = min(free, int(limit) - int(used)), min(total, int(limit))
    return free, total


def limits(num_ranks: int) -> Iterator[Finding]:
    """Yields the limits that the system sets for this process (not on Windows)."""
    try:
        import resource
    except ImportError:
        return

    def said(limit: int, unit: int = 1) -> str:
        return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit // unit:,}"

    files, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], 512 + 16 * num_ranks
    short = files != resource.RLIM_INFINITY and files < needed
    yield warned("memory", "open files", said(files), f"ulimit -n {max(65536, needed)}" if short else "")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    has_infiniband = Path("/sys/class/infiniband").is_dir()
    remedy = "ulimit -l unlimited: InfiniBand pins its buffers" if has_infiniband else ""
    is_limited = locked != resource.RLIM_INFINITY
    yield warned("memory", "locked memory", f"{said(locked, 1024)} KiB", remedy if is_limited else "")


def devices(num_ranks: int) -> Iterator[Finding]:
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        yield Finding("accelerators", "accelerator", "none; ranks compute on the CPU")
        return
    number = torch.accelerator.device_count()
    remedy = (
        "" if accelerator() else f"torch has no backend of process groups that reaches {device.type}; ranks use the CPU"
    )
    yield warned("accelerators", "accelerator", f"{number} x {device.type}", remedy)
    if num_ranks > number and accelerator():
        remedy = f"start {number}, one per device"
        yield failed("accelerators", "ranks", f"{num_ranks} ranks for {number} device(s)", remedy)
    module = torch.get_device_module(device)
    for index in range(number):
        name = module.get_device_name(index) if hasattr(module, "get_device_name") else device.type
        free, total = module.mem_get_info(index) if hasattr(module, "mem_get_info") else (0, 0)
        remedy = "another process holds much of it" if free < total / 2 else ""
        node = node_of(torch.device(device.type, index))
        near = "" if node is None else f", on NUMA node {node}"
        value = f"{name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free{near}"
        yield warned("accelerators", f"{device.type}:{index}", value, remedy)


def backends() -> Iterator[Finding]:
    """Yields the backends of process groups in this torch, and the one that `sherd train` takes."""
    if not dist.is_available():
        yield failed("backends", "torch.distributed", "not built", "install a torch that has it")
        return
    known = [name for name in dist.Backend.backend_list if name != "undefined" and _is_there(name)]
    yield failed("backends", "available", ", ".join(known), "" if known else "install a torch with gloo")
    yield Finding("backends", "sherd train takes", backend())


def _is_there(name: str) -> bool:
    try:
        return bool(dist.is_backend_available(name))
    except (AssertionError, RuntimeError, ValueError):
        return False


def _read(path: str) -> str:
    """Returns the contents of a file of the system, or an empty text."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
