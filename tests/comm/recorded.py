"""What the lanes and compute do in one step of a small model, in order."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from sherd import CommPolicy, fully_shard
from sherd.comm.streams import RecordingStreams, use_streams

Log = list[tuple[str, str]]


class Block(nn.Module):
    """A linear layer that notes in `log` when it computes, forward and backward."""

    def __init__(self, name: str, log: Log) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.name = name
        self.log = log

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(("compute", self.name))
        hidden = self.linear(x)
        hidden.register_hook(self._in_backward)
        return hidden.relu()

    def _in_backward(self, gradient: Tensor) -> None:
        self.log.append(("compute", f"{self.name} backward"))


def steps(num_steps: int, num_blocks: int = 3, *, replicas: int = 1, **options: object) -> list[Log]:
    """On a rank: each step's log. The root has no parameters of its own."""
    streams = RecordingStreams()
    size = torch.distributed.get_world_size()
    mesh = None
    if replicas > 1:
        mesh = init_device_mesh("cpu", (replicas, size // replicas), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(*(Block(f"block {number}", streams.log) for number in range(num_blocks)))
    buffers = options.pop("reduce_buffers", None)
    # The calls of an accelerator; ranks that share memory have no lane to order.
    options.setdefault("comm_policy", CommPolicy("torch"))
    with use_streams(streams):
        for block in model:
            fully_shard(block, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
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


def unsharded_by_hand() -> Log:
    """On a rank: what `unshard()` does outside of a forward."""
    streams = RecordingStreams()
    block = Block("block", streams.log)
    with use_streams(streams):
        fully_shard(block, comm_policy=CommPolicy("torch"))
    streams.log.clear()
    block.unshard(async_op=True)
    return list(streams.log)


def step_that_may_not_read_tensors() -> bool:
    """On a rank: a learnt step in which every method that brings a tensor's values to the host raises."""

    def refused(*_: Any) -> Any:
        raise AssertionError("a tensor's values were read on the host in the middle of a step")

    with use_streams(RecordingStreams()):
        comm = CommPolicy("torch")
        model = nn.Sequential(*(fully_shard(nn.Linear(8, 8), comm_policy=comm) for _ in range(3)))
        fully_shard(model, comm_policy=comm)
    model(torch.ones(2, 8)).sum().backward()
    loss_gradient = torch.ones(2, 8)
    methods = dict.fromkeys(("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "cpu"), refused)
    with mock.patch.multiple(torch.Tensor, create=True, **methods):
        model(torch.ones(2, 8)).backward(loss_gradient)
    return model[0].weight.grad is not None
