"""`sherd doctor --bandwidth`: the speed of compute and links under all ranks at once, measured, as a cluster file."""

from __future__ import annotations

import copy
import os
import platform
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles

import torch
import torch.distributed as dist
from torch import nn

from sherd.api.fully_shard import fully_shard
from sherd.comm.objects import all_gather_objects
from sherd.comm.transports import transport_of
from sherd.errors import InputError
from sherd.policy import CommPolicy
from sherd.tools.doctor.findings import Finding
from sherd.tools.doctor.machine import host_memory
from sherd.tools.doctor.operations import EXACTLY, Operations, Step, timed_operations, usual_steps, with_operations
from sherd.tools.doctor.ranks import collective, device
from sherd.tools.simulate.cluster import Cluster, Device, Link, cluster_toml, texts_of
from sherd.tools.simulate.costs import waited
from sherd.tools.simulate.sharded import OPTIMIZERS
from sherd.tools.simulate.work import OpKind

MEASURE_S = 0.3  # the seconds for which an operation is repeated; the shortest run counts
OWN_S = 10.0  # the seconds for which a step of the user's model is repeated; the fastest run counts
STEPS_S, LEAST_TURNS = 6.0, 9  # the seconds and least number of turns of models that are compared
SIZES = (2**16, 2**19, 2**22, 2**24)  # bytes of a collective
# The widths of units with a square weight each, and the number of inputs that take much compute between two
# collectives: 5 to 15 ms on a server's core.
WIDTHS = {64: 2**20, 128: 2**20, 512: 2**20, 1024: 2**18, 2048: 2**18}
FEW = 2**14  # the number of inputs that take little compute
UNITS, VECTORS = 8, 7  # the number of units, and of the vectors in each unit
QUEUED = 200  # small operations in a row
BESIDE = 0.84  # the share of its speed that an accelerator keeps while a collective runs
# The side of matrices, rows of 4 KiB, and queries as batch, heads, length and width.
ON_CPU, ON_DEVICE = (1024, 2**13, (2, 4, 512, 64)), (8192, 2**18, (4, 16, 4096, 128))


def require_free(file: str) -> None:
    """Raise InputError if `file` exists already or its folder does not. An empty name is no file."""
    if file and (Path(file).exists() or not Path(file).parent.is_dir()):
        raise InputError(f"--bandwidth {file}: it is there, or its folder is not; name a new file in a folder")


def of_the_bandwidth(file: str, own_steps: Iterable[Step] = ()) -> Iterator[Finding]:
    """Measure with all ranks of the default process group, and write `file` on rank 0. Yields a line per figure.

    `own_steps` are steps of a user's model, whose operations are timed too.
    """
    cluster = measured(Path(file).stem, own_steps)
    if dist.get_rank() == 0:
        Path(file).write_text(cluster_toml(cluster), encoding="utf-8")
    texts = texts_of(cluster)
    yield from (Finding("bandwidth", name, texts[name]) for name in texts if "peak_flops" not in name)
    yield Finding("bandwidth", "written", file)


