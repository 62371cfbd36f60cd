"""The findings of all ranks: hosts and versions, transports and their speed, clocks, and a self-test."""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from sherd import __version__
from sherd.api.fully_shard import fully_shard
from sherd.comm.accelerator import accelerator
from sherd.comm.objects import all_gather_objects
from sherd.comm.transport import Sizes, Transport
from sherd.comm.transports import transport_of
from sherd.errors import MeshError
from sherd.policy import TRANSPORTS, CommPolicy, MixedPrecisionPolicy
from sherd.tools.doctor.findings import FAILURE, Finding, failed, warned
from sherd.tools.verify.equivalence import verify_equivalence

SMALL, LARGE = 4 * 2**10, 16 * 2**20  # bytes of the unsharded buffer of a collective
MEASURE_S = 0.3  # the seconds for which an operation is repeated; the shortest run counts
QUICKLY_S = 0.02  # the same for a look at a link
FAR_BELOW = 20  # ranks of one host share memory: all-gathers have a few times less than a copy
APART_S = 0.1  # by a larger difference of clocks, lines of two logs appear in the wrong order
WIDTH = 32


def of_the_ranks(timeout_s: float) -> Iterator[Finding]:
    """Yields findings on the default process group. All ranks must call this function, and all get the same findings.

    `timeout_s` is the time-out of `sherd train`.
    """
    yield from who()
    yield from transports()
    yield from clocks()
    yield from timeouts(timeout_s)
    yield from self_test()


def who() -> Iterator[Finding]:
    """Yields the ranks and their hosts, and the versions that differ between them."""
    own = {"torch": torch.__version__, "python": platform.python_version(), "sherd": __version__}
    ranks = all_gather_objects((socket.gethostname(), own), "who the ranks are")
    hosts = {host for host, _ in ranks}
    yield Finding("ranks", "ranks", f"{len(ranks)} on {len(hosts)} host(s): {', '.join(sorted(hosts)[:8])}")
    for name in own:
        versions = sorted({theirs[name] for _, theirs in ranks})
        if len(versions) > 1:
            remedy = f"install the same {name} on all hosts"
            yield Finding("ranks", name, f"ranks run {' and '.join(versions)}", FAILURE, remedy)


def device() -> torch.device:
    device_type = accelerator()
    if device_type is None:
        return torch.device("cpu")
    return torch.device(device_type, torch.accelerator.current_device_index())


def transports() -> Iterator[Finding]:
    """Yields the transports that these ranks can use, the chosen one, and its speed."""
    group = dist.group.WORLD
    if dist.get_world_size() == 1 or not isinstance(group, dist.ProcessGroup):
        yield Finding("links", "transport", "none: there is one rank")
        return
    usable: dict[str, Transport] = {}
    why_not: dict[str, str] = {}
    for name in TRANSPORTS:
        try:
            usable[name] = transport_of(group, device(), CommPolicy(transport=name))
        except MeshError as error:
            why_not[name] = str(error.args[0]).partition(": ")[2] or str(error.args[0])
    chosen = type(usable["auto"]).__name__
    reason, remedy = _why(chosen, group, why_not)
    yield warned("links", "transport", f"auto is {chosen}: {reason}", remedy)
    yield Finding("links", "others", f"usable: {', '.join(usable)}" + "".join(f"; not {name}" for name in why_not))
    one_host = len({*all_gather_objects(socket.gethostname(), "the names of hosts")}) == 1
    copied = _copied_per_second() if one_host and device().type == "cpu" else 0.0
    for what in ("all-gather", "reduce-scatter"):
        calls = {size: collective(usable["auto"], what, size, group.size()) for size in (SMALL, LARGE)}
        seconds = {size: slowest(call, device(), QUICKLY_S) for size, call in calls.items()}
        rate = LARGE * (1 - 1 / group.size()) / seconds[LARGE] / 1e9
        value = f"{seconds[SMALL] * 1e6:,.0f} us for 4 KiB; {rate:.2f} GB/s into each rank for 16 MiB"
        value += f", where a copy has {copied:.2f}" if copied else ""
        remedy = "the link is slow: check the interface, and what else uses link and cores"
        remedy = remedy if rate < max(0.05, copied / FAR_BELOW) else ""
        yield warned("links", what, value, remedy)


def _copied_per_second() -> float:
    """Returns the GB that the slowest rank copies within its memory in a second, while all ranks do."""
    source, target = torch.zeros(LARGE, dtype=torch.uint8), torch.zeros(LARGE, dtype=torch.uint8)
    return LARGE / slowest(lambda: target.copy_(source), device(), QUICKLY_S) / 1e9


