"""State dicts held through training, full ones given out by rank 0, meta models, optimizer state."""

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Shard

from sherd import fully_shard
from tests.conformance.newer.behaviours import MLP, batch, behaviour, equal, folder, full, rank, same, same_models


def shard(model, **kw):
    for m in model:
        if next(m.parameters(), None) is not None:
            fully_shard(m, **kw)
    return fully_shard(model, **kw)


@behaviour(2)
def a_state_dict_taken_once_follows_training():
    for dim in (2, 3, 4, 5):
        model = fully_shard(nn.Linear(dim, dim, bias=False), reshard_after_forward=True)
        state, optimizer = model.state_dict(), torch.optim.AdamW(model.parameters(), lr=1e-2)
        for i in range(3):
            optimizer.zero_grad(), model(batch(dim, dim, seed=i)).sum().backward(), optimizer.step()
            same(state["weight"].to_local(), model.weight.to_local(), f"dim {dim}, step {i}", 0)
            if state["weight"].to_local().numel():
                equal(
                    state["weight"].to_local().untyped_storage().data_ptr(),
                    model.weight.to_local().untyped_storage().data_ptr(),
                    "memory",
                )


@behaviour(2)
def a_state_dict_while_unsharded_shows_shards():
    model = shard(nn.Sequential(MLP(3), nn.Linear(3, 3)), reshard_after_forward=False)
    first = {k: v.to_local().clone() for k, v in model.state_dict().items()}
    model(batch(2, 3))
    for k, v in model.state_dict().items():
        assert isinstance(v, DTensor), k
        same(v.to_local(), first[k], k, 0)


@behaviour(2)
def full_state_of_rank_0_into_a_sharded_model():
    for kw in ({}, {"cpu_offload": True}):
        torch.manual_seed(1)
        plain = nn.Sequential(MLP(5), nn.Linear(5, 3))
        model = shard(nn.Sequential(MLP(5), nn.Linear(5, 3)))
        set_model_state_dict(
            model,
            plain.state_dict() if rank() == 0 else {},
            options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, **kw),
        )
        same_models(model, plain, grads=False, tol=0)
        got = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank() == 0:
            for k, v in plain.state_dict().items():
                same(got[k], v, k, 0)
        else:
            equal(got, {}, "other ranks get nothing")


@behaviour(2)
def full_state_of_rank_0_into_a_meta_model():
    for broadcast in (True, False):
        torch.manual_seed(1)
        plain = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2)))
        with torch.device("meta"):
            model = shard(nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2))))
        set_model_state_dict(
            model,
            plain.state_dict(),
            options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast, strict=False),
        )
        for k, v in model.state_dict().items():
            equal(v.device.type, "cpu", k), same(v, plain.state_dict()[k], k, 0)


@behaviour(2)
def full_state_of_rank_0_into_a_plain_model():
    torch.manual_seed(1)
    model = nn.Linear(2, 2)
    want = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        [p.zero_() for p in model.parameters()]
    set_model_state_dict(
        model, want if rank() == 0 else {}, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )
    for k, v in model.state_dict().items():
        same(v, want[k], k, 0)


def stepped(kind, **kw):
    torch.manual_seed(1)
    model = shard(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)))
    optimizer = kind(model.parameters(), lr=1e-2, **kw)
    for i in range(2):
        model(batch(2, 4, seed=i)).square().sum().backward(), optimizer.step(), optimizer.zero_grad()
    return model, optimizer


def states_agree(a, b):
    for i, (p, q) in enumerate(
        zip(
            [p for g in a.param_groups for p in g["params"]],
            [p for g in b.param_groups for p in g["params"]],
            strict=False,
        )
    ):
        equal(set(a.state[p]), set(b.state[q]), f"keys of {i}")
        for k, v in a.state[p].items():
            same(b.state[q][k], v, f"{i}.{k}", 0) if isinstance(v, torch.Tensor) else equal(b.state[q][k], v, k)


@behaviour(2)
def optimizer_state_by_every_option():
    for kw in (
        {},
        {"full_state_dict": True},
        {"full_state_dict": True, "cpu_offload": True},
        {"full_state_dict": True, "broadcast_from_rank0": True},
        {"flatten_optimizer_state_dict": True},
    ):
        model, optimizer = stepped(torch.optim.AdamW)
        state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**kw))
        if kw.get("cpu_offload"):  # given to rank 0 alone
            kw = {"full_state_dict": True, "broadcast_from_rank0": True}
        other, new = stepped(torch.optim.AdamW)
        new = torch.optim.AdamW(other.parameters(), lr=1.0)
        set_optimizer_state_dict(other, new, state, options=StateDictOptions(**kw))
        equal(new.param_groups[0]["lr"], 1e-2, "lr"), states_agree(optimizer, new)


@behaviour(2)
def state_of_an_optimizer_without_state():
    model, optimizer = stepped(torch.optim.SGD)
    for kw in ({}, {"flatten_optimizer_state_dict": True}):
        state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**kw))
        new = torch.optim.SGD(model.parameters(), lr=1.0)
        set_optimizer_state_dict(model, new, state, options=StateDictOptions(**kw))
        (
            equal([v for v in new.state_dict()["state"].values() if v], [], "state"),
            equal(new.param_groups[0]["lr"], 1e-2, "lr"),
        )


