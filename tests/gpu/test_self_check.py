"""The tools of the tests on a GPU do what they say, as far as a CPU can tell."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.device.trace import Span, common, joined, overlap, spans_by_stream
from sherd.comm.buffers import Buffer
from sherd.comm.streams import RecordingStreams
from tests.gpu.devices import Accelerator
from tests.gpu.load import CASES, NUM_STEPS, differs, in_host_order, spoil, spoilt_memory, tolerance, under_load
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
    case, host = CASES[name], Accelerator()
    shape = case.setting.mesh
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


def test_what_is_freed_is_spoilt_and_a_number_that_is_nan_or_another_one_is_named():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        tensor = torch.ones(8, dtype=dtype)
        assert spoil(tensor[2:4]) == tensor.nbytes, "beyond the ends of a view, too"
        assert tensor.isnan().all(), dtype
    with spoilt_memory(Accelerator()) as seen:
        buffer = Buffer(8, torch.float32, torch.device("cpu"))
        buffer.free()
        assert (seen["host"], seen["bytes"]) == (1, 32)
    buffer.allocate()
    buffer.free()
    assert seen["host"] == 1, "only inside"

    expected = [torch.ones(2) for _ in range(NUM_STEPS + 1)]
    assert differs(expected, expected, 0, 0) is None
    late = [*expected[:-1], torch.tensor([1.0, torch.nan])]
    assert differs(late, expected, 0, 0).startswith("shard 0")
    assert "1 NaN" in differs(late, expected, 0, 0)
    assert differs(expected, late, 0, 0).startswith("shard 0 should be finite")
    assert differs([torch.zeros(2), *expected[1:]], expected, 0, 0).startswith("loss 0")


def event(stream, start, duration, kind="kernel"):
    return {"ph": "X", "cat": kind, "ts": start, "dur": duration, "args": {"stream": stream}}


def test_overlap_is_the_share_of_the_lanes_time_beside_compute_the_busiest_stream():
    for spans, union in (
        ([], []),
        ([Span(3, 4), Span(0, 2)], [Span(0, 2), Span(3, 4)]),
        ([Span(0, 5), Span(1, 2), Span(5, 6)], [Span(0, 6)]),
    ):
        assert joined(spans) == union, spans
    assert common([Span(0, 4), Span(6, 8)], [Span(1, 2), Span(3, 7)]) == 1 + 1 + 1
    assert common([Span(0, 1)], [Span(1, 2)]) == 0
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
    with pytest.raises(AssertionError, match="all ran on stream 7"):
        overlap([event(7, 0, 10)])
