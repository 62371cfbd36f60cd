"""One order at a time is taken away from sherd. The device must name both sides of the race, and numbers must be wrong
under pauses where the host's calls leave room for that."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from sherd.comm import streams
from sherd.engine.state import group
from tests.device.test_order import num_ranks
from tests.device.training import GPT, Setting, difference, sharded, train


@contextlib.contextmanager
def without(owner: type, method: str, within: str = "") -> Iterator[None]:
    """`owner.method` does nothing, where the function called `within` calls it if one is named."""
    original = getattr(owner, method)

    def instead(*args: Any, **kwargs: Any) -> Any:
        if not within or sys._getframe(1).f_code.co_qualname == within:
            return None
        return original(*args, **kwargs)

    with mock.patch.object(owner, method, instead):
        yield


@contextlib.contextmanager
def lanes_run_at_once() -> Iterator[None]:
    """A lane does not run behind the handoff that it is given."""
    original = streams._StreamLane.run

    def run(self: Any, start: streams.Run, after: Any = None) -> streams.Handoff:
        return original(self, start)

    with mock.patch.object(streams._StreamLane, "run", run):
        yield


@contextlib.contextmanager
def events_are_early() -> Iterator[None]:
    """A handoff's event is recorded before the collective, not behind it."""

    def run(self: Any, start: streams.Run, after: Any = None) -> streams.Handoff:
        if after is not None:
            self._stream.wait_event(after.event)
        with self._stream:
            handoff = streams._Recorded(self._device, self._stream.record_event())
            start(False)
            return handoff

    with mock.patch.object(streams._StreamLane, "run", run):
        yield


@contextlib.contextmanager
def hooks_run_at_once() -> Iterator[None]:
    """A hook on the user's stream is not ordered after compute."""

    def run_beside(self: Any, stream: torch.Stream, work: Callable[[], None]) -> None:
        with stream:
            work()
        torch.accelerator.current_stream().wait_stream(stream)

    with mock.patch.object(streams.DeviceStreams, "run_beside", run_beside):
        yield


@contextlib.contextmanager
def compute_does_not_wait_for_hooks() -> Iterator[None]:
    def run_beside(self: Any, stream: torch.Stream, work: Callable[[], None]) -> None:
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            work()

    with mock.patch.object(streams.DeviceStreams, "run_beside", run_beside):
        yield


@contextlib.contextmanager
def rows_are_taken_at_once() -> Iterator[None]:
    """Compute writes to memory of a lane, which it does not wait for."""

    def lend(self: Any, allocate: Callable[[], None]) -> None:
        with self._stream:
            allocate()

    with mock.patch.object(LANE, "lend", lend):
        yield


@contextlib.contextmanager
def shards_are_fetched_on_any_stream() -> Iterator[None]:
    """Shards come from host memory on a stream for which nobody waits."""

    def fetch_into(target: torch.Tensor, shard: torch.Tensor) -> None:
        with torch.Stream(target.device):
            target.copy_(shard, non_blocking=True)

    with mock.patch.object(group, "fetch_into", fetch_into):
        yield


