"""Behaviours, each on forked ranks of its own with a fresh gloo group, so that one that hangs or dies costs no other.

A program prints `ok NAME` or `FAIL NAME why` for each; `ONLY=a,b` chooses some, `TRACE=1` prints tracebacks.
"""

import datetime
import importlib
import os
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import sherd
from sherd._torch.versions import minor_of_torch

warnings.filterwarnings("ignore")
torch.set_num_threads(1)
# Between ranks of one host sherd uses shared memory. Where a program counts collectives, it asks for torch's calls.
COUNTED = {"comm_policy": sherd.CommPolicy(transport="torch")}
BF16, F32 = torch.bfloat16, torch.float32
LIMIT = float(os.environ.get("LIMIT", 120))
_behaviours = []


def behaviour(world, since=(2, 0)):
    """A program for `world` ranks, of what torch has `since` a version."""

    def add(f):
        if minor_of_torch() >= since:
            _behaviours.append((f.__name__, world, f))
        return f

    return add


def cases(world, **functions):
    """The same for functions by their names."""
    _behaviours.extend((name, world, f) for name, f in functions.items())


def rank():
    return dist.get_rank()


def world():
    return dist.get_world_size()


def full(t):
    t = t.detach()
    return t.full_tensor() if isinstance(t, DTensor) else t


def same(got, want, what="value", tol=1e-5):
    """Raises unless two tensors (or both None) agree; DTensors are gathered."""
    if got is None or want is None:
        assert got is want, f"{what}: one of {got} and {want} is missing"
        return
    got, want = full(got), full(want)
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)} instead of {tuple(want.shape)}"
    if got.numel():
        off, size = (got.double() - want.double()).abs().max().item(), want.double().abs().max().item()
        assert off <= tol * max(1.0, size), f"{what}: off by {off:.3g} of {size:.3g}"


def equal(got, want, what="value"):
    assert got == want, f"{what}: {got} instead of {want}"


def raises(kinds, call, what):
    try:
        call()
    except kinds as e:
        return e
    raise AssertionError(f"{what}: no error")


def averaged(plain, group=None, factor=None):
    """The gradients of a plain model become the mean over ranks (or the sum over `factor`)."""
    for p in plain.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad, group=group)
            p.grad.div_(factor or dist.get_world_size(group))
    return plain


def same_models(model, plain, grads=True, tol=1e-5):
    found = dict(model.named_parameters())
    for name, want in plain.named_parameters():
        same(found[name], want, name, tol)
        if grads:
            same(found[name].grad, want.grad, name + ".grad", tol)


def alike(model, plain, *inputs, tol=1e-5, clear=False):
    """A backward of both models, after which their parameters and gradients agree."""
    for m in (model, plain):
        if clear:
            m.zero_grad()
        m(*inputs).square().sum().backward()
    same_models(model, averaged(plain), tol=tol)


def units(api, model, *inner, **kw):
    """Applies `api` to `inner`, or to all children of a model, and to the model; returns what that returns."""
    for m in inner or model.children():
        api(m, **kw)
    return api(model, **kw)


def all_sharded(params):
    return all(isinstance(p, DTensor) for p in params)


def none_sharded(params):
    return not any(isinstance(p, DTensor) for p in params)


def batch(*shape, seed=0, each_rank=True, **kw):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * seed + (rank() if each_rank else 0)), **kw)


class MLP(nn.Module):
    def __init__(self, dim, mult=2, bias=True):
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(dim, mult * dim, bias=bias), nn.Linear(mult * dim, dim, bias=bias)

    def forward(self, x):
        return self.out_proj(F.relu(self.in_proj(x)))


def stack():
    return nn.Sequential(nn.Linear(6, 6), MLP(6), MLP(6))


class Gather(sherd.AllGather):
    def __init__(self):
        self.calls = self.buffers = 0

    def allocate(self, size, *, dtype, device):
        self.buffers += 1
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.calls += 1
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class Scatter(sherd.ReduceScatter):
    __init__, allocate = Gather.__init__, Gather.allocate

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.calls += 1
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def folder():
    """A new folder that all ranks see."""
    name = [tempfile.mkdtemp() if rank() == 0 else None]
    dist.broadcast_object_list(name, src=0)
    return name[0]


def _child(f, number, count, store, out):
    problem = ""
    try:
        os.environ.update(RANK=str(number), WORLD_SIZE=str(count), LOCAL_RANK=str(number), LOCAL_WORLD_SIZE=str(count))
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, count),
            rank=number,
            world_size=count,
            timeout=datetime.timedelta(seconds=60),
        )
        torch.manual_seed(0)
        f()
        dist.barrier()
    except BaseException as e:
        where = [f"{os.path.basename(s.filename)}:{s.lineno}" for s in traceback.extract_tb(e.__traceback__)]
        said = " ".join(str(e).split())[:330]
        problem = f"[rank {number}] {type(e).__name__}: {said} ({' '.join(where[1:2])}, raised at {where[-1]})"
        if os.environ.get("TRACE"):
            problem += "\n" + traceback.format_exc()
    os.write(out, problem.encode()[:60000] or b"\0")
    os._exit(0)


def _start(f, number, count, store):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _child(f, number, count, store, writing)
    os.close(writing)
    return pid, reading


def _finish(started, limit):
    """What each rank said: '' is right."""
    said, deadline = [None] * len(started), time.time() + limit
    while None in said and time.time() < deadline:
        waiting = {fd: i for i, (pid, fd) in enumerate(started) if said[i] is None}
        for fd in select.select(list(waiting), [], [], 1.0)[0]:
            data = os.read(fd, 65536)
            said[waiting[fd]] = data.decode(errors="replace").strip("\0") if data else "the rank died"
            if said[waiting[fd]]:
                deadline = min(deadline, time.time() + 20)
    for i, (pid, fd) in enumerate(started):
        if said[i] is None:
            said[i] = "no end within the limit"
            os.kill(pid, signal.SIGKILL)
        os.close(fd)
        os.waitpid(pid, 0)
    return said


def main(program):
    """Runs the behaviours of `tests.conformance.newer.PROGRAM`."""
    importlib.import_module(f"tests.conformance.newer.{program}")
    only = [name for name in os.environ.get("ONLY", "").split(",") if name]
    folder, wrong = tempfile.mkdtemp(prefix="newer-"), 0
    for name, count, f in _behaviours:
        if only and name not in only:
            continue
        said = _finish([_start(f, number, count, os.path.join(folder, name)) for number in range(count)], LIMIT)
        bad = [each for each in said if each]
        # The rank that says most of the cause first, not those that waited for it.
        bad.sort(key=lambda each: any(word in each for word in ("no end", "timed out", "closed by", "CommError")))
        wrong += bool(bad)
        print(f"FAIL {name} {bad[0]}" if bad else f"ok {name}", flush=True)
    sys.exit(1 if wrong else 0)
