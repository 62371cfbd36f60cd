"""Programs of collectives that run alike on gloo and on the simulated device, with whole numbers, so that results are
equal bit for bit in whatever order ranks are added up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

# torch 2.14 gives them new names, and warns of the old ones.
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

ROUNDS = 3
SIZE = 6


@dataclass(frozen=True)
class Ranks:
    """Where a program runs: on this device, with `async_op` or without."""

    device: str
    is_async: bool

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def size(self) -> int:
        return dist.get_world_size()

    def mine(self, numel: int = SIZE, salt: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        """This rank's numbers, which compute has just written."""
        return numbers(self.rank, numel, salt, dtype, self.device)

    def empty(self, numel: int = SIZE, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device)

    def wait(self, work: dist.Work | None) -> None:
        assert (work is not None) == self.is_async or self.device == "cpu"
        if work is not None:
            work.wait()


def numbers(
    rank: int, numel: int = SIZE, salt: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Tensor:
    """What `Ranks.mine` is on that rank."""
    return ((torch.arange(numel, device=device) * (rank + 2) + salt + rank) % 7 + 1).to(dtype)


def all_reduce(ranks: Ranks) -> Iterator[Tensor]:
    for salt in range(ROUNDS):
        for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT):
            x = ranks.mine(salt=salt)
            ranks.wait(dist.all_reduce(x, op=op, async_op=ranks.is_async))
            yield x * 2


def all_reduce_of_other_dtypes(ranks: Ranks) -> Iterator[Tensor]:
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8):
        x = ranks.mine(dtype=dtype)
        ranks.wait(dist.all_reduce(x, async_op=ranks.is_async))
        yield x


def all_gather(ranks: Ranks) -> Iterator[Tensor]:
    for salt in range(ROUNDS):
        parts = [ranks.empty() for _ in range(ranks.size)]
        ranks.wait(dist.all_gather(parts, ranks.mine(salt=salt), async_op=ranks.is_async))
        yield from (part + 1 for part in parts)


def all_gather_single(ranks: Ranks) -> Iterator[Tensor]:
    for salt in range(ROUNDS):
        whole = ranks.empty(ranks.size * SIZE)
        ranks.wait(gather_single(whole, ranks.mine(salt=salt), async_op=ranks.is_async))
        yield whole + 1


def all_gather_in_place(ranks: Ranks) -> Iterator[Tensor]:
    whole = ranks.empty(ranks.size * SIZE)
    own = whole[ranks.rank * SIZE : (ranks.rank + 1) * SIZE].copy_(ranks.mine())
    ranks.wait(gather_single(whole, own, async_op=ranks.is_async))
    yield whole


def reduce_scatter(ranks: Ranks) -> Iterator[Tensor]:
    for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT):
        parts = [ranks.mine(salt=salt) for salt in range(ranks.size)]
        out = ranks.empty()
        ranks.wait(dist.reduce_scatter(out, parts, op=op, async_op=ranks.is_async))
        yield out + 1


def reduce_scatter_single(ranks: Ranks) -> Iterator[Tensor]:
    for salt in range(ROUNDS):
        out = ranks.empty()
        whole = ranks.mine(ranks.size * SIZE, salt)
        ranks.wait(scatter_single(out, whole, async_op=ranks.is_async))
        yield out + 1


def broadcast_and_reduce(ranks: Ranks) -> Iterator[Tensor]:
    for root in range(ranks.size):
        x, y = ranks.mine(salt=root), ranks.mine(salt=root + 1)
        ranks.wait(dist.broadcast(x, root, async_op=ranks.is_async))
        ranks.wait(dist.reduce(y, root, async_op=ranks.is_async))
        yield from [x, y] if ranks.rank == root else [x]


def gather_and_scatter(ranks: Ranks) -> Iterator[Tensor]:
    for root in range(ranks.size):
        is_root = ranks.rank == root
        parts = [ranks.empty() for _ in range(ranks.size)] if is_root else None
        ranks.wait(dist.gather(ranks.mine(salt=root), parts, root, async_op=ranks.is_async))
        out, given = ranks.empty(), [ranks.mine(salt=salt) for salt in range(ranks.size)] if is_root else None
        ranks.wait(dist.scatter(out, given, root, async_op=ranks.is_async))
        yield from [*(parts or []), out]


