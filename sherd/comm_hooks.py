"""Communication hooks for `register_comm_hook`, which reduce gradients in the place of the default reduction.

    hook(state, gradient)          over copies (`NO_SHARD`): averages `gradient`, [n], over the ranks, in place
    hook(state, gradient, shard)   over shards: fills `shard`, [n], with this rank's part of the average of `gradient`,
                                   [ranks * n]

Names, arguments and factors are those of torch 2.13's default hooks. The hooks that compress also work on the CPU,
where torch's hooks fail. Hooks have the form of DDP (Li et al., "PyTorch Distributed: Experiences on Accelerating Data
Parallel Training", VLDB 2020).
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
    """The state of the default hooks: the ranks that reduce, and the divisors before and after the sum.

    Gradients are divided by about the root of the number of ranks before the sum and by the rest after it, so that they
    neither overflow nor underflow in a narrow dtype. A user may set both divisors.

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
    """The state of the hooks that compress.

    Args:
        process_group: the ranks of one wrapper.
        parameter_type: the dtype that reduced gradients have.
    """

    def __init__(self, process_group: dist.ProcessGroup, parameter_type: torch.dtype = torch.float32) -> None:
        super().__init__(process_group)
        self.parameter_type = parameter_type


def _power_of_two_near_the_root(number: int) -> float:
    """Returns the first power of two that is at least the root of `number`, or does not divide `number`."""
    power = 1
    while power * power < number and number % power == 0:
        power *= 2
    return float(power)


def allreduce_hook(state: DefaultState, grad: torch.Tensor) -> None:
    """Average `grad`, [n], over the ranks of `state`, in place."""
    _divide(grad, state.gradient_predivide_factor)
    dist.all_reduce(grad, group=state.process_group)
    _divide(grad, state.gradient_postdivide_factor)


def reduce_scatter_hook(state: DefaultState, grad: torch.Tensor, output: torch.Tensor) -> None:
    """Fill `output`, [n], with this rank's part of the average of `grad`, [ranks * n]. `grad` is scaled in place."""
    _divide(grad, state.gradient_predivide_factor)
    reduce_scatter_single(output, grad, group=state.process_group)
    _divide(output, state.gradient_postdivide_factor)


def fp16_compress_hook(state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Average `grad` in float16, in place, or into `output` if it is given. The result has `state.parameter_type`."""
    _compressed(torch.float16, state, grad, output)


def bf16_compress_hook(state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Average `grad` in bfloat16, in place, or into `output` if it is given. The result has `state.parameter_type`."""
    _compressed(torch.bfloat16, state, grad, output)


def _compressed(dtype: torch.dtype, state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None) -> None:
    """Average `grad` in `dtype`, then make the result the data of the caller's tensor."""
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