def copied(groups):
    """An optimizer fills in what its groups leave out."""
    return [dict(group) for group in groups]


@behaviour(2)
def several_groups_and_an_empty_one():
    for empty in (False, True):
        torch.manual_seed(1)
        model = shard(nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 2, bias=False)))
        a, b = model.parameters()
        groups = (
            [{"params": [a, b]}, {"params": [], "lr": 0.2}] if empty else [{"params": [a]}, {"params": [b], "lr": 0.2}]
        )
        for kw in ({}, {"full_state_dict": True}, {"full_state_dict": True, "broadcast_from_rank0": True}):
            optimizer = torch.optim.AdamW(copied(groups), lr=0.1)
            model(batch(2, 4)).square().sum().backward(), optimizer.step(), optimizer.zero_grad()
            state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**kw))
            new = torch.optim.AdamW(copied(groups), lr=0.1)
            set_optimizer_state_dict(model, new, state, options=StateDictOptions(**kw))
            (
                equal([g["lr"] for g in new.param_groups], [g["lr"] for g in optimizer.param_groups], "lr"),
                states_agree(optimizer, new),
            )


@behaviour(2)
def frozen_parameters_left_out():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    shard(model)
    state = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    equal(sorted(state), ["1.bias", "1.weight"], "keys")
    full_ = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True, full_state_dict=True))
    if rank() == 0:
        equal(sorted(full_), ["1.bias", "1.weight"], "keys of the full one")
    before = full(model[0].weight).clone()
    set_model_state_dict(
        model, {k: torch.zeros_like(v) for k, v in state.items()}, options=StateDictOptions(strict=False)
    )
    same(model[0].weight, before, "the frozen layer", 0), same(model[1].weight, torch.zeros(4, 4), "the other", 0)


@behaviour(2)
def frozen_after_a_step_keeps_its_optimizer_state():
    model, optimizer = stepped(torch.optim.AdamW)
    model[0].requires_grad_(False)
    state = get_optimizer_state_dict(model, optimizer)
    new = torch.optim.AdamW(model.parameters(), lr=1.0)
    set_optimizer_state_dict(model, new, state)
    equal(set(new.state_dict()["state"]) >= {2, 3}, True, "the trained layer's state")
    for k, v in optimizer.state[model[1].weight].items():
        same(new.state[model[1].weight][k], v, k, 0)


@behaviour(2)
def a_compiled_model_with_buffers():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)
            (
                self.register_buffer("kept", torch.randn(4)),
                self.register_buffer("dropped", torch.randn(4), persistent=False),
            )

        def forward(self, x):
            return self.lin(x) + self.kept + self.dropped

    model = fully_shard(Model())
    compiled = torch.compile(model, backend="eager")
    state = get_model_state_dict(compiled)
    equal(sorted(state), ["kept", "lin.bias", "lin.weight"], "keys")
    set_model_state_dict(compiled, state)


@behaviour(2)
def saved_by_dcp_and_loaded_into_another_layout():
    model, optimizer = stepped(torch.optim.AdamW)
    where = folder()
    m, o = get_state_dict(model, optimizer)
    dcp.save({"model": m, "optim": o}, checkpoint_id=where)
    torch.manual_seed(2)
    other = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    fully_shard(other[0], shard_placement_fn=lambda p: Shard(p.dim() - 1)), fully_shard(other)
    new = torch.optim.AdamW(other.parameters(), lr=1.0)
    m, o = get_state_dict(other, new)
    dcp.load({"model": m, "optim": o}, checkpoint_id=where)
    set_state_dict(other, new, model_state_dict=m, optim_state_dict=o)
    for (k, a), (_, b) in zip(model.named_parameters(), other.named_parameters(), strict=False):
        same(b, a, k, 0)
    states_agree(optimizer, new), equal(new.param_groups[0]["lr"], 1e-2, "lr")


@behaviour(2, since=(2, 14))
def local_tensors_with_global_shapes_in_dcp():
    from torch.distributed.checkpoint import protocol

    def piece(t, shape, offset):
        t.global_shape, t.global_offsets, t.local_offsets, t.local_sizes = (
            shape,
            (offset,),
            ((0, 0),),
            (tuple(t.shape),),
        )
        assert isinstance(t, protocol.CheckpointableTensor)
        return t

    where = folder()
    model = fully_shard(nn.Linear(4, 6, bias=False))
    whole = full(model.weight)
    rows = model.weight.to_local()
    mine = piece(rows.detach().clone(), (6, 4), (3 * rank(), 0))
    dcp.save({"w": mine}, checkpoint_id=where)
    state = {"w": torch.zeros_like(model.weight.detach())}  # read into shards
    dcp.load(state, checkpoint_id=where)
    same(state["w"], whole, "pieces read into shards", 0)
    where = folder()
    dcp.save({"w": model.state_dict()["weight"]}, checkpoint_id=where)
    columns = piece(torch.zeros(6, 2), (6, 4), (0, 2 * rank()))
    dcp.load({"w": columns}, checkpoint_id=where)
    same(columns, whole[:, 2 * rank() : 2 * rank() + 2], "shards read into pieces", 0)
