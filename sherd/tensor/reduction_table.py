"""The table of reductions: each row says how the values of all ranks become one.

    row        a rank sends              ranks join by    a rank without elements sends    the answer
    SUM        its sum                   SUM              0                                the joined sum
    LARGEST    its largest, has it nan   MAX              the lowest number, no nan        nan if any rank has one
    norm p     its norm to the power p   SUM              0                                the p-th root

Reductions of ragged tensors, gradient clipping and the gradient scaler all use these rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from sherd._torch import local_tensor
from sherd.comm.failures import announced, named

Change = Callable[[torch.Tensor], torch.Tensor]
# MPS and Gaudi have no float64; Ascend has it, but its all-reduce refuses it.
WITHOUT_FLOAT64 = ("mps", "hpu", "npu")


def _as_it_is(values: torch.Tensor) -> torch.Tensor:
    return values


@dataclass(frozen=True, slots=True)
class ReductionRow:
    """One row of the table. Its functions take one value, or a vector of values that are reduced side by side.

    Attributes:
        op: joins the parts of all ranks, in an all-reduce.
        fold: the same on one rank: it reduces all elements, or those along the dim that it is given.
        neutral: the value of a rank that has no elements.
        send: makes the part that a rank sends of the rank's values.
        finish: makes the answer of the joined parts.
        name: says what is joined, where ranks may differ in it.
    """

    op: dist.ReduceOp.RedOpType
    fold: Callable[..., torch.Tensor]
    neutral: float
    send: Change = _as_it_is
    finish: Change = _as_it_is
    name: str = ""

    def nothing(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        value = self.neutral
        if math.isinf(value) and not dtype.is_floating_point:
            limits = torch.iinfo(dtype)
            value = limits.max if value > 0 else limits.min
        return torch.full((), value, dtype=dtype, device=device)

    def join(self, parts: torch.Tensor, groups: Iterable[dist.ProcessGroup | None], what: str) -> torch.Tensor:
        """Join the parts of all ranks, in place, over one process group after the other. `what` is for error texts."""
        groups = list(groups)
        with announced(groups, f"reduces {parts.numel()} numbers{self.name}", what):
            for group in groups:
                with named(what, group):
                    dist.all_reduce(parts, op=self.op, group=group)
        return parts

    def over(self, values: torch.Tensor, groups: Iterable[dist.ProcessGroup]) -> torch.Tensor:
        """Reduce this rank's values of a ragged tensor over the groups that shard it. May write into `values`."""
        return self.finish(self.join(self.send(values), groups, "a reduction of a RaggedDTensor"))


# Backends differ in the MAX and the MIN of nan. So ranks send a mark with each value that is nan: 1, which a MAX
# keeps, or -1, which a MIN keeps (test_what_is_not_finite_on_one_rank_is_seen_by_all,
# test_whole_numbers_complex_numbers_nan_empty_and_single_ones).


def _beside_nan(values: torch.Tensor, mark: int = 1) -> torch.Tensor:
    is_nan = values.isnan()
    return torch.stack([values.masked_fill(is_nan, 0), mark * is_nan.to(values.dtype)])


def _nan_again(parts: torch.Tensor) -> torch.Tensor:
    values, is_nan = parts
    return torch.where(is_nan != 0, math.nan, values) if parts.dtype.is_floating_point else values


_Op = dist.ReduceOp
SUM = ReductionRow(_Op.SUM, torch.sum, 0.0)
PRODUCT = ReductionRow(_Op.PRODUCT, torch.prod, 1.0)
ANY = ReductionRow(_Op.MAX, torch.amax, 0.0)
ALL = ReductionRow(_Op.MIN, torch.amin, 1.0)
LARGEST = ReductionRow(_Op.MAX, torch.amax, -math.inf, _beside_nan, _nan_again)
SMALLEST = ReductionRow(_Op.MIN, torch.amin, math.inf, partial(_beside_nan, mark=-1), _nan_again)
LARGEST_MAGNITUDE = ReductionRow(_Op.MAX, torch.amax, 0.0, _beside_nan, _nan_again)


@lru_cache(maxsize=64)
def norm_of_order(power: float) -> ReductionRow:
    """Returns the row that joins the norms of shards. The norm of order 0 is the number of elements that are not 0."""
    extremes = {math.inf: LARGEST_MAGNITUDE, -math.inf: SMALLEST, 0: SUM}
    neutral = 0.0 if power > 0 else math.inf
    of_powers = ReductionRow(
        _Op.SUM, torch.sum, neutral, lambda norms: norms**power, lambda total: total ** (1 / power)
    )
    return replace(extremes.get(power, of_powers), name=f" for the norm of order {power:g}")


def local_norms(shards: Sequence[torch.Tensor], power: float, foreach: bool) -> list[torch.Tensor]:
    """Returns the norm of each shard of one dtype. Norms of 16-bit floats are float32: they are added up later."""
    dtype = torch.float32 if shards[0].dtype.itemsize < 4 else None
    if foreach:
        return list(torch._foreach_norm(list(shards), power, dtype=dtype))
    return [torch.linalg.vector_norm(shard, power, dtype=dtype) for shard in shards]


def by_dtype(shards: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Returns the shards that have elements, in lists of one device and dtype."""
    lists: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for shard in shards:
        if shard.numel():
            lists.setdefault((shard.device, shard.dtype), []).append(shard)
    return list(lists.values())


def local_gradient_of(grad: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a gradient: the memory itself."""
    if isinstance(grad, DTensor):
        return local_tensor(grad)
    if grad.is_sparse and not grad.is_coalesced():
        # The value at an index that occurs twice is the sum of both.
        grad = parameter.grad = grad.coalesce()
    return grad.values() if grad.is_sparse else grad


def sum_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Returns the dtype in which ranks send parts of a sum: the widest of the device, so that the sum loses little."""
    if dtype.is_complex:
        return torch.complex128 if device.type not in WITHOUT_FLOAT64 else torch.complex64
    if dtype.is_floating_point:
        return torch.float64 if device.type not in WITHOUT_FLOAT64 else torch.float32
    return torch.int64
