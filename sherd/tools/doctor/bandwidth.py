"""`sherd doctor --bandwidth`: the speed of compute and links under all ranks at once, measured, as a cluster file."""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from sherd.comm.objects import all_gather_objects
from sherd.comm.transports import transport_of
from sherd.errors import InputError
from sherd.policy import CommPolicy
from sherd.storage.scratch import Scratch
from sherd.tools.doctor.findings import Finding
from sherd.tools.doctor.machine import host_memory
from sherd.tools.doctor.ranks import collective, device, seconds_of, slowest
from sherd.tools.simulate.cluster import Cluster, Device, Link, cluster_toml, texts_of
from sherd.tools.simulate.work import OpKind

SIZES = (2**16, 2**19, 2**22, 2**24)  # bytes of a collective
ON_DISK = (2**20, 2**24, 2**26)  # bytes of a scratch file
QUEUED = 200  # small operations in a row
BESIDE = 0.84  # the share of its speed that an accelerator keeps while a collective runs
# The side of matrices, rows of 4 KiB, and queries as batch, heads, length and width.
ON_CPU, ON_DEVICE = (1024, 2**13, (2, 4, 512, 64)), (8192, 2**18, (4, 16, 4096, 128))


def require_free(file: str) -> None:
    """Raise InputError if `file` exists already or its folder does not. An empty name is no file."""
    if file and (Path(file).exists() or not Path(file).parent.is_dir()):
        raise InputError(f"--bandwidth {file}: it is there, or its folder is not; name a new file in a folder")


def of_the_bandwidth(file: str, scratch: str = "") -> Iterator[Finding]:
    """Measure with all ranks of the default process group, and write `file` on rank 0. Yields a line per figure.

    The disk of the folder `scratch` is measured too, if one is given.
    """
    cluster = measured(Path(file).stem, scratch)
    if dist.get_rank() == 0:
        Path(file).write_text(cluster_toml(cluster), encoding="utf-8")
    texts = texts_of(cluster)
    yield from (Finding("bandwidth", name, texts[name]) for name in texts if "peak_flops" not in name)
    yield Finding("bandwidth", "written", file)


def measured(name: str, scratch: str = "") -> Cluster:
    """Returns the cluster of these ranks. The slowest rank's figures count."""
    at, hosts = device(), all_gather_objects(socket.gethostname(), "the names of hosts")
    per_node, statm = hosts.count(hosts[0]), Path("/proc/self/statm")
    resident = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 2**29
    flops, attention = _flops(at)
    rates = {kind: nbytes / slowest(call, at) for kind, (call, nbytes) in _movers(at).items()}
    launch, host = _overheads(at)
    within, across = _links(hosts, launch)
    in_memory = Link(launch, rates[OpKind.COPY] / 2)
    memory, model, to_host = host_memory()[1] // per_node or 2**32, f"CPU, {platform.machine()}", in_memory
    from_host = in_host = None
    if at.type != "cpu":
        module, there = torch.get_device_module(at), torch.empty(ON_DEVICE[1], 1024, device=at)
        (free, memory), model = module.mem_get_info(at), module.get_device_name(at)
        resident = max(0, memory - free - module.memory_reserved(at))
        pinned = torch.empty(there.shape).pin_memory()
        to_host = Link(launch, there.nbytes / slowest(lambda: pinned.copy_(there, non_blocking=True), at))
        from_host = Link(launch, there.nbytes / slowest(lambda: there.copy_(pinned, non_blocking=True), at))
        add, nbytes = _movers(torch.device("cpu"))[OpKind.POINTWISE]
        in_host = nbytes / slowest(add, torch.device("cpu"))
    resident = max(all_gather_objects(resident, "the memory of libraries"))
    bandwidth = rates.pop(OpKind.POINTWISE)
    shares = {kind: min(1.0, rate / bandwidth) for kind, rate in rates.items()}
    on_device = (memory, resident, flops, flops, attention, bandwidth, shares, launch, host, at.type != "cpu")
    beside = 1.0 if at.type == "cpu" else BESIDE
    if at.type == "cpu" and within:  # timings among other work may fit a link without end; none is faster than memory
        within = Link(within.latency, min(within.bandwidth, bandwidth))
    said = f"measured by sherd doctor --bandwidth on {time.strftime('%Y-%m-%d')}, torch {torch.__version__}, "
    said, guess = f"{said}{len(hosts)} ranks", "estimate: not measured, as"
    sources = dict.fromkeys(("devices_per_node", "host_memory", "device", "within", "across", "to_host"), said)
    sources |= {name: said for name, each in (("from_host", from_host), ("host_bandwidth", in_host)) if each}
    sources |= {"disk": f"{said}, in {scratch}"} if scratch else {}
    sources["device.peak_flops"] = "estimate: the maker's figure is not known, so what was achieved; MFU is of that"
    if at.type != "cpu":
        sources["device.beside"] = "estimate: not measured, as on the accelerators of Lee et al. (2025) in the mean"
    if within is None:
        sources["within"] = f"{guess} no ranks share a host, or hosts differ: half of what memory copies"
    if across is None:
        sources["across"] = f"{guess} there is one host, or hosts differ in ranks: Ethernet of 10 Gbit/s"
    links = (within or in_memory, across or Link(30e-6, 1.1e9), to_host)
    return Cluster(
        name or "measured",
        Device(model, *on_device, beside),
        per_node,
        *links,
        None,
        "",
        sources,
        host_memory=host_memory()[1] or None,
        from_host=from_host,
        host_bandwidth=in_host,
        disk=_disk(scratch) if scratch else None,
    )


