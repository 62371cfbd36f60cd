"""The order of streams under load: compute and lanes that are late, and memory spoilt as soon as it is free.

The ranks are made up (`Tiled`), so that one process trains on real values. What must come out is what comes out in host
order, on one stream: `in_host_order()`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import sherd
from sherd.comm import streams, transports
from sherd.comm.buffers import Buffer
from sherd.comm.streams import DeviceStreams, Handoff, HostStreams, Streams, use_streams
from sherd.comm.transport import Pending, Transport, parts
from tests.gpu.devices import Accelerator
from tests.gpu.setting_runs import of_micro_batch, shard_units
from tests.gpu.settings import Setting
from tests.support.models import noise

WIDTH, BATCH, NUM_BLOCKS, NUM_STEPS = 64, 16, 3, 4


# Compute that is late


class Late(torch.autograd.Function):
    """The identity, after a while, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, accelerator: Accelerator, microseconds: int) -> Tensor:
        ctx.late = accelerator, microseconds
        accelerator.sleep(microseconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        accelerator, microseconds = ctx.late
        accelerator.sleep(microseconds)
        return gradients[0], None, None


class LateBlock(nn.Module):
    """Reads its parameters late: in forward, behind the first pause, in backward behind the last one's."""

    def __init__(self, accelerator: Accelerator, microseconds: int) -> None:
        super().__init__()
        self.late = accelerator, microseconds
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = Late.apply(x, *self.late)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return Late.apply(x, *self.late)


class LateNet(nn.Module):
    """Blocks, and a head of the root's own: one parameter alone in its group."""

    def __init__(self, accelerator: Accelerator, microseconds: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LateBlock(accelerator, microseconds) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).float()


# Ranks that are made up


class Tiled(Transport):
    """Ranks that hold what this one holds: whole tensors are its shard again and again, and every part of what is
    reduced counts for this rank. On the lane, after a while."""

    def __init__(self, num_ranks: int, accelerator: Accelerator, microseconds: int) -> None:
        self._num_ranks = num_ranks
        self._accelerator = accelerator
        self._microseconds = microseconds

    def all_gather(self, rows: Tensor, rest: Tensor, sizes: Sequence[int], async_op: bool) -> Pending | None:
        self._accelerator.sleep(self._microseconds)
        for part in parts(rows, sizes):
            numel = min(part.numel(), rest.numel())
            part[:numel].copy_(rest[:numel])
            part[numel:].zero_()
        return None

    def reduce_scatter(self, rest: Tensor, rows: Tensor, sizes: Sequence[int], async_op: bool) -> Pending | None:
        self._accelerator.sleep(self._microseconds)
        rest.zero_()
        for part in parts(rows, sizes):
            numel = min(part.numel(), rest.numel())
            rest[:numel].add_(part[:numel])
        return None

    def all_reduce(self, tensor: Tensor, async_op: bool) -> Pending | None:
        self._accelerator.sleep(self._microseconds)
        tensor.mul_(self._num_ranks)
        return None


class TiledByUser:
    """The same as collectives of a user's: they bring memory of their own, so that no unsharded buffer is filled in
    place."""

    def __init__(self, accelerator: Accelerator, microseconds: int) -> None:
        self._accelerator = accelerator
        self._microseconds = microseconds

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class TiledGather(TiledByUser, sherd.AllGather):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        self._accelerator.sleep(self._microseconds)
        output_tensor.view(-1, input_tensor.numel()).copy_(input_tensor)


class TiledReduce(TiledByUser, sherd.ReduceScatter):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        self._accelerator.sleep(self._microseconds)
        # In a temporary, of the lane's memory: one more block that goes back to its pool.
        output_tensor.copy_(input_tensor.view(-1, output_tensor.numel()).sum(0))


@contextmanager
def tiled_ranks(accelerator: Accelerator, microseconds: int = 0) -> Iterator[None]:
    """Inside, every process group of more than one rank is served by `Tiled`."""

    def made(group: Any, device: torch.device, wanted: str) -> Transport:
        return Tiled(group.size(), accelerator, microseconds)

    with mock.patch.object(transports, "_made", made), mock.patch.object(transports, "_known", {}):
        yield


# Memory that is spoilt


@contextmanager
def spoilt_memory(accelerator: Accelerator) -> Iterator[Counter[str]]:
    """Inside, memory is filled with NaN by the first who could be given it: counts how often, and how many bytes.

    Compute's, when a buffer was freed; a lane's, whenever it is about to run, for only then does sherd allocate on it.
    """
    seen: Counter[str] = Counter()
    free, run = Buffer.free, streams._StreamLane.run

    def spoil_and_free(buffer: Buffer) -> None:
        if buffer.tensor.device.type == "cpu":
            # There is one order only; whoever still reads what was freed reads this, or dies.
            seen["bytes"] += spoil(buffer.tensor)
            seen["host"] += 1
            free(buffer)
            return
        free(buffer)
        seen["bytes"] += accelerator.spoil_free_blocks()
        seen["compute"] += 1

    def spoil_and_run(lane: Any, start: Callable[[bool], Any], after: Handoff | None = None) -> Handoff:
        def spoil_and_start(async_op: bool) -> Any:
            seen["bytes"] += accelerator.spoil_free_blocks()
            seen["lanes"] += 1
            return start(async_op)

        seen["bytes"] += accelerator.spoil_free_blocks()
        return run(lane, spoil_and_start, after)

    with (
        mock.patch.object(Buffer, "free", spoil_and_free),
        mock.patch.object(streams._StreamLane, "run", spoil_and_run),
    ):
        yield seen


def spoil(tensor: Tensor) -> int:
    """Fill the storage of `tensor` with bytes that are NaN in every floating dtype."""
    storage = tensor.untyped_storage()
    torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage).fill_(255)
    return storage.nbytes()


