"""The last step of a group's gradients: a reduced buffer becomes the `.grad` of the shards, or is added to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from itertools import chain, starmap
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
from sherd.engine.moves.buffer_plan import Scale
from sherd.engine.state.flat import FlatParameter, note_gradients
from sherd.engine.state.group import Group
from sherd.engine.state.parameter import ShardedParameter, as_sharded
from sherd.errors import GradientError, PolicyError
from sherd.policy import UnitPolicy
from sherd.tensor.ragged import RaggedDTensor, as_dtensor


def _changed_by_hook(name: str, hook: Callable[[Any], Any], term: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """Returns the reduced gradient as a user's hook (`register_hook`) changes it."""
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


def _laid_out(gradient: DTensor, spec: DTensorSpec, device: torch.device) -> DTensor:
    from sherd.tensor.relayout import laid_out, lies_as  # seldom needed, so loaded late: tests/test_storeys.py

    return gradient if lies_as(gradient, spec) else laid_out(gradient, spec, device)


def _form_of(record: ShardedParameter, dtype: torch.dtype) -> tuple[type[DTensor], DTensorSpec]:
    spec = record.gradient_spec(dtype)
    return type(as_sharded(record.optimizer_param)) if record.gradient_owner is None else RaggedDTensor, spec


@dataclass(frozen=True, slots=True)
class GradientForm:
    """The dtype in which gradients are reduced, that of the shards' `.grad`, and the class and spec of each `.grad`."""

    reduce_dtype: torch.dtype
    dtype: torch.dtype
    specs: list[tuple[type[DTensor], DTensorSpec]]


class ShardGradients:
    """The `.grad` of one group's shards.

    Attributes:
        form: replaced where gradients of any dtype may come (`grad_dtype=None`), and another one came.
    """

    def __init__(self, group: Group) -> None:
        params = group.gradients
        self._group = group
        # For `give`, which every backward calls: a record, a class and spec, and a view of the buffer each.
        self._records = [each.record for each in params]
        self._flat = flat if isinstance(flat := params[0].parameter, FlatParameter) else None
        strides = [torch.empty(each.shape, device="meta").stride() for each in params]
        self._views = [(each.shape, of_it, each.extent.start) for each, of_it in zip(params, strides, strict=True)]
        self.numel = group.gradient_packing.shard_numels[group.mesh.piece]  # without flags
        self.form = self._form_in(group.reduce_dtype, group.grad_dtype)

    def _form_in(self, reduce_dtype: torch.dtype, dtype: torch.dtype) -> GradientForm:
        return GradientForm(reduce_dtype, dtype, [_form_of(record, dtype) for record in self._records])

    def take_dtype(self, came: torch.dtype, policy: UnitPolicy, is_added: bool) -> None:
        """Reduce and keep gradients in the dtype in which they `came`. `is_added`: to earlier ones, of another dtype.

        Raises:
            PolicyError: ranks without a gradient, which send zeros, would not know the dtype.
        """
        if policy.reduce_unused:
            raise PolicyError(
                f"{self._group.name} has grad_dtype=None, and set_reduce_scatter_unused_params(True) lets ranks "
                "without its gradient send zeros, whose dtype is unknown; give MixedPrecisionPolicy(reduce_dtype=...)"
            )
        dtype = reduce(torch.promote_types, [self.form.reduce_dtype] if is_added else [], came)
        self.form = self._form_in(dtype, dtype)

    def mean(self, reduced: torch.Tensor, scale: Scale) -> torch.Tensor:
        """Returns the sum `reduced` times its factor, in the dtype of `.grad`. May write to `reduced`."""
        dtype = self.form.dtype
        if scale.after != 1.0:
            reduced = reduced.to(dtype) if dtype.itemsize > reduced.itemsize else reduced
            reduced.mul_(scale.after)
        return reduced if reduced.dtype == dtype else reduced.to(dtype)

    def anywhere(self, reduced: torch.Tensor, local: frozenset[int]) -> frozenset[int]:
        """Returns the trainable parameters that have a gradient on this rank (`local`) or another one."""
        flags = reduced[self.numel :]
        missing = [i for i, each in enumerate(self._group.parameters) if i not in local and each.requires_grad]
        if not missing or not self._group.num_flags:
            return local
        # On an accelerator the host waits for the flags. So they are read only in steps where something is missing.
        values = flags.tolist()
        return local.union(index for index in missing if values[index] != 0)

    def take_unread(self, with_gradient: frozenset[int]) -> bool:
        """Returns whether `give` reads no value of gradients of these parameters."""
        parameters = [each.parameter for each in self._group.gradients]
        has_all = len(with_gradient) == len(self._group.parameters) and not any(
            each.gaps for each in self._group.gradients
        )
        are_first = all(each.grad is None for each in parameters)
        return has_all and are_first and not any(chain.from_iterable(map(hooks_on_gradient, parameters)))

    def give(self, reduced: torch.Tensor, with_gradient: frozenset[int]) -> None:
        """Add `reduced`, laid out as `gradient_packing` says, to the `.grad` of the parameters `with_gradient`.

        Each gradient is a view of `reduced`, which lives as long as one of the gradients does.

        Raises:
            GradientError: a `.grad` is no DTensor, or a user's hook on a gradient returned no DTensor.
        """
        sums: list[torch.Tensor] = []
        terms: list[torch.Tensor] = []
        hooked: list[nn.Parameter] = []
        parameters = [each.shard if each.flat is None else each.flat.parameter for each in self._records]
        have_hooks = any(chain.from_iterable(map(hooks_on_gradient, parameters)))
        lacks_some = len(with_gradient) < len(self._group.parameters)
        begin = reduced.storage_offset()
        views = starmap(
            reduced.as_strided, [(*view, at + begin) for *view, at in self._views] if begin else self._views
        )
        each_of = zip(self._group.gradients, parameters, self.form.specs, views, strict=True)
        for optimizer_param, parameter, (tensor_class, spec), term in each_of:
            if (lacks_some and optimizer_param.members.isdisjoint(with_gradient)) or not parameter.requires_grad:
                continue
            for gap in optimizer_param.gaps:
                # The reduction leaves any values in padding, and a norm would see it.
                reduced[gap.start : gap.stop].zero_()
            # A unit's backward accumulates into unsharded parameters, so torch calls no hook on a shard:
            # test_hooks_on_parameters_see_the_reduced_gradients_and_may_step.
            for hook in gradient_hooks(parameter) if have_hooks else ():
                term = _changed_by_hook(optimizer_param.name, hook, term, spec)
            gradient = parameter.grad
            if gradient is None:
                parameter.grad = new_dtensor(tensor_class, term, spec)
            elif isinstance(gradient, DTensor):
                if gradient._spec is not spec:  # a user's, or of a penalty: `weight.sum()` gives replicated ones
                    gradient = parameter.grad = _laid_out(gradient, spec, term.device)
                sums.append(local_tensor(gradient))
                terms.append(term)
            else:
                raise GradientError(
                    f"{optimizer_param.name}: its .grad is a {type(gradient).__name__}, not a DTensor, so the reduced "
                    "gradient cannot be added to it; set it to None, or to a DTensor placed as the parameter"
                )
            if self._flat is not None and (lacks_some or gradient is not None):
                note_gradients(self._flat, with_gradient, gradient is None)
            if have_hooks:
                hooked.append(parameter)
        if sums:
            torch._foreach_add_(sums, terms)
        # After all sums: such a hook may step an optimizer.
        for parameter in hooked:
            for hook in after_accumulation_hooks(parameter):
                hook(parameter)
