"""A forecast agrees with the buffers that a step really had, and with every tensor that the dispatcher saw."""

import contextlib
import gc
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2

from bench.peak import LiveBytes
from sherd import CommPolicy, Flat, MixedPrecisionPolicy, PrefetchPolicy, fully_shard
from sherd.comm.streams import HostStreams, RecordingStreams, use_streams
from sherd.engine.run.runtime import Runtime
from sherd.engine.run.sizes import sizes_of
from sherd.engine.run.unit import Unit
from sherd.engine.state import group
from sherd.memory.report import forecast_for
from sherd.memory.watch import bytes_of, held_by, watched
from sherd.schedule.moments import MemoryKind
from tests.support.comparing import assert_same, whole_grads
from tests.support.ranks.bodies import on_processes, on_threads
from tests.support.sharding import sharded

WIDTH = 128
INNER = 2048
VOCABULARY = 1024
LARGEST = 4 * WIDTH * INNER
"""Bytes of the largest tensor; what is as large as that travels alone here, which otherwise begins at 4 MiB."""


class Stack(nn.Module):
    """Blocks of 2 MiB, whose weights travel alone, between an embedding and a head of half a MiB each."""

    def __init__(self, tied=False, frozen=(), vocabulary=VOCABULARY):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        for name in frozen:
            self.get_parameter(name).requires_grad_(False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).logsumexp(-1).mean()


def made(
    tied=False,
    frozen=(),
    vocabulary=VOCABULARY,
    transport="gloo",
    depth=1,
    streams=HostStreams,
    alone=LARGEST,
    **options,
):
    torch.manual_seed(0)
    options["comm_policy"] = CommPolicy(transport=transport)
    options["prefetch_policy"] = PrefetchPolicy(forward_depth=depth, backward_depth=depth)
    with use_streams(streams()), mock.patch.object(group, "ALONE_BYTES", alone):
        return sharded(Stack(tied, frozen, vocabulary), **options)


def step(model):
    model(torch.tensor([[1, 2]])).backward()


def drop_gradients(model):
    for parameter in model.parameters():
        parameter.grad = None


def peaks(**choices):
    """Of one step: what every tensor took, what the engine's buffers took, what was said before and after."""
    model = made(**choices)
    guess = forecast_for(model, Unit.below(model))
    live = live_peak(model)
    watched_peak, told = min(watched_and_told(model) for _ in range(NUM_TRIES))
    return live, watched_peak, told, guess.peak


def watched_and_told(model):
    """What the engine's buffers took in a step, and what is said then that such a step takes."""
    with watched(model, Unit.of(model)) as watch:
        step(model)
    drop_gradients(model)
    return watch.peak.peak, forecast_for(model, Unit.below(model)).peak


def live_peak(model):
    """What every tensor takes in a step, at most; the first step is run to learn the order."""
    found = []
    gc.collect()
    gc.freeze()  # or each collection below would go through all that is imported
    with LiveBytes() as live:
        for _ in range(1 + NUM_TRIES):
            gc.collect()  # what waits in cycles would count
            live.forget_peak()
            step(model)
            found.append(live.peak)
            drop_gradients(model)
    gc.unfreeze()
    return min(found[1:])


NUM_TRIES = 3
"""The least of so many steps is what a step takes: when a thread of gloo's is late to let go of the parameters that it
has gathered, they are freed after backward of their unit and not within."""

STREAMS = {"streams": RecordingStreams, "vocabulary": 2 * VOCABULARY}
"""As on an accelerator, where nothing of the blocks travels alone; embedding and head, of 1 MiB each, do."""

