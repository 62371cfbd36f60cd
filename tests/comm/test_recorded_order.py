"""Every lane is ordered after what it reads and before what reads it, and runs ahead where it may."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from sherd import CommPolicy, Flat, fully_shard
from sherd.comm.streams import RecordingStreams, use_streams
from tests.support.meshes import mesh_of
from tests.support.ranks.bodies import on_processes
from tests.support.sharding import sharded

Log = list[tuple[str, str]]


class Logged(nn.Module):
    """A linear layer that notes in `log` when it computes, forward and backward."""

    def __init__(self, name: str, log: Log) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.name, self.log = name, log

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(("compute", self.name))
        hidden = self.linear(x)
        hidden.register_hook(lambda _: self.log.append(("compute", f"{self.name} backward")))
        return hidden.relu()


def steps(num_steps: int, num_blocks: int = 3, *, replicas: int = 1, **options: object) -> list[Log]:
    """On a rank: each step's log. The root has no parameters of its own."""
    streams, size = RecordingStreams(), torch.distributed.get_world_size()
    mesh = mesh_of((replicas, size // replicas) if replicas > 1 else None)
    model = nn.Sequential(*(Logged(f"block {number}", streams.log) for number in range(num_blocks)))
    buffers = options.pop("reduce_buffers", None)
    # The calls of an accelerator; ranks that share memory have no lane to order.
    options.setdefault("comm_policy", CommPolicy("torch"))
    with use_streams(streams):
        sharded(model, mesh=mesh, **options)
    if buffers is not None:
        model.set_reduce_scatter_max_input_buffers(buffers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    logs: list[Log] = []
    for _ in range(num_steps):
        streams.log.clear()
        model(torch.ones(2, 8, requires_grad=True)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        logs.append(list(streams.log))
    return logs


COMPUTE_WAITS = ("compute", "follow gather")
RELEASED = ("gather", "follow compute")
GATHER = ("gather", "run")


@pytest.fixture(scope="module")
def learnt(world):
    """The third step of three blocks on two ranks, when the order is known."""
    first, other = world(2).run(steps, 3)
    assert first == other, "all ranks order their lanes alike"
    return first[2]


def places(log: Log, entry: tuple[str, str]) -> list[int]:
    return [place for place, each in enumerate(log) if each == entry]


def block(number: int, backward: bool = False) -> tuple[str, str]:
    return "compute", f"block {number}" + (" backward" if backward else "")


def test_the_whole_learnt_forward_is_this(learnt):
    assert learnt[: learnt.index(block(2)) + 1] == [
        ("gather", "follow compute"),  # the step begins: the optimizer has written the shards
        GATHER,
        COMPUTE_WAITS,
        RELEASED,
        GATHER,
        block(0),
        COMPUTE_WAITS,
        RELEASED,
        GATHER,
        block(1),
        COMPUTE_WAITS,
        RELEASED,
        block(2),
    ]


@pytest.fixture(scope="module", params=["flat", "coalesced"])
def learnt_flat(world, request):
    """The same step when unsharded parameters are views of what was gathered, or are gathered each by itself."""
    options = {"placement": Flat()} if request.param == "flat" else {"comm_policy": CommPolicy("coalesced")}
    first, *_ = world(2).run(steps, 3, **options)
    return first[2]


def test_the_whole_learnt_forward_without_copies_is_this(learnt_flat):
    assert learnt_flat[: learnt_flat.index(block(2)) + 1] == [
        ("gather", "follow compute"),
        GATHER,
        COMPUTE_WAITS,
        GATHER,  # nothing is copied out, so nothing is released: the unsharded buffer is the lane's until it is freed
        block(0),
        RELEASED,
        COMPUTE_WAITS,
        GATHER,
        block(1),
        RELEASED,
        COMPUTE_WAITS,
        block(2),
    ]


def test_whole_buffers_return_to_the_gather_lane_after_compute_has_read_them(learnt_flat):
    """Each is freed behind its block; the lane is ordered after compute before it may hand the memory out again."""
    for number in range(2):
        behind = learnt_flat[learnt_flat.index(block(number)) + 1 :]
        assert behind.index(RELEASED) < behind.index(GATHER) if GATHER in behind else True
    assert learnt_flat.count(RELEASED) == 1 + 6  # the step's begin; three blocks, forward and backward


def test_in_backward_gathers_start_before_the_compute_beside_them_and_reductions_after_it_has_written(learnt):
    backward = learnt[learnt.index(block(2)) + 1 :]
    _, second, third = places(backward, GATHER)
    assert second < backward.index(block(2, True))
    assert third < backward.index(block(1, True))
    runs = places(learnt, ("reduce", "run"))
    assert len(runs) == 3
    assert all(learnt[place - 1] == ("reduce", "follow compute") for place in runs)


def test_rows_return_to_the_gather_lane_after_compute_has_read_them(learnt):
    assert all(learnt[place + 1] == RELEASED for place in places(learnt, COMPUTE_WAITS))


def test_compute_waits_for_a_reduction_only_when_the_next_one_needs_its_buffer_or_backward_is_over(learnt):
    run, settle = ("reduce", "run"), ("compute", "follow reduce")
    assert [entry for entry in learnt if entry in {run, settle}] == [run, settle] * 3
    # The second block's backward is computed beside the first reduction.
    first_run, first_settle = learnt.index(run), learnt.index(settle)
    assert first_run < learnt.index(block(1, True)) < first_settle


def test_with_more_buffers_as_many_reductions_are_in_flight_before_compute_waits_for_one(world):
    for buffers in (2, 3):
        log = world(2).run(steps, 2, 5, reduce_buffers=buffers)[0][1]
        assert log[: log.index(("compute", "follow reduce"))].count(("reduce", "run")) == buffers


def test_the_all_reduce_lane_waits_for_the_reduce_scatter_and_compute_for_the_all_reduce_alone(world):
    log = world(4).run(steps, 2, replicas=2)[0][1]
    runs = places(log, ("all_reduce", "run"))
    assert len(runs) == 3
    for place in runs:
        assert log[place - 2 : place] == [("reduce", "run"), ("all_reduce", "follow handoff")]
    assert log.count(("compute", "follow all_reduce")) == 3
    assert ("compute", "follow reduce") not in log


def test_parameters_kept_after_forward_are_gathered_once_a_step(world):
    log = world(2).run(steps, 2, reshard_after_forward=False)[0][1]
    assert log.count(GATHER) == 3
    assert GATHER not in log[log.index(block(2)) :]


def test_a_kept_part_is_compute_memory_so_its_gather_waits_for_compute(world):
    log = world(4).run(steps, 2, reshard_after_forward=2)[0][1]
    backward = log[log.index(block(2)) + 1 :]
    runs = places(backward, GATHER)
    assert len(runs) == 3
    assert all(backward[place - 1] == RELEASED for place in runs)


@on_processes(2)
def test_a_gather_that_a_user_starts_follows_the_optimizer_too():
    streams = RecordingStreams()
    block = Logged("block", streams.log)
    with use_streams(streams):
        fully_shard(block, comm_policy=CommPolicy("torch"))
    streams.log.clear()
    block.unshard(async_op=True)
    assert streams.log == [RELEASED, GATHER]


@on_processes(2)
def test_nothing_in_a_step_reads_a_tensor_on_the_host_which_would_wait_for_the_device():
    """Every method that brings a tensor's values to the host raises in a learnt step."""

    def refused(*_: Any) -> Any:
        raise AssertionError("a tensor's values were read on the host in the middle of a step")

    with use_streams(RecordingStreams()):
        layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        model = sharded(layers, comm_policy=CommPolicy("torch"))
    model(torch.ones(2, 8)).sum().backward()
    loss_gradient = torch.ones(2, 8)
    methods = dict.fromkeys(("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "cpu"), refused)
    with mock.patch.multiple(torch.Tensor, create=True, **methods):
        model(torch.ones(2, 8)).backward(loss_gradient)
    assert model[0].weight.grad is not None


def test_two_lines_wait_for_a_device_and_none_marks_tensors_as_used_by_a_stream():
    """Those that offload needs: for gradients in host memory, and for state there that is copied or pickled."""
    package = Path(__file__).parents[2] / "sherd"
    found = [
        f"{file.relative_to(package)} .{node.attr}"
        for layer in ("schedule", "comm", "engine")
        for file in sorted((package / layer).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in {"synchronize", "record_stream"}
    ]
    assert found == ["comm/streams.py .synchronize"] * 2
