"""A prefetch policy bounds how far all-gathers run ahead, and changes nothing else."""

import pytest
import torch.distributed as dist
from torch import nn

from sherd import PrefetchPolicy
from sherd.comm.streams import RecordingStreams, use_streams
from tests.api.checks import assert_trains, on_ranks
from tests.support.models import WIDTH
from tests.support.sharding import sharded
from tests.support.training import made, mean_square


def layers():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))


class Watched(RecordingStreams):
    """Counts gathers that were started and not yet waited for."""

    def most_in_flight(self, start, stop):
        now = most = 0
        for entry in self.log[start:stop]:
            now += (entry == ("gather", "run")) - (entry == ("compute", "follow gather"))
            most = max(most, now)
        return most


def gathers_in_flight(policy):
    """Most gathers at once in (forward, backward) of the second step."""
    streams, rank = Watched(), dist.get_rank()
    with use_streams(streams):
        model = sharded(made(layers), reshard_after_forward=True, prefetch_policy=policy)
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
@on_ranks(2)
def test_a_prefetch_policy_bounds_how_far_gathers_run_ahead_and_changes_no_number(policy, most):
    # The unit that is waited for at once counts as well: at most one more than is prefetched.
    for found, bound in zip(gathers_in_flight(policy), most, strict=True):
        assert found in (bound, bound - 1)
    assert_trains(sharded(made(layers), prefetch_policy=policy), layers)


@on_ranks(2)
def test_prefetch_stays_within_the_bytes_in_flight():
    found = []
    for limit in (0, 1, 2, 50):
        policy = PrefetchPolicy(forward_depth=5, bytes_in_flight=limit * 2 * LAYER_BYTES)
        found.append(gathers_in_flight(policy)[0])
    assert found == sorted(found)
    assert found[0] < found[-1]
    assert found[1] <= 3