def measured(name: str, own: Iterable[Step] = ()) -> Cluster:
    """Returns the cluster of these ranks. The slowest rank's figures count.

    `own` are steps of the user's model, which are timed on CPUs.
    """
    at, hosts = device(), all_gather_objects(socket.gethostname(), "the names of hosts")
    per_node, statm = hosts.count(hosts[0]), Path("/proc/self/statm")
    resident = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 2**29
    flops, attention = _flops(at)
    rates = {kind: nbytes / _slowest(call, at) for kind, (call, nbytes) in _movers(at).items()}
    launch, host = _overheads(at)
    within, across = _links(hosts, launch)
    in_memory = Link(launch, rates[OpKind.COPY] / 2)
    memory, model, to_host = host_memory()[1] // per_node or 2**32, f"CPU, {platform.machine()}", in_memory
    if at.type != "cpu":
        module, there = torch.get_device_module(at), torch.empty(ON_DEVICE[1], 1024, device=at)
        (free, memory), model = module.mem_get_info(at), module.get_device_name(at)
        resident = max(0, memory - free - module.memory_reserved(at))
        pinned = torch.empty(there.shape).pin_memory()
        to_host = Link(launch, there.nbytes / _slowest(lambda: there.copy_(pinned, non_blocking=True), at))
    resident = max(all_gather_objects(resident, "the memory of libraries"))
    bandwidth = rates.pop(OpKind.POINTWISE)
    shares = {kind: min(1.0, rate / bandwidth) for kind, rate in rates.items()}
    on_device = (memory, resident, flops, flops, attention, bandwidth, shares, launch, host, at.type != "cpu")
    beside = 1.0 if at.type == "cpu" else BESIDE
    timed: Operations = {}
    if at.type == "cpu":
        timed = with_operations(timed_operations(usual_steps()), timed_operations(own, EXACTLY, OWN_S))
    optimizer, skew = None, 0.0
    if at.type == "cpu" and within and hosts.count(hosts[0]) == len(hosts):
        together = measured_together(launch)
        # Timings among other work may fit a link without end; none is faster than memory.
        within = Link(together.within.latency, min(together.within.bandwidth, bandwidth))
        optimizer, skew = together.optimizer, together.skew
    said = f"measured by sherd doctor --bandwidth on {time.strftime('%Y-%m-%d')}, torch {torch.__version__}, "
    said, guess = f"{said}{len(hosts)} ranks", "estimate: not measured, as"
    sources = dict.fromkeys(("devices_per_node", "host_memory", "device", "within", "across", "to_host"), said)
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
        Device(model, *on_device, beside, skew, timed),
        per_node,
        *links,
        None,
        "",
        sources,
        optimizer,
        host_memory()[1] or None,
    )


def _slowest(call: Callable[[], object], at: torch.device) -> float:
    """Returns the seconds of `call`: the longest among the ranks' shortest runs. All ranks run at the same time."""
    call()
    once: float = max(all_gather_objects(_seconds(call, at), "times"))
    repeated = min(max(3, int(MEASURE_S / once)), 1000)  # the same on all ranks, since `call` may be a collective
    slowest: float = max(all_gather_objects(min(_seconds(call, at) for _ in range(repeated)), "times"))
    return slowest


def _seconds(call: Callable[[], object], at: torch.device) -> float:
    """Returns the seconds of one run; on an accelerator, between two events on its stream."""
    if at.type == "cpu":
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    first, last = torch.Event(at, enable_timing=True), torch.Event(at, enable_timing=True)
    first.record()
    call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def _flops(at: torch.device) -> tuple[dict[str, float], float]:
    """Returns the FLOP/s of large matrix products by dtype, and the share of them that fused attention achieves."""
    on_cpu, usual = at.type == "cpu", torch.get_float32_matmul_precision()
    (size, _, shape), dtype = (ON_CPU, "float32") if on_cpu else (ON_DEVICE, "bfloat16")

    def matmul_flops(name: str) -> float:
        torch.set_float32_matmul_precision("high" if name == "tfloat32" else "highest")
        a = torch.randn(size, size, device=at).to(getattr(torch, name.replace("tfloat", "float")))
        out = torch.empty_like(a)
        return 2 * size**3 / _slowest(lambda: torch.mm(a, a, out=out), at)

    flops = {name: matmul_flops(name) for name in (["bfloat16", "float32"] + ["float16", "tfloat32"] * (not on_cpu))}
    torch.set_float32_matmul_precision(usual)
    q = torch.randn(shape, device=at).to(getattr(torch, dtype))
    took = _slowest(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q), at)
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

    launch, host = _slowest(queue, at), 0.0
    if at.type != "cpu":
        begin = time.perf_counter()
        queue()
        host = max(all_gather_objects(time.perf_counter() - begin, "times of the host"))
        large = torch.ones(ON_DEVICE[0], ON_DEVICE[0], device=at, dtype=torch.bfloat16)
        for _ in range(8):  # keeps the device busy while the host queues the timed operations
            torch.mm(large, large)
        launch = max(all_gather_objects(_seconds(queue, at), "times of the device"))
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
    took = [_slowest(call, device()) for _, call in calls]
    return _line([(number - 1) / number * size for size, _ in calls], took, launch, number - 1)


