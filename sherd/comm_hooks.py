"""What reduces gradients in the place of the default, for `register_comm_hook`? The hooks that DDP and FSDP1 offer.

    hook(state, gradient)          over copies (`NO_SHARD`): sums `gradient`, 1-D, over the ranks, in place
    hook(state, gradient, shard)   over shards: fills `shard`, [n], with its part of the sum of `gradient`, [ranks * n]

Either divides, too. Names, arguments and factors are those of torch 2.13's default hooks, which fail on the CPU where
they compress; these work there and on accelerators.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from sherd._torch import reduce_scatter_single
from sherd.errors import PolicyError

__all__ = [
    "DefaultState",
    "LowPrecisionState",
    "allreduce_hook",
    "bf16_compress_hook",
    "fp16_compress_hook",
    "reduce_scatter_hook",
]


class DefaultState:
    """What the default hooks need to know: the ranks that reduce, and by what the mean is divided before and after.

    Half of the division goes in front of the sum, so that neither overflows nor underflows in a narrow dtype. The two
    factors may be written.

    Args:
        process_group: the ranks of one wrapper.

    Raises:
        PolicyError: no group.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        if process_group is None:
            raise PolicyError(
                f"Expected to pass in an explicit ProcessGroup to {type(self).__name__}: give it the wrapper's group, "
                "torch.distributed.group.WORLD for all ranks"
            )
        self.process_group = process_group
        self.world_size = dist.get_world_size(process_group)
        self.gradient_predivide_factor = _power_of_two_near_the_root(self.world_size)
        self.gradient_postdivide_factor = self.world_size / self.gradient_predivide_factor


class LowPrecisionState(DefaultState):
    """The same for hooks that compress: `parameter_type` is the dtype that gradients are to have in the end."""

    def __init__(self, process_group: dist.ProcessGroup, parameter_type: torch.dtype = torch.float32) -> None:
        super().__init__(process_group)
        self.parameter_type = parameter_type


def _power_of_two_near_the_root(number: int) -> float:
    """The first power of two that is no smaller than the root of `number`, or does not divide it."""
    power = 1
    while power * power < number and number % power == 0:
        power *= 2
    return float(power)


def allreduce_hook(state: DefaultState, grad: torch.Tensor) -> None:
    """The mean over `state`'s ranks, in place."""
    _divide(grad, state.gradient_predivide_factor)
    dist.all_reduce(grad, group=state.process_group)
    _divide(grad, state.gradient_postdivide_factor)


def reduce_scatter_hook(state: DefaultState, grad: torch.Tensor, output: torch.Tensor) -> None:
    """The mean over `state`'s ranks of this rank's part, into `output`; `grad` is scaled."""
    _divide(grad, state.gradient_predivide_factor)
    reduce_scatter_single(output, grad, group=state.process_group)
    _divide(output, state.gradient_postdivide_factor)


def fp16_compress_hook(state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """The mean, summed in float16: in place without `output`, else into it. The result is of `state.parameter_type`."""
    _compressed(torch.float16, state, grad, output)


def bf16_compress_hook(state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """The mean, summed in bfloat16: in place without `output`, else into it. The result is of
    `state.parameter_type`."""
    _compressed(torch.bfloat16, state, grad, output)


def _compressed(dtype: torch.dtype, state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None) -> None:
    """Reduce in `dtype`, in memory of the same stream, then give the caller's tensor the result as its data."""
    narrow = grad.to(dtype)
    if output is None:
        allreduce_hook(state, narrow)
        grad.data = narrow.to(state.parameter_type)
    else:
        part = torch.empty_like(output, dtype=dtype)
        reduce_scatter_hook(state, narrow, part)
        output.data = part.to(state.parameter_type)


def _divide(gradient: torch.Tensor, by: float) -> None:
    if by > 1:
        gradient.div_(by)
