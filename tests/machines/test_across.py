"""A run across two machines trains as on one, ends by name when the link is cut, and goes on from its checkpoint."""

import json
import os
import re
import time
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from sherd import CommPolicy, fully_shard
from sherd._torch import timeout_of
from sherd.comm.transports import transport_of
from sherd.errors import CommError
from sherd.train.config import Config
from sherd.train.ranks import interface_to
from tests.machines.examples import kubernetes, slurm
from tests.machines.hosts import ADDRESSES, INTERFACE, PATIENCE_S, waited_for
from tests.support.ranks.forked import torchrun
from tests.support.versions import set_group_timeout
from tests.train.test_loop import TREE, plain_losses

TIMEOUT_S = 8  # silence for so long is the end


def impatient(words, environment):
    """torchrun, whose ranks wait for one another for TIMEOUT_S once all are there."""
    from sherd.train import rank

    grid_of = rank.grid_of
    rank.grid_of = lambda config: (set_group_timeout(timedelta(seconds=TIMEOUT_S)), grid_of(config))[1]
    torchrun(words, environment)


def started(hosts, calls, folder, **environment):
    """A torchrun on each host, as an example starts it; what host h says goes to folder / h."""
    folder.mkdir()
    return [
        hosts.start(host, impatient, words, environment, output=folder / str(host))
        for host, (_, *words) in enumerate(calls)
    ]


def ended(processes, within):
    """Their exit codes."""
    deadline = time.monotonic() + within
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    return [process.exitcode for process in processes]


def records(out, event):
    metrics = out / "metrics.jsonl"
    read = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return [record for record in read if record["event"] == event]


def losses(out):
    return {record["step"]: record["loss"] for record in records(out, "step")}


@pytest.mark.slow
def test_a_run_whose_link_is_cut_ends_by_name_and_the_same_command_goes_on_from_the_checkpoint(hosts, tmp_path):
    """Started as Slurm's example does, and again as that of Kubernetes does."""
    (tmp_path / "text.txt").write_text("the quick brown foxes jump over the lazy dog. " * 100)
    tree = {**TREE, "data": str(tmp_path / "text.txt"), "batch": 4, "steps": 80, "every": 4}
    config, out = tmp_path / "run.json", tmp_path / "out"
    config.write_text(json.dumps(tree))
    chosen = {"RANKS_PER_MACHINE": "1", "CONFIG": str(config), "OUT": str(out)}

    _, calls = slurm(tmp_path / "slurm", nodes="\\n".join(ADDRESSES), **chosen)
    processes = started(hosts, calls, tmp_path / "cut")
    # A checkpoint is written while the run goes on: on a slow disk the first one takes more than its four steps.
    waited_for(
        lambda: (len(losses(out)) >= 7 and records(out, "checkpoint")) or ended(processes, 0) != [None, None],
        "step 7 and a checkpoint",
    )
    hosts.cut()
    assert ended(processes, TIMEOUT_S + PATIENCE_S) == [1, 1]
    for host in (0, 1):
        said = (tmp_path / "cut" / str(host)).read_text()
        (last,) = re.findall(r"^(?:\[rank\d\]: )?sherd\.errors\.CommError: (.*)$", said, re.MULTILINE)[-1:]
        assert last.startswith(f"[rank {host}] "), last
        assert re.search(rf"with rank {1 - host}\b", last), last
        assert "--resume" in last or "start them again from the last checkpoint" in last
    first = losses(out)
    assert 7 <= max(first) < 80

    hosts.mend()
    calls = kubernetes(tmp_path / "kubernetes", MASTER_ADDR=ADDRESSES[0], **chosen)
    assert ended(started(hosts, calls, tmp_path / "again"), PATIENCE_S) == [0, 0]
    went_on = re.search(r"going on after step (\d+)", (tmp_path / "again" / "0").read_text())
    # A checkpoint may be whole when the link is cut, and not yet reported.
    assert int(went_on[1]) in {step for step in first if step % tree["every"] == 0}

    never_cut = dict(enumerate(plain_losses(Config.of(tree)), 1))
    assert losses(out) == pytest.approx(never_cut, rel=1e-4)
    assert first == pytest.approx({step: never_cut[step] for step in first}, rel=1e-4)


# Ranks of a program of one's own: two on each host, shards within it and replicas across.

NUM_STEPS = 5  # the forward after the fourth compares what that step did, the one after the fifth nothing


def model_of_three():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 1))


def batches():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(NUM_STEPS, 8, 6, generator=generator)


def losses_on_one_rank():
    model, found = model_of_three(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches():
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def hybrid(rank, environment, pipe):
    """Five steps, the third with a break of the link, and a backward without it; what is seen goes into the pipe."""
    os.environ.update(environment, RANK=str(rank), GLOO_SOCKET_IFNAME=interface_to(environment["MASTER_ADDR"]))
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_S))
    set_group_timeout(timedelta(seconds=TIMEOUT_S))  # all are there
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, across_all = model_of_three(), nn.Linear(4, 4)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    fully_shard(across_all)
    across_all(torch.ones(1, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, batch in enumerate(batches()):
        if step == 2:
            pipe.send("ready")
            pipe.recv()
        loss = model(batch[2 * rank : 2 * rank + 2]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach() / 4
        dist.all_reduce(total)
        pipe.send(total.item())
    groups = {"shard": mesh.get_group("shard"), "replicate": mesh.get_group("replicate"), "all": dist.group.WORLD}
    kinds = {name: transport_of(group, torch.device("cpu"), CommPolicy()) for name, group in groups.items()}
    pipe.send((os.environ["GLOO_SOCKET_IFNAME"], {name: type(kind).__name__ for name, kind in kinds.items()}))
    pipe.send({name: timeout_of(group, torch.device("cpu")) for name, group in groups.items() if name != "shard"})
    for group in groups.values():
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
    assert pipe.recv() == "the link is cut"
    try:
        model(batches()[0]).sum().backward()
    except CommError as error:
        pipe.send(str(error))
    os._exit(0)


def test_ranks_share_memory_within_a_host_use_gloo_across_miss_no_break_and_name_who_is_cut_off(hosts, tmp_path):
    """The groups of a mesh are given no timeout, and yet wait no longer than the default group."""
    environment = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500", "WORLD_SIZE": "4", "OMP_NUM_THREADS": "1"}
    pipes = []
    for rank in range(4):
        ours, theirs = torch.multiprocessing.Pipe()
        hosts.start(rank // 2, hybrid, rank, environment, theirs, output=tmp_path / str(rank))
        theirs.close()
        pipes.append(ours)

    def heard():
        for pipe in pipes:
            assert pipe.poll(PATIENCE_S)
        return [pipe.recv() for pipe in pipes]

    found = [heard(), heard()]
    assert heard() == ["ready"] * 4
    hosts.cut()
    for pipe in pipes:
        pipe.send("go on")
    time.sleep(0.7)
    assert not any(pipe.poll() for pipe in pipes)
    hosts.mend()
    found += [heard(), heard(), heard()]
    assert found == [pytest.approx([expected] * 4, rel=1e-5) for expected in losses_on_one_rank()]
    assert heard() == [(INTERFACE, {"shard": "SharedMemory", "replicate": "Gloo", "all": "Gloo"})] * 4
    assert heard() == [dict.fromkeys(("replicate", "all"), timedelta(seconds=TIMEOUT_S))] * 4

    hosts.cut()
    for pipe in pipes:
        pipe.send("the link is cut")
    for rank, said in enumerate(heard()):
        assert f"[rank {rank}] all-reduce of " in said
        assert f"with rank {(rank + 2) % 4}: " in said
