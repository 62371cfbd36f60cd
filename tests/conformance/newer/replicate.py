"""`replicate`: a copy on every rank, gradients all-reduced."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_module
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from sherd import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
    replicate,
)
from tests.conformance.newer.behaviours import (
    BF16,
    COUNTED,
    F32,
    MLP,
    alike,
    all_sharded,
    averaged,
    batch,
    behaviour,
    cases,
    equal,
    raises,
    rank,
    same,
    same_models,
    stack,
    units,
)
from tests.support.models import Wired


def copies(model, **kw):
    return units(replicate, model, *model[1:], **kw)


def train(model, plain, steps=3, tol=1e-5, dtype=F32, lr=1e-2):
    optimizers = [torch.optim.Adam(m.parameters(), lr=lr) for m in (model, plain)]
    for i in range(steps):
        losses = []
        for m in (model, plain):
            losses.append(m(batch(3, 6, seed=i).to(dtype)).square().sum())
            losses[-1].backward()
        same(losses[0], losses[1], "loss", tol)
        same_models(model, averaged(plain), tol=tol)
        for o in optimizers:
            o.step(), o.zero_grad(set_to_none=i % 2 == 0)


@behaviour(2)
def parameters_before_and_after():
    plain = stack()
    model = copies(copy.deepcopy(plain))
    assert all_sharded(model.parameters())
    assert isinstance(model, FSDPModule)
    for p in model.parameters():
        equal(p.placements, (Replicate(),), "placements")
    same_models(model, plain, grads=False)
    y = model(batch(2, 6))
    for m in model.modules():
        if isinstance(m, FSDPModule):
            m.reshard()
    assert all_sharded(model.parameters()), "after reshard()"
    model(batch(2, 6)).sum().backward()
    assert all_sharded(model.parameters()), "after backward"
    del y


@behaviour(2)
def one_group():
    for a, b in ((15, 8), (7, 3)):
        plain = nn.Sequential(nn.Linear(6, a), nn.ReLU(), nn.Linear(a, b))
        train(replicate(copy.deepcopy(plain)), plain)


@behaviour(2)
def several_groups():
    plain = stack()
    train(copies(copy.deepcopy(plain)), plain)


@behaviour(2)
def on_a_given_mesh():
    plain = stack()
    train(copies(copy.deepcopy(plain), mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("replicate",))), plain)


@behaviour(2)
def several_groups_offloaded():
    plain = stack()
    train(copies(copy.deepcopy(plain), offload_policy=CPUOffloadPolicy(pin_memory=False)), plain)


@behaviour(2)
def cast_to_float64_after_init():
    plain = stack()
    model = copies(copy.deepcopy(plain)).to(torch.float64)
    for p in model.parameters():
        equal((p.dtype, p.to_local().dtype), (torch.float64,) * 2, "dtype")
    train(model, plain.to(torch.float64), dtype=torch.float64)
    for p in model.parameters():
        equal(p.dtype, torch.float64, "dtype")


@behaviour(2)
def under_a_root_and_alone():
    plain = nn.Sequential(MLP(6), MLP(6), MLP(6))
    model = units(replicate, copy.deepcopy(plain))
    alike(model, plain, batch(2, 6))
    for m in (model, plain):
        m.zero_grad(), m[0](batch(2, 6, seed=1)).square().sum().backward()
    same_models(model, averaged(plain))


@behaviour(2)
def a_module_used_twice():
    plain = Wired(
        lambda self, x: self.outer(self.inner(x) + self.inner(x + 1)), inner=nn.Linear(6, 6), outer=nn.Linear(6, 5)
    )
    model = copy.deepcopy(plain)
    replicate(model.inner), replicate(model)
    train(model, plain)


@behaviour(2)
def explicit_prefetching():
    plain = nn.Sequential(*(MLP(6) for _ in range(5)))
    model = units(replicate, copy.deepcopy(plain))
    for i in range(3):
        model[i].set_modules_to_forward_prefetch([model[i + 1], model[i + 2]])
    for i in range(2, 5):
        model[i].set_modules_to_backward_prefetch([model[i - 1], model[i - 2]])
    train(model, plain)


@behaviour(2)
def checkpointed_blocks():
    from torch.distributed._composable import checkpoint

    plain = stack()
    model = copy.deepcopy(plain)
    for block in (model[1], model[2]):
        checkpoint(block)
    train(copies(model), plain)


@behaviour(2)
def tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.mid, self.b = nn.Linear(6, 6, bias=False), MLP(6), nn.Linear(6, 6, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.mid(self.a(x)))

    plain = Tied()
    model = copy.deepcopy(plain)
    replicate(model.mid), replicate(model)
    train(model, plain)


def accumulate(mode, offload=False):
    plain = stack()
    model = copies(
        copy.deepcopy(plain), **COUNTED, **({"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {})
    )
    for step in range(2):
        sums = 0
        for i in range(3):
            last = i == 2
            if mode == "all":
                model.set_requires_gradient_sync(last)
            elif mode == "all_reduce":
                model.set_requires_all_reduce(last)
            elif mode == "root":
                model.set_requires_gradient_sync(last, recurse=False)
            else:
                model[1].set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            with CommDebugMode() as comm:
                model(batch(3, 6, seed=10 * step + i)).square().sum().backward()
            sums += sum(
                n for op, n in comm.get_comm_counts().items() if "allreduce" in str(op) or "all_reduce" in str(op)
            )
            plain(batch(3, 6, seed=10 * step + i)).square().sum().backward()
        averaged(plain)
        same_models(model, plain, tol=1e-4)
        equal(sums, {"all": 3, "all_reduce": 3, "root": 7, "block": 7}[mode], "all-reduces")
        model.zero_grad(set_to_none=bool(step)), plain.zero_grad()


cases(
    2,
    accumulation_without_sync=lambda: accumulate("all"),
    accumulation_without_all_reduce=lambda: accumulate("all_reduce"),
    accumulation_with_the_root_waiting=lambda: accumulate("root"),
    accumulation_with_a_block_waiting=lambda: accumulate("block"),
    accumulation_offloaded=lambda: accumulate("all", True),
)


@behaviour(2)
def one_forward_one_backward_with_explicit_unshard():
    for explicit in (False, True):
        plain = stack()
        model = copies(copy.deepcopy(plain))
        if explicit:
            for m in model.modules():
                if isinstance(m, FSDPModule):
                    m.unshard(async_op=True)
        for i in range(3):
            (
                model.set_requires_gradient_sync(i == 2),
                model.set_is_last_backward(i == 2),
                model.set_reshard_after_backward(i == 2),
            )
            for m in (model, plain):
                m(batch(3, 6, seed=i)).square().sum().backward()
        same_models(model, averaged(plain), tol=1e-4)


@behaviour(2)
def another_method_as_forward():
    class Vision(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Conv2d(3, 8, 4, stride=4)

        def features(self, x):
            return self.proj(x).flatten(2).transpose(1, 2)

        def forward(self, x):
            return self.features(x).sum(1)

    plain = Wired(lambda self, x: self.head(self.vision.features(x)), vision=Vision(), head=nn.Linear(8, 4))
    model = copy.deepcopy(plain)
    (
        replicate(model.vision),
        replicate(model.head),
        replicate(model),
        register_fsdp_forward_method(model.vision, "features"),
    )
    alike(model, plain, batch(2, 3, 8, 8))


@behaviour(4)
def beside_tensor_parallelism():
    for dim in (5, 16):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "tp"))
        plain = nn.Sequential(MLP(dim), MLP(dim))
        model = parallelize_module(
            copy.deepcopy(plain),
            mesh["tp"],
            {
                k: v
                for i in range(2)
                for k, v in (
                    (f"{i}.in_proj", ColwiseParallel(use_local_output=False)),
                    (f"{i}.out_proj", RowwiseParallel(use_local_output=bool(i))),
                )
            },
        )
        for block in model:
            replicate(block, mesh=mesh["replicate"])
        replicate(model, mesh=mesh["replicate"])
        for i in range(2):
            x = batch(4, dim, seed=10 * i + rank() // 2, each_rank=False)
            for m in (model, plain):
                m(x).square().sum().backward()
            averaged(plain)
            for (name, got), (_, want) in zip(model.named_parameters(), plain.named_parameters(), strict=False):
                equal(got.device_mesh.ndim, 2, "axes of the parameter's mesh"), same(got.grad, want.grad, name, 1e-4)
            model.zero_grad(), plain.zero_grad()


@behaviour(2)
def beside_sharded_blocks():
    for root in (replicate, fully_shard):
        plain = nn.Sequential(nn.Linear(6, 6), MLP(6), MLP(6))
        model = copy.deepcopy(plain)
        replicate(model[1]), fully_shard(model[2])
        root(model)
        for p in model[1].parameters():
            equal(p.placements, (Replicate(),), "replicated block")
        for p in model[2].parameters():
            equal(p.placements, (Shard(0),), "sharded block")
        alike(model, plain, batch(3, 6))


@behaviour(2)
def replicate_around_a_sharded_module_itself_is_refused():
    model = fully_shard(MLP(6))
    raises((RuntimeError, ValueError, AssertionError), lambda: replicate(model), "replicate of a sharded module")


@behaviour(2)
def shard_axes_are_refused():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    model = MLP(6)
    distribute_module(model, mesh)
    raises(
        ValueError,
        lambda: replicate(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="fsdp")),
        "replicate with shard axes",
    )


@behaviour(2)
def low_precision_compute():
    for dtype in (BF16, torch.float16):
        plain = nn.Sequential(nn.Linear(6, 6, bias=False))
        model = copy.deepcopy(plain)
        replicate(model, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
        y = model(batch(3, 6))
        equal(y.dtype, dtype, "output")
        y.sum().backward()
        low = copy.deepcopy(plain).to(dtype)
        low(batch(3, 6).to(dtype)).sum().backward()
        g = low[0].weight.grad.float()
        dist.all_reduce(g)
        same(model[0].weight.grad, g / 2, "grad", 1e-2), equal(model[0].weight.grad.dtype, F32, "grad dtype")


@behaviour(2)
def inputs_from_outside_the_model():
    class Takes(nn.Module):
        def __init__(self, seen):
            super().__init__()
            self.l, self.seen = nn.Linear(8, 8), seen

        def forward(self, x, y):
            self.seen["x"], self.seen["y"] = x.dtype, y.dtype
            return self.l(x)

    class Model(nn.Module):
        def __init__(self, seen):
            super().__init__()
            self.l1, self.l2, self.seen = nn.Linear(8, 8), Takes(seen), seen

        def forward(self, x):
            self.seen["root"] = x.dtype
            return self.l2(self.l1(x), torch.ones(2, 8))

    for cast in (False, True):
        seen = {}
        model, half = Model(seen), torch.float16
        replicate(model.l2, mp_policy=MixedPrecisionPolicy(param_dtype=half, cast_forward_inputs=cast))
        replicate(model, mp_policy=MixedPrecisionPolicy(param_dtype=half))
        model(torch.zeros(2, 8)).sum().backward()
        equal((seen["root"], seen["x"], seen["y"]), (half, half, half if cast else F32), f"cast {cast}")


@behaviour(2)
def norms_in_low_precision():
    for dtype in (BF16, torch.float16):
        for middle, x in ((nn.LayerNorm(8), (4, 8)), (nn.RMSNorm(8), (4, 8))):
            model = nn.Sequential(nn.Linear(8, 8), middle, nn.Linear(8, 8))
            units(replicate, model, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
            y = model(torch.randn(x))
            equal(y.dtype, dtype, "output")
            y.sum().backward()


@behaviour(2)
def a_batch_norm_with_a_policy_of_its_own():
    for dtype in (BF16, torch.float16):
        model = nn.Sequential(nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.Conv2d(5, 4, 3))
        replicate(model[1], mp_policy=MixedPrecisionPolicy(output_dtype=dtype))
        for m in (model[0], model[2], model):
            replicate(m, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
        y = model(torch.randn(3, 1, 9, 9))
        equal(y.dtype, dtype, "output")
        y.sum().backward()


@behaviour(2)
def inputs_in_a_dataclass():
    import dataclasses

    @dataclasses.dataclass
    class Input:
        x: torch.Tensor

    model = replicate(
        Wired(lambda self, i: self.layer(i.x), layer=nn.Linear(10, 10)),
        mp_policy=MixedPrecisionPolicy(BF16, BF16, BF16, True),
    )
    y = model(Input(torch.randn(2, 10)))
    equal(y.dtype, BF16, "output")
    y.sum().backward()
    assert model.layer.weight.grad is not None


@behaviour(2)
def forwards_under_jvp_and_vmap():
    plain = Wired(
        lambda self, z, t, r: self.b(torch.relu(self.a(torch.cat((z, t, r), -1)))), a=nn.Linear(8, 6), b=nn.Linear(6, 6)
    )
    model = copy.deepcopy(plain)
    for m in (model.a, model.b, model):
        replicate(m)
    z, t, r = batch(4, 6), torch.rand(4, 1), torch.rand(4, 1)
    same(torch.vmap(model)(z, t, r), torch.vmap(plain)(z, t, r), "vmap")
    for i in range(2):
        z = batch(4, 6, seed=i).requires_grad_()
        for m in (model, plain):
            out, tangent = torch.func.jvp(m, (z, t, r), (torch.ones_like(z), torch.ones_like(t), torch.zeros_like(r)))
            (out.square().mean() + tangent.square().mean()).backward()
        same_models(model, averaged(plain))
        model.zero_grad(), plain.zero_grad()
