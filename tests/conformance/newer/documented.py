"""What the docstrings of torch 2.14 promise and no test of its own checks in numbers."""

import copy

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

from sherd import MixedPrecisionPolicy, fully_shard, replicate
from tests.conformance.newer.behaviours import (
    BF16,
    F32,
    MLP,
    alike,
    all_sharded,
    averaged,
    batch,
    behaviour,
    equal,
    folder,
    full,
    raises,
    rank,
    same,
    same_models,
    units,
)
from tests.support.models import Wired


@behaviour(2)
def reset_iter_state_discards_what_was_accumulated():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.armed = nn.Linear(6, 6), False

        def forward(self, x):
            if self.armed:
                raise KeyError
            return self.lin(x)

    plain = nn.Sequential(MLP(6), Fails())
    model = units(fully_shard, copy.deepcopy(plain))
    model.set_requires_gradient_sync(False)
    model(batch(3, 6, seed=7)).square().sum().backward()
    model[1].armed = True
    raises(KeyError, lambda: model(batch(3, 6)), "forward")
    model[1].armed = False
    model.reset_iter_state(), model.zero_grad()
    for i in range(2):
        model.set_requires_gradient_sync(i == 1)
        for m in (model, plain):
            m(batch(3, 6, seed=i)).square().sum().backward()
    same_models(model, averaged(plain))


@behaviour(4)
def reset_iter_state_discards_partial_sums_of_replicas():
    plain = MLP(6)
    model = fully_shard(
        copy.deepcopy(plain), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    )
    model.set_requires_all_reduce(False)
    model(batch(3, 6, seed=7)).square().sum().backward()
    model.reset_iter_state(), model.zero_grad()
    for i in range(2):
        model.set_requires_all_reduce(i == 1)
        for m in (model, plain):
            m(batch(3, 6, seed=i)).square().sum().backward()
    same_models(model, averaged(plain))


@behaviour(2)
def unshard_follows_the_policys_dtype():
    model = fully_shard(nn.Linear(6, 4), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    want = full(model.weight)
    for a in (False, True):
        handle = model.unshard(async_op=a)
        if handle is not None:
            handle.wait()
        equal((model.weight.dtype, tuple(model.weight.shape)), (BF16, (4, 6)), "unsharded")
        same(model.weight.float(), want.to(BF16).float(), tol=0)
        model.reshard()
        equal(model.weight.dtype, F32, "shard")


@behaviour(2)
def an_embedding_that_backward_does_not_need():
    plain = Wired(
        lambda self, ids: self.head(self.norm(self.body(self.tok(ids) + self.pos(torch.arange(ids.shape[1]))))),
        tok=nn.Embedding(9, 6),
        pos=nn.Embedding(8, 6),
        body=MLP(6),
        norm=nn.LayerNorm(6),
        head=nn.Linear(6, 9, bias=False),
    )
    model = copy.deepcopy(plain)
    returned = fully_shard([model.tok, model.pos])
    assert [id(each) for each in returned] == [id(model.tok), id(model.pos)], "a list comes back"
    fully_shard(model.body), fully_shard([model.norm, model.head]), fully_shard(model)
    model.tok.set_unshard_in_backward(False)
    ids = torch.randint(0, 9, (2, 8), generator=torch.Generator().manual_seed(rank()))
    for _i in range(2):
        alike(model, plain, ids, tol=1e-4, clear=True)
        assert all_sharded(model.parameters())


@behaviour(2)
def state_dicts_of_replicated_modules():
    torch.manual_seed(1)
    plain = nn.Sequential(MLP(5), nn.Linear(5, 3))
    model = units(replicate, copy.deepcopy(plain))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for k, v in model.state_dict().items():
        same(v, plain.state_dict()[k], k, 0)
    got = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank() == 0:
        for k, v in plain.state_dict().items():
            same(got[k], v, k, 0)
    model(batch(3, 5)).square().sum().backward(), optimizer.step(), optimizer.zero_grad()
    where = folder()
    dcp.save({"m": get_model_state_dict(model), "o": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=where)
    torch.manual_seed(2)
    other = nn.Sequential(MLP(5), nn.Linear(5, 3))  # replicas are read into shards
    units(fully_shard, other)
    new = torch.optim.AdamW(other.parameters(), lr=1.0)
    state = {"m": get_model_state_dict(other), "o": get_optimizer_state_dict(other, new)}
    dcp.load(state, checkpoint_id=where)
    set_model_state_dict(other, state["m"]), set_optimizer_state_dict(other, new, state["o"])
    for (k, a), (_, b) in zip(model.named_parameters(), other.named_parameters(), strict=False):
        same(b, a, k, 0), same(new.state[b]["exp_avg"], optimizer.state[a]["exp_avg"], k, 0)


@behaviour(2)
def rank_0_gives_a_full_state_to_replicated_modules():
    torch.manual_seed(1)
    plain = nn.Sequential(MLP(5), nn.Linear(5, 3))
    torch.manual_seed(5)
    model = nn.Sequential(MLP(5), nn.Linear(5, 3))
    units(replicate, model)
    set_model_state_dict(
        model,
        plain.state_dict() if rank() == 0 else {},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    same_models(model, plain, grads=False, tol=0)


@behaviour(2)
def a_replicated_model_from_the_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    units(replicate, model)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    for m in model:
        m.reset_parameters()
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with torch.no_grad():
        for p, q in zip(plain.parameters(), model.parameters(), strict=False):
            p.copy_(full(q))
            dist.broadcast(p, 0)
            q.to_local().copy_(p)
    alike(model, plain, batch(3, 4))


@behaviour(2)
def hooks_on_replicated_parameters():
    model, calls = nn.Sequential(MLP(6), MLP(6)), {}
    units(replicate, model)
    for n, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, n=n: calls.__setitem__(n, calls.get(n, 0) + 1))
    for _i in range(2):
        model(batch(3, 6)).sum().backward()
    equal(calls, {n: 2 for n, _ in model.named_parameters()}, "calls")


@behaviour(2)
def a_set_reduction_hook_sees_replicated_gradients():
    plain, shapes = nn.Linear(6, 4, bias=False), []
    model = replicate(copy.deepcopy(plain))

    def hook(output):
        shapes.append(output.numel())
        output.mul_(2)

    model.set_all_reduce_hook(hook)
    for m in (model, plain):
        m(batch(3, 6)).square().sum().backward()
    averaged(plain)
    equal(shapes, [24], "numel"), same(model.weight.grad, 2 * plain.weight.grad)
