"""Tied weights cut unevenly, models made layer by layer, forwards without inputs, one rank, recomputation."""

import copy
import gc

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from sherd import fully_shard, share_comm_ctx
from tests.conformance.newer.behaviours import (
    BF16,
    MLP,
    alike,
    averaged,
    batch,
    behaviour,
    equal,
    rank,
    same,
    same_models,
)
from tests.support.models import Wired


class Tied(nn.Module):
    def __init__(self, words):
        super().__init__()
        self.embed, self.out = nn.Embedding(words, 6), nn.Linear(6, words, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids):
        return self.out(self.embed(ids))


@behaviour(2)
def tied_rows_cut_unevenly_all_train():
    words = 2 * 4 + 1
    for reshard in (True, False):
        plain = Tied(words)
        model = copy.deepcopy(plain)
        fully_shard([model.embed, model.out], reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
        for i in range(3):
            ids = torch.randint(0, words, (2, 8), generator=torch.Generator().manual_seed(9 * i + rank()))
            for m in (model, plain):
                F.cross_entropy(m(ids).flatten(0, 1), ids.flatten()).backward()
            averaged(plain)
            for o in optimizers:
                o.step(), o.zero_grad()
        model.embed.unshard()
        same(model.embed.weight, plain.embed.weight, "the last rows too", 1e-4)
        model.embed.reshard()


@behaviour(2)
def a_tie_across_two_calls_is_refused_or_right():
    plain = Tied(7)
    model, ids = copy.deepcopy(plain), torch.arange(6).view(2, 3) + rank() % 2
    try:
        fully_shard(model.embed), fully_shard(model.out), fully_shard(model)
        model(ids).square().sum().backward()
    except ValueError:
        return
    plain(ids).square().sum().backward()
    same_models(model, averaged(plain))


@behaviour(2)
def blocks_made_and_sharded_one_at_a_time():
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList()

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    model, plain = Stack(), Stack()
    for _ in range(8):
        block = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6, bias=False))
        plain.blocks.append(copy.deepcopy(block))
        model.blocks.append(fully_shard(block))
        del block
        gc.collect()
    fully_shard(model)
    alike(model, plain, batch(2, 6), tol=1e-4)


@behaviour(2)
def a_forward_without_inputs():
    plain = Wired(lambda self: self.weight @ self.weight, weight=nn.Parameter(torch.randn(4, 4)))
    model = fully_shard(copy.deepcopy(plain))
    for m in (model, plain):
        out = m()
        equal(out.shape, (4, 4), "output")
        out.sum().backward()
    same_models(model, averaged(plain))


@behaviour(2)
def a_root_that_only_passes_nested_inputs():
    class Sums(nn.Module):
        def forward(self, x, ys):
            return x + ys[0] + ys[1]

    model = fully_shard(Sums())
    x, ys = torch.ones(3), (torch.ones(3), torch.ones(3))
    same(model(x, ys), torch.full((3,), 3.0))


@behaviour(1)
def one_rank_sends_nothing():
    for shapes in ([(16, 15), (15, 8)], [(7, 15), (15, 3)]):
        plain = nn.Sequential(nn.Linear(*shapes[0]), nn.ReLU(), nn.Linear(*shapes[1]))
        model = fully_shard(copy.deepcopy(plain))
        optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (model, plain)]
        for i in range(3):
            x = batch(4, shapes[0][0], seed=i)
            plain(x).sum().backward()
            with CommDebugMode() as comm:
                model(x).sum().backward()
            equal(comm.get_total_counts(), 0, "collectives")
            same_models(model, plain)
            for o in optimizers:
                o.step(), o.zero_grad(set_to_none=i % 2 == 0)


@behaviour(1)
def one_rank_divides_by_the_factor_alone():
    for factor in (None, 1.0, 2.0):
        model = nn.Linear(8, 4, bias=False)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        if factor is not None:
            model.set_gradient_divide_factor(factor)
        model(torch.ones(3, 8)).sum().backward()
        same(model.weight.grad, torch.full((4, 8), 3 / (factor or 1)), f"factor {factor}")


