"""One order at a time is taken away from sherd. The device must name both sides of the race, and numbers must be wrong
under pauses where the host's calls leave room for that."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType
from typing import Any
from unittest import mock

import pytest
import torch

from sherd.comm import streams
from sherd.engine.moves.gradients import Gradients
from sherd.engine.moves.weights import Unsharded, Weights
from sherd.engine.state.compared import Compared
from tests.gpu.devices import here
from tests.gpu.setting_model import Outcome, plain
from tests.gpu.setting_runs import mesh_of, sharded, trained, wrong_numbers
from tests.gpu.settings import Setting

TakeAway = Callable[[], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def without(owner: type, method: str, within: FunctionType | None = None) -> Iterator[None]:
    """`owner.method` does nothing, where `within` calls it if a function is given."""
    original = getattr(owner, method)

    def instead(*args: Any, **kwargs: Any) -> Any:
        if within is None or sys._getframe(1).f_code is within.__code__:
            return None
        return original(*args, **kwargs)

    with mock.patch.object(owner, method, instead):
        yield


LANE, HANDOFF, STREAMS = streams._StreamLane, streams._Recorded, streams.DeviceStreams
RUN = LANE.run


def at_once(lane: Any, start: streams.Run, after: Any = None) -> streams.Handoff:
    """A lane does not run behind the handoff that it is given."""
    return RUN(lane, start)


@contextlib.contextmanager
def at_once_and_uncompared() -> Iterator[None]:
    """Nor do replicas compare their values, which would raise in place of wrong numbers."""
    with mock.patch.object(LANE, "run", at_once), without(Compared, "doubt_replicas"):
        yield


def with_an_early_event(lane: Any, start: streams.Run, after: Any = None) -> streams.Handoff:
    """A handoff's event is recorded before the collective, not behind it."""
    if after is not None:
        lane._stream.wait_event(after.event)
    with lane._stream:
        handoff = streams._Recorded(lane._device, lane._stream.record_event())
        start(False)
        return handoff


def beside_compute(queues: Any, stream: torch.Stream, work: Callable[[], None]) -> None:
    """A hook on the user's stream is not ordered after compute."""
    with stream:
        work()
    torch.accelerator.current_stream().wait_stream(stream)


def without_compute_waiting(queues: Any, stream: torch.Stream, work: Callable[[], None]) -> None:
    """Compute does not wait for a hook on the user's stream."""
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        work()


def for_nobody(lane: Any, allocate: Callable[[], None]) -> None:
    """Compute writes to memory of a lane, which it does not wait for."""
    with lane._stream:
        allocate()


def on_any_stream(target: torch.Tensor, shard: torch.Tensor) -> None:
    """Shards come from host memory on a stream for which nobody waits."""
    with torch.Stream(target.device):
        target.copy_(shard, non_blocking=True)


def gather_for_nobody(setting: Setting, take_away: TakeAway) -> Outcome:
    """A gather is started and given up, and the shards are written."""
    model: Any = sharded(setting, mesh_of(setting.mesh))
    with take_away(), torch.no_grad():
        for block in model.blocks:
            block.unshard(async_op=True)
            block.reshard()
        for parameter in model.parameters():
            parameter.to_local().zero_()
    return Outcome(races=here().races())


@dataclass(frozen=True)
class Sabotage:
    """An order that is taken away, where it matters, and what the two sides of the race are called."""

    take_away: TakeAway
    setting: Setting
    first: str
    second: str
    program: Callable[..., Outcome] = trained
    shows: bool = True  # numbers are wrong under some pauses, which they are not where the race spoils what is dropped


# Their streams pause as the ranks say.
SHARD = Setting(num_blocks=3, pauses=0)
FLAT, HSDP = replace(SHARD, placement="Flat"), replace(SHARD, mesh=(2, 2), strategy="hsdp")
HOOK, OFFLOAD = replace(SHARD, hook=True), replace(SHARD, offload="pinned", built="cpu")
SUMMED_ONCE = replace(HSDP, micro_batches=3, accumulation="replicas once")

