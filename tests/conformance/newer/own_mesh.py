"""A parameter on another mesh than the rest of its unit (`shard_placement_fn`): routed experts."""

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from sherd import OnMesh, fully_shard
from tests.conformance.newer.behaviours import (
    Gather,
    Scatter,
    averaged,
    batch,
    behaviour,
    cases,
    equal,
    full,
    raises,
    same,
    same_models,
)


class Block(nn.Module):
    """Every rank computes all experts of its part; the parts of an expert axis are summed by hand."""

    def __init__(self, dim=4, experts=4):
        super().__init__()
        self.dense, self.experts = nn.Linear(dim, dim), nn.Parameter(torch.randn(experts, dim, dim) * 0.3)

    def forward(self, x):
        local = self.experts.to_local() if isinstance(self.experts, DTensor) else self.experts
        return self.dense(x) + torch.einsum("bd,edf->bf", x, local)


def experts(replicas):
    whole = init_device_mesh(
        "cpu",
        (replicas, 4 // replicas // 2, 2) if replicas > 1 else (2, 2),
        mesh_dim_names=("rep", "efsdp", "ep") if replicas > 1 else ("efsdp", "ep"),
    )
    mesh = (
        init_device_mesh("cpu", (replicas, 4 // replicas), mesh_dim_names=("rep", "dp"))
        if replicas > 1
        else init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    )
    ep, own = whole["ep"], whole["rep", "efsdp"] if replicas > 1 else whole["efsdp"]
    plain = nn.Sequential(nn.Linear(4, 4), Block())
    model = copy.deepcopy(plain)
    model[1].experts = nn.Parameter(distribute_tensor(model[1].experts.detach(), ep, [Shard(0)]))
    chosen = model[1].experts
    fully_shard(
        model[1],
        mesh=mesh,
        shard_placement_fn=lambda p: OnMesh(own, Shard(0)) if p is chosen else Shard(0),
    )
    fully_shard(model, mesh=mesh)
    mine = slice(2 * ep.get_local_rank(), 2 * ep.get_local_rank() + 2)
    same(model[1].experts, plain[1].experts, "experts at the start")
    for i in range(2):
        x = batch(3, 4, seed=i)
        model(x).square().sum().backward()
        # the same computation: this rank's experts alone, with plain parameters
        h = plain[0](x)
        (plain[1].dense(h) + torch.einsum("bd,edf->bf", h, plain[1].experts[mine])).square().sum().backward()
        averaged(plain)
        want, got = plain[1].experts.grad, full(model[1].experts.grad)
        # torch divides by the ranks of the parameter's own mesh, sherd (documented at OnMesh) by those of the unit's
        same(got, want, "experts.grad", 1e-4)
        for name in ("0.weight", "1.dense.weight", "1.dense.bias"):
            same(dict(model.named_parameters())[name].grad, dict(plain.named_parameters())[name].grad, name, 1e-4)
        model.zero_grad(), plain.zero_grad()
    state = model.state_dict()
    same(state["1.experts"], plain[1].experts, "saved experts")
    refused = (
        lambda: model[1].set_all_reduce_hook(lambda output: None),
        lambda: model[1].set_custom_all_gather(Gather()),
        lambda: model[1].set_custom_reduce_scatter(Scatter()),
    )
    for call in refused:
        raises(ValueError, call, "one collective for several groups")


cases(
    4,
    experts_on_a_mesh_of_their_own=lambda: experts(1),
    experts_on_a_mesh_of_their_own_with_replicas=lambda: experts(2),
)


@behaviour(4)
def plain_parameters_on_two_meshes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    plain = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False))
    model = copy.deepcopy(plain)
    first = model[0].weight
    whole = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    fully_shard(
        model,
        mesh=whole,
        shard_placement_fn=lambda p: OnMesh(mesh, Shard(0)) if p is first else Shard(1),
    )
    (
        equal(model[0].weight.placements, (Replicate(), Shard(0)), "placements of the first"),
        equal(model[1].weight.placements[-1].dim, 1, "dim of the second")
        if plain[1].weight.shape[1] % 4 == 0
        else None,
    )
    for i in range(2):
        for m in (model, plain):
            m(batch(3, 4, seed=i)).square().sum().backward()
    same_models(model, averaged(plain))
