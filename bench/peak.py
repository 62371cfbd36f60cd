"""How much memory does a step need? The most bytes of tensor storage alive at once, with activations and without."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import sherd
from sherd.memory.report import BESIDE_UNITS, memory_report, track_memory

from .models import Workload, gpt, num_bytes
from .ranks import Conditions, on_ranks
from .steps import workloads
from .systems import (
    FLAT,
    FLAT_GLOO,
    FSDP1,
    FSDP1_FLAT,
    FSDP2,
    PLAIN,
    SHERD,
    SHERD_GLOO,
    WRAPPERS,
    Trainee,
    contenders,
)
from .table import Aim, Figure, Row, row_of_counts

MIB = 2**20


class LiveBytes(TorchDispatchMode):
    """Follows every tensor storage that an operation reads or makes, until it dies.

    `now` and `peak` are bytes. A storage counts from the first operation that touches it: let one step pass
    before reading `peak`, and call `forget_peak` in between. Storages freed and refilled in place are
    followed through `UntypedStorage.resize_`. What C++ allocates and frees within one operation (gloo's
    own buffers, say) is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._bytes_of: dict[int, int] = {}

    def forget_peak(self) -> None:
        self.peak = self.now

    def __enter__(self) -> LiveBytes:
        self._resizes = _watched_resizes(self._note)
        self._resizes.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._resizes.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own dispatch then runs on the local tensors, which come back here
        kwargs = kwargs or {}
        self._note_all((args, kwargs))
        result = func(*args, **kwargs)
        # The arguments again: an operation such as resize_ changes a storage without making one.
        self._note_all((args, kwargs, result))
        return result

    def _note_all(self, tree: Any) -> None:
        for leaf in tree_iter(tree):
            if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage()).device.type != "meta":
                self._note(storage)  # a meta storage, be it under a fake tensor, takes no memory

    def _note(self, storage: torch.UntypedStorage) -> None:
        if not storage.resizable():
            return  # a window on memory that another storage owns (DLPack, NumPy): it is counted there
        key, size = storage._cdata, storage.nbytes()
        if key not in self._bytes_of:
            weakref.finalize(storage, self._died, key)
        self.now += size - self._bytes_of.get(key, 0)
        self._bytes_of[key] = size
        self.peak = max(self.peak, self.now)

    def _died(self, key: int) -> None:
        self.now -= self._bytes_of.pop(key)