STREAMS_AND_SMALL_ENDS = {"streams": RecordingStreams, "alone": LARGEST // 2}
"""The same, with an embedding and a head of half a MiB: autograd holds the last gradient, the embedding's, while the
root is reduced, which no forecast knows, and with the larger ones in half precision that would be the peak."""

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
CHOICES = {
    "default": {},
    "flat": {"placement": Flat()},
    "torch": {"transport": "torch"},
    "torch-flat": {"transport": "torch", "placement": Flat()},
    "coalesced": {"transport": "coalesced"},
    "shared": {"transport": "shared_memory"},
    "shared-flat": {"transport": "shared_memory", "placement": Flat()},
    "freed": {"reshard_after_forward": True},
    "kept": {"reshard_after_forward": False},
    "kept-flat": {"reshard_after_forward": False, "placement": Flat()},
    "depth-0": {"depth": 0},
    "depth-2": {"depth": 2},
    "depth-2-flat": {"depth": 2, "placement": Flat()},
    "half": {"mp_policy": HALF},
    "half-flat": {"mp_policy": HALF, "placement": Flat()},
    "half-shared": {"mp_policy": HALF, "transport": "shared_memory"},
    "tied": {"tied": True},
    "tied-flat": {"tied": True, "placement": Flat()},
    "frozen": {"frozen": ("embed.weight", "blocks.0.1.weight", "blocks.2.3.weight")},
    "streams": STREAMS,
    "streams-flat": {**STREAMS, "placement": Flat()},
    "streams-coalesced": {**STREAMS, "transport": "coalesced"},
    "streams-half": {**STREAMS_AND_SMALL_ENDS, "mp_policy": HALF},
    "frozen-flat": {"frozen": ("embed.weight", "blocks.0.1.weight"), "placement": Flat()},
}


@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES)
def test_the_forecast_is_what_two_ranks_measure(world, choices):
    for live, watched_peak, told, guess in world(2).run(peaks, **choices):
        # What autograd holds by itself is in no forecast: here a tied gradient, between its two uses.
        autograds = 4 * VOCABULARY * WIDTH if choices.get("tied") else 0
        assert watched_peak == pytest.approx(told, rel=0.005)
        # Nor is what gloo's own reduce-scatter holds: a copy of what it was given, seen when it is done.
        gloos = LARGEST if choices.get("transport") in ("torch", "coalesced") else 0
        assert live - autograds - gloos == pytest.approx(told, rel=0.02)
        assert guess == pytest.approx(told, rel=0.1)


@pytest.mark.parametrize("placement", [None, Flat()], ids=["shard", "flat"])
def test_the_forecast_is_what_four_ranks_measure_when_a_part_is_kept(world, placement):
    for live, watched_peak, told, _ in world(4).run(peaks, reshard_after_forward=2, placement=placement):
        assert watched_peak == pytest.approx(told, rel=0.005)
        assert live == pytest.approx(told, rel=0.02)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("placement", [None, Flat()], ids=["shard", "flat"])
@on_processes(2)
def test_with_streams_a_step_takes_less_than_under_fsdp2(placement):
    """What every tensor takes, with streams and torch's calls."""
    ours = live_peak(made(transport="torch", placement=placement, **STREAMS))
    torch.manual_seed(0)
    rival = Stack(vocabulary=STREAMS["vocabulary"])
    for unit in (*rival.blocks, rival):
        fsdp2(unit)
    assert ours < live_peak(rival)


@on_processes(2)
def test_large_rows_are_allocated_once_a_units_parameters_are_free():
    """What else a unit of four weights holds on a CPU while its gradients lie in rows, in a step after the first."""
    torch.manual_seed(0)
    block = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    model = nn.Sequential(block, nn.Linear(WIDTH, WIDTH))
    with mock.patch.object(group, "ALONE_BYTES", 4 * 4 * WIDTH * WIDTH):
        fully_shard(block, placement=Flat())
        fully_shard(model)
    step_of_linears(model)
    found = []
    with watched(model, Unit.of(model)) as watch:
        look, unit = watch.look, Unit.of(block)

        def looked(number, *turns):
            held = look(number, *turns)
            if watch.units[number] is unit:
                found.append(frozenset(bytes_of(held)))
            return held

        with mock.patch.object(watch, "look", looked):
            step_of_linears(model)
    with_rows = [kinds for kinds in found if MemoryKind.GRADIENT_ROWS in kinds]
    assert with_rows
    assert not any(MemoryKind.UNSHARDED in kinds for kinds in with_rows)


