"""What AdamW's state on a disk costs: a step next to what the disk takes for as many bytes, and the memory of the host.

    python -m bench.disk_step /scratch     # a folder of the disk; writes the table of docs/understand/benchmarks.md

The bound of a step is the longer of two times: of the same step with its state in memory, and of the state's bytes
through the same folder with the same requests and without arithmetic, in the same round. Both pass the page
cache, if the file system can do that. Memory is the anonymous memory of the process above what it was before the model,
sampled while steps are made, where the C library gives freed vectors back to the system.
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
from sherd.on_disk import vectors_on
from sherd.optim.chunks import CHUNK_NUMEL
from sherd.storage.scratch import Request

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


def pattern(disk: sherd.Disk) -> Callable[[], float]:
    """Returns a function that reads and writes as many bytes as a step does, and returns the seconds."""
    vectors = vectors_on(disk)
    moments = [vectors.empty(f"moment {number}", NUMEL, torch.float32) for number in range(2)]
    chunks = range(0, NUMEL, CHUNK_NUMEL)

    def read(start: int) -> list[tuple[Request, torch.Tensor]]:
        buffers = [vectors.buffer(start, CHUNK_NUMEL, torch.float32, False) for _ in moments]
        return [(vectors.read(each, start, buffer), buffer) for each, buffer in zip(moments, buffers, strict=True)]

    def transfer() -> float:
        begun, reading = time.perf_counter(), deque(map(read, chunks[:2]))
        for number, start in enumerate(chunks):
            reading.extend(map(read, chunks[number + 2 : number + 3]))
            for moment, (request, buffer) in zip(moments, reading.popleft(), strict=True):
                request.wait()
                vectors.write(moment, start, buffer)
        vectors.settle()
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
        "pattern": pattern(sherd.Disk(folder)),
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
