"""Does a prefetch policy bound how far all-gathers run ahead, and change nothing else?"""

import pytest
import torch.distributed as dist
from torch import nn

from sherd import PrefetchPolicy
from sherd.comm.streams import RecordingStreams, use_streams
from tests.support.models import WIDTH, Block
from tests.support.sharding import shard_children
from tests.support.training import assert_trained, made, mean_square, train_job


def stack():
    return nn.Sequential(Block(), Block(), Block())


# Prefetch


class Watched(RecordingStreams):
    """Counts gathers that were started and not yet waited for."""

    def most_in_flight(self, start, stop):
        now = most = 0
        for entry in self.log[start:stop]:
            now += (entry == ("gather", "run")) - (entry == ("compute", "follow gather"))
            most = max(most, now)
        return most


def gathers_in_flight(policy):
    """Most gathers at once in (forward, backward) of the second step, and the parameters after four."""
    streams, rank = Watched(), dist.get_rank()
    model = made(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))))
    with use_streams(streams):
        shard_children(model, reshard_after_forward=True, prefetch_policy=policy)
    mean_square(model, rank, 0).backward()
    start = len(streams.log)
    loss = mean_square(model, rank, 1)
    middle = len(streams.log)
    loss.backward()
    return streams.most_in_flight(start, middle), streams.most_in_flight(middle, len(streams.log))


LAYER_BYTES = (WIDTH * WIDTH + WIDTH) * 4

BOUNDS = [
    (PrefetchPolicy(), (2, 2)),
    (PrefetchPolicy(forward_depth=0, backward_depth=0), (1, 1)),
    (PrefetchPolicy(forward_depth=3), (4, 2)),
    (PrefetchPolicy(backward_depth=2), (2, 3)),
    (PrefetchPolicy(forward_depth=5, backward_depth=5, bytes_in_flight=0), (1, 1)),
    (PrefetchPolicy(forward_depth=100, backward_depth=100), (6, 6)),
]


@pytest.mark.parametrize(("policy", "most"), BOUNDS)
def test_a_prefetch_policy_bounds_how_far_gathers_run_ahead(world, policy, most):
    for forward, backward in world(2).run(gathers_in_flight, policy):
        # The unit that is waited for at once counts as well: at most one more than is prefetched.
        assert forward in (most[0], most[0] - 1)
        assert backward in (most[1], most[1] - 1)


def train_with_prefetch(policy):
    return train_job(shard_children(made(stack), prefetch_policy=policy), mean_square)


@pytest.mark.parametrize("policy", [policy for policy, _ in BOUNDS])
def test_a_prefetch_policy_changes_no_number(world, policy):
    assert_trained(world(2).run(train_with_prefetch, policy), stack)


def gathers_within(limit):
    forward, _ = gathers_in_flight(PrefetchPolicy(forward_depth=5, bytes_in_flight=limit))
    return forward


def test_prefetch_stays_within_the_bytes_in_flight(world):
    found = [world(2).run(gathers_within, limit * 2 * LAYER_BYTES)[0] for limit in (0, 1, 2, 50)]
    assert found == sorted(found)
    assert found[0] < found[-1]
    assert found[1] <= 3