# Training


@dataclass(frozen=True)
class Case:
    """What is chosen for a model, and who is late: `reader` is compute, `lane` the lanes; in microseconds."""

    setting: Setting
    reader: int = 0
    lane: int = 0


def train(case: Case, mesh: DeviceMesh, accelerator: Accelerator, queues: Streams | None = None) -> list[Tensor]:
    """Some steps on rank 0's shards; the losses, and the shards at the end, in host memory. Call it in `tiled_ranks`.

    Nothing is read before the last step is launched, so that the host runs as far ahead as it may.
    """
    device, setting = accelerator.device, case.setting
    queues = queues if queues is not None else streams.streams_for(device)
    with tiled_ranks(accelerator, case.lane):
        with use_streams(queues):
            model = _sharded(case, mesh, accelerator)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
        losses = []
        batches = [noise(seed, 0, BATCH, WIDTH).to(device) for seed in range(2 * NUM_STEPS)]
        for step in range(NUM_STEPS):
            if setting.accumulation:
                with of_micro_batch(setting, model, False):
                    model(batches[NUM_STEPS + step]).square().mean().backward()
            with of_micro_batch(setting, model, True):
                loss = (model(batches[step]) - 0.5).square().mean()
                loss.backward()
            accelerator.sleep(case.reader)  # gradients are read late, and parameters written
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [each.cpu() for each in (*losses, *(p.detach().to_local() for p in model.parameters()))]


def _sharded(case: Case, mesh: DeviceMesh, accelerator: Accelerator) -> Any:
    torch.manual_seed(0)
    model: Any = LateNet(accelerator, case.reader).to(accelerator.device)
    shard_units(replace(case.setting, own_collectives=False), model, mesh)
    if case.setting.own_collectives:
        for unit in (*model.blocks, model):
            unit.set_custom_all_gather(TiledGather(accelerator, case.lane))
            unit.set_custom_reduce_scatter(TiledReduce(accelerator, case.lane))
    return model


def in_host_order(case: Case, mesh: DeviceMesh, accelerator: Accelerator) -> list[Tensor]:
    """What must come out: the same on one stream, with nobody late and nothing spoilt."""
    with mock.patch.object(streams._Started, "wait_on_host", _wait_for_the_device):
        return train(Case(case.setting), mesh, accelerator, HostStreams())


def _wait_for_the_device(_: Handoff) -> None:
    """Host order on a device has no events: gradients are in host memory once all that was queued is done."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def under_load(
    case: Case, mesh: DeviceMesh, accelerator: Accelerator, queues: Streams | None = None
) -> tuple[list[Tensor], Counter[str]]:
    """What comes out on lanes of their own, with memory spoilt; and how often it was."""
    if accelerator.kind != "cpu":
        torch.accelerator.empty_cache()  # what earlier tests have left need not be spoilt again and again
        queues = queues if queues is not None else DeviceStreams(accelerator.device)
    with spoilt_memory(accelerator) as seen:
        return train(case, mesh, accelerator, queues), seen


def differs(found: Sequence[Tensor], expected: Sequence[Tensor], rtol: float, atol: float) -> str | None:
    """Which tensor is another one, in words; None if none is. NaN is never the same."""
    assert len(found) == len(expected), "losses and parameters"
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        what = f"loss {number}" if number < NUM_STEPS else f"shard {number - NUM_STEPS}"
        if not torch.isfinite(other).all():
            return f"{what} should be finite to compare with, but is {other}"
        if not torch.allclose(one, other, rtol=rtol, atol=atol):
            return f"{what}: largest difference {(one - other).abs().max().item()}, {int(one.isnan().sum())} NaN"
    return None


def tolerance(case: Case) -> dict[str, float]:
    """The order of additions differs between the two, and in bfloat16 that is seen."""
    return {"rtol": 1e-4, "atol": 1e-5} if not case.setting.param_dtype else {"rtol": 2e-2, "atol": 2e-2}


# The cases


def cases() -> dict[str, Case]:
    """By name: every placement with every way to run ahead, and what else takes memory across lanes."""
    ahead = {
        "not ahead": {"forward_depth": 0, "backward_depth": 0},
        "one ahead": {},
        "two ahead": {"forward_depth": 2, "backward_depth": 2},
        "after backward": {"after_backward": True},
    }
    kept = {"freed": True, "kept": False, "kept in part": 2}
    replicated = {"mesh": (2, 2), "strategy": "hsdp"}
    others = {
        "replicated": replicated,
        "replicated, unsynced": replicated | {"accumulation": "replicas once"},
        "bfloat16": {"param_dtype": "bfloat16"},
        "offloaded": {"offload": "pinned"},
        "unsynced": {"accumulation": "no_sync"},
        "two reductions": {"reduce_buffers": 2},
        "own collectives": {"own_collectives": True},
    }
    chosen = {
        f"{prefetch}, {reshard}": ahead[prefetch] | {"reshard": kept[reshard]} for prefetch in ahead for reshard in kept
    }
    return {
        f"{placement}, {name}": Case(Setting(**({"mesh": (4,)} | choices), placement=placement))
        for placement in ("Shard(0)", "Flat")
        for name, choices in (chosen | others).items()
    }


CASES = cases()
