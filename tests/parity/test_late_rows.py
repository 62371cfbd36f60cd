"""Are micro-batches added up rightly whose gradients wait as they are: for rows that come late, or for one another?"""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from sherd import CommPolicy, Flat, fully_shard
from sherd.comm.streams import HostStreams, RecordingStreams, use_streams


class Branches(nn.Module):
    """One unit with three branches, any of which may be left out."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(3, 5) for _ in range(3))

    def forward(self, x, used):
        return sum(self.branches[index](x).square().sum() for index in used)


# By micro-batch: which branches are used. The last one reduces.
USED = {
    "twice the same, others never": [(0, 1), (0, 1)],
    "others in the last": [(0,), (0,), (0, 1, 2)],
    "others in the first": [(0, 1, 2), (1,), (1,)],
}


def gradients(used_by_micro, **sharding):
    """After all micro-batches, whole, of the model sharded like that, or not at all; None where there is none."""
    torch.manual_seed(0)
    model = Branches()
    if sharding:
        fully_shard(model, comm_policy=CommPolicy("torch"), **sharding)
    for number, used in enumerate(used_by_micro):
        if sharding:
            model.set_requires_gradient_sync(number == len(used_by_micro) - 1)
        model(torch.randn(2, 3), used).backward()
    found = [each.grad for each in model.parameters()]
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in found]


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


def recomputed(streams):
    """Gradients sharded, with reductions and without before the last, and not sharded."""
    found = []
    for micro_batches, is_sharded in ((1, False), (1, True), (2, False), (2, True)):
        torch.manual_seed(0)
        model = Recomputed()
        if is_sharded:
            with use_streams(streams()):
                fully_shard(model, comm_policy=CommPolicy("torch"))
        for number in range(micro_batches):
            if is_sharded:
                model.set_requires_gradient_sync(number == micro_batches - 1)
            model(torch.randn(2, 3)).backward()
        grads = [each.grad for each in model.parameters()]
        found.append([each.full_tensor() if is_sharded else each for each in grads])
    return found


@pytest.mark.parametrize("streams", [HostStreams, RecordingStreams])
def test_gradients_that_come_twice_while_others_are_awaited_add_up(world, streams):
    for plain, sharded, plain_twice, sharded_twice in world(2).run(recomputed, streams):
        torch.testing.assert_close(sharded, plain)
        torch.testing.assert_close(sharded_twice, plain_twice)


def with_each_layout(streams, used_by_micro):
    with use_streams(streams()):
        return [gradients(used_by_micro, placement=each) for each in (None, Flat())]


@pytest.mark.parametrize("streams", [HostStreams, RecordingStreams])
@pytest.mark.parametrize("used_by_micro", USED.values(), ids=USED)
def test_micro_batches_that_are_reduced_together_add_up_whatever_comes(world, used_by_micro, streams):
    for layouts in world(2).run(with_each_layout, streams, used_by_micro):
        for found in layouts:
            torch.testing.assert_close(found, gradients(used_by_micro))
