"""Which collectives of a user's own do tests give to a unit? They count what they are asked for."""

import math

import torch
import torch.distributed as dist

from sherd import AllGather, ReduceScatter


class GatherByList(AllGather):
    """Gathers into a list of chunks; counts what it is asked for."""

    def __init__(self, waits):
        self.waits = waits
        self.allocated = []
        self.calls = []
        self.groups = set()

    def allocate(self, size, *, dtype, device):
        self.allocated.append((math.prod(size), dtype))
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.calls.append((output_tensor.numel(), input_tensor.numel(), input_tensor.dtype))
        self.groups.add(id(group))
        work = dist.all_gather(list(output_tensor.chunk(group.size())), input_tensor, group, async_op=True)
        if async_op and not self.waits:
            return work
        work.wait()
        return None


class ReduceByAllReduce(ReduceScatter):
    """Sums everything everywhere and keeps a part; counts what it is asked for."""

    def __init__(self):
        self.allocated = []
        self.calls = []
        self.groups = set()

    def allocate(self, size, *, dtype, device):
        self.allocated.append((math.prod(size), dtype))
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.calls.append((output_tensor.numel(), input_tensor.numel(), input_tensor.dtype))
        self.groups.add(id(group))
        total = input_tensor.clone()
        dist.all_reduce(total, op, group)
        output_tensor.copy_(total.chunk(group.size())[group.rank()])
