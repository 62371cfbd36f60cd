"""Casts of structured inputs and outputs, dtypes of reductions, recomputation under casts, frozen parameters."""

import copy
import dataclasses
import functools
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from sherd import MixedPrecisionPolicy, fully_shard, replicate
from tests.conformance.newer.behaviours import (
    BF16,
    F32,
    averaged,
    batch,
    behaviour,
    cases,
    equal,
    rank,
    same,
    same_models,
    units,
)
from tests.support.models import Wired


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass
class Nested:
    inner: Pair
    z: torch.Tensor


class Named(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Make(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        if self.kind == "nested":
            return Nested(Pair(x, x.clone()), x.clone())
        return {"dataclass": Pair, "namedtuple": Named}[self.kind](x, x.clone())


class Each(nn.Module):
    def __init__(self, seen=None):
        super().__init__()
        self.layer, self.seen = nn.Linear(6, 6), seen

    def forward(self, v):
        if isinstance(v, Nested):
            return Nested(Pair(self.layer(v.inner.x), self.layer(v.inner.y)), self.layer(v.z))
        return type(v)(self.layer(v.x), self.layer(v.y))


class Add(nn.Module):
    def forward(self, v):
        return v.inner.x + v.inner.y + v.z if isinstance(v, Nested) else v.x + v.y


def structured(kind, low):
    plain = nn.Sequential(Make(kind), Each(), Each(), Add())
    model = copy.deepcopy(plain)
    policy = MixedPrecisionPolicy(*low)
    units(fully_shard, model, mp_policy=policy)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (model, plain)]
    for i in range(3):
        x = batch(2, 6, seed=i)
        y = model(x)
        equal(y.dtype, low[0] or F32, "output")
        y.square().sum().backward(), plain(x).square().sum().backward()
        averaged(plain)
        same_models(model, plain, tol=1e-5 if low[0] is None else 5e-2)
        if low[0] is None:
            for o in optimizers:
                o.step()
        model.zero_grad(), plain.zero_grad()


cases(
    2,
    **{
        f"activations_in_a_{kind}_{name}": functools.partial(structured, kind, low)
        for kind in ("dataclass", "nested", "namedtuple")
        for name, low in (
            ("float32", (None, None)),
            ("bfloat16", (BF16, BF16)),
            ("bfloat16_reduced_in_float32", (BF16, F32)),
        )
    },
)


@behaviour(2)
def a_dataclass_is_cast_going_in_and_out():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, v):
            equal(v.x.dtype, BF16, "input")
            return Pair(self.layer(v.x), v.y)

    model = fully_shard(Model(), mp_policy=MixedPrecisionPolicy(BF16, BF16, F32, True))
    out = model(Pair(torch.randn(2, 6), torch.randn(2, 6)))
    equal((out.x.dtype, out.y.dtype), (F32, F32), "outputs")
    out.x.sum().backward()
    assert model.layer.weight.grad is not None


def one_value(model):
    """Rank 0 sends 256, rank 1 sends 1: the sum is 257 in float32, 256 in bfloat16."""
    model(torch.full((1, 6), 256.0 if rank() == 0 else 1.0)).sum().backward()


@behaviour(2)
def reduction_dtype_after_a_frozen_first_forward():
    model = fully_shard(
        Wired(
            lambda self, x: self.layer(x),
            layer=nn.Linear(6, 3, bias=False),
            whole=nn.Parameter(torch.ones(6, dtype=torch.int64), requires_grad=False),
        ),
        mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32),
    )
    model.requires_grad_(False)
    with torch.no_grad():
        model(batch(2, 6))
    model.layer.requires_grad_(True)
    one_value(model)
    same(model.layer.weight.grad, torch.full((3, 6), 257 / 2)), equal(model.layer.weight.grad.dtype, F32, "grad dtype")
    assert model.whole.grad is None


def reduction_in_float32(api, **kw):
    model = api(nn.Linear(6, 3, bias=False), mp_policy=MixedPrecisionPolicy(reduce_dtype=F32, **kw))
    one_value(model)
    same(model.weight.grad, torch.full((3, 6), 257 / 2)), equal(model.weight.grad.dtype, F32, "grad dtype")


cases(
    2,
    reduction_dtype_is_float32_without_a_policy_for_compute=lambda: reduction_in_float32(fully_shard),
    reduction_of_replicas_in_float32=lambda: reduction_in_float32(replicate, param_dtype=BF16),
)


@behaviour(2)
def gradients_keep_the_shards_dtype_when_the_model_is_low_precision():
    model = nn.Sequential(nn.Linear(6, 6, dtype=BF16), nn.Linear(6, 3, bias=False, dtype=BF16))
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)
    units(fully_shard, model, mp_policy=policy)
    equal(policy.reduce_dtype, BF16, "the policy's dtype")
    model.to(F32)
    y = model(batch(4, 6))
    equal(y.dtype, BF16, "output")
    y.sum().backward()
    for p in model.parameters():
        equal((p.dtype, p.grad.dtype), (F32, F32), "dtypes")


