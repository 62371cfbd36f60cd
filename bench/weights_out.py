"""How fast do the weights come out? `iter_full_parameters` beside the bare all-gathers of the same bytes; and what has
changed of them, beside all."""

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
SHARES = (0.003, 0.01, 0.03, 0.3)
"""Of the elements in bfloat16, those that change between two exports: 1 to 3 % in reinforcement learning."""


def measure(conditions: Conditions) -> Figure:
    """Rows per transport: the time over that of the bare all-gathers, the median of the rounds; of all parameters, and
    in bfloat16 of all and of those that have changed."""
    transports = ["shared_memory", "gloo"] if conditions.device == "cpu" else ["torch"]
    samples = {each: on_ranks(conditions, laps_of, each, conditions.quick, conditions.rounds)[0] for each in transports}
    rows = [row_of(transport, laps) for transport, laps in samples.items()]
    changed: dict[str, dict[str, list[Lap]]] = {}
    for transport in transports:
        changed[transport], sent = on_ranks(
            conditions, laps_of_changes, transport, conditions.quick, conditions.rounds
        )[0]
        rows += rows_of_changes(transport, changed[transport], sent)
    return Figure(rows, {"laps": samples, "laps of changes": changed})


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
    readers: dict[str, Callable[[], object]] = {}
    for system, placement in ((SHERD, None), (FLAT, sherd.Flat())):
        torch.manual_seed(0)
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

    def lap(reader: Callable[[], object], number: int) -> Lap:
        dist.barrier()
        return timed(lambda: (reader(), dist.barrier()), device)[0]

    runners = {name: partial(lap, reader) for name, reader in readers.items()}
    interleaved(runners, 2)
    with without_collector():
        return interleaved(runners, num_rounds)


def rows_of_changes(transport: str, laps: dict[str, list[Lap]], sent: dict[str, int]) -> list[Row]:
    """A row for everything, and for each share of changed elements."""
    bare, rows = median(lap.wall_ms for lap in laps[BARE]), []
    for part in ("everything", *(f"{share:.1%} changed" for share in SHARES)):
        taken = {system.name: laps[f"{system.name} {part}"] for system in (SHERD, FLAT)}
        over = {
            name: median(ours.wall_ms / bare.wall_ms for ours, bare in zip(own, laps[BARE], strict=True))
            for name, own in taken.items()
        }
        cpu = median(lap.cpu_ms for lap in taken[SHERD.name])
        remark = (
            f"{sent[part] / 2**20:.1f} MiB reach each rank; CPU time {cpu:.0f} ms; all all-gathers took {bare:.0f} ms"
        )
        rows.append(Row(f"bfloat16 out, {transport}, {part}", "times the bare all-gathers", over, remark=remark))
    return rows


def laps_of_changes(
    mesh: DeviceMesh, transport: str, quick: bool, num_rounds: int
) -> tuple[dict[str, list[Lap]], dict[str, int]]:
    """On a rank: laps of exports in bfloat16, all weights or those that have changed, and the bytes of each export."""
    workload, device = gpt(1, 8, num_blocks=2 if quick else 12), torch.device(mesh.device_type)
    policy = sherd.CommPolicy(transport=transport)
    runners: dict[str, Callable[[int], Lap]] = {}
    sent: dict[str, int] = {}

    def lap(prepare: Callable[[int], object], reader: Callable[[], int], part: str, number: int) -> Lap:
        prepare(number)
        dist.barrier()
        taken, (sent[part], _) = timed(lambda: (reader(), dist.barrier()), device)
        return taken

    for system, placement in ((SHERD, None), (FLAT, sherd.Flat())):
        torch.manual_seed(0)
        model = workload.build().to(mesh.device_type)
        total = num_bytes(model) // 2
        for unit in (*model.blocks, model):
            sherd.fully_shard(unit, mesh=mesh, placement=placement, comm_policy=policy)
        whole = partial(read, model, torch.bfloat16)
        runners[f"{system.name} everything"] = partial(lap, int, whole, "everything")
        reader = partial(read_changes, model, sherd.WeightMark())
        for share in SHARES:
            part = f"{share:.1%} changed"
            runners[f"{system.name} {part}"] = partial(lap, partial(change, model, share, reader), reader, part)
    runners[BARE] = partial(lap, int, partial(bare_bytes, bare_gathers(mesh, policy, total // 4), total), BARE)
    interleaved(runners, 2)
    with without_collector():
        return interleaved(runners, num_rounds), sent


@torch.no_grad()
def change(model: nn.Module, share: float, catch_up: Callable[[], int], seed: int) -> None:
    """Change this share of this rank's elements, in bfloat16, too, since the moment of `catch_up()`."""
    catch_up()
    torch.manual_seed(1000 * seed + dist.get_rank())
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor), "all are sharded"
        local = parameter.to_local()
        local[torch.rand_like(local) < share] += 1


def read_changes(model: nn.Module, mark: sherd.WeightMark) -> int:
    """Go through the changes, and return their bytes."""
    deltas = sherd.iter_full_parameters(model, BUCKET_BYTES, torch.bfloat16, changed_since=mark)
    return sum(delta.nbytes for delta in deltas)


def bare_bytes(gathers: Callable[[], None], nbytes: int) -> int:
    """Gather, and return `nbytes`."""
    gathers()
    return nbytes


def read(model: nn.Module, dtype: torch.dtype | None = None) -> int:
    """Go through all parameters, keep none, and return their bytes."""
    return sum(each.nbytes for _, each in sherd.iter_full_parameters(model, BUCKET_BYTES, dtype))


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
