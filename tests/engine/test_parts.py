"""Which units are cut into parts, and what is done with a part?"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sherd import CommPolicy, Flat, fully_shard
from sherd.comm.streams import HostStreams, RecordingStreams, Streams, use_streams
from sherd.engine.run.seal import unit_of
from sherd.errors import PolicyError
from sherd.schedule.state import Live
from tests.support.comparing import assert_named_close, whole_grads

WIDTH = 32
BYTES = 4 * WIDTH * WIDTH


class Block(nn.Module):
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


def built() -> Block:
    torch.manual_seed(3)
    return Block()


def sharded(streams: Streams, part_bytes: int | None, **options: object) -> Block:
    model = built()
    with use_streams(streams):
        return fully_shard(model, comm_policy=CommPolicy("torch", part_bytes=part_bytes), **options)


def groups(streams: type[Streams], part_bytes: int | None, options: dict, in_the_way: bool) -> list[list[str]]:
    """The weights of each group."""
    model = sharded(streams(), part_bytes, **options)
    if in_the_way:
        model.set_all_reduce_hook(lambda gradient: None)
    names = [[each.name for each in weights.group.parameters] for weights in unit_of(model).weights]
    small = [name for group in names[1:] for name in group if name.endswith(".bias")]
    assert not small, "what is small has gone to the first part"
    return [[name.removesuffix(".weight") for name in group if name.endswith(".weight")] for group in names]


WHOLE = [["first", "second", "third", "fourth", "norm"]]


@pytest.mark.parametrize(
    ("part_bytes", "expected"),
    [
        (1, [["norm", "first", "second"], ["third"], ["fourth"]]),
        (4 * BYTES, [["norm", "first", "second", "third"], ["fourth"]]),
        (6 * BYTES, WHOLE),
        (None, WHOLE),
    ],
)
def test_a_unit_is_cut_into_parts_of_at_least_so_many_bytes(world, part_bytes, expected):
    assert world(2).run(groups, RecordingStreams, part_bytes, {}, False) == [expected] * 2


@pytest.mark.parametrize(
    ("streams", "options", "in_the_way"),
    [
        (HostStreams, {}, False),
        (RecordingStreams, {"placement": Flat()}, False),
        (RecordingStreams, {"placements": "zero2"}, False),
        (RecordingStreams, {}, True),
    ],
    ids=["without streams", "runs", "kept unsharded", "with the user's own hook"],
)
def test_in_one_part_is_a_unit(world, streams, options, in_the_way):
    assert world(2).run(groups, streams, 1, options, in_the_way) == [WHOLE] * 2


def test_parts_of_no_bytes_are_refused():
    with pytest.raises(PolicyError, match=r"part_bytes=0"):
        CommPolicy(part_bytes=0)


def backward(model: nn.Module) -> dict[str, Tensor]:
    model(torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)).square().mean().backward()
    found = whole_grads(model)
    model.zero_grad(set_to_none=True)
    return found


def two_backwards() -> tuple[list[list[Live]], list[dict[str, Tensor]], list[str]]:
    """Where each part is when backward comes to the first, the gradients, and what the reduce lane does in the second
    backward."""
    streams = RecordingStreams()
    model = sharded(streams, 1)
    seen: list[list[Live]] = []
    model.look = lambda: seen.append([weights.live for weights in unit_of(model).weights])
    found = [backward(model)]
    streams.log.clear()
    found.append(backward(model))
    return seen, found, [what for lane, what in streams.log if lane == "reduce" and what in ("lend", "run")]


def test_a_part_is_freed_once_its_gradients_are_there_and_all_rows_are_taken_before_the_first_is_reduced(world):
    plain = backward(built())
    for seen, found, of_the_lane in world(2).run(two_backwards):
        assert seen == [[Live.UNSHARDED] * 3, [Live.UNSHARDED, Live.SHARDED, Live.SHARDED]]
        assert of_the_lane == ["lend"] * 3 + ["run"] * 3, "compute would wait for the reduction of a part"
        for each in found:
            assert_named_close(each, plain, "gradient", rtol=1e-4, atol=1e-7)