SABOTAGES = {
    "gathers behind the optimizer": Sabotage(partial(without, STREAMS, "begin_step"), SHARD, "add", "all_gather"),
    "gathers behind the optimizer's event": Sabotage(
        partial(without, LANE, "follow_event"), replace(SHARD, follows_event=True), "add", "all_gather"
    ),
    "gathered rows behind their copy": Sabotage(
        partial(without, LANE, "follow_compute", Weights._land), SHARD, "copy", "malloc"
    ),
    "freed weights behind their readers": Sabotage(
        partial(without, LANE, "follow_compute", Unsharded.free), FLAT, "mm", "malloc"
    ),
    "compute behind gathers": Sabotage(partial(without, HANDOFF, "wait", Weights._land), SHARD, "all_gather", "copy"),
    "compute behind gathers in place": Sabotage(
        partial(without, HANDOFF, "wait", Weights._land), FLAT, "all_gather", "mm"
    ),
    "optimizer behind a gather for nobody": Sabotage(
        partial(without, HANDOFF, "wait", Weights.free), SHARD, "all_gather", "zero", gather_for_nobody, False
    ),
    "gathers of a kept part behind compute": Sabotage(
        partial(without, LANE, "follow_compute", Weights._gather_into_buffers),
        replace(SHARD, mesh=(4,), reshard=2),
        "copy",
        "all_gather",
    ),
    "reductions behind gradients": Sabotage(
        partial(without, LANE, "follow_compute", Gradients.reduce), SHARD, "mul", "reduce_scatter"
    ),
    "optimizer behind reductions": Sabotage(
        partial(without, HANDOFF, "wait", Gradients.finish_reduce), SHARD, "reduce_scatter", "add"
    ),
    "sums of micro-batches behind reductions": Sabotage(
        partial(without, HANDOFF, "wait", Gradients.finish_reduce), SUMMED_ONCE, "reduce_scatter", "add"
    ),
    "dropped gradients behind their reductions": Sabotage(
        partial(without, HANDOFF, "wait", Gradients.discard),
        replace(SHARD, interrupted=True, reduce_buffers=2),
        "reduce_scatter",
        "malloc",
        shows=False,
    ),
    "rows of gradients behind the reduction before": Sabotage(
        partial(mock.patch.object, LANE, "lend", for_nobody), SHARD, "malloc", "mul"
    ),
    "sums over replicas behind reductions": Sabotage(at_once_and_uncompared, HSDP, "reduce_scatter", "all_reduce"),
    "events behind collectives": Sabotage(
        partial(mock.patch.object, LANE, "run", with_an_early_event), SHARD, "all_gather", "copy"
    ),
    "hooks behind reductions": Sabotage(
        partial(mock.patch.object, STREAMS, "run_beside", beside_compute), HOOK, "reduce_scatter", "mul"
    ),
    "optimizer behind hooks": Sabotage(
        partial(mock.patch.object, STREAMS, "run_beside", without_compute_waiting), HOOK, "div", "add"
    ),
    "host behind gradients": Sabotage(partial(without, HANDOFF, "wait_on_host"), OFFLOAD, "copy", "read"),
    "gathers behind shards from the host": Sabotage(
        partial(mock.patch, "sherd.engine.state.group.fetch_into", on_any_stream), OFFLOAD, "copy", "all_gather"
    ),
}


@pytest.mark.parametrize("name", SABOTAGES)
def test_missing_order_is_named_and_makes_numbers_wrong(name, sim_world):
    sabotage = SABOTAGES[name]
    setting = sabotage.setting
    for seed in range(1, 9):
        world = sim_world(setting.num_ranks, pause_us=1500, seed=seed)
        found = world.observe(sabotage.program, setting, sabotage.take_away).values
        for outcome in found:
            sides = [race.split(", and unordered with it ") for race in outcome.races]
            assert any(sabotage.first in one and sabotage.second in other for one, other in sides), outcome.races
        if not sabotage.shows or any(map(wrong_numbers, [setting] * len(found), found, plain(setting))):
            return
    pytest.fail("numbers are right under all pauses")