def all_to_all_single(ranks: Ranks) -> Iterator[Tensor]:
    even = ranks.empty(ranks.size * 2)
    ranks.wait(dist.all_to_all_single(even, ranks.mine(ranks.size * 2), async_op=ranks.is_async))
    # Rank a sends a + b + 1 elements to rank b: nothing is equal but what two ranks exchange.
    splits = [ranks.rank + other + 1 for other in range(ranks.size)]
    uneven, given = ranks.empty(sum(splits)), ranks.mine(sum(splits))
    ranks.wait(dist.all_to_all_single(uneven, given, splits, splits, async_op=ranks.is_async))
    yield from (even, uneven)


def messages_round_a_ring(ranks: Ranks) -> Iterator[Tensor]:
    after, before = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
    for salt in range(ROUNDS):
        x, y = ranks.mine(salt=salt), ranks.empty()
        sending = dist.isend(x, after)
        receiving = dist.irecv(y, before)
        sending.wait()
        receiving.wait()
        yield y + x


ON_GLOO_TOO: dict[str, Callable[[Ranks], Iterator[Tensor]]] = {
    each.__name__: each
    for each in (
        all_reduce,
        all_reduce_of_other_dtypes,
        all_gather,
        all_gather_single,
        all_gather_in_place,
        reduce_scatter,
        reduce_scatter_single,
        broadcast_and_reduce,
        gather_and_scatter,
        all_to_all_single,
        messages_round_a_ring,
    )
}


# What gloo has not, each with what it gives by hand.

Pairs = list[tuple[Tensor, Tensor]]


def averages(ranks: Ranks) -> Pairs:
    x, out = ranks.mine(), ranks.empty()
    ranks.wait(dist.all_reduce(x, op=ReduceOp.AVG, async_op=ranks.is_async))
    whole = ranks.mine(ranks.size * SIZE)
    ranks.wait(scatter_single(out, whole, op=ReduceOp.AVG, async_op=ranks.is_async))
    mean = sum(numbers(rank) for rank in range(ranks.size)) / ranks.size
    wholes = sum(numbers(rank, ranks.size * SIZE) for rank in range(ranks.size)) / ranks.size
    return [(x, mean), (out, wholes.view(ranks.size, SIZE)[ranks.rank])]


def scaled_sums(ranks: Ranks) -> Pairs:
    total = sum(numbers(rank) for rank in range(ranks.size))
    x, y = ranks.mine(), ranks.mine()
    ranks.wait(dist.all_reduce(x, op=dist._make_nccl_premul_sum(0.25), async_op=ranks.is_async))
    factor = torch.full((1,), 4.0, device=ranks.device) * 2
    ranks.wait(dist.all_reduce(y, op=dist._make_nccl_premul_sum(factor), async_op=ranks.is_async))
    return [(x, total * 0.25), (y, total * 8)]


def uneven_lists(ranks: Ranks) -> Pairs:
    numels = [rank * 2 for rank in range(ranks.size)]  # of rank 0: none
    parts = [ranks.empty(numel) for numel in numels]
    ranks.wait(dist.all_gather(parts, ranks.mine(numels[ranks.rank]), async_op=ranks.is_async))
    out = ranks.empty(numels[ranks.rank])
    given = [ranks.mine(numel, salt=3) for numel in numels]
    ranks.wait(dist.reduce_scatter(out, given, async_op=ranks.is_async))
    total = sum(numbers(rank, numels[ranks.rank], 3) for rank in range(ranks.size))
    gathered = [(part, numbers(rank, numel)) for rank, (part, numel) in enumerate(zip(parts, numels, strict=True))]
    return [*gathered, (out, total)]


def lists_to_all(ranks: Ranks) -> Pairs:
    def between(one: int, other: int) -> int:
        return 1 + one + other

    given = [ranks.mine(between(ranks.rank, other), salt=other) for other in range(ranks.size)]
    out = [ranks.empty(between(ranks.rank, other)) for other in range(ranks.size)]
    ranks.wait(dist.all_to_all(out, given, async_op=ranks.is_async))
    return [(each, numbers(other, between(ranks.rank, other), ranks.rank)) for other, each in enumerate(out)]


def flags(ranks: Ranks) -> Pairs:
    x = ranks.mine(dtype=torch.int64).eq(3)
    ranks.wait(dist.all_reduce(x, async_op=ranks.is_async))
    return [(x, torch.stack([numbers(rank, dtype=torch.int64).eq(3) for rank in range(ranks.size)]).any(0))]


ONLY_AS_NCCL: dict[str, Callable[[Ranks], Pairs]] = {
    each.__name__: each for each in (averages, scaled_sums, uneven_lists, lists_to_all, flags)
}
