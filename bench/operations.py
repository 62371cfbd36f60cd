"""The seconds of single operations while small models train on all ranks at once.

They are CPU time of the rank's thread, on which other load on the machine has little effect.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import product
from statistics import median_low
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from sherd._torch import TorchDispatchMode
from sherd.tools.plan.operations import op_of
from sherd.tools.simulate.cluster import Timed
from sherd.tools.simulate.work import Op

REPEATED = 3
HEADS = 8
CACHE_BYTES = 2**26  # written before each step, so that the step finds nothing in caches
CELLS, EXACTLY = 2, 256  # cells per doubling of a size; operations in one cell count as one
DTYPES = torch.float32, torch.bfloat16
Step = Callable[[], None]
"""Forward and backward of a model."""
Operations = Mapping[str, tuple[Timed, ...]]
"""By name and dtype, as `Device.timed` has them."""


def timed_operations(steps: Iterable[Step], cells_per_doubling: float = CELLS) -> Operations:
    """Returns the timed operations of `steps` on this rank. All ranks must call this function.

    Args:
        steps: forwards and backwards of models, which are repeated.
        cells_per_doubling: of a size; operations in one cell are returned as one.
    """
    cells: dict[tuple[str, ...], list[tuple[float, ...]]] = {}
    for step in steps:
        for op, seconds in _run(step):
            sizes = (op.flops, op.nbytes, op.depth)
            at = (str(round(cells_per_doubling * math.log2(max(1, size)))) for size in sizes)
            cells.setdefault((f"{op.name.removeprefix('aten.')}.{op.dtype}", *at), []).append((*sizes, seconds))
    timed: dict[str, tuple[Timed, ...]] = {}
    for (name, *_), seen in cells.items():
        flops, nbytes, depth, took = (sum(column) / len(seen) for column in zip(*seen, strict=True))
        timed[name] = (*timed.get(name, ()), Timed(round(flops), round(nbytes), round(depth), took))
    return timed


def until(least: int, seconds: float) -> Iterator[int]:
    """Yields 0, 1, 2, ... for at least `seconds` and `least` times, equally often on all ranks."""
    begin, number, is_over = time.perf_counter(), 0, False
    while not is_over:
        yield number
        number += 1
        passed = torch.tensor(time.perf_counter() - begin)
        dist.broadcast(passed, 0)
        is_over = number >= least and float(passed) > seconds


def with_operations(timed: Operations, others: Operations) -> Operations:
    """Returns the operations of both."""
    return {name: (*timed.get(name, ()), *others.get(name, ())) for name in {**timed, **others}}


def usual_steps() -> Iterator[Step]:
    """Yields steps of models with common operations in many sizes."""
    for dtype in DTYPES:
        for model, batch in probes(dtype):
            yield partial(_step, model, batch)


def _step(model: nn.Module, batch: Tensor) -> None:
    model.zero_grad()
    batch.grad = None
    out = model(batch)
    out.backward(torch.ones_like(out))


def probes(dtype: torch.dtype) -> Iterator[tuple[nn.Module, Tensor]]:
    """Yields models, with inputs, that have common operations in many sizes."""
    for length, width in product((32, 64, 128, 256, 512, 1024), (16, 32, 64, 128)):
        samples = max(1, min(16, 1024 // length))
        yield _Attention(), torch.randn(samples, length, 3 * HEADS * width, dtype=dtype, requires_grad=True)
    for tokens, width in product((64, 99, 256, 777, 1024, 4096, 16384, 32768), (64, 96, 128, 192, 256, 384, 512, 768)):
        for hidden in (width, 4 * width) if width in (64, 128, 256) else (2 * width,):
            vocabulary = 2000 if width < 256 and tokens < 4096 else 256
            if tokens * width <= 2**21 and tokens * width * hidden <= 2**29:
                yield _Layers(width, hidden, vocabulary).to(dtype), torch.randint(vocabulary, (tokens,))
    for width, kernel, side in product((16, 24, 32, 48, 64, 96, 128, 192), (1, 3, 5), (8, 16, 32)):
        work = (width * kernel) ** 2
        samples = max(1, min(256, 2**18 // (width * side**2), 2**29 // (work * side**2)))
        if work <= 2**19:
            yield _Pictures(width, kernel).to(dtype), torch.randn(samples, width, side, side, dtype=dtype)


def _run(step: Step) -> Iterator[tuple[Op, float]]:
    """Yields each operation of `step` with its median seconds, and its share of the time between operations."""
    step()
    steps, whole, others = [], list[float](), torch.zeros(CACHE_BYTES // 4)
    for number in range(2 * REPEATED):
        others.add_(1)
        dist.barrier()
        begin = time.thread_time()
        with _Timer() if number % 2 else nullcontext() as timer:
            step()
        if timer is None:
            whole.append(time.thread_time() - begin)
        else:
            steps.append(timer.seen)
    runs = ([seconds for _, seconds in seen] for seen in steps)
    medians = [median_low(seconds) for seconds in zip(*runs, strict=True)]
    factor = max(1.0, median_low(whole) / sum(medians))
    for (op, _), seconds in zip(steps[0], medians, strict=True):
        yield op, max(1e-9, seconds * factor)


class _Timer(TorchDispatchMode):
    """Notes each operation that runs, and its seconds."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[Op, float]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        begin = time.thread_time()
        result = func(*args, **(kwargs or {}))
        seconds = time.thread_time() - begin
        op = op_of(func, args, kwargs or {}, result)
        if op is not None:
            self.seen.append((op, seconds))
        return result


class _Attention(nn.Module):
    """Attention of queries, keys and values in one tensor."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in x.chunk(3, -1))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


class _Layers(nn.Module):
    """An embedding, feed-forwards of three kinds with both norms, and a head with a loss."""

    def __init__(self, width: int, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.layer_norm, self.rms_norm = nn.LayerNorm(width), nn.RMSNorm(width)
        self.ups = nn.ModuleList(nn.Linear(width, hidden) for _ in range(3))
        self.downs = nn.ModuleList(nn.Linear(hidden, width, bias=number > 0) for number in range(3))
        self.gate = nn.Linear(width, hidden, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        y = self.rms_norm(x)
        x = x + self.downs[0](F.silu(self.gate(y)) * self.ups[0](y))
        x = x + self.downs[1](F.gelu(self.ups[1](self.layer_norm(x))))
        x = x + self.downs[2](F.relu(self.ups[2](self.layer_norm(x))))
        one, other = x.unflatten(-1, (-1, 32)).transpose(0, 1).chunk(2, -1)
        one, other = one.tanh() * 2, other * torch.ones(16, dtype=x.dtype)
        x = torch.cat((one - other, -one), -1).transpose(0, 1).flatten(1)
        return F.cross_entropy(self.head(x).float(), tokens)


class _Pictures(nn.Module):
    """Two convolutions with both norms, and a mean."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, kernel, padding=kernel // 2) for _ in range(2))
        self.batch_norm, self.group_norm, self.head = (
            nn.BatchNorm2d(width),
            nn.GroupNorm(4, width),
            nn.Linear(width, 64),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.relu(self.batch_norm(self.first(x)))
        x = x + F.relu(self.group_norm(self.second(x)))
        out = self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)).float()
        return F.mse_loss(out, torch.zeros_like(out))
