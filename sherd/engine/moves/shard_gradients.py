"""Reduced gradients on their way to the shards' `.grad`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sherd._torch import (
    DTensorSpec,
    after_accumulation_hooks,
    gradient_hooks,
    hooks_on_gradient,
    local_tensor,
    new_dtensor,
)
from sherd.engine.state.group import Group
from sherd.engine.state.parameter import as_sharded
from sherd.errors import GradientError
from sherd.tensor.ragged import as_dtensor


class ShardGradients:
    """The gradients that one group's optimizer parameters have."""

    def __init__(self, group: Group) -> None:
        self._group = group
        all_of = group.optimizer_params
        self._records = [each.record for each in all_of]
        self._forms = [(type(as_sharded(each.parameter)), each.gradient_spec(group.grad_dtype)) for each in all_of]
        self._places = [slice(each.extent.start, each.extent.stop) for each in all_of]
        self._shapes = [each.shape for each in all_of]

    def give(self, reduced: torch.Tensor, with_gradient: frozenset[int]) -> None:
        """Add `reduced`, 1-D, this rank's part of the reduced gradients, to the shards' `.grad`, of the parameters
        `with_gradient` (their indices). Each gradient is a view of `reduced`, which lives as long as one of them does.

        Raises:
            GradientError: a `.grad` is no DTensor, or a user's hook on a gradient returned none.
        """
        sums: list[torch.Tensor] = []
        terms: list[torch.Tensor] = []
        given: list[nn.Parameter] = []  # which have hooks
        low_precision = self._group.grad_dtype != self._group.dtype
        parameters = [each.shard if each.flat is None else each.flat.parameter for each in self._records]
        have_hooks = any(chain.from_iterable(map(hooks_on_gradient, parameters)))
        lacks_some = len(with_gradient) < len(self._group.parameters)
        views = map(torch.Tensor.view, map(reduced.__getitem__, self._places), self._shapes)
        each_of = zip(self._group.optimizer_params, parameters, self._forms, views, strict=True)
        for optimizer_param, parameter, (kind, spec), term in each_of:
            if (lacks_some and optimizer_param.members.isdisjoint(with_gradient)) or not parameter.requires_grad:
                continue
            for gap in optimizer_param.gaps:
                # The reduction leaves there what it finds, and a norm would see it.
                reduced[gap.start : gap.stop].zero_()
            for hook in gradient_hooks(parameter) if have_hooks else ():
                term = _as_hook_says(optimizer_param.name, hook, term, spec)
            gradient = parameter.grad
            if gradient is None:
                if low_precision:
                    optimizer_param.expect_gradients_in(self._group.grad_dtype)
                parameter.grad = new_dtensor(kind, term, spec)
            elif isinstance(gradient, DTensor):
                sums.append(local_tensor(gradient))
                terms.append(term)
            else:
                raise GradientError(
                    f"{optimizer_param.name}: its .grad is a {type(gradient).__name__}, not a DTensor, so the reduced "
                    "gradient cannot be added to it; set it to None, or to a DTensor placed as the parameter"
                )
            if have_hooks:
                given.append(parameter)
        if sums:
            torch._foreach_add_(sums, terms)
        for parameter in given:
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