def accumulation_in_float32(api, reshard, **kw):
    low = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)
    model = api(nn.Linear(6, 3, bias=False), mp_policy=low, **kw)
    for i, value in enumerate((256.0, 1.0, 1.0)):
        model.set_requires_gradient_sync(i == 2), model.set_reshard_after_backward(i == 2 or reshard)
        model(torch.full((1, 6), value)).sum().backward()
    same(model.weight.grad, torch.full((3, 6), 258.0))


cases(
    2,
    accumulation_in_the_reduction_dtype=lambda: accumulation_in_float32(fully_shard, True),
    accumulation_in_the_reduction_dtype_while_unsharded=lambda: accumulation_in_float32(
        fully_shard, False, reshard_after_forward=False
    ),
    accumulation_of_replicas_in_float32=lambda: accumulation_in_float32(replicate, True),
)


def recomputed(way):
    class Layer(nn.Linear):
        def forward(self, x):
            self.seen.append(x.dtype)
            return super().forward(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.outputs = Layer(1, 1), []
            self.layer.seen = []

        def part(self, x):
            x = self.layer(x)
            self.outputs.append(x.dtype)
            return x

        def forward(self, x):
            return (
                checkpoint(self.part, x.to(F32 if way == "input" else BF16), use_reentrant=False, early_stop=False)
                .float()
                .sum()
            )

    model = Model()
    policy = MixedPrecisionPolicy(BF16, BF16) if way == "input" else MixedPrecisionPolicy(BF16, BF16, F32, False)
    fully_shard(model.layer, mp_policy=policy), fully_shard(model, mp_policy=policy)
    model(batch(8, 1)).backward()
    if way == "input":
        equal(model.layer.seen, [BF16, BF16], "inputs in forward and recomputation")
    else:
        equal(model.outputs, [F32, F32], "outputs in forward and recomputation")


cases(
    2,
    recomputation_casts_inputs=lambda: recomputed("input"),
    recomputation_casts_outputs=lambda: recomputed("output"),
)


@behaviour(2)
def a_derivative_in_forward_mode_of_a_first_forward():
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32, cast_forward_inputs=True)
    with torch.device("meta"):
        enc, dec = nn.Linear(12, 16, bias=False), nn.Linear(16, 20, bias=False)
    for i, m in enumerate((enc, dec)):
        fully_shard(m, mp_policy=policy, reshard_after_forward=False)
        m.to_empty(device="cpu")
        with torch.no_grad():
            m.weight.to_local().normal_(generator=torch.Generator().manual_seed(i))
    e = enc(torch.randn(12, dtype=BF16))
    out, tangent = torch.func.jvp(
        lambda unused: dec(e), (torch.randn(20, dtype=BF16, requires_grad=True),), (torch.randn(20, dtype=BF16),)
    )
    equal((out.shape, out.dtype), ((20,), BF16), "output"), same(tangent, torch.zeros(20))


@behaviour(2)
def a_frozen_parameter_in_eight_bits():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.low, self.high = (
                nn.Parameter(torch.ones(8, 8).to(torch.float8_e4m3fn), requires_grad=False),
                nn.Parameter(torch.ones(8, 8)),
            )

        def forward(self, x):
            equal((self.low.dtype, self.low.shape), (torch.float8_e4m3fn, (8, 8)), "in forward")
            return (self.low.float() * self.high).sum() * x

    model = fully_shard(Model(), mesh=init_device_mesh("cpu", (2,)))
    model(1.0).backward()
    same(model.high.grad, torch.ones(8, 8))


def half_precision(api):
    class Layer(nn.Linear):
        def forward(self, x):
            self.seen.append(x.dtype)
            return super().forward(x.to(self.weight.dtype))

    half = torch.float16
    for which, kw, want in (
        (1, {}, (F32, half)),
        (1, {"cast_forward_inputs": False}, (F32, F32)),
        (0, {"output_dtype": F32}, (half, F32)),
    ):
        model = nn.Sequential(Layer(8, 8), Layer(8, 8))
        for m in model:
            m.seen = []
        api(model[which], mp_policy=MixedPrecisionPolicy(param_dtype=half, **kw)), api(model)
        model(torch.zeros(2, 8)).sum().backward()
        equal((model[0].seen[0], model[1].seen[0]), want, f"{which} {kw}")


cases(
    2,
    half_precision_of_one_module=lambda: half_precision(fully_shard),
    half_precision_of_one_replicated_module=lambda: half_precision(replicate),
)
