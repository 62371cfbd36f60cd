"""What the tests of unshard contexts, flat parameters and refusals shard, and the ways to shard it."""

from operator import attrgetter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from sherd import Blocks, Flat, FullyShardedDataParallel, Owned, ShardingStrategy, fully_shard
from tests.support.comparing import assert_same
from tests.support.meshes import mesh_of
from tests.support.models import Block
from tests.support.training import made as seeded

WORDS, WIDTH = 11, 6


class TiedAndFrozen(nn.Module):
    """A tied and a one-element parameter in the root, an ordinary block, a frozen layer of odd sizes."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.block = Block(WIDTH, 5)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor([0.7]))
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embed.weight

    def forward(self, words):
        return self.head(self.frozen(self.block(self.embed(words))) * self.scale)


def made():
    """The net, with the same weights wherever it is made."""
    return seeded(TiedAndFrozen)


def words(seed=0, rank=None):
    """The batch of a rank, of this one unless another is asked for."""
    rank = dist.get_rank() if rank is None else rank
    return torch.randint(WORDS, (4, 3), generator=torch.Generator().manual_seed(100 * seed + rank))


def trained(model):
    """The parameters that are not frozen."""
    return [each for each in model.parameters() if each.requires_grad]


def backward(model, seed=0):
    model(words(seed)).square().mean().backward()


def backward_plain(net, seed=0):
    """The batches of all ranks, one after the other."""
    ranks = dist.get_world_size()
    for rank in range(ranks):
        (net(words(seed, rank)).square().mean() / ranks).backward()


def backwards(plain, model, seed=0):
    """Of the sharded model, and of the plain one."""
    backward(model, seed)
    backward_plain(plain, seed)


def steps(plain, model, optimizers, seeds):
    """Steps of both, each with its optimizer."""
    for seed in seeds:
        backwards(plain, model, seed)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def by_columns(parameter):
    """Matrices on dim 1, which need not divide: its size is that of the ranks or a multiple."""
    divides = parameter.dim() > 1 and parameter.shape[1] % dist.get_world_size() == 0
    return Shard(1) if divides else None


COMPOSED = {
    "rows": lambda: {},
    "kept": lambda: {"reshard_after_forward": False},
    "columns": lambda: {"shard_placement_fn": by_columns},
    "flat": lambda: {"placement": Flat()},
    "blocks": lambda: {"placement": Blocks(4)},
    "whole": lambda: {"placement": Owned()},
    "hybrid": lambda: {"mesh": _grid()},
}
"""By name, the arguments of `fully_shard`."""

WRAPPED = {
    "flat_param": lambda: {},
    "orig_params": lambda: {"use_orig_params": True},
    "flat_kept": lambda: {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "orig_kept": lambda: {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "use_orig_params": True},
    "flat_copied": lambda: {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "orig_copied": lambda: {"sharding_strategy": ShardingStrategy.NO_SHARD, "use_orig_params": True},
    "flat_hybrid": lambda: {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": _grid()},
    "orig_hybrid": lambda: {
        "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
        "device_mesh": _grid(),
        "use_orig_params": True,
    },
}
"""By name, the arguments of `FullyShardedDataParallel`."""

WAYS = (*COMPOSED, *WRAPPED)


def _grid():
    ranks = dist.get_world_size()
    return mesh_of((max(1, ranks // 2), min(2, ranks)))


def sharded(way, net=None, **more):
    """The net as three units: block, frozen layer, root."""
    net = made() if net is None else net
    if way in COMPOSED:
        options = {**COMPOSED[way](), **more}
        for module in (net.block, net.frozen, net):
            fully_shard(module, **options)
        return net
    options = {**WRAPPED[way](), **more}
    net.block = FullyShardedDataParallel(net.block, **options)
    net.frozen = FullyShardedDataParallel(net.frozen, **options)
    return FullyShardedDataParallel(net, **options)


def own(model):
    """The user's module of a model, wrapped or not."""
    return model.module if isinstance(model, FullyShardedDataParallel) else model


NAMES = tuple(name for name, _ in made().named_parameters(remove_duplicate=False))


def wholes(model):
    """Every parameter, by the net's own names, gathered from the shards that the modules show."""
    shown = {name: attrgetter(name)(own(model)) for name in NAMES}
    assert all(isinstance(each, DTensor) for each in shown.values()), "modules show shards"
    return {name: each.detach().full_tensor() for name, each in shown.items()}


def values(net):
    """The same of a plain net."""
    return {name: attrgetter(name)(net).detach().clone() for name in NAMES}


def assert_close(model, plain):
    """The sharded model has the values of the plain one but for the order of sums."""
    found = wholes(model)
    for name, value in values(plain).items():
        torch.testing.assert_close(found[name], value, msg=lambda said, name=name: f"{name}: {said}")


def assert_holds(model, plain):
    """The sharded model has the values of the plain one, to the bit."""
    assert_same(wholes(model), values(plain))


def assert_computes(model, plain, seed=0):
    """The sharded model's output is the plain one's."""
    torch.testing.assert_close(model(words(seed)), plain(words(seed)))