@behaviour(2)
def two_forwards_then_one_backward_with_checkpointing():
    from torch.distributed._composable import checkpoint as composable
    from torch.utils.checkpoint import checkpoint as function

    class Block(nn.Module):
        def __init__(self, by_function):
            super().__init__()
            self.attention, self.feed, self.by_function = MLP(6), MLP(6), by_function

        def both(self, x):
            return self.feed(x + self.attention(x))

        def forward(self, x):
            return function(self.both, x, use_reentrant=False) if self.by_function else self.both(x)

    for by_function in (True, False):
        for reshard in (True, False):
            plain = nn.Sequential(nn.Linear(6, 6), Block(by_function), Block(by_function), nn.Linear(6, 2))
            model = copy.deepcopy(plain)
            for block in (model[1], model[2]):
                if not by_function:
                    composable(block)
                for m in (block.attention, block.feed, block):
                    fully_shard(m, reshard_after_forward=reshard)
            fully_shard(model, reshard_after_forward=reshard)
            for m in (model, plain):
                (m(batch(2, 6, seed=1)).sum() - m(batch(2, 6, seed=2)).sum()).square().backward()
            same_models(model, averaged(plain), tol=1e-4)


@behaviour(2)
def backward_prefetch_set_inside_checkpointed_blocks():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    plain = nn.Sequential(nn.Linear(6, 6), MLP(6), MLP(6), MLP(6), nn.Linear(6, 2))
    model = copy.deepcopy(plain)
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, MLP))
    blocks = [model[i] for i in (1, 2, 3)]
    for block in blocks:
        fully_shard(block.out_proj, reshard_after_forward=True), fully_shard(block, reshard_after_forward=True)
    (
        fully_shard(model[0]),
        fully_shard(model[4], reshard_after_forward=True),
        fully_shard(model, reshard_after_forward=True),
    )
    for step in range(3):
        if step == 1:
            model[4].set_modules_to_backward_prefetch([blocks[2]])
            for later, earlier in ((blocks[2], blocks[1]), (blocks[1], blocks[0])):
                later.set_modules_to_backward_prefetch([earlier, earlier.out_proj])
            blocks[0].set_modules_to_backward_prefetch([model[0]])
        for m in (model, plain):
            m(batch(2, 6, seed=step)).square().sum().backward()
        averaged(plain)
        for (name, got), (_, want) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            same(got.grad, want.grad, name)
        model.zero_grad(), plain.zero_grad()


@behaviour(2)
def compiled_blocks_train_alike():
    plain = nn.Sequential(nn.Linear(6, 6), MLP(6), MLP(6))
    for reshard in (True, False):
        model, want = copy.deepcopy(plain), copy.deepcopy(plain)
        for block in (model[1], model[2]):
            block.compile(backend="aot_eager", fullgraph=True)
            fully_shard(block, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
        optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (model, want)]
        for i in range(2):
            for m in (model, want):
                m(batch(2, 6, seed=i)).square().sum().backward()
            same_models(model, averaged(want))
            for o in optimizers:
                o.step(), o.zero_grad()


@behaviour(2)
def a_shared_context_of_models_without_a_root():
    plain = nn.Sequential(MLP(6), MLP(6), MLP(6))
    model = copy.deepcopy(plain)
    for layer in model:
        fully_shard(layer)
    share_comm_ctx(list(model))
    for i in range(2):
        for m in (model, plain):
            m(batch(2, 6, seed=i)).square().sum().backward()
    same_models(model, averaged(plain))


@behaviour(2)
def weights_loaded_between_forwards_are_used():
    for reshard in (True, False):
        for assign in (False, True):
            model = fully_shard(nn.Linear(6, 4).requires_grad_(False), reshard_after_forward=reshard)
            for version in range(3):
                state = {name: torch.full_like(t, version) for name, t in model.state_dict().items()}
                model.load_state_dict(state, assign=assign)
                with torch.no_grad():
                    same(
                        model(torch.ones(2, 6)),
                        torch.full((2, 4), 7.0 * version),
                        f"reshard {reshard}, assign {assign}, version {version}",
                    )


@behaviour(2)
def cast_after_a_backward_as_a_plain_module():
    plain = nn.Linear(4, 4)
    with torch.no_grad():
        plain.weight.fill_(0.25), plain.bias.fill_(0.125)
    model, x = fully_shard(copy.deepcopy(plain)), torch.arange(8.0).view(2, 4) / 8
    for m in (model, plain):
        m(x).sum().backward(), m.to(BF16)
    for got, want in zip(model.parameters(), plain.parameters(), strict=False):
        (
            equal(got.dtype, want.dtype, "dtype"),
            equal(got.requires_grad, want.requires_grad, "requires_grad"),
            same(got, want),
            same(got.grad, want.grad, "grad"),
        )
        if want.grad is not None:
            equal(got.grad.dtype, want.grad.dtype, "grad dtype")
    for m in (model, plain):
        m.zero_grad()
        for kind in (torch.optim.SGD, torch.optim.Adam):
            m(x.to(BF16)).sum().backward(), kind(m.parameters(), lr=0.01).step()
    same_models(model, plain, tol=1e-2)
