"""Which units are cut into parts, and what is done with a part."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sherd import CommPolicy, Flat, fully_shard
from sherd.comm.streams import HostStreams, RecordingStreams, Streams, use_streams
from sherd.engine.run.unit import Unit
from sherd.errors import PolicyError
from sherd.schedule.state import Live
from tests.engine.gradients import assert_as_plain, gradients
from tests.support.comparing import Named
from tests.support.ranks.bodies import on_threads
from tests.support.training import made

WIDTH = 32
BYTES = 4 * WIDTH * WIDTH


class Growing(nn.Module):
    """A matrix of `BYTES`, one of twice and two of four times as many. `look` is called between their backwards. The
    last norm is registered behind all weights, and is used first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.third, self.fourth = nn.Linear(2 * WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, 2 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.look = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.norm(x))
        if x.requires_grad:
            x.register_hook(lambda _: self.look())
        return self.fourth(self.third(self.second(x)))


def sharded(streams: Streams, part_bytes: int | None, **options: object) -> Growing:
    with use_streams(streams):
        return fully_shard(made(Growing), comm_policy=CommPolicy("torch", part_bytes=part_bytes), **options)


def groups(model: Growing) -> list[list[str]]:
    """The weights of each group."""
    names = [[each.name for each in weights.group.parameters] for weights in Unit.of(model).weights]
    small = [name for group in names[1:] for name in group if name.endswith(".bias")]
    assert not small, "what is small has gone to the first part"
    return [[name.removesuffix(".weight") for name in group if name.endswith(".weight")] for group in names]


WHOLE = [["first", "second", "third", "fourth", "norm"]]


@on_threads(2)
def test_a_unit_is_cut_into_parts_of_at_least_so_many_bytes():
    for part_bytes, expected in (
        (1, [["norm", "first", "second"], ["third"], ["fourth"]]),
        (4 * BYTES, [["norm", "first", "second", "third"], ["fourth"]]),
        (6 * BYTES, WHOLE),
        (None, WHOLE),
    ):
        assert groups(sharded(RecordingStreams(), part_bytes)) == expected, part_bytes


@on_threads(2)
def test_in_one_part_is_a_unit_without_streams_or_of_runs_or_kept_unsharded_or_with_the_users_own_hook():
    hooked = sharded(RecordingStreams(), 1)
    hooked.set_all_reduce_hook(lambda gradient: None)
    for model in (
        sharded(HostStreams(), 1),
        sharded(RecordingStreams(), 1, placement=Flat()),
        sharded(RecordingStreams(), 1, placements="zero2"),
        hooked,
    ):
        assert groups(model) == WHOLE


def test_parts_of_no_bytes_are_refused():
    with pytest.raises(PolicyError, match=r"part_bytes=0"):
        CommPolicy(part_bytes=0)


def backward(model: nn.Module) -> Named:
    return gradients(model, model(torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)).square().mean())


@on_threads(2)
def test_a_part_is_freed_once_its_gradients_are_there_and_all_rows_are_taken_before_the_first_is_reduced():
    streams = RecordingStreams()
    model, plain = sharded(streams, 1), backward(made(Growing))
    seen: list[list[Live]] = []
    model.look = lambda: seen.append([weights.live for weights in Unit.of(model).weights])
    for _ in range(2):
        streams.log.clear()
        assert_as_plain([backward(model)], plain)
    assert seen == [[Live.UNSHARDED] * 3, [Live.UNSHARDED, Live.SHARDED, Live.SHARDED]]
    of_the_lane = [what for lane, what in streams.log if lane == "reduce" and what in ("lend", "run")]
    assert of_the_lane == ["lend"] * 3 + ["run"] * 3, "compute would wait for the reduction of a part"
