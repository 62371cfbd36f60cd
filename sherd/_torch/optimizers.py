"""Private names of `torch.optim`: step hooks, and the types that foreach and fused forms take."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

__all__ = [
    "hooked_step",
    "keep_loaded_state",
    "put_around_step",
    "register_foreach_type",
    "register_optimizer_step_post_hook",
    "register_optimizer_step_pre_hook",
]

Result = TypeVar("Result")

Kept = Callable[[torch.Tensor, torch.Tensor, object], torch.Tensor | None]
"""Returns what is kept of a loaded tensor, given its parameter, the tensor, and its key; None: what torch keeps."""


def keep_loaded_state(kept: Kept) -> None:
    """Let `kept` say what optimizers keep of the tensors that `load_state_dict` gives them.

    torch gives them the dtype and the device of the parameter, in a static method without a setter (2.11 to 2.15).
    """
    theirs: Callable[..., torch.Tensor] = torch.optim.Optimizer._process_value_according_to_param_policy

    @functools.wraps(theirs)
    def ours(param: torch.Tensor, value: torch.Tensor, param_id: int, groups: Any, key: Any = None) -> torch.Tensor:
        own = kept(param, value, key)
        return theirs(param, value, param_id, groups, key) if own is None else own

    torch.optim.Optimizer._process_value_according_to_param_policy = staticmethod(ours)  # type: ignore[assignment]


def register_foreach_type(tensor_class: type[torch.Tensor]) -> None:
    """Have `torch.optim` and `clip_grad_norm_` take tensors of exactly this type for their foreach and fused forms.

    DTensor is in the same two lists, which have no public setter (2.1 to 2.15).
    """
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for known in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        if tensor_class not in known:
            known.append(tensor_class)


def put_around_step(optimizer_class: Any, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let the `step` of a class call `around(function)`, inside of all step hooks, in the place of its own function.

    What a step hook changes the other hooks see, and the last one is called after an exception no more. torch's wrapper
    keeps the function in a cell without a public setter (2.11 to 2.15); hooks around the function alone would replace
    this.
    """
    step: Any = optimizer_class.step
    names = step.__code__.co_freevars if getattr(step, "hooked", False) else ()
    if "func" in names and step not in _entered:
        _entered.add(step)
        cell = step.__closure__[names.index("func")]
        cell.cell_contents = around(cell.cell_contents)


_entered: weakref.WeakSet[Any] = weakref.WeakSet()


def hooked_step(step: Callable[..., Result]) -> Callable[..., Result]:
    """Returns `step`, a method of an optimizer's class, with the optimizer's step hooks and the global ones around it.

    `Optimizer.__init__` wraps the `step` of the object's class, but not of a class that the object gets later. torch's
    own wrapper also opens a range for profilers, which takes a third of a small step, so it serves only while a
    profiler is on. None of the names is documented (2.11 to 2.15).
    """
    profiled: Callable[..., Result] = torch.optim.Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def hooked(*args: Any, **kwargs: Any) -> Result:
        if torch._C._autograd._profiler_enabled():
            return profiled(*args, **kwargs)
        optimizer = args[0]
        for hook in (*_global_optimizer_pre_hooks.values(), *optimizer._optimizer_step_pre_hooks.values()):
            changed = hook(optimizer, args, kwargs)
            if changed is not None:
                if not (isinstance(changed, tuple) and len(changed) == 2):
                    raise RuntimeError(f"a step pre-hook returned {changed}; return None, or new (args, kwargs)")
                args, kwargs = changed
        result = step(*args, **kwargs)
        for hook in (*optimizer._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()):
            hook(optimizer, args, kwargs)
        return result

    hooked.hooked = True  # type: ignore[attr-defined]  # torch wraps a step without this mark again
    return hooked
