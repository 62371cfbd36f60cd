"""Ignored parameters beside DDP, replicas of shards offloaded, gradient scaling, clipping, hooks, extensions."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from sherd import CPUOffloadPolicy, FSDPModule, ShardedGradScaler, fully_shard, replicate
from tests.conformance.newer.behaviours import (
    MLP,
    alike,
    all_sharded,
    averaged,
    batch,
    behaviour,
    cases,
    equal,
    full,
    none_sharded,
    raises,
    rank,
    same,
    same_models,
    units,
)
from tests.support.models import Wired


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.plus = (
            Wired(
                lambda self, x: self.lin(self.left(x)) - self.minus,
                lin=nn.Linear(6, 6),
                left=nn.Linear(6, 6),
                minus=nn.Parameter(torch.randn(6)),
            ),
            nn.Parameter(torch.randn(6)),
        )

    def forward(self, x):
        return (self.inner(x) + self.plus).square().sum()


@behaviour(2)
def ddp_around_units_around_ignored_parameters():
    from torch.distributed.tensor.experimental import implicit_replication

    plain = Outer()
    model = copy.deepcopy(plain)
    ignored = set(model.inner.left.parameters())
    fully_shard(model.inner.lin, ignored_params=ignored), fully_shard(model.inner, ignored_params=ignored)
    assert none_sharded(model.inner.left.parameters())
    assert all_sharded(model.inner.lin.parameters())
    sharded = [n for n, p in model.named_parameters() if isinstance(p, DTensor)]
    equal(sorted(sharded), ["inner.lin.bias", "inner.lin.weight", "inner.minus"], "sharded")
    DDP._set_params_and_buffers_to_ignore_for_model(module=model, params_and_buffers_to_ignore=sharded)
    ddp = DDP(model, broadcast_buffers=False)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (ddp, plain)]
    for i in range(3):
        losses = [m(batch(3, 6, seed=i)) for m in (ddp, plain)]
        same(*losses, "loss")
        for loss in losses:
            loss.backward()
        averaged(plain)
        with implicit_replication():
            for o in optimizers:
                o.step(), o.zero_grad()
        same_models(model, plain, grads=False)


def ignored_parameters(api):
    model = MLP(6)
    ignored = set(model.out_proj.parameters())
    api(model, ignored_params=ignored)
    assert set(model.out_proj.parameters()) == ignored
    assert none_sharded(ignored)
    model(batch(2, 6)).square().sum().backward()
    both = [torch.empty(6) for _ in range(2)]
    dist.all_gather(both, model.out_proj.bias.grad)
    assert not torch.equal(*both), "the gradient of an ignored parameter is this rank's own"
    model.to(torch.float64)
    assert all(p.dtype == torch.float64 for p in ignored), "an ignored parameter is cast with the model"


cases(
    2,
    ignored_parameters_stay_as_they_are=lambda: ignored_parameters(fully_shard),
    ignored_parameters_of_a_replicated_module_stay=lambda: ignored_parameters(replicate),
)


def replicas(offload, reshard):
    plain = nn.Sequential(nn.LayerNorm(5, bias=False), MLP(5), MLP(5))
    model = copy.deepcopy(plain)
    kw = {
        "mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")),
        "reshard_after_forward": reshard,
    }
    if offload:
        kw["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    units(fully_shard, model, **kw)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (model, plain)]
    for step in range(2):
        for i in range(3):
            model.set_requires_gradient_sync(i == 2)
            for m in (model, plain):
                m(batch(3, 5, seed=5 * step + i)).square().sum().backward()
        same_models(model, averaged(plain), tol=1e-4)
        for o in optimizers:
            o.step(), o.zero_grad(set_to_none=step == 0)
        same_models(model, plain, grads=False, tol=1e-3)


cases(
    4,
    replicas_of_shards=lambda: replicas(False, True),
    replicas_of_shards_kept_after_forward=lambda: replicas(False, False),
    replicas_of_shards_offloaded=lambda: replicas(True, True),
)


@behaviour(4)
def a_part_of_the_shard_axis_after_forward():
    plain = nn.Sequential(MLP(6), MLP(6))
    model = units(fully_shard, copy.deepcopy(plain), reshard_after_forward=2)
    for i in range(2):
        alike(model, plain, batch(3, 6, seed=i), clear=True)


@behaviour(2)
def accumulation_while_parameters_stay():
    plain = nn.Sequential(nn.Linear(6, 6), MLP(6), MLP(6))
    for offload in (False, True):
        model, want = copy.deepcopy(plain), copy.deepcopy(plain)
        kw = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {"reshard_after_forward": False}
        for m in (model[1], model[2], model):
            fully_shard(m, **kw)
        for i in range(3):
            model.set_requires_gradient_sync(i == 2), model.set_reshard_after_backward(i == 2)
            for m in (model, want):
                m(batch(3, 6, seed=i)).square().sum().backward()
        same_models(model, averaged(want), tol=1e-4)


def clipping(api, norms, ways):
    plain = nn.Sequential(MLP(6), nn.Linear(6, 3))
    for norm in norms:
        for foreach in ways:
            want = copy.deepcopy(plain)
            model = units(api, copy.deepcopy(plain))
            for m in (model, want):
                m(batch(3, 6)).square().sum().backward()
            averaged(want)
            a = nn.utils.clip_grad_norm_(want.parameters(), 0.5, norm_type=norm, foreach=foreach)
            b = nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=norm, foreach=foreach)
            same(b, a, f"norm {norm}"), same_models(model, want)


cases(
    2,
    clipping_by_every_norm=lambda: clipping(fully_shard, (2, 1, 3, float("inf")), (None, True, False)),
    clipping_replicated_modules=lambda: clipping(replicate, (2, float("inf")), (None,)),
)


@behaviour(2)
def a_scaler_that_meets_infinity_on_one_rank():
    from torch.amp import GradScaler

    for kind in (GradScaler, ShardedGradScaler):
        for bad in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
            units(fully_shard, model)
            scaler, optimizer = kind(device="cpu", init_scale=2.0), torch.optim.Adam(model.parameters(), lr=1e-2)
            before = [full(p).clone() for p in model.parameters()]
            scaler.scale(model(batch(4, 4)).sum()).backward()
            first = model[0].weight.grad
            if bad and rank() == 1:
                first.to_local()[0, 0] = float("inf")
            scaled = first.to_local().clone()
            scaler.unscale_(optimizer)
            same(torch.nan_to_num(first.to_local(), posinf=0), torch.nan_to_num(scaled / 2, posinf=0), "unscaled")
            scaler.step(optimizer), scaler.update()
            equal(
                all(torch.equal(full(p), q) for p, q in zip(model.parameters(), before, strict=False)),
                bad,
                f"{kind.__name__}: the step is skipped",
            )
            equal(scaler.get_scale(), 1.0 if bad else 2.0, f"{kind.__name__}: scale")


@behaviour(2)
def an_optimizer_inside_backward():
    plain = nn.Sequential(MLP(6), MLP(6))
    model = units(fully_shard, copy.deepcopy(plain))
    calls, each = {}, {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}

    def hook(p):
        calls[p] = calls.get(p, 0) + 1
        each[p].step(), each[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for i in range(3):
        for m in (model, plain):
            m(batch(3, 6, seed=i)).square().sum().backward()
        averaged(plain), optimizer.step(), optimizer.zero_grad()
        assert all(calls[p] == i + 1 for p in model.parameters())
        same_models(model, plain, grads=False, tol=1e-4)


@behaviour(4)
def an_extension_is_given_the_shard_axis():
    mesh, seen = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")), []

    def before(self, mesh, outer_size, outer_stride, module, mp_policy):
        seen.append((mesh.ndim, mesh.size(), tuple(outer_size), tuple(outer_stride)))
        return (self,), None

    def after(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        return None if out is not None else (all_gather_outputs[0], all_gather_outputs)

    plain = nn.Linear(8, 8, bias=False)
    model = fully_shard(copy.deepcopy(plain), mesh=mesh)
    local = model.weight._local_tensor
    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = before.__get__(local), torch.no_grad()(after).__get__(local)
    x = batch(2, 8)
    same(model(x), plain(x), "output")
    equal(seen[0], (1, 2, (8, 8), (8, 1)), "what the extension is given")


@behaviour(2)
def an_unsharded_handle_can_be_waited_for():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for lin in model:
        fully_shard(lin)
    fully_shard(model)
    model.unshard(async_op=True).wait()  # the root has no parameters of its own
    handle = model[0].unshard(async_op=True)
    handle.wait()
    assert none_sharded(model[0].parameters())
    assert all_sharded(model[1].parameters())
    model[0].reshard()
    assert all_sharded(model.parameters())
    equal(model[1].unshard(), None, "unshard()"), model[1].reshard()


@behaviour(2)
def unshard_ahead_in_a_program_of_async_collectives():
    class Reduce(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            y = F.relu(x @ self.weight)
            return y, dist.all_reduce(y.detach(), async_op=True)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.r, self.m = nn.ModuleList(Reduce() for _ in range(2)), nn.ModuleList(MLP(4) for _ in range(2))

        def forward(self, x):
            ys = []
            for r, m in zip(self.r, self.m, strict=False):
                ys.append(r(x))
                if isinstance(m, FSDPModule):
                    m.unshard(async_op=True)
            out = 0
            for (y, work), m in zip(ys, self.m, strict=False):
                work.wait()
                out = out + m(y)
            return out

    plain = Model()
    model = copy.deepcopy(plain)
    for m in model.m:
        fully_shard(m, reshard_after_forward=False)
    for i in range(2):
        for m in (model, plain):
            m.zero_grad(), m(batch(2, 4, seed=i)).square().sum().backward()
        averaged(plain.m)
        same_models(model.m, plain.m)


@behaviour(2)
def slicing_gives_a_plain_module():
    model = fully_shard(nn.Sequential(MLP(4), MLP(4), MLP(4)))
    equal(type(model).__name__, "FSDPSequential", "class"), equal(isinstance(model[:2], FSDPModule), False, "a slice")
    raises((AssertionError, ValueError), lambda: fully_shard(model), "twice")
    raises(ValueError, lambda: fully_shard(nn.ModuleList([MLP(4)])), "a list module")