def _disk(folder: str) -> Link:
    """Returns the link to the disk of `folder`: bytes are written, reach the disk, and are read from it again."""

    def seconds(nbytes: int) -> float:
        file, buffer = scratch.file("the bandwidth", nbytes), memoryview(bytearray(nbytes))

        def there_and_back() -> None:
            file.write_from(buffer).wait()
            file.map().flush()
            file.drop()
            file.read_into(buffer).wait()

        return slowest(there_and_back, torch.device("cpu"))

    with Scratch(folder) as scratch:
        return line_through([2 * nbytes for nbytes in ON_DISK], [seconds(nbytes) for nbytes in ON_DISK])


def _flops(at: torch.device) -> tuple[dict[str, float], float]:
    """Returns the FLOP/s of large matrix products by dtype, and the share of them that fused attention achieves."""
    on_cpu, usual = at.type == "cpu", torch.get_float32_matmul_precision()
    (size, _, shape), dtype = (ON_CPU, "float32") if on_cpu else (ON_DEVICE, "bfloat16")

    def matmul_flops(name: str) -> float:
        torch.set_float32_matmul_precision("high" if name == "tfloat32" else "highest")
        a = torch.randn(size, size, device=at).to(getattr(torch, name.replace("tfloat", "float")))
        out = torch.empty_like(a)
        return 2 * size**3 / slowest(lambda: torch.mm(a, a, out=out), at)

    flops = {name: matmul_flops(name) for name in (["bfloat16", "float32"] + ["float16", "tfloat32"] * (not on_cpu))}
    torch.set_float32_matmul_precision(usual)
    q = torch.randn(shape, device=at).to(getattr(torch, dtype))
    took = slowest(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q), at)
    return flops, min(1.0, 4 * q.numel() * shape[2] / took / flops[dtype])


def _movers(at: torch.device) -> dict[OpKind, tuple[Callable[[], object], int]]:
    """Returns an operation of each memory-bound kind, and the bytes that it reads and writes."""
    a = torch.ones((ON_CPU if at.type == "cpu" else ON_DEVICE)[1], 1024, device=at)
    b, out, index = a.clone(), torch.empty_like(a), torch.randperm(len(a), device=at)
    return {
        OpKind.POINTWISE: (lambda: torch.add(a, b, out=out), 3 * a.nbytes),
        OpKind.REDUCTION: (lambda: torch.softmax(a, 1, out=out), 2 * a.nbytes),
        OpKind.LOOKUP: (lambda: torch.index_select(a, 0, index, out=out), 2 * a.nbytes),
        OpKind.COPY: (lambda: out.copy_(a), 2 * a.nbytes),
    }


def _overheads(at: torch.device) -> tuple[float, float]:
    """Returns the seconds of a small operation on the device, and of queueing it on the host: 0 on a CPU."""
    small = torch.ones(8, device=at)

    def queue() -> None:
        for _ in range(QUEUED):
            small.add_(1.0)

    launch, host = slowest(queue, at), 0.0
    if at.type != "cpu":
        begin = time.perf_counter()
        queue()
        host = max(all_gather_objects(time.perf_counter() - begin, "times of the host"))
        large = torch.ones(ON_DEVICE[0], ON_DEVICE[0], device=at, dtype=torch.bfloat16)
        for _ in range(8):  # keeps the device busy while the host queues the timed operations
            torch.mm(large, large)
        launch = max(all_gather_objects(seconds_of(queue, at), "times of the device"))
    return launch / QUEUED, host / QUEUED


def _links(hosts: Sequence[str], launch: float) -> tuple[Link | None, Link | None]:
    """Returns the links inside of a host and between hosts; None where there are none, or if hosts differ."""
    places = [[rank for rank, host in enumerate(hosts) if host == here] for here in dict.fromkeys(hosts)]
    if len({len(place) for place in places}) > 1:
        return None, None
    return _link(places, launch), _link([list(rail) for rail in zip(*places, strict=True)], launch)


def _link(groups: list[list[int]], launch: float) -> Link | None:
    """Returns the link between ranks of one group, while all `groups` use theirs at the same time.

    By least squares over all-gathers and reduce-scatters of p ranks, which take
    launch + (p - 1) * latency + (p - 1) / p * bytes / bandwidth.
    """
    if (number := len(groups[0])) == 1:
        return None
    group = dist.group.WORLD if len(groups) == 1 else dist.new_subgroups_by_enumeration(groups)[0]
    transport, kinds = transport_of(group, device(), CommPolicy()), ("all-gather", "reduce-scatter")
    calls = [(size, collective(transport, kind, size, number)) for size in SIZES for kind in kinds]
    took = [slowest(call, device()) for _, call in calls]
    return line_through([(number - 1) / number * size for size, _ in calls], took, launch, number - 1)


def line_through(sizes: Sequence[float], took: Sequence[float], launch: float = 0.0, steps: int = 1) -> Link:
    """Returns the link over which `sizes` took so long, without `launch`, by least squares of relative errors."""
    pairs = [(1 / seconds, size / seconds) for size, seconds in zip(sizes, took, strict=True)]
    shares = torch.tensor(pairs, dtype=torch.float64)
    fixed, per_byte = torch.linalg.lstsq(shares, shares.new_ones(len(took), 1)).solution.flatten().tolist()
    # By noise, the line may fall, or begin below `launch`.
    return Link(max(fixed - launch, 1e-9) / steps, 1 / max(per_byte, 0.1 / float(shares[:, 1].max())))
