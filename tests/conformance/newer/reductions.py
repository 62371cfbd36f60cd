"""How gradients are reduced: divide factors, sums, buffers, a second group; when parameters are resharded."""

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from sherd import FSDPModule, MixedPrecisionPolicy, fully_shard
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
    none_sharded,
    raises,
    rank,
    same,
    same_models,
    stack,
    units,
    world,
)
from tests.support.models import Wired


def shard(model, **kw):
    return units(fully_shard, model, *model[1:], **kw)


def gathers(comm):
    return sum(n for op, n in comm.get_comm_counts().items() if "allgather" in str(op) or "all_gather" in str(op))


def reductions(comm):
    return sum(n for op, n in comm.get_comm_counts().items() if "reduce_scatter" in str(op))


def factors(shape, names, sums):
    for factor in (world() * 2, world()):
        plain = stack()
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = shard(copy.deepcopy(plain), mesh=mesh, reshard_after_forward=False)
        model.set_gradient_divide_factor(factor)
        if sums:
            for m in model.modules():
                if isinstance(m, FSDPModule):
                    m.set_force_sum_reduction_for_comms(True)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
        for i in range(2):
            for m in (model, plain):
                m(batch(3, 6, seed=i)).square().sum().backward()
            averaged(plain[0], factor=factor)  # the root's own parameters alone
            averaged(plain[1]), averaged(plain[2])
            same_models(model, plain, tol=1e-4)
            for o in optimizers:
                o.step(), o.zero_grad()


cases(
    4,
    divide_factor_of_the_root_alone=lambda: factors((4,), ("outer",), False),
    divide_factor_of_the_root_alone_with_sums=lambda: factors((4,), ("outer",), True),
    divide_factor_with_replicas=lambda: factors((2, 2), ("outer", "inner"), False),
    divide_factor_with_replicas_with_sums=lambda: factors((2, 2), ("outer", "inner"), True),
    divide_factor_with_replicas_of_one_rank=lambda: factors((4, 1), ("outer", "inner"), False),
    divide_factor_with_replicas_of_one_rank_with_sums=lambda: factors((4, 1), ("outer", "inner"), True),
)


@behaviour(2)
def divide_factor_in_mixed_precision():
    low = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)
    plain = nn.Linear(6, 3, bias=False)
    model = fully_shard(copy.deepcopy(plain), mp_policy=low)
    model.set_gradient_divide_factor(4.0), model.set_force_sum_reduction_for_comms(True)
    x = torch.full((1, 6), 256.0 if rank() == 0 else 1.0)
    model(x).sum().backward()
    same(model.weight.grad, torch.full((3, 6), 257 / 4.0))  # 257 is no bfloat16
    equal(model.weight.grad.dtype, F32, "grad dtype")


@behaviour(2)
def force_sum_changes_no_value():
    plain = stack()
    model = shard(copy.deepcopy(plain))
    for m in (model, model[1], model[2]):
        m.set_force_sum_reduction_for_comms(True)
    alike(model, plain, batch(3, 6))


def buffers(shape, names):
    low = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for reshard in (True, False):
        for number in (1, 2):
            plain = stack()
            models = [
                shard(copy.deepcopy(plain), mesh=mesh, reshard_after_forward=reshard, mp_policy=low) for _ in range(2)
            ]
            models[1].set_reduce_scatter_max_input_buffers(number)
            optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in models]
            for i in range(2):
                for m in models:
                    m(batch(3, 6, seed=i)).square().sum().backward()
                for (name, a), (_, b) in zip(models[0].named_parameters(), models[1].named_parameters(), strict=False):
                    same(b, a, name, 0), same(b.grad, a.grad, name + ".grad", 0)
                for o in optimizers:
                    o.step(), o.zero_grad()


cases(2, reduction_buffers_change_no_value=lambda: buffers((2,), ("outer",)))
cases(4, reduction_buffers_change_no_value_with_replicas=lambda: buffers((2, 2), ("outer", "inner")))


@behaviour(1)
def reduction_buffers_are_checked():
    model = fully_shard(nn.Linear(4, 4))
    raises(ValueError, lambda: model.set_reduce_scatter_max_input_buffers(0), "0")
    raises(TypeError, lambda: model.set_reduce_scatter_max_input_buffers(2.5), "2.5")
    raises(TypeError, lambda: model.set_reduce_scatter_max_input_buffers(True), "True")
    model.set_reduce_scatter_max_input_buffers(2)


@behaviour(2)
def one_unit_with_more_buffers_than_others():
    plain = stack()
    model = shard(copy.deepcopy(plain))
    model[1].set_reduce_scatter_max_input_buffers(3, recurse=False)
    alike(model, plain, batch(3, 6))