def step_of_linears(model):
    model(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
    drop_gradients(model)


@pytest.mark.parametrize("placement", [None, Flat()], ids=["shard", "flat"])
@pytest.mark.parametrize("choices", [{}, STREAMS], ids=["host", "streams"])
@on_processes(2)
def test_the_forecast_knows_of_backwards_that_are_not_reduced(placement, choices):
    """Peaks of three backwards of which the last one reduces."""
    model = made(placement=placement, **choices)
    step(model)
    drop_gradients(model)
    with watched(model, Unit.of(model)) as watch:
        for number in range(3):
            model.set_requires_gradient_sync(number == 2)
            step(model)
    assert watch.peak.peak == pytest.approx(forecast_for(model, Unit.below(model), unsynced=2).peak, rel=0.005)


@pytest.fixture
def alone():
    """The tensors that travel alone in a model of `made` do so in the models of all threads."""
    with mock.patch.object(group, "ALONE_BYTES", LARGEST):
        yield


@pytest.mark.usefixtures("alone")
@on_threads(2)
def test_freed_buffers_count_nothing_and_allocated_ones_what_their_sizes_say():
    """Bytes by kind of a block's unit: before and after a step, inside its forward, and its sizes."""
    model = made(transport="torch")
    unit = Unit.of(model.blocks[1])
    shards, unsharded, gradients = (
        sum(each) for each in zip(*((of.shards, of.unsharded, of.gradients) for of in sizes_of(unit)), strict=True)
    )
    seen = []
    model.blocks[1][2].register_forward_hook(lambda *_: seen.append(bytes_of(held_by(unit))))
    assert bytes_of(held_by(unit)) == {MemoryKind.SHARDS: shards}
    step(model)
    assert seen == [{MemoryKind.SHARDS: shards, MemoryKind.UNSHARDED: unsharded}]
    assert bytes_of(held_by(unit)) == {MemoryKind.SHARDS: shards, MemoryKind.GRADIENTS: gradients}
    drop_gradients(model)
    assert bytes_of(held_by(unit)) == {MemoryKind.SHARDS: shards}
    assert unsharded >= 2 * LARGEST
    assert shards == pytest.approx(unsharded / 2, rel=0.001)


def observers_of(unit):
    return [Runtime.over(unit).tape.observer, *(gradients._observer for gradients in unit.gradients)]


@pytest.mark.usefixtures("alone")
@on_threads(2)
def test_a_watched_step_computes_what_any_other_does_and_nothing_is_left_of_a_watch_that_an_exception_ends():
    model = made(transport="torch")
    step(model)
    drop_gradients(model)
    step(model)
    expected, unit = whole_grads(model), Unit.of(model)
    drop_gradients(model)
    with contextlib.suppress(ZeroDivisionError), watched(model, unit):
        step(model)
        within = observers_of(unit)
        raise ZeroDivisionError
    assert_same(whole_grads(model), expected)
    assert len(within) > 1
    assert None not in within
    assert observers_of(unit) == [None] * len(within)


def when_backward_begins(is_unit):
    """Of a step: the bytes of unsharded parameters, and how often backward then gathers the embedding."""
    torch.manual_seed(0)
    model = Stack()
    sharded(model, units=[*([model.embed] if is_unit else []), *model.blocks, model])
    if is_unit:
        model.embed.set_unshard_in_backward(False)
    step(model)
    loss, units = model(torch.tensor([[1, 2]])), Unit.below(model)
    held = sum(bytes_of(held_by(unit)).get(MemoryKind.UNSHARDED, 0) for unit in units)
    weights = Unit.of(model.embed if is_unit else model).weights[0]
    with mock.patch.object(weights, "gather", wraps=weights.gather) as gather:
        loss.backward()
    assert model.embed.weight.grad is not None
    return held, gather.call_count


def test_an_embedding_that_is_a_unit_is_freed_behind_its_forward_and_its_backward_need_not_gather_it(threads):
    in_root, as_unit = (threads(2).run(when_backward_begins, each) for each in (False, True))
    for (kept, _), (less, gathers) in zip(in_root, as_unit, strict=True):
        assert kept - less == 4 * VOCABULARY * WIDTH
        assert gathers == 0
