"""A model of which one block of each kind was sharded is seen as if all of it had been."""

from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import sherd
from sherd._torch import imagined_ranks
from sherd.tools.plan.axes import auto_units
from sherd.tools.plan.sharding import sharded_of, shares_of_blocks, thin_out, with_blocks
from sherd.tools.simulate.settings import SHARES
from sherd.tools.simulate.sharded import Optimizer
from sherd.tools.simulate.work import Module, Parameter, Work

ADAMW = Optimizer(states=2, accesses=7, scalars=4, temporaries=1)


class Block(nn.Module):
    """Of three modules, so that a part of it may be a unit."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, width), nn.Linear(width, 8), nn.LayerNorm(8)


class Stack(nn.Module):
    """Blocks of two kinds in turn, around them an embedding whose weight is the head's too."""

    def __init__(self, widths, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(40, 8)
        self.blocks = nn.ModuleList(Block(width) for width in widths)
        self.head = nn.Linear(8, 40, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def shell(model):
    """The work of a model that does nothing."""
    named = dict(model.named_modules())
    numbers = {name: number for number, name in enumerate(named)}
    modules = tuple(Module(name, type(each).__name__, None) for name, each in named.items())
    parameters = tuple(
        Parameter(name, numbers[name.rpartition(".")[0]], tuple(each.shape), "float32", each.nbytes)
        for name, each in model.named_parameters()
    )
    return Work(modules, parameters, (), 1, 1)


def on(num_ranks, shard, widths, tied, thin, together=1):
    with imagined_ranks(num_ranks), torch.device("meta"):
        model = Stack(widths, tied)
        work = shell(model)
        like = thin_out(model, together) if thin else {}
        sharded = sharded_of(shard(model, mesh=init_device_mesh("cpu", (num_ranks,))), work, ADAMW)
        return like, with_blocks(sharded, like, work) if thin else sharded


def block_by_block(model, mesh, **options):
    for block in model.blocks:
        sherd.fully_shard(block, mesh=mesh, **options)
    return sherd.fully_shard(model, mesh=mesh, **options)


def parts_of_blocks(model, mesh):
    for block in model.blocks:
        sherd.fully_shard(block.up, mesh=mesh)
        sherd.fully_shard([block.down, block.norm], mesh=mesh)
    return sherd.fully_shard(model, mesh=mesh)


flat = partial(block_by_block, placement=sherd.Flat())


@pytest.mark.pairs
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("num_ranks", [3, 8])
@pytest.mark.parametrize("shard", [block_by_block, flat, parts_of_blocks, sherd.auto_shard])
def test_blocks_that_are_alike_need_not_be_sharded_each(shard, num_ranks, tied):
    widths = [16, 24] * 3 + [16]
    _, whole = on(num_ranks, shard, widths, tied, thin=False)
    like, thinned = on(num_ranks, shard, widths, tied, thin=True)
    assert Counter(like.values()) == {("blocks.0",): 3, ("blocks.1",): 2}
    assert thinned == whole


@pytest.mark.parametrize("options", [{}, {"placement": sherd.Flat()}], ids=["shard", "flat"])
@pytest.mark.parametrize("widths", [[16, 24] * 3 + [16], [16] * 6, [16, 16, 24, 24, 16, 16, 24]])
def test_pairs_of_blocks_need_not_be_sharded_each(widths, options):
    pairs = partial(auto_units, wrapping="pairs", **options)
    _, whole = on(4, pairs, widths, False, thin=False, together=2)
    like, thinned = on(4, pairs, widths, False, thin=True, together=2)
    assert like
    assert all(len(run) == 2 for run in like)
    assert [unit.name for unit in whole.units][1] == "blocks.0, blocks.1"
    assert thinned == whole


def test_blocks_that_are_no_units_are_all_needed_and_one_that_shares_a_parameter_stays():
    like, thinned = on(4, sherd.fully_shard, [16, 16], False, thin=True)
    assert like == {("blocks.1",): ("blocks.0",)}
    assert thinned is None
    model = Stack([16, 16, 16])
    model.blocks[2].norm.weight = model.blocks[1].norm.weight
    assert thin_out(model) == {}


def test_shares_of_blocks_are_different_numbers():
    eighths = tuple(eighth / 8 for eighth in range(9))
    for num, shares in (
        (1, (0.0, 1.0)),
        (2, (0.0, 0.5, 1.0)),
        (4, (0.0, 0.25, 0.5, 0.75, 1.0)),
        (5, (0.0, 0.25, 0.375, 0.625, 0.75, 1.0)),
        (8, eighths),
        (80, eighths),
    ):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(num)))
        assert shares_of_blocks(model, SHARES) == shares