def second_group(shape, names):
    plain = stack()
    model = shard(copy.deepcopy(plain), mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    for enable in (True, False, True):
        model.set_separate_reduce_scatter_group(enable)
        alike(model, plain, batch(3, 6), clear=True)


cases(2, a_second_group_for_reductions=lambda: second_group((2,), ("outer",)))
cases(4, a_second_group_for_reductions_with_replicas=lambda: second_group((2, 2), ("outer", "inner")))


@behaviour(2)
def ranks_that_use_different_parameters():
    plain = nn.Sequential(
        nn.Linear(4, 4),
        Wired(lambda self, x: (self.a if rank() == 0 else self.b)(x), a=nn.Linear(4, 4), b=nn.Linear(4, 4)),
    )
    model = copy.deepcopy(plain)
    fully_shard(model[1]), fully_shard(model)
    model.set_reduce_scatter_unused_params(True)
    for i in range(2):
        for m in (model, plain):
            m.zero_grad(), m(batch(3, 4, seed=i)).square().sum().backward()
        for p in plain.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        same_models(model, averaged(plain))


@behaviour(2)
def unused_on_all_ranks_is_zero_when_asked_for():
    model = fully_shard(
        Wired(
            lambda self, x: (self.used @ x).sum(),
            used=nn.Parameter(torch.randn(8, 4)),
            unused=nn.Parameter(torch.randn(8, 4)),
        )
    )
    model.set_reduce_scatter_unused_params(True)
    model(torch.ones(4)).backward()
    same(model.unused.grad, torch.zeros(8, 4)), same(model.used.grad, torch.ones(8, 4))


@behaviour(4)
def unused_expert_that_is_a_dtensor():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("used", "unused"):
                setattr(self, name, nn.Parameter(distribute_tensor(torch.ones(8, 4), mesh["ep"], [Shard(0)])))

        def forward(self, x):
            return self.used.to_local().float().sum() + x.sum() * 0

    model = fully_shard(Experts(), mesh=mesh["dp"], reshard_after_forward=True)
    model.set_reduce_scatter_unused_params(True)
    model(torch.ones(1)).backward()
    assert isinstance(model.unused.grad, DTensor), "grad is a DTensor"
    same(model.unused.grad.to_local(), torch.zeros_like(model.unused.grad.to_local()))


def counted(setting, recurse):
    model = (
        shard(stack(), **COUNTED) if setting is None else shard(stack(), reshard_after_forward=not setting, **COUNTED)
    )
    if setting is not None:
        model.set_reshard_after_forward(reshard_after_forward=setting, recurse=recurse)
    with CommDebugMode() as forward:
        loss = model(batch(3, 6)).sum()
    with CommDebugMode() as backward:
        loss.backward()
    equal(gathers(forward), 3, "all-gathers of forward")
    equal(reductions(backward), 3, "reduce-scatters of backward")
    want = 2 if setting is None else (3 if recurse else 1) if setting else (0 if recurse else 2)
    equal(gathers(backward), want, "all-gathers of backward")


cases(
    2,
    reshard_after_forward_by_default_spares_the_root=lambda: counted(None, True),
    set_reshard_after_forward_true_for_all=lambda: counted(True, True),
    set_reshard_after_forward_true_for_the_root=lambda: counted(True, False),
    set_reshard_after_forward_false_for_all=lambda: counted(False, True),
    set_reshard_after_forward_false_for_the_root=lambda: counted(False, False),
)


@behaviour(1)
def set_reshard_after_forward_is_checked():
    model = fully_shard(nn.Linear(4, 4))
    raises((ValueError, TypeError), lambda: model.set_reshard_after_forward("yes"), "a string")


@behaviour(2)
def what_modules_show_after_forward():
    model = nn.Sequential(MLP(3), MLP(3))
    for setting in (True, False, None):
        model = nn.Sequential(MLP(3), MLP(3))
        kw = {"reshard_after_forward": setting}
        fully_shard(model[0].in_proj, **kw), fully_shard(model[0].out_proj, **kw), fully_shard(model, **kw)
        assert all_sharded(model.parameters())
        y = model(batch(2, 3))
        inner, root = list(model[0].parameters()), list(model[1].parameters())
        assert (all_sharded if setting is not False else none_sharded)(inner), f"{setting}: inner"
        assert (all_sharded if setting is True else none_sharded)(root), f"{setting}: root"
        for m in model.modules():
            if isinstance(m, FSDPModule):
                m.reshard()
        assert all_sharded(model.parameters()), f"{setting}: after reshard()"
        del y