def gather_for_nobody(setting: Setting, take_away: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """A gather is started and given up, and the shards are written."""
    model: Any = sharded(GPT(False, False).to("sim"), setting, init_device_mesh("sim", (2,)))
    with take_away(), torch.no_grad():
        for block in model.blocks:
            block.unshard(async_op=True)
            block.reshard()
        for parameter in model.parameters():
            parameter.to_local().zero_()


@dataclass(frozen=True)
class Sabotage:
    """An order that is taken away, where it matters, and what the two sides of the race are called."""

    take_away: Callable[[], contextlib.AbstractContextManager[None]]
    setting: Setting
    first: str
    second: str
    program: Callable[..., Any] = train
    shows: bool = True  # numbers are wrong under some pauses, which they are not where the race spoils what is dropped


LANE, HANDOFF, STREAMS = streams._StreamLane, streams._Recorded, streams.DeviceStreams
SHARD, FLAT, HSDP, HOOK = Setting(), Setting(placement="Flat"), Setting(replicas=2), Setting(hook=True)
SUMMED_ONCE = Setting(replicas=2, micro_batches=3, sums_replicas_once=True)
OFFLOAD = Setting(offload=True, built_on="cpu")

SABOTAGES = {
    "gathers behind the optimizer": Sabotage(partial(without, STREAMS, "begin_step"), SHARD, "add", "all_gather"),
    "gathers behind the optimizer's event": Sabotage(
        partial(without, LANE, "follow_event"), Setting(follows_event=True), "add", "all_gather"
    ),
    "gathered rows behind their copy": Sabotage(
        partial(without, LANE, "follow_compute", "Weights._land"), SHARD, "copy", "malloc"
    ),
    "freed weights behind their readers": Sabotage(
        partial(without, LANE, "follow_compute", "Unsharded.free"), FLAT, "mm", "malloc"
    ),
    "compute behind gathers": Sabotage(partial(without, HANDOFF, "wait", "Weights._land"), SHARD, "all_gather", "copy"),
    "compute behind gathers in place": Sabotage(
        partial(without, HANDOFF, "wait", "Weights._land"), FLAT, "all_gather", "mm"
    ),
    "optimizer behind a gather for nobody": Sabotage(
        partial(without, HANDOFF, "wait", "Weights.free"), SHARD, "all_gather", "zero", gather_for_nobody, False
    ),
    "gathers of a kept part behind compute": Sabotage(
        partial(without, LANE, "follow_compute", "Weights._gather_into_buffers"),
        Setting(reshard=2),
        "copy",
        "all_gather",
    ),
    "reductions behind gradients": Sabotage(
        partial(without, LANE, "follow_compute", "Gradients.reduce"), SHARD, "mul", "reduce_scatter"
    ),
    "optimizer behind reductions": Sabotage(
        partial(without, HANDOFF, "wait", "Gradients.finish_reduce"), SHARD, "reduce_scatter", "add"
    ),
    "sums of micro-batches behind reductions": Sabotage(
        partial(without, HANDOFF, "wait", "Gradients.finish_reduce"), SUMMED_ONCE, "reduce_scatter", "add"
    ),
    "dropped gradients behind their reductions": Sabotage(
        partial(without, HANDOFF, "wait", "Gradients.discard"),
        Setting(interrupted=True, reduce_buffers=2),
        "reduce_scatter",
        "malloc",
        shows=False,
    ),
    "rows of gradients behind the reduction before": Sabotage(rows_are_taken_at_once, SHARD, "malloc", "mul"),
    "sums over replicas behind reductions": Sabotage(lanes_run_at_once, HSDP, "reduce_scatter", "all_reduce"),
    "events behind collectives": Sabotage(events_are_early, SHARD, "all_gather", "copy"),
    "hooks behind reductions": Sabotage(hooks_run_at_once, HOOK, "reduce_scatter", "mul"),
    "optimizer behind hooks": Sabotage(compute_does_not_wait_for_hooks, HOOK, "div", "add"),
    "host behind gradients": Sabotage(partial(without, HANDOFF, "wait_on_host"), OFFLOAD, "copy", "read"),
    "gathers behind shards from the host": Sabotage(shards_are_fetched_on_any_stream, OFFLOAD, "copy", "all_gather"),
}


@pytest.mark.parametrize("name", SABOTAGES)
def test_missing_order_is_named_and_makes_numbers_wrong(name, sim_world):
    sabotage = SABOTAGES[name]
    setting = sabotage.setting
    for seed in range(1, 9):
        world = sim_world(num_ranks(setting), pause_us=1500, seed=seed)
        found = world.observe(sabotage.program, setting, sabotage.take_away)
        for races in found.races:
            sides = [race.split(", and unordered with it ") for race in races]
            assert any(sabotage.first in one and sabotage.second in other for one, other in sides), races
        if not sabotage.shows or difference(found.values, setting):
            return
    pytest.fail("numbers are right under all pauses")
