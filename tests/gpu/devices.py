"""The accelerator under test: the first GPU, or the simulated device, behind one interface.

Tests ask `Accelerator` for what torch has no common name for: to keep a stream busy, to spoil free memory, to count how
often the host waited, to name accesses that nothing orders. All else they ask `torch.accelerator`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sherd._torch import local_tensor

SMALL = 1 << 20
"""CUDA's allocator serves requests up to this many bytes from segments of their own."""


class Accelerator:
    """One device, made current and ready. As it is here, the CPU, where the order of the program is the order of the
    work: for the tests of these tests.

    `collectives` is the backend of its process groups, `fake_group` the one of a group whose other ranks do not exist.
    `late_us` is how long a stream has to be busy for the host to be ahead of it by a whole step. Where several ranks
    share a GPU, gloo carries their tensors through host memory, so `counts_waits_of_ranks` is false there.
    """

    collectives = "gloo"
    fake_group = "fake"
    late_us = 0
    has_profiler = False
    names_races = False
    counts_waits_of_ranks = False
    device = torch.device("cpu")

    @property
    def kind(self) -> str:
        """Returns the device's type, as `init_device_mesh` takes it."""
        return self.device.type

    def sleep(self, microseconds: int) -> None:
        """Keep the current stream busy."""

    def pause(self, seed: int) -> None:
        """Have streams pause now and then, at places that `seed` draws; 0: nowhere. A GPU's pause by themselves."""

    def spoil_free_blocks(self) -> int:
        """Fill the current stream's free memory with NaN. Returns how many bytes were found spoilt, or were spoilt."""
        return 0

    def races(self) -> dict[str, int]:
        """Returns the pairs of accesses since the last call that nothing orders, by text; none where nobody counts."""
        return {}

    def host_steps(self, parameters: Iterable[Tensor]) -> None:
        """Say that the host reads the gradients of `parameters` now, and writes these, in its own memory: `races` sees
        no operator there."""

    @contextmanager
    def host_waits(self) -> Iterator[Counter[str]]:
        """Inside, the Counter is empty: on leaving it holds how often the host waited inside, by cause."""
        yield Counter()

    def synchronize(self) -> None:
        """Wait for all streams."""
        if self.kind != "cpu":
            torch.accelerator.synchronize(self.device)

    def allocated(self) -> int:
        """Returns the bytes of all tensors that are alive."""
        return torch.accelerator.memory_allocated(self.device)

    def reserved(self) -> int:
        """Returns the bytes that the allocator keeps, free blocks included."""
        return torch.accelerator.memory_reserved(self.device)


class Cuda(Accelerator):
    """The first GPU. Ranks of one host share it."""

    collectives = "nccl"
    late_us = 16_000
    has_profiler = True
    CYCLES_PER_MICROSECOND = 1_900

    def __init__(self) -> None:
        torch.cuda.init()
        # Made current before a mesh is made, which would take one GPU a rank.
        torch.cuda.set_device(0)
        self.device = torch.device("cuda", 0)

    def sleep(self, microseconds: int) -> None:
        if microseconds:
            torch.cuda._sleep(microseconds * self.CYCLES_PER_MICROSECOND)

    @torch.no_grad()
    def spoil_free_blocks(self) -> int:
        stream = torch.cuda.current_stream(self.device).cuda_stream
        sizes = [
            size
            for segment in torch.cuda.memory_snapshot()
            if segment["stream"] == stream and segment["device"] == self.device.index
            for block in segment["blocks"]
            if block["state"] == "inactive"
            for size in _requests(block["size"], segment["segment_type"] == "small")
        ]
        # The largest first: then each finds its block, and none is split for another.
        blocks = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sorted(sizes, reverse=True)]
        for block in blocks:
            block.fill_(255)
        return sum(sizes)

    @contextmanager
    def host_waits(self) -> Iterator[Counter[str]]:
        seen: Counter[str] = Counter()
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield seen
            finally:
                torch.cuda.set_sync_debug_mode(before)
        seen.update(f"{each.filename}:{each.lineno}" for each in said if "synchronizing" in str(each.message))


def _requests(size: int, is_small: bool) -> list[int]:
    """Returns what to ask for to be given a free block: those of small segments are for requests of at most 1 MiB."""
    if not is_small:
        return [size]
    return [SMALL] * (size // SMALL) + ([size % SMALL] if size % SMALL else [])


class Simulated(Accelerator):
    """The simulated device (simdevice)."""

    collectives = "cpu:gloo,sim:simccl"
    fake_group = "cpu:fake,sim:fake"
    late_us = 2_000
    names_races = True
    counts_waits_of_ranks = True
    PAUSE_US = 300

    def __init__(self) -> None:
        import simdevice

        self._sim = simdevice
        simdevice.load()
        self.device = torch.device("sim", torch.accelerator.current_device_index())
        handed_out = torch.empty(64, device=self.device)
        self._spoilt = handed_out.nbytes if handed_out.isnan().all() else 0

    def sleep(self, microseconds: int) -> None:
        if microseconds:
            self._sim.sleep(microseconds)

    def pause(self, seed: int) -> None:
        self._sim.configure(pause_us=self.PAUSE_US if seed else 0, seed=seed)

    def spoil_free_blocks(self) -> int:
        # The device spoils all memory that it hands out, on the stream that the memory is for.
        return self._spoilt

    def host_steps(self, parameters: Iterable[Tensor]) -> None:
        for each in parameters:
            for tensor, tell in ((each.grad, self._sim.host_reads), (each.detach(), self._sim.host_writes)):
                local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
                if local is not None and local.device.type == "cpu" and local.numel():
                    tell(local)

    def races(self) -> dict[str, int]:
        self.synchronize()
        return self._sim.races()

    @contextmanager
    def host_waits(self) -> Iterator[Counter[str]]:
        seen: Counter[str] = Counter()
        self._sim.host_waits()
        try:
            yield seen
        finally:
            seen.update(self._sim.host_waits())


def here() -> Accelerator:
    """Returns this process's accelerator: the simulated one if it is loaded, else the first GPU.

    Ranks call it, which are not told.
    """
    kind = torch.accelerator.current_accelerator()
    return Simulated() if kind is not None and kind.type == "sim" else Cuda()


def end_backwards(device: torch.device | str) -> None:
    """Have autograd's thread for `device` drop what it keeps of earlier backwards.

    The thread tells the caller that a backward is done, and drops its part of it only when it runs again. What others
    (FSDP2) had queued for the end of backward stays as long, with their model. Before its next task all is dropped.
    """
    empty = torch.empty(0, device=device, requires_grad=True)
    empty.backward(torch.empty_like(empty))


def chosen(option: str | None) -> Accelerator | str:
    """Returns the accelerator that pytest's `--device` asks for, None being CUDA; or why there is none, in words."""
    if option == "sim":
        import simdevice

        try:
            return Simulated()
        except simdevice.CannotBuild as error:
            return f"the simulated device cannot be built: {error}"
    if not torch.cuda.is_available():
        return "torch.cuda.is_available() is false: these tests need one CUDA device, or --device=sim"
    return Cuda()
