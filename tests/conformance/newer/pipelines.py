"""Stages of torch.distributed.pipelining that are sharded or replicated over a data-parallel axis."""

import copy
import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)

from sherd import MixedPrecisionPolicy, fully_shard, replicate
from sherd.interop import torch_fsdp_identity
from tests.conformance.newer.behaviours import F32, MLP, batch, cases, equal, same, units

torch_fsdp_identity()  # so that torch's schedules know the stages' type


def loss(y, target):
    return (y - target).square().sum()


def runs(kind, api, several, policy=None, steps=2):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    dp, pp, parts = mesh["dp"], mesh["pp"].get_local_rank(), 4
    plain = nn.Sequential(*(MLP(6) for _ in range(4)))
    model = copy.deepcopy(plain)
    number = 4 if several else 2
    per = 4 // number
    mine = [i for i in range(number) if i % 2 == pp]
    stages, modules = [], []
    for i in mine:
        part = nn.Sequential(*list(model)[i * per : (i + 1) * per])
        units(api, part, mesh=dp, **({"mp_policy": policy} if policy else {}))
        (
            stages.append(PipelineStage(part, i, number, torch.device("cpu"), group=mesh["pp"].get_group())),
            modules.append(part),
        )
    schedule = kind(stages if several else stages[0], n_microbatches=parts, loss_fn=loss)
    for step in range(steps):
        x, target = (batch(8, 6, seed=10 * step + s + dp.get_local_rank(), each_rank=False) for s in (1, 5))
        plain.zero_grad()
        sum(loss(plain(a), b) for a, b in zip(x.chunk(parts), target.chunk(parts), strict=False)).div(parts).backward()
        for p in plain.parameters():
            dist.all_reduce(p.grad, group=dp.get_group()), p.grad.div_(2)
        for m in modules:
            m.zero_grad()
        first, last = pp == 0, (number - 1) in mine
        losses = []
        args, kw = (x,) if first else (), {"target": target, "losses": losses} if last else {}
        schedule.step(*args, **kw)
        if last:
            equal(len(losses), parts, "losses")
        for i, m in zip(mine, modules, strict=False):
            want = dict(nn.Sequential(*list(plain)[i * per : (i + 1) * per]).named_parameters())
            for name, p in m.named_parameters():
                same(p.grad, want[name].grad, f"step {step}, stage {i}, {name}", 1e-4 if policy is None else 5e-2)


cases(
    4,
    **{
        f"{kind.__name__}_of_{name}_stages": functools.partial(runs, kind, api, several)
        for kind, several in (
            (ScheduleGPipe, False),
            (Schedule1F1B, False),
            (ScheduleInterleaved1F1B, True),
            (ScheduleLoopedBFS, True),
            (ScheduleInterleavedZeroBubble, True),
        )
        for name, api in (("sharded", fully_shard), ("replicated", replicate))
    },
    low_precision_stages=lambda: runs(Schedule1F1B, fully_shard, False, MixedPrecisionPolicy(F32, F32)),
)
