"""Do the tools of the tests on a GPU do what they say? As far as a CPU can tell."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import sherd
from bench.device.trace import Span, common, joined, overlap, spans_by_stream
from sherd.comm.buffers import Buffer
from sherd.comm.streams import RecordingStreams
from tests.gpu.devices import Host
from tests.gpu.load import CASES, NUM_STEPS, differs, in_host_order, spoil, spoilt_memory, tolerance, under_load
from tests.gpu.training import RECIPES, assert_same, train_here, train_plain
from tests.support.ranks.forked import answer_of

RUNS_ON_CPU = True

# Some of the forty: each placement, each way to run ahead, and each kind of memory.
CHECKED = [
    "Shard(0), two ahead, freed",
    "Shard(0), after backward, kept in part",
    "Shard(0), replicated, unsynced",
    "Shard(0), own collectives",
    "Flat, not ahead, kept in part",
    "Flat, bfloat16",
    "Flat, unsynced",
    "Flat, two reductions",
]


def run_case(name):
    """What differs from the run in host order, how much was spoilt: in that order, and recorded."""
    case, host = CASES[name], Host()
    shape = (case.replicas, 4 // case.replicas) if case.replicas > 1 else (4,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    expected, runs = in_host_order(case, mesh, host), []
    for queues in (None, RecordingStreams()):
        found, seen = under_load(case, mesh, host, queues)
        runs.append((differs(found, expected, **tolerance(case)), seen["bytes"]))
    return runs


def run_cases(names):
    """As rank 0 of four that do not exist, as on a GPU."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    return {name: run_case(name) for name in names}


def test_nothing_reads_what_was_freed_in_host_order_and_as_with_streams():
    for name, runs in answer_of(run_cases, CHECKED).items():
        for difference, num_bytes in runs:
            assert difference is None, name
            assert num_bytes > 0, name


# Each recipe once, and each way to train.
TRAININGS = [
    ("float32", "torch's calls", {}),
    ("bfloat16", "torch's calls", {"placement": sherd.Flat()}),
    ("recomputed", "own collectives", {}),
    ("unsynced", "own collectives", {"placement": sherd.Flat()}),
    ("clipped", "wrapper", {"use_orig_params": False}),
    ("float16, scaled", "wrapper", {"use_orig_params": True}),
]


def train_on_cpu():
    return [train_here(RECIPES[recipe], how, torch.device("cpu"), options) for recipe, how, options in TRAININGS]


def test_the_recipes_train_as_the_plain_model(world):
    expected = [train_plain(RECIPES[recipe], torch.device("cpu"), num_ranks=2) for recipe, _, _ in TRAININGS]
    for runs in world(2).run(train_on_cpu):
        for (recipe, _, _), found, plain in zip(TRAININGS, runs, expected, strict=True):
            assert_same(found, plain, RECIPES[recipe], own_losses=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_spoilt_memory_is_nan_in_every_dtype_beyond_a_views_ends_too(dtype):
    tensor = torch.ones(8, dtype=dtype)
    assert spoil(tensor[2:4]) == tensor.nbytes
    assert tensor.isnan().all()


def test_a_buffer_is_spoilt_when_it_is_freed_and_only_inside():
    with spoilt_memory(Host()) as seen:
        buffer = Buffer(8, torch.float32, torch.device("cpu"))
        buffer.free()
        assert (seen["host"], seen["bytes"]) == (1, 32)
    buffer.allocate()
    buffer.free()
    assert seen["host"] == 1


def test_what_is_nan_or_another_number_is_named():
    expected = [torch.ones(2) for _ in range(NUM_STEPS + 1)]
    assert differs(expected, expected, 0, 0) is None
    late = [*expected[:-1], torch.tensor([1.0, torch.nan])]
    assert differs(late, expected, 0, 0).startswith("shard 0")
    assert "1 NaN" in differs(late, expected, 0, 0)
    assert differs(expected, late, 0, 0).startswith("shard 0 should be finite")
    assert differs([torch.zeros(2), *expected[1:]], expected, 0, 0).startswith("loss 0")


@pytest.mark.parametrize(
    ("spans", "union"),
    [
        ([], []),
        ([Span(3, 4), Span(0, 2)], [Span(0, 2), Span(3, 4)]),
        ([Span(0, 5), Span(1, 2), Span(5, 6)], [Span(0, 6)]),
    ],
)
def test_spans_are_joined_where_they_touch(spans, union):
    assert joined(spans) == union


def test_common_time_is_that_in_which_both_are_busy():
    assert common([Span(0, 4), Span(6, 8)], [Span(1, 2), Span(3, 7)]) == 1 + 1 + 1
    assert common([Span(0, 1)], [Span(1, 2)]) == 0


def event(stream, start, duration, kind="kernel"):
    return {"ph": "X", "cat": kind, "ts": start, "dur": duration, "args": {"stream": stream}}


def test_overlap_is_the_share_of_the_lanes_time_beside_compute_the_busiest_stream():
    events = [
        event(7, 0, 10),
        event(7, 12, 10),
        event(13, 8, 4, "gpu_memcpy"),  # half of it beside compute
        event(20, 15, 2, "gpu_memset"),  # all of it
        {"ph": "X", "cat": "cpu_op", "ts": 0, "dur": 100, "args": {}},
        {"ph": "i", "cat": "kernel"},
    ]
    assert spans_by_stream(events) == {7: [Span(0, 10), Span(12, 22)], 13: [Span(8, 12)], 20: [Span(15, 17)]}
    assert overlap(events) == (2 + 2) / 6


def test_with_one_stream_there_is_no_overlap_to_speak_of():
    with pytest.raises(AssertionError, match="all ran on stream 7"):
        overlap([event(7, 0, 10)])