@contextmanager
def _watched_resizes(note: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Resizing a storage is no operation of the dispatcher, so it is watched at its method."""
    resize = torch.UntypedStorage.resize_

    def resize_and_note(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        note(storage)
        return result

    torch.UntypedStorage.resize_ = resize_and_note  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


def measure(conditions: Conditions) -> Figure:
    ranks = on_ranks(conditions, peaks, conditions.quick)
    rows = [row for title in ranks[0] for row in _rows(title, [rank[title] for rank in ranks])]
    held = on_ranks(conditions, held_peaks, conditions.quick)
    rows += [row for title in held[0] for row in _held_rows(title, [rank[title] for rank in held])]
    return Figure(rows, {"bytes_per_rank": ranks, "held_bytes_per_rank": held})


Peaks = dict[str, tuple[float, float]]  # per system: bytes of forward and backward, bytes of the whole step


def _rows(title: str, ranks: list[Peaks]) -> Iterator[Row]:
    for which, span in enumerate(("forward and backward", "a step")):
        most = {name: max(rank[name][which] for rank in ranks) / MIB for name in ranks[0]}
        remark = f"sherd {most['sherd'] - most[PLAIN.name]:+,.0f} beside plain"
        yield row_of_counts(f"{title}: peak bytes of {span}", "MiB", most, Aim(1.0), remark)


def peaks(mesh: DeviceMesh, quick: bool) -> dict[str, Peaks]:
    """On a rank: per workload and system, one system alive at a time."""
    return {
        workload.title: {system.name: peak_of_step(Trainee(system, workload, mesh)) for system in contenders(mesh)}
        for workload in workloads(quick)
    }


def peak_of_step(trainee: Trainee) -> tuple[float, float]:
    """The median of five steps, before the optimizer and with it.

    A median, for gloo's threads drop a finished work's buffers a little earlier or later from step to step.
    Two steps go before: by then the optimizer has its state, DDP its buckets and DTensor its caches.
    """
    trainee.step(trainee.batch(0))
    with live_bytes(trainee.device) as live:
        trainee.step(trainee.batch(1))
        peaks = []
        for seed in range(2, 7):
            batch = trainee.batch(seed)
            gc.collect()  # what waits in cycles for the collector would count or not, as chance has it
            live.forget_peak()
            trainee.forward_backward(batch)
            before_optimizer = live.peak
            trainee.optimizer.step()
            peaks.append((before_optimizer, live.peak))
            trainee.drop_gradients()
    return median(before for before, _ in peaks), median(whole for _, whole in peaks)


# Without activations

HOLDERS = (FSDP1, FSDP1_FLAT, FSDP2, SHERD, SHERD_GLOO, FLAT, FLAT_GLOO, *WRAPPERS)


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of parameters, gradients and buffers at the peak of forward and backward; what the schedule had `said`.

    `staged`: what ranks share beside it, which is mapped and no tensor's own.
    """

    nbytes: float
    said: int | None = None
    staged: int = 0


def _held_rows(title: str, ranks: list[dict[str, Held]]) -> Iterator[Row]:
    """How much, and how far it was from what the schedule had said."""
    held = {name: max((rank[name] for rank in ranks), key=lambda each: each.nbytes) for name in ranks[0]}
    most = {name: each.nbytes / MIB for name, each in held.items()}
    off = {name: 100 * abs(each.nbytes / each.said - 1) for name, each in held.items() if each.said is not None}
    staged = max(each.staged for each in held.values()) / MIB
    remark = f"no optimizer, activations subtracted; {staged:,.0f} MiB staged in shared memory, as gloo's own, apart"
    aims = [Aim(0.9, system=system.name) for system in (FLAT, SHERD)]
    yield row_of_counts(f"{title}: peak bytes of parameters, gradients, buffers", "MiB", most, aims, remark)
    aims = [Aim(2, of=name) for name in off]
    yield Row(f"{title}: that, off the schedule's prediction", "%", off, aim=aims, remark="largest rank")


def short_workloads(quick: bool) -> list[Workload]:
    """The one of `workloads` where bytes cost most, on eight tokens, so that activations are next to nothing."""
    return [gpt(1, 8, 4) if quick else gpt(1, 8)]


def held_peaks(mesh: DeviceMesh, quick: bool) -> dict[str, dict[str, Held]]:
    """On a rank: per workload and system, what is needed beside activations, those of the plain module."""
    found = {}
    for workload in short_workloads(quick):
        plain = Trainee(PLAIN, workload, mesh)
        activations = peak_of_backward(plain) - 2 * num_bytes(plain.model)
        del plain
        systems = [system for system in contenders(mesh) if system in HOLDERS]
        found[workload.title] = {
            system.name: held_by(Trainee(system, workload, mesh), activations) for system in systems
        }
    return found


def held_by(trainee: Trainee, activations: float) -> Held:
    """The median of five steps, and what the schedule says once it was shown in which order gradients arrive."""
    nbytes = peak_of_backward(trainee) - activations
    if not isinstance(trainee.model, sherd.FSDPModule):
        return Held(nbytes)
    with track_memory(trainee.model):
        trainee.forward_backward(trainee.batch(0))
    trainee.drop_gradients()
    report = memory_report(trainee.model)
    staged = sum(row.at_peak for row in report.rows if row.unit == BESIDE_UNITS)
    return Held(nbytes, report.predicted_peak - staged, staged)


def peak_of_backward(trainee: Trainee) -> float:
    """The median of five forwards and backwards, each without gradients before it, and no optimizer."""
    trainee.forward_backward(trainee.batch(0))
    trainee.drop_gradients()
    with live_bytes(trainee.device) as live:
        peaks = []
        for seed in range(1, 7):
            batch = trainee.batch(seed)
            gc.collect()
            live.forget_peak()
            trainee.forward_backward(batch)
            peaks.append(live.peak)
            trainee.drop_gradients()
    return median(peaks[1:])


class AllocatedBytes:
    """The same questions, answered by the device's caching allocator."""

    def __enter__(self) -> AllocatedBytes:
        return self

    def __exit__(self, *error: Any) -> None:
        """The allocator counts on."""

    def forget_peak(self) -> None:
        torch.accelerator.reset_peak_memory_stats()

    @property
    def peak(self) -> int:
        return torch.accelerator.max_memory_allocated()


def live_bytes(device: torch.device) -> LiveBytes | AllocatedBytes:
    """What counts the bytes on `device`."""
    return LiveBytes() if device.type == "cpu" else AllocatedBytes()