def _line(sizes: Sequence[float], took: Sequence[float], launch: float = 0.0, steps: int = 1) -> Link:
    """Returns the link over which `sizes` took so long, without `launch`, by least squares of relative errors."""
    pairs = [(1 / seconds, size / seconds) for size, seconds in zip(sizes, took, strict=True)]
    shares = torch.tensor(pairs, dtype=torch.float64)
    fixed, per_byte = torch.linalg.lstsq(shares, shares.new_ones(len(took), 1)).solution.flatten().tolist()
    # By noise, the line may fall, or begin below `launch`.
    return Link(max(fixed - launch, 1e-9) / steps, 1 / max(per_byte, 0.1 / float(shares[:, 1].max())))


class _Unit(nn.Module):
    """A product with a square weight, and with vectors, as a block's biases and norms are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.vectors = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in range(VECTORS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.weight
        for vector in self.vectors:
            x = x * vector
        return x


@dataclass(frozen=True, slots=True)
class Together:
    """Figures of CPU ranks that train together: a cluster's links `within` and `optimizer`, and its device's `skew`."""

    within: Link
    optimizer: Link
    skew: float


def measured_together(launch: float, transport: str = "auto") -> Together:
    """Times small trainings on CPU ranks of one host, beside the same trainings on each rank alone.

    Returns the cost of a unit's collectives, two gathers and one reduction with all that the engine does around them;
    how this cost grows with the compute in between, since ranks wait for the slowest; and the cost of AdamW's step.
    Lower quartiles count, which leaves out most other load on the machine.
    """
    soon, late, adamw, ranks = [], [], [], dist.get_world_size()
    for width, many in WIDTHS.items():
        plain = nn.Sequential(*(_Unit(width) for _ in range(UNITS)))
        sharded = copy.deepcopy(plain)
        for unit in (*sharded, sharded):
            fully_shard(unit, comm_policy=CommPolicy(transport))
        batches = [torch.randn(inputs // width, width) for inputs in (FEW, many)]
        steps = [partial(_train, model, batch) for batch in batches for model in (plain, sharded)]
        # A unit has three collectives.
        few_alone, few_sharded, many_alone, many_sharded = (seconds / (3 * UNITS) for seconds in _in_turns(steps))
        soon.append((few_alone, few_sharded - few_alone))
        late.append((many_alone, many_sharded - many_alone))
        weights = [parameter for parameter in sharded.parameters() if parameter.dim() > 1]
        adamw.append(_slowest(torch.optim.AdamW(weights, foreach=True).step, device()) / UNITS)
    skew = _skew(soon, late)
    took = [max(1e-6, seconds - waited(computed, skew)) for computed, seconds in soon]
    sizes, accesses = [4 * width**2 for width in WIDTHS], OPTIMIZERS["adamw"].accesses
    within = _line([(ranks - 1) / ranks * size for size in sizes], took, launch, ranks - 1)
    optimizer = _line([accesses * size / ranks for size in sizes], adamw, steps=accesses)
    return Together(within, optimizer, skew)


def _skew(soon: Sequence[tuple[float, float]], late: Sequence[tuple[float, float]]) -> float:
    """Returns the skew by which equal collectives take longer after much compute (`late`) than after little (`soon`).

    A collective is the seconds of compute before it, and its own.
    """
    pairs = zip(soon, late, strict=True)
    return max(0.0, median((b - a) / (waited(after, 1.0) - waited(before, 1.0)) for (before, a), (after, b) in pairs))


def _train(model: nn.Module, batch: torch.Tensor) -> None:
    model.zero_grad()
    model(batch).sum().backward()


def _in_turns(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Returns the seconds of each of `calls`: the lower quartile of the slowest rank's times.

    The calls run in turns, so that load on the machine affects all of them alike.
    """
    begin = time.perf_counter()
    for call in calls:
        call()
    once: float = max(all_gather_objects(time.perf_counter() - begin, "times"))
    mine = []
    for _ in range(min(max(LEAST_TURNS, int(STEPS_S / once)), 1000)):
        for call in calls:
            dist.barrier()
            mine.append(_seconds(call, device()))
    slowest = [*map(max, *all_gather_objects(mine, "times"), [0.0] * len(mine))]
    runs = [slowest[number :: len(calls)] for number in range(len(calls))]
    return [quantiles(times, n=4, method="inclusive")[0] for times in runs]
