"""What does a step of several micro-batches cost? It can reduce gradients after each, or once at the end.

Both give the same gradients. Reducing each time keeps gradients sharded; reducing once sends fewer bytes but
holds whole gradients between micro-batches.

    torchrun --nproc-per-node 2 examples/gradient_accumulation.py
"""

import copy
import time

import torch
import torch.distributed as dist
from torch import nn

from sherd import fully_shard

NUM_MICRO_BATCHES = 4


def sharded(plain: nn.Sequential) -> nn.Sequential:
    """A sharded copy of `plain`, one unit per layer."""
    model = copy.deepcopy(plain)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model


def accumulate(model: nn.Module, micro_batches: list[torch.Tensor], *, reduce_once: bool) -> None:
    """Leave on `model` the gradients of the mean loss over all micro-batches and ranks."""
    for index, batch in enumerate(micro_batches):
        last = index == len(micro_batches) - 1
        if reduce_once:
            model.set_requires_gradient_sync(last)  # no reduce-scatter before the last one
            model.set_reshard_after_backward(last)  # and parameters stay whole: no all-gather between
        model.set_is_last_backward(last)
        loss = model(batch).square().mean() / len(micro_batches)
        loss.backward()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(6)))
    data = torch.Generator().manual_seed(1 + rank)
    micro_batches = [torch.randn(16, 256, generator=data) for _ in range(NUM_MICRO_BATCHES)]

    gradients = {}
    for reduce_once in (False, True):
        model = sharded(plain)
        accumulate(model, micro_batches, reduce_once=reduce_once)  # the first step learns the order of units
        times = []
        for _ in range(5):
            model.zero_grad()
            start = time.perf_counter()
            accumulate(model, micro_batches, reduce_once=reduce_once)
            times.append(time.perf_counter() - start)
        gradients[reduce_once] = [param.grad.full_tensor() for param in model.parameters()]
        if rank == 0:
            how = "once at the end " if reduce_once else "every micro-batch"
            print(f"reduced {how:17s} {1e3 * min(times):6.1f} ms for {NUM_MICRO_BATCHES} micro-batches, the best of 5")

    worst = max((a - b).abs().max().item() for a, b in zip(*gradients.values(), strict=True))
    if rank == 0:
        print(f"largest difference between the two: {worst:.1e}")
    assert worst < 1e-6
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
