"""What fewer bits are worth on a slow link: steps of ranks in two network namespaces, with 1 Gbit/s between them.

    python -m bench.slow_link --rounds 5 --json slow.json
    python -m bench.slow_link --hsdp            # two ranks in each namespace: sharded within, replicated between

It needs Linux, root, `ip` and `tc` with the queueing discipline tbf, which holds the rate. All systems take turns in
the same ranks, over gloo: no memory is shared. A step is forward, backward, AdamW and `zero_grad` of a GPT of 42 M.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import sherd
from sherd import CommPolicy, Reduction

from .models import Model, gpt
from .ranks import TIMEOUT
from .steps import laps_of
from .systems import System, Trainee

RATE = "1gbit"
PORT = 29517
BF16 = (torch.bfloat16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Sharded:
    """`fully_shard` of torch or of sherd, with the dtypes of compute and of reductions, and sherd's policy."""

    library: Any
    dtypes: tuple[torch.dtype, torch.dtype] | tuple[()] = ()
    policy: CommPolicy | None = None

    def __call__(self, model: Model, mesh: DeviceMesh) -> nn.Module:
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": self.library.MixedPrecisionPolicy(*self.dtypes)}
        if self.policy is not None:
            options["comm_policy"] = self.policy
        for block in model.blocks:
            self.library.fully_shard(block, **options)
        sharded: nn.Module = self.library.fully_shard(model, **options)
        return sharded


INT8: dict[str, Any] = {"gather": "int8", "reduce": Reduction(wire="int8")}


def over_gloo(**formats: Any) -> CommPolicy:
    return CommPolicy(transport="gloo", **formats)


SYSTEMS = {
    "FSDP2 fp32": Sharded(torch_fsdp),
    "FSDP2 bf16": Sharded(torch_fsdp, BF16),
    "sherd": Sharded(sherd, policy=over_gloo()),
    "sherd bf16 wire": Sharded(sherd, policy=over_gloo(reduce=Reduction(wire=torch.bfloat16))),
    "sherd bf16": Sharded(sherd, BF16, over_gloo()),
    "sherd int8 both ways": Sharded(sherd, policy=over_gloo(**INT8)),
    "sherd bf16, int8 both ways": Sharded(sherd, BF16, over_gloo(**INT8)),
}
"""bf16 is the dtype of compute and of reductions; a wire's format leaves compute in float32."""

OF_HSDP = {
    **{name: SYSTEMS[name] for name in ("FSDP2 fp32", "FSDP2 bf16", "sherd", "sherd bf16")},
    "sherd int8 between": Sharded(sherd, policy=over_gloo(reduce_replicas=Reduction(wire="int8"))),
    "sherd bf16, int8 between": Sharded(sherd, BF16, over_gloo(reduce_replicas=Reduction(wire="int8"))),
}


def be_rank(rank: int, per_host: int, rounds: int, out: Path) -> None:
    """Be a rank, within its namespace; rank 0 is at the first address."""
    from tests.machines.hosts import ADDRESSES, INTERFACE

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    dist.init_process_group(
        "gloo", init_method=f"tcp://{ADDRESSES[0]}:{PORT}", rank=rank, world_size=2 * per_host, timeout=TIMEOUT
    )
    if per_host == 1:
        systems, mesh = SYSTEMS, init_device_mesh("cpu", (2,))
    else:
        systems, mesh = OF_HSDP, init_device_mesh("cpu", (2, per_host), mesh_dim_names=("between", "within"))
    workload = gpt(2, 128)
    trainees = {name: Trainee(System(name, shard), workload, mesh) for name, shard in systems.items()}
    training = laps_of(trainees, rank, rounds)
    walls = {name: [lap.wall_ms for lap in laps] for name, laps in training.laps.items()}
    cpus = {name: [lap.cpu_ms for lap in laps] for name, laps in training.laps.items()}
    out.write_text(
        json.dumps({"wall": walls, "cpu": cpus, "losses": training.losses, "round_trip": round_trip(rank, per_host)})
    )
    dist.destroy_process_group()


def round_trip(rank: int, other: int, times: int = 200) -> float:
    """Returns the median of the seconds that a byte takes from rank 0 to rank `other` and back; 0.0 on other ranks."""
    import time

    from tests.machines.hosts import ADDRESSES

    taken = []
    with socket.socket() as listening:
        if rank == 0:
            listening.bind((ADDRESSES[0], PORT + 1))
            listening.listen()
        dist.barrier()
        if rank not in (0, other):
            return 0.0
        line = listening.accept()[0] if rank == 0 else socket.create_connection((ADDRESSES[0], PORT + 1))
        with line:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(times):
                since = time.perf_counter()
                if rank == 0:
                    line.sendall(b"0")
                line.recv(1)
                if rank:
                    line.sendall(b"1")
                taken.append(time.perf_counter() - since)
    return median(taken)


def main() -> None:
    from tests.machines.hosts import INTERFACE, Hosts

    parser = argparse.ArgumentParser(prog="python -m bench.slow_link", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--hsdp", action="store_true")
    chosen = parser.parse_args()
    hosts, per_host = Hosts(), 2 if chosen.hsdp else 1
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / f"{rank}" for rank in range(2 * per_host)]
        try:
            hosts.build()
            for pid in hosts.pids:
                limit = ("tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", "rate", RATE, "burst", "256kb")
                subprocess.run(["nsenter", "--target", f"{pid}", "--net", *limit, "latency", "50ms"], check=True)
            ranks = [
                hosts.start(rank // per_host, be_rank, rank, per_host, chosen.rounds, out)
                for rank, out in enumerate(outs)
            ]
            for each in ranks:
                each.join()
        finally:
            hosts.close()
        told = [json.loads(out.read_text()) for out in outs]
    walls = {
        name: [max(lap) for lap in zip(*(rank["wall"][name] for rank in told), strict=True)] for name in told[0]["wall"]
    }
    print(f"round trip {told[0]['round_trip'] * 1e3:.2f} ms, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    print("| system | step, ms | of FSDP2 fp32 | of FSDP2 bf16 | CPU time, ms |\n|---|---|---|---|---|")
    for name, taken in walls.items():
        ratios = [in_words(taken, walls[rival]) for rival in ("FSDP2 fp32", "FSDP2 bf16")]
        cpu = median(sum(lap) / len(lap) for lap in zip(*(rank["cpu"][name] for rank in told), strict=True))
        print(f"| {name} | {median(taken):,.0f} | {' | '.join(ratios)} | {cpu:,.0f} |")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(told, indent=1))


def in_words(ours: list[float], theirs: list[float]) -> str:
    """Returns the median ratio of the rounds, and the middle half of them."""
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    low, middle, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
