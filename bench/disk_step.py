"""What AdamW's state on a disk costs: a step next to what the disk takes for as many bytes, and the memory of the host.

    python -m bench.disk_step /scratch     # a folder of the disk; writes the table of docs/understand/benchmarks.md

The bound of a step is the longer of two times: of the same step with its state in memory, and of the state's bytes
through the same folder with the same requests and without arithmetic, in the same round. What the page cache holds
counts as disk in both. Memory is the anonymous memory of the process above what it was before the model, sampled while
steps are made, where the C library gives freed vectors back to the system.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn, optim

import sherd
from sherd.optim.chunks import CHUNK_NUMEL
from sherd.optim.on_disk import DEPTH
from sherd.storage.scratch import Request, Scratch
from sherd.tensor.ragged import memory_of

from .pages import written
from .table import markdown

PAGE = Path(__file__).parents[1] / "docs/understand/benchmarks.md"
NUM_UNITS, WIDTH = 4, 4096
NUMEL = NUM_UNITS * WIDTH * WIDTH


def held() -> int:
    return 1024 * int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0])


class Sampled:
    """The most that `held` has returned inside of this context."""

    def __enter__(self) -> Sampled:
        self.most, self._over = held(), threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._over.wait(0.002):
            self.most = max(self.most, held())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def trainer(policy: sherd.OffloadPolicy) -> Callable[[], float]:
    """Returns a function that makes a step, and returns the seconds of the optimizer's."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_UNITS)))
    for unit in (*model, model):
        sherd.fully_shard(unit, offload_policy=policy)
    optimizer = optim.AdamW(model.parameters(), fused=True)

    def step() -> float:
        model(torch.ones(1, WIDTH)).sum().backward()
        begun = time.perf_counter()
        optimizer.step()
        taken = time.perf_counter() - begun
        optimizer.zero_grad()
        return taken

    return step


def pattern(scratch: Scratch) -> Callable[[], float]:
    """Returns a function that reads and writes as many bytes as a step does, and returns the seconds."""
    files = [scratch.file(f"moment {number}", 4 * NUMEL) for number in range(2)]
    buffers = [[torch.empty(CHUNK_NUMEL) for _ in files] for _ in range(3 + DEPTH // 2)]

    def begin(way: str, number: int) -> list[Request]:
        views = map(memory_of, buffers[number % len(buffers)])
        return [getattr(file, way)(view, 4 * number * CHUNK_NUMEL) for file, view in zip(files, views, strict=True)]

    def transfer() -> float:
        begun, writing = time.perf_counter(), deque[Request]()
        reading = [begin("read_into", number) for number in range(2)]
        for number in range(NUMEL // CHUNK_NUMEL):
            if (number + 2) * CHUNK_NUMEL < NUMEL:
                reading.append(begin("read_into", number + 2))
            for each in reading.pop(0):
                each.wait()
            writing += begin("write_from", number)
            while len(writing) > DEPTH:
                writing.popleft().wait()
        for each in writing:
            each.wait()
        return time.perf_counter() - begun

    return transfer


def measure(folder: str, rounds: int = 7) -> list[list[str]]:
    before = held()
    on_disk = trainer(sherd.OffloadPolicy(optimizer=sherd.Disk(folder)))
    on_disk()
    with Sampled() as sampled:
        on_disk()
    unit = 4 * WIDTH**2
    own, bound = sampled.most - before, (2 * NUM_UNITS + 3) * unit
    makers = {
        "memory": trainer(sherd.OffloadPolicy()),
        "disk": on_disk,
        "pattern": pattern(Scratch(folder, depth=DEPTH)),
    }
    makers["memory"]()
    taken = [{way: make() for way, make in makers.items()} for _ in range(rounds)]
    ratios = [each["disk"] / max(each["memory"], each["pattern"]) for each in taken]
    milliseconds = [f"{1e3 * median(each[way] for each in taken):.0f}" for way in ("memory", "pattern", "disk")]
    bytes_moved = 16 * NUMEL
    speed = bytes_moved / median(each["pattern"] for each in taken) / 2**30
    memory = f"{own / unit:.1f} of {bound / unit:.0f}"
    return [[*milliseconds, f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})", f"{speed:.1f}", memory]]


def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else "."
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD
    head = ["state in memory, ms", "bytes through the disk", "state on the disk", "of the longer", "GiB/s"]
    text = markdown([*head, "memory, units"], measure(folder))
    dist.destroy_process_group()
    print(text)
    PAGE.write_text(written(PAGE.read_text(), {"disk step": f"\n{text}\n"}))


if __name__ == "__main__":
    main()
