"""Micro-batches add up rightly whose gradients wait as they are: for rows that come late, or for one another."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from sherd import CommPolicy, Flat, fully_shard
from sherd.comm.streams import HostStreams, RecordingStreams, use_streams
from tests.support.comparing import assert_same, whole_grads
from tests.support.models import Wired
from tests.support.ranks.bodies import on_processes
from tests.support.training import made


def branches():
    """One unit with three branches, any of which may be left out."""
    parts = {"branches": nn.ModuleList(nn.Linear(3, 5) for _ in range(3))}
    return Wired(lambda self, x, used: sum(self.branches[index](x).square().sum() for index in used), **parts)


class Recomputed(nn.Module):
    """One unit of two groups, by dtype, one of which is used in two reentrant checkpoints: its gradients come twice,
    before the other group has any."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3, dtype=torch.float64)
        self.twice = nn.Linear(3, 3)

    def forward(self, x):
        x = self.first(x.double()).float()
        for _ in range(2):
            x = checkpoint(self.twice, x, use_reentrant=True)
        return x.square().sum()


def gradients(make, inputs, **sharding):
    """After micro-batches with these further inputs, whole, of the model sharded like that, or not at all."""
    model = made(make)
    if sharding:
        fully_shard(model, comm_policy=CommPolicy("torch"), **sharding)
    for number, further in enumerate(inputs):
        if sharding:
            model.set_requires_gradient_sync(number == len(inputs) - 1)
        model(torch.randn(2, 3), *further).backward()
    return whole_grads(model)


# By micro-batch: what else forward is given, as which branches are used. The last one reduces.
PROGRAMS = {
    "others never": (branches, [[(0, 1)], [(0, 1)]]),
    "others in the last": (branches, [[(0,)], [(0,)], [(0, 1, 2)]]),
    "others in the first": (branches, [[(0, 1, 2)], [(1,)], [(1,)]]),
    "recomputed once": (Recomputed, [[]]),
    "recomputed twice": (Recomputed, [[], []]),
}


@pytest.mark.parametrize("streams", [HostStreams, RecordingStreams])
@on_processes(2, name=PROGRAMS, placement=(None, Flat()))
def test_micro_batches_that_are_reduced_together_add_up_whatever_comes(streams, name, placement):
    with use_streams(streams()):
        found = gradients(*PROGRAMS[name], placement=placement)
    assert_same(found, gradients(*PROGRAMS[name]), rtol=None, atol=None)
