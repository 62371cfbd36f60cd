"""How long does it take to shard a 7 B-shaped model over 1,024 ranks, with no memory behind it?"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

from .models import llama
from .ranks import Conditions, on_fake_ranks
from .rounds import without_collector
from .systems import FSDP2, SHERD, System
from .table import Aim, Figure, row_of_rounds

NUM_RANKS = 1024
NUM_LAYERS = 32
SHAPES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "meta": lambda: torch.device("meta"),
    "fake tensors": FakeTensorMode,
}


def measure(conditions: Conditions) -> Figure:
    """Every sample is a fresh process: what a user waits for, with no cache warm."""
    num_layers, num_rounds = (2, 1) if conditions.quick else (NUM_LAYERS, min(conditions.rounds, 3))
    samples = {kind: _seconds(kind, num_layers, num_rounds) for kind in SHAPES}
    size = "7 B" if num_layers == NUM_LAYERS else f"{num_layers} layers of 7 B"
    rows = [
        row_of_rounds(
            f"sharding {size}, {kind}, {NUM_RANKS:,} fake ranks",
            "s",
            seconds,
            Aim(2.0, of="sherd") if num_layers == NUM_LAYERS else None,
            "calls of fully_shard",
        )
        for kind, seconds in samples.items()
    ]
    return Figure(rows, {"seconds": samples})


def _seconds(kind: str, num_layers: int, num_rounds: int) -> dict[str, list[float]]:
    on_cpu = Conditions(device="cpu")  # whatever the device asked for: none takes part
    seconds: dict[str, list[float]] = {FSDP2.name: [], SHERD.name: []}
    for _ in range(num_rounds):
        for system in (FSDP2, SHERD):
            taken = on_fake_ranks(on_cpu, NUM_RANKS, seconds_to_shard, system, kind, num_layers)
            seconds[system.name].append(taken)
    return seconds


def seconds_to_shard(mesh: DeviceMesh, system: System, kind: str, num_layers: int) -> float:
    with SHAPES[kind](), without_collector():
        model = llama(num_layers)
        start = time.perf_counter()
        system.distribute(model, mesh)
        return time.perf_counter() - start
