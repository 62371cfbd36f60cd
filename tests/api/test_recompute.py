"""Selective checkpointing keeps what it says, computes the rest again, and leaves every number as it is."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import sherd
from sherd.api.recompute import KeptResults
from tests.api.checks import assert_trains
from tests.support.models import Wired, noise
from tests.support.ranks.bodies import on_processes

WIDTH, LENGTH = 16, 8


class Attention(nn.Module):
    """Three products, attention, a product that is kept by its number, and what a unit inside adds."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        query, key, value = (head(x).unsqueeze(1) for head in self.heads)
        return x + torch.tanh(self.out(F.scaled_dot_product_attention(query, key, value).squeeze(1)))


class Operations(TorchDispatchMode):
    """Counts products and attention."""

    def __init__(self):
        super().__init__()
        self.count = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func.overloadpacket)
        self.count[name] = self.count.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def made(contexts):
    torch.manual_seed(0)
    call = partial(checkpoint, use_reentrant=False, **({"context_fn": contexts} if contexts else {}))
    blocks = nn.ModuleList(Attention() for _ in range(2))
    return Wired(lambda self, x: call(self.blocks[1], call(self.blocks[0], x)), blocks=blocks)


def attend(model, rank, step):
    return model(noise(step, rank, 4, LENGTH, WIDTH)).square().mean()


@pytest.mark.parametrize("unit_inside", [False, True])
@on_processes(2)
def test_a_sharded_model_trains_as_a_plain_one(unit_inside):
    model = made(sherd.selective_contexts)
    for block in model.blocks:
        for each in (*block.heads, block) if unit_inside else (block,):
            sherd.fully_shard(each)
    assert_trains(sherd.fully_shard(model), partial(made, None), attend)


def count_in_backward(contexts):
    loss = made(contexts)(torch.ones(4, LENGTH, WIDTH)).sum()
    with Operations() as seen:
        loss.backward()
    return seen.count


def test_attention_and_every_second_product_are_not_computed_again():
    full, selective = count_in_backward(None), count_in_backward(sherd.selective_contexts)
    attention = "aten._scaled_dot_product_flash_attention_for_cpu"
    assert (full[attention], selective.get(attention, 0)) == (2, 0)
    assert full["aten.mm"] - selective["aten.mm"] == 4  # of query and value, in each of two blocks
    assert full["aten.addmm"] == selective["aten.addmm"] == 2  # of `out`, the fourth product


def test_each_forward_counts_its_products_anew():
    kept = KeptResults()
    assert [kept.keeps("aten.mm") for _ in range(5)] == [True, False, True, False, True]
    assert kept.keeps("aten._scaled_dot_product_flash_attention")
    assert not kept.keeps("aten.mul")
    assert not kept.keeps("aten.addmm")
    assert KeptResults().keeps("aten.addmm")
