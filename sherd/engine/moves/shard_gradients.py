"""Reduced gradients on their way to the shards' `.grad`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sherd._torch import (
    DTensorSpec,
    after_accumulation_hooks,
    gradient_hooks,
    have_gradient_hooks,
    local_tensor,
)
from sherd.engine.state.group import Group, parameters_of
from sherd.errors import GradientError
from sherd.tensor.placement import is_ragged
from sherd.tensor.ragged import as_dtensor, ragged_dtensor
from sherd.tensor.sharded import around_chunk


class ShardGradients:
    """The gradients that one group's optimizer parameters have."""

    def __init__(self, group: Group) -> None:
        self._group = group
        specs = [optimizer_param.gradient_spec(group.grad_dtype) for optimizer_param in group.optimizer_params]
        self._forms = [(spec, ragged_dtensor if is_ragged(spec) else around_chunk) for spec in specs]

    def give(self, reduced: torch.Tensor, with_gradient: frozenset[int]) -> None:
        """Add `reduced`, 1-D, this rank's part of the reduced gradients, to the shards' `.grad`, of the parameters
        `with_gradient` (their indices). Each gradient is a view of `reduced`, which lives as long as one of them does.

        Raises:
            GradientError: a `.grad` is no DTensor, or a user's hook on a gradient returned none.
        """
        sums: list[torch.Tensor] = []
        terms: list[torch.Tensor] = []
        given: list[nn.Parameter] = []
        low_precision = self._group.grad_dtype != self._group.dtype
        parameters = parameters_of(self._group.optimizer_params)
        have_hooks = have_gradient_hooks(parameters)
        for optimizer_param, parameter, form in zip(self._group.optimizer_params, parameters, self._forms, strict=True):
            spec, as_gradient = form
            if optimizer_param.members.isdisjoint(with_gradient) or not parameter.requires_grad:
                continue
            for gap in optimizer_param.gaps:
                # The reduction leaves there what it finds, and a norm would see it.
                reduced[gap.start : gap.stop].zero_()
            start = optimizer_param.extent.start
            term = reduced[start : start + optimizer_param.extent.numel].view(optimizer_param.shape)
            for hook in gradient_hooks(parameter) if have_hooks else ():
                term = _as_hook_says(optimizer_param.name, hook, term, spec)
            gradient = parameter.grad
            if gradient is None:
                if low_precision:
                    optimizer_param.expect_gradients_in(self._group.grad_dtype)
                parameter.grad = as_gradient(term, spec)
            elif isinstance(gradient, DTensor):
                sums.append(local_tensor(gradient))
                terms.append(term)
            else:
                raise GradientError(
                    f"{optimizer_param.name}: its .grad is a {type(gradient).__name__}, not a DTensor, so the reduced "
                    "gradient cannot be added to it; set it to None, or to a DTensor placed as the parameter"
                )
            given.append(parameter)
        if sums:
            torch._foreach_add_(sums, terms)
        for parameter in given if have_hooks else ():
            for hook in after_accumulation_hooks(parameter):
                hook(parameter)


def _as_hook_says(name: str, hook: Callable[[Any], Any], term: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """Returns the reduced gradient as a hook of the user's (`register_hook`) changes it."""
    changed = hook(as_dtensor(term, spec))
    if changed is None:
        return term
    if not isinstance(changed, DTensor):
        raise GradientError(
            f"{name}: a hook on its gradient returned a {type(changed).__name__}; the gradient that it was given is a "
            "DTensor, this rank's part of the reduced one, and so must be what it returns"
        )
    if changed.placements != spec.placements:
        changed = changed.redistribute(placements=spec.placements)
    return local_tensor(changed).contiguous()
