"""How fast do the weights come out? `iter_full_parameters` beside the bare all-gathers of the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import sherd
from sherd.comm.transports import transport_of

from .models import gpt, num_bytes
from .ranks import Conditions, on_ranks
from .rounds import Lap, interleaved, timed, without_collector
from .systems import FLAT, FSDP2, SHERD
from .table import Aim, Figure, Row

BUCKET_BYTES = 16 << 20
BARE = "bare"


def measure(conditions: Conditions) -> Figure:
    """A row per transport: the time over that of the bare all-gathers, the median of the rounds."""
    transports = ["shared_memory", "gloo"] if conditions.device == "cpu" else ["torch"]
    samples = {each: on_ranks(conditions, laps_of, each, conditions.quick, conditions.rounds)[0] for each in transports}
    return Figure([row_of(transport, laps) for transport, laps in samples.items()], {"laps": samples})


def row_of(transport: str, laps: dict[str, list[Lap]]) -> Row:
    """The aim is 0.9 of the speed of the bare all-gathers."""
    over = {
        name: median(ours.wall_ms / bare.wall_ms for ours, bare in zip(laps[name], laps[BARE], strict=True))
        for name in laps
        if name != BARE
    }
    bare = median(lap.wall_ms for lap in laps[BARE])
    aims = [Aim(1.11, of=each.name) for each in (SHERD, FLAT)]
    remark = f"of all parameters; the all-gathers took {bare:.0f} ms; FSDP2: `full_tensor()` of each"
    return Row(f"weights out, {transport}", "times the bare all-gathers", over, aim=aims, remark=remark)


def laps_of(mesh: DeviceMesh, transport: str, quick: bool, num_rounds: int) -> dict[str, list[Lap]]:
    """On a rank: laps of the all-gathers, of sherd under two layouts, and of FSDP2. All models have been trained, as
    those whose weights go out have: sherd's shards lie in one buffer from then on."""
    workload = gpt(1, 8, num_blocks=2 if quick else 12)
    batch = [each.to(mesh.device_type) for each in workload.batch(0)]
    policy = sherd.CommPolicy(transport=transport)
    readers: dict[str, Callable[[], None]] = {}
    for system, placement in ((SHERD, None), (FLAT, sherd.Flat())):
        model = workload.build().to(mesh.device_type)
        total = num_bytes(model)
        for unit in (*model.blocks, model):
            sherd.fully_shard(unit, mesh=mesh, placement=placement, comm_policy=policy)
        model(*batch).backward()
        readers[system.name] = partial(read, model)
    torchs = FSDP2.distribute(workload.build().to(mesh.device_type), mesh)
    torchs(*batch).backward()
    readers[FSDP2.name] = partial(read_by_torch, torchs)
    readers[BARE] = bare_gathers(mesh, policy, total // 4)
    device = torch.device(mesh.device_type)

    def lap(reader: Callable[[], None], number: int) -> Lap:
        dist.barrier()
        return timed(lambda: (reader(), dist.barrier()), device)[0]

    runners = {name: partial(lap, reader) for name, reader in readers.items()}
    interleaved(runners, 2)
    with without_collector():
        return interleaved(runners, num_rounds)


def read(model: nn.Module) -> None:
    """Go through all parameters, and keep none."""
    for _ in sherd.iter_full_parameters(model, BUCKET_BYTES):
        pass


def read_by_torch(model: nn.Module) -> None:
    """Gather each parameter by itself."""
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor), "all are sharded"
        parameter.full_tensor()


def bare_gathers(mesh: DeviceMesh, policy: sherd.CommPolicy, numel: int) -> Callable[[], None]:
    """Returns the all-gathers of `numel` float32 elements in buckets, over the same transport, by turns into two
    buffers that were there before; the next one starts before the last is waited for."""
    num_ranks, device = mesh.size(), torch.device(mesh.device_type)
    transport = transport_of(mesh.get_group(), device, policy)
    shards = [
        each.clone() for each in torch.randn(numel // num_ranks, device=device).split(BUCKET_BYTES // 4 // num_ranks)
    ]
    rows = [torch.empty(BUCKET_BYTES // 4, device=device) for _ in range(2)]

    def gather() -> None:
        before = None
        for index, shard in enumerate(shards):
            size = shard.numel()
            pending = transport.all_gather(rows[index % 2][: size * num_ranks], shard, [size] * num_ranks, True)
            if before is not None:
                before.wait()
            before = pending
        if before is not None:
            before.wait()

    return gather
