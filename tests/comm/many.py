"""What one of many forked ranks holds and receives for what sherd compares and watches.

Their own group connects on demand, too, and is counted with it: gloo's full mesh of 256 ranks does not start here. What
they import is imported once, before the fork, by a step of one rank.

python -m tests.comm.many 64        prints the sockets that a rank has more after two steps than before the model was
                                    sharded, and the bytes that all ranks have received over such and from the store
"""

import gc
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import sherd
from sherd._torch import gloo_on_demand
from sherd.guard import flight
from tests.support.ranks.process import die_with_the_parent
from tests.support.sockets import received, sockets


def two_steps() -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
    for unit in (*model, model):
        sherd.fully_shard(unit)
    for _ in range(2):
        model(torch.ones(2, 64)).sum().backward()


def one_of(num_ranks: int, rank: int, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1"}
    port = folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, num_ranks, is_master=True, wait_for_workers=False)
        port.with_suffix(".new").write_text(str(store.port))
        port.with_suffix(".new").rename(port)
    else:
        while not port.exists():
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), num_ranks, is_master=False, wait_for_workers=False)
    dist.init_process_group(f"cpu:{gloo_on_demand()}", store=store, rank=rank, world_size=num_ranks)
    dist.barrier()
    held, told = sockets(), received()
    two_steps()
    dist.barrier()
    ours = 0
    for name, (other, nbytes) in received().items():
        if name not in held:
            ours += nbytes
        elif other == store.port:
            ours += nbytes - told[name][1]
    (folder / f"{rank}").write_text(json.dumps([len(sockets()) - len(held), ours]))
    dist.barrier()
    os._exit(0)


def main(num_ranks: int) -> None:
    die_with_the_parent()
    torch.set_num_threads(1)  # a forked child has no threads of its parent's pool, and would wait for them
    flight.NOTE_AFTER_S = math.inf  # on a busy machine a rank would ask all others where they are
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    two_steps()
    dist.destroy_process_group()
    gc.freeze()  # so that ranks share its pages
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(num_ranks):
            if not (pid := os.fork()):
                die_with_the_parent()
                try:
                    one_of(num_ranks, rank, Path(folder))
                finally:
                    os._exit(1)
            ranks.append(pid)
        assert {os.waitpid(pid, 0)[1] for pid in ranks} == {0}
        found = [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(num_ranks)]
    print(json.dumps([max(held for held, _ in found), sum(nbytes for _, nbytes in found)]))


if __name__ == "__main__":
    main(int(sys.argv[1]))
