"""A unit of several modules: the model's forward runs some, and the program runs the others later, by chunks."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from sherd import MixedPrecisionPolicy, fully_shard
from tests.conformance.newer.behaviours import (
    BF16,
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
    same_models,
    units,
)
from tests.support.models import Wired


class Chunked(nn.Module):
    def __init__(self, tie=False, dim=8, words=20):
        super().__init__()
        self.embed, self.body, self.norm, self.head = (
            nn.Embedding(words, dim),
            nn.Linear(dim, dim, bias=False),
            nn.RMSNorm(dim),
            nn.Linear(dim, words, bias=False),
        )
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, tokens, with_head=True):
        h = self.norm(self.body(self.embed(tokens)))
        return self.head(h) if with_head else h


def tokens(seed):
    return torch.randint(0, 20, (2, 8), generator=torch.Generator().manual_seed(10 * seed + rank()))


def shard(model, tie=False, reshard=True, grouped=True, inner=None, outer=None):
    inner, outer = inner or MixedPrecisionPolicy(), outer or MixedPrecisionPolicy()
    if tie:
        fully_shard(model.body, mp_policy=outer, reshard_after_forward=reshard)
        fully_shard([model.embed, model.norm, model.head], mp_policy=inner, reshard_after_forward=reshard)
    else:
        fully_shard(model.embed, mp_policy=outer, reshard_after_forward=reshard)
        fully_shard(model.body, mp_policy=outer, reshard_after_forward=reshard)
        for part in [[model.norm, model.head]] if grouped else [model.norm, model.head]:
            fully_shard(part, mp_policy=inner, reshard_after_forward=reshard)
    return fully_shard(model, mp_policy=outer, reshard_after_forward=reshard)


def by_chunks(model, ids, chunks=4, each=None):
    h, found = model(ids, with_head=False), []
    for part in torch.chunk(h.detach().float(), chunks, dim=1):
        part = part.contiguous().requires_grad_()
        out = model.head(part)
        out.float().square().sum().backward()
        found.append(part.grad)
        if each:
            each(h, out)
    h.backward(torch.cat(found, dim=1).to(h.dtype))
    return h


def steps(tie, reshard):
    plain = Chunked(tie)
    model = shard(copy.deepcopy(plain), tie, reshard)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (model, plain)]
    for i in range(3):
        for m in (model, plain):
            by_chunks(m, tokens(i))
        averaged(plain)
        same_models(model, plain)
        for o in optimizers:
            o.step(), o.zero_grad(set_to_none=i % 2 == 0)


cases(
    2,
    head_called_by_chunks_resharded=lambda: steps(False, True),
    head_called_by_chunks_kept=lambda: steps(False, False),
    tied_head_called_by_chunks_resharded=lambda: steps(True, True),
    tied_head_called_by_chunks_kept=lambda: steps(True, False),
)


def dtypes(root_casts):
    low = MixedPrecisionPolicy(param_dtype=F32, output_dtype=BF16)
    for tie in (False, True):
        model = shard(Chunked(tie), tie, inner=low, outer=low if root_casts else MixedPrecisionPolicy(param_dtype=F32))
        h = by_chunks(model, tokens(0), each=lambda h, out: equal(out.dtype, BF16, "a chunk's output"))
        equal(h.dtype, BF16, "the model's output")
        assert all(p.grad is not None for p in model.parameters())


cases(
    2,
    output_dtype_holds_for_each_module_of_a_group=lambda: dtypes(False),
    output_dtype_of_root_and_group=lambda: dtypes(True),
)


@behaviour(2)
def inputs_are_cast_for_each_module_of_a_group():
    model, low = (
        Wired(lambda self, x: self.b(self.a(x).float()), a=nn.Linear(8, 8, bias=False), b=nn.Linear(8, 8, bias=False)),
        MixedPrecisionPolicy(param_dtype=BF16),
    )
    fully_shard([model.a, model.b], mp_policy=low)
    fully_shard(model, mp_policy=low)
    out = model(batch(2, 8))
    equal(out.dtype, BF16, "output")
    out.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@behaviour(2)
def chunks_while_gradients_accumulate():
    for reshard in (True, False):
        plain = Chunked()
        models = [shard(copy.deepcopy(plain), reshard=reshard, grouped=g) for g in (True, False)]
        for i in range(3):
            for m in models:
                m.set_requires_gradient_sync(i == 2), m.set_is_last_backward(i == 2)
                by_chunks(m, tokens(i), chunks=2)
            by_chunks(plain, tokens(i), chunks=2)
        averaged(plain)
        for m in models:
            same_models(m, plain)


@behaviour(2)
def resharding_switched_off_during_chunks():
    for tie, reshard in ((False, False), (False, True), (True, False), (True, True)):
        plain = Chunked(tie)
        model = shard(copy.deepcopy(plain), tie, reshard)
        for i in range(2):
            h, found = model(tokens(i), with_head=False), []
            model.head.set_reshard_after_forward(False), model.head.set_reshard_after_backward(False)
            for part in torch.chunk(h.detach(), 4, dim=1):
                part = part.contiguous().requires_grad_()
                model.head(part).square().sum().backward()
                found.append(part.grad)
                assert not isinstance(model.head.weight, DTensor), "the head was resharded between two chunks"
            model.head.set_reshard_after_forward(True), model.head.set_reshard_after_backward(True)
            model.head.reshard()
            assert isinstance(model.head.weight, DTensor), "head.reshard() left it unsharded"
            h.backward(torch.cat(found, dim=1))
            by_chunks(plain, tokens(i))
            averaged(plain)
            same_models(model, plain)
            model.zero_grad(), plain.zero_grad()


@behaviour(2)
def group_never_completed_twice_then_backward():
    plain = Chunked()
    model = copy.deepcopy(plain)
    fully_shard([model.norm, model.head]), fully_shard(model)
    for m in (model, plain):
        (m(tokens(0), with_head=False).square().sum() + m(tokens(1), with_head=False).sum()).backward()
    averaged(plain)
    assert model.head.weight.grad is None, "head was not used"
    same_models(model, plain)


@behaviour(2)
def after_an_error_in_forward_reset_iter_state():
    class Fails(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.armed = inner, False

        def forward(self, x):
            if self.armed:
                raise KeyError("on purpose")
            return self.inner(x)

    plain = Chunked()
    plain.body = Fails(plain.body)
    model = copy.deepcopy(plain)
    fully_shard([model.norm, model.head]), fully_shard(model)
    for i in range(2):
        model.body.armed = True
        raises(KeyError, lambda: model(tokens(0), with_head=False), "forward")
        model.body.armed = False
        model.reset_iter_state()
        assert all_sharded(model.parameters()), "reset_iter_state leaves shards"
        model(tokens(i)).square().sum().backward(), plain(tokens(i)).square().sum().backward()
        averaged(plain)
        same_models(model, plain)
        model.zero_grad(), plain.zero_grad()


@behaviour(2)
def after_an_error_in_backward_reset_iter_state():
    plain = nn.Sequential(MLP(4), MLP(4))
    model = units(fully_shard, copy.deepcopy(plain))
    x = batch(3, 4)
    h = model[0](x)  # a first use below the root is no part of this
    del h
    model.zero_grad()

    class Stop(Exception):
        pass

    def stop(grad):
        raise Stop

    model = units(fully_shard, copy.deepcopy(plain))
    y = model(x)
    y.register_hook(stop)
    raises(Stop, lambda: y.sum().backward(), "backward")
    model.reset_iter_state()
    assert all_sharded(model.parameters()), "reset_iter_state leaves shards"
    model.zero_grad()
    model(x).square().sum().backward(), plain(x).square().sum().backward()
    averaged(plain)
    same_models(model, plain)


@behaviour(2)
def reset_iter_state_is_the_roots():
    model = nn.Sequential(MLP(4), MLP(4))
    units(fully_shard, model)
    model(batch(2, 4)).sum().backward()
    raises(RuntimeError, model[0].reset_iter_state, "reset_iter_state on a block")


@behaviour(2)
def a_group_with_a_module_that_never_runs():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.unused, self.lin = nn.Linear(1, 1), nn.Linear(6, 6)

        def forward(self, x):
            return F.relu(self.lin(x))

    plain = nn.Sequential(Half(), Half(), nn.Linear(6, 6))
    model = copy.deepcopy(plain)
    (
        fully_shard([model[0].unused, model[0].lin], reshard_after_forward=True),
        fully_shard([model[1].unused, model[1].lin], reshard_after_forward=True),
        fully_shard(model),
    )
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
    for i in range(3):
        alike(model, plain, batch(2, 6, seed=i))
        for o in optimizers:
            o.step(), o.zero_grad()
