"""Collectives of a user's own that tests give to a unit. They count what they are asked for."""

import math

import torch
import torch.distributed as dist

from sherd import AllGather, ReduceScatter


class Counted:
    """What was allocated, the sizes and dtype of each call, and the groups of all of them."""

    def __init__(self, waits=True):
        self.waits = waits
        self.allocated = []
        self.calls = []
        self.groups = set()

    def allocate(self, size, *, dtype, device):
        self.allocated.append((math.prod(size), dtype))
        return torch.empty(*size, dtype=dtype, device=device)

    def note(self, output_tensor, input_tensor, group):
        self.calls.append((output_tensor.numel(), input_tensor.numel(), input_tensor.dtype))
        self.groups.add(id(group))


class GatherByList(Counted, AllGather):
    """Gathers into a list of chunks."""

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.note(output_tensor, input_tensor, group)
        work = dist.all_gather(list(output_tensor.chunk(group.size())), input_tensor, group, async_op=True)
        if async_op and not self.waits:
            return work
        work.wait()
        return None


class ReduceByAllReduce(Counted, ReduceScatter):
    """Sums everything everywhere and keeps a part."""

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.note(output_tensor, input_tensor, group)
        total = input_tensor.clone()
        dist.all_reduce(total, op, group)
        output_tensor.copy_(total.chunk(group.size())[group.rank()])
