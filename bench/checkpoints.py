"""How fast is a checkpoint written and read? Beside torch's of FSDP2, and beside `dd` with fsync on the same disk."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import sherd

from .ranks import Conditions, on_ranks
from .systems import FSDP2, SHERD, System
from .table import Aim, Figure, row_of_rounds

WIDTH = 2048
NUM_LAYERS, NUM_LAYERS_QUICK = 32, 8
OF_DD = 1 / 0.8
"""The aim: 0.8 of what `dd` reaches."""

Samples = dict[str, dict[str, list[float]]]


def measure(conditions: Conditions) -> Figure:
    """Times over that of dd in the same round; of the call of async_save over that of a copy in memory."""
    num_layers = NUM_LAYERS_QUICK if conditions.quick else NUM_LAYERS
    on_cpu = Conditions(device="cpu", quick=conditions.quick, rounds=conditions.rounds)
    with tempfile.TemporaryDirectory() as folder:
        samples = on_ranks(on_cpu, times, folder, num_layers, conditions.rounds)[0]
    size = f"{num_layers * WIDTH * WIDTH * 4 >> 20} MiB on {on_cpu.num_ranks} ranks"
    aim = Aim(OF_DD, of=SHERD.name)
    rows = [
        row_of_rounds(f"save of {size}", "of dd", samples["save"], aim, "until it is on the disk"),
        row_of_rounds(f"load of {size}", "of dd", samples["load"], aim, "from the system's cache; dd writes"),
        row_of_rounds(f"call of async_save of {size}", "of a copy", samples["async"], None, "beside memcpy of a shard"),
    ]
    return Figure(rows, {"checkpoints": samples})


def times(mesh: DeviceMesh, folder: str, num_layers: int, num_rounds: int) -> Samples:
    """On a rank: by what was done and system, the times in each round, over that of dd or of a copy."""
    models = {system: _sharded(system, mesh, num_layers) for system in (FSDP2, SHERD)}
    rounds = [_round(models, f"{folder}/round", num_layers) for _ in range(num_rounds)]
    return {
        what: {name: [each[what][name] for each in rounds] for name in systems} for what, systems in rounds[0].items()
    }


def _round(models: dict[System, nn.Module], folder: str, num_layers: int) -> dict[str, dict[str, float]]:
    state, items = models[FSDP2].state_dict(), {"model": models[SHERD]}
    shards = [each.to_local() for each in models[SHERD].parameters() if isinstance(each, DTensor)]
    begun: list[sherd.Saving] = []
    beside = _seconds(lambda: _dd(f"{folder}-dd", num_layers) if dist.get_rank() == 0 else None)
    save = {
        FSDP2.name: _seconds(lambda: dcp.save(state, checkpoint_id=f"{folder}/torch")) / beside,
        SHERD.name: _seconds(lambda: sherd.save(f"{folder}/sherd", items, step=0)) / beside,
    }
    load = {
        FSDP2.name: _seconds(lambda: dcp.load(state, checkpoint_id=f"{folder}/torch")) / beside,
        SHERD.name: _seconds(lambda: sherd.load(f"{folder}/sherd", items)) / beside,
    }
    copy = _seconds(lambda: [shard.clone() for shard in shards])
    call = _seconds(lambda: begun.append(sherd.async_save(f"{folder}/sherd", items, step=1)))
    begun[0].wait()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return {"save": save, "load": load, "async": {SHERD.name: call / copy}}


def _sharded(system: System, mesh: DeviceMesh, num_layers: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)))
    shard = sherd.fully_shard if system is SHERD else torch.distributed.fsdp.fully_shard
    for layer in model:
        shard(layer, mesh=mesh)
    shard(model, mesh=mesh)
    return model


def _seconds(action: Callable[[], object]) -> float:
    """The time until all ranks have done it."""
    dist.barrier()
    begun = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - begun


def _dd(target: str, num_layers: int) -> None:
    blocks = f"count={num_layers * WIDTH * WIDTH * 4 >> 24}"
    given = ["dd", "if=/dev/zero", f"of={target}", "bs=16M", blocks, "conv=fsync"]
    subprocess.run(given, check=True, stderr=subprocess.DEVNULL)
    Path(target).unlink()