def _why(chosen: str, group: dist.ProcessGroup, why_not: dict[str, str]) -> tuple[str, str]:
    """Returns why this transport was chosen, and what to do if a better one is possible."""
    if chosen == "SharedMemory":
        return "gloo ranks that are all on one host", ""
    if chosen in ("SingleCalls", "PartByPart"):
        return f"torch's own calls, as the backends are {dist.get_backend_config(group)}", ""
    hosts = {*all_gather_objects(socket.gethostname(), "the names of hosts")}
    if len(hosts) > 1:
        return f"gloo ranks on {len(hosts)} hosts", ""
    remedy = why_not.get("shared_memory", "it was not possible")
    return "gloo ranks on one host without shared memory", f"shared memory would be faster, but {remedy}"


def collective(transport: Transport, what: str, size: int, number: int) -> Callable[[], None]:
    """Returns a function that runs a collective of `number` ranks, with `size` bytes on all ranks together."""
    at, numel = device(), size // 4 // number
    sizes = Sizes([numel] * number)
    rows, shard = (transport.empty(length, torch.float32, at) for length in (numel * number, numel))
    rows.zero_()
    shard.zero_()

    def call() -> None:
        if what == "all-gather":
            pending = transport.all_gather(rows, shard, sizes, False)
        else:
            pending = transport.reduce_scatter(shard, rows, sizes, False)
        if pending is not None:
            pending.wait()

    return call


def slowest(call: Callable[[], object], at: torch.device, measure_s: float | None = None) -> float:
    """Returns the seconds of `call`: the longest among the ranks' shortest runs. All ranks run at the same time.

    `call` is repeated for `measure_s` seconds; None: for `MEASURE_S`.
    """
    call()
    once: float = max(all_gather_objects(seconds_of(call, at), "times"))
    seconds = MEASURE_S if measure_s is None else measure_s
    repeated = min(max(3, int(seconds / once)), 1000)  # the same on all ranks, since `call` may be a collective
    longest: float = max(all_gather_objects(min(seconds_of(call, at) for _ in range(repeated)), "times"))
    return longest


def seconds_of(call: Callable[[], object], at: torch.device) -> float:
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


def clocks() -> Iterator[Finding]:
    """Yields the largest difference between clocks, at the end of an exchange: almost the same moment on all ranks.

    Of several exchanges, the one with the least difference counts.
    """
    apart, now = float("inf"), time.time()
    for exchange in range(6):
        times: Sequence[float] = all_gather_objects(now, "the time")
        now = time.time()
        if exchange:  # `times` are those of the end of the last exchange
            apart = min(apart, max(times) - min(times))
    remedy = "" if apart <= APART_S else "synchronise the hosts' clocks (chrony, ntp): logs of ranks cannot be compared"
    yield warned("ranks", "clocks", f"at most {apart * 1e3:.1f} ms apart", remedy)


def timeouts(trainers_s: float) -> Iterator[Finding]:
    """Yields how long ranks wait for a missing rank. `trainers_s` is the time-out of `sherd train`."""
    torchs = dist.default_pg_timeout.total_seconds()
    yield Finding("time-outs", "process groups", f"{torchs:.0f} s unless init_process_group is told another")
    yield Finding("time-outs", "sherd train", f"{trainers_s:.0f} s")
    name = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
    if name in os.environ:
        yield Finding("time-outs", name, f"{os.environ[name]} s")


class _Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        out: torch.Tensor = self.head(x)
        return out


def _shard(precision: MixedPrecisionPolicy, model: nn.Module) -> None:
    for unit in (*model.get_submodule("blocks").children(), model):
        fully_shard(unit, mp_policy=precision)


def self_test() -> Iterator[Finding]:
    """Yields whether a tiny model trains over all ranks as in one process, in two precisions."""
    numbers = torch.Generator().manual_seed(0)
    batches = [torch.randn(4 * dist.get_world_size(), WIDTH, generator=numbers) for _ in range(2)]
    for dtype in (None, torch.bfloat16):
        begin = time.perf_counter()
        report = verify_equivalence(_Tiny, batches, shard=partial(_shard, MixedPrecisionPolicy(param_dtype=dtype)))
        value = f"{report.steps} steps equal those of one process, {time.perf_counter() - begin:.1f} s"
        remedy = "" if report.ok else "training would be wrong here: report this table, and the versions in it"
        name = f"train in {str(dtype or torch.float32).removeprefix('torch.')}"
        yield failed("self-test", name, value if report.ok else str(report.first_difference), remedy)
