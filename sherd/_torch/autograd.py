"""Private names of autograd: the backward pass under way, hooks on gradients, function transforms, version counters."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch.autograd import Variable

set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""Has autograd record from now on, or not. `torch.no_grad` calls it too, after ten other calls (2.11 to 2.13)."""


def in_backward() -> bool:
    """Returns whether this thread is inside a backward pass. No public name tells (2.11 to 2.13)."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the present backward pass ends, unless it raises. No public name (2.11 to 2.13)."""
    engine = Variable._execution_engine
    engine.queue_callback(callback)


def will_get_gradient(leaf: torch.Tensor) -> bool:
    """Returns whether the present backward pass will accumulate a gradient in `leaf`.

    It will if it reaches `leaf` and was not started by `torch.autograd.grad`. No public name tells (2.11 to 2.13).
    """
    with outside_transforms():
        node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        executes: bool = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # `torch.autograd.grad` for this very leaf
        return False
    return executes


def gradient_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], torch.Tensor | None]]:
    """Returns the hooks given to `tensor.register_hook`. No public name lists them (2.11 to 2.13)."""
    return list((tensor._backward_hooks or {}).values())


hooks_on_gradient: Callable[[torch.Tensor], tuple[object, object]]
hooks_on_gradient = operator.attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
"""Returns the hooks that a tensor was given on its gradient, of either kind, empty or None if there are none. All in C,
as every reduction asks. No public name (2.11 to 2.13)."""


def after_accumulation_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
    """Returns the hooks given to `tensor.register_post_accumulate_grad_hook`. No public name lists them (2.11 to
    2.13)."""
    return list((getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values())


def exchangeable_hook(
    tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]
) -> Callable[[Callable[[torch.Tensor], None]], None]:
    """Register `hook` as `tensor.register_post_accumulate_grad_hook` does. Returns a call that puts another hook in its
    place, in C. There is none in public: a handle removes, and to register anew takes ten times as long (2.11 to 2.13).
    """
    handle = tensor.register_post_accumulate_grad_hook(hook)
    hooks: dict[int, Callable[[torch.Tensor], None]] = handle.hooks_dict_ref()
    return functools.partial(hooks.__setitem__, handle.id)


def move_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Give `target` the hooks on gradients of `source`. Their handles then remove them from `target` too.

    No public call copies hooks (2.11 to 2.13).
    """
    if source._backward_hooks:
        target._backward_hooks = source._backward_hooks
    if hooks := getattr(source, "_post_accumulate_grad_hooks", None):
        target._post_accumulate_grad_hooks = hooks


increment_versions: Callable[[Sequence[torch.Tensor]], None] = torch._C._increment_version
"""Adds 1 to the version counter of each tensor. The public function is a call in Python around it, which every gather
would pay for (2.11 to 2.13)."""

set_versions: Callable[[tuple[torch.Tensor, ...], tuple[int, ...]], None] = (
    torch._C._autograd._unsafe_set_version_counter
)
"""Sets the version counter of each tensor. The public `increment_version` adds 1 only (2.11 to 2.13)."""


_UNCHANGED = contextlib.nullcontext()


are_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether this thread is inside a function under `torch.func.jvp`, `vmap` and the like. No public name tells (2.11 to
2.13)."""


def outside_transforms() -> contextlib.AbstractContextManager[None]:
    """A context in which tensors are ordinary ones, also inside a function under `torch.func.jvp`, `vmap` and the like.

    Function transforms have no public way out (2.11 to 2.13).
    """
    return _outside() if are_transforms_active() else _UNCHANGED


@contextlib.contextmanager
def _outside() -> Iterator[None]:
    functorch = torch._C._functorch
    allowed = functorch.get_inplace_requires_grad_allowed()
    with torch._C._DisableFuncTorch():
        # Without this torch refuses `requires_grad_()` here even for ordinary tensors.
        functorch.set_inplace_requires_grad_allowed(True)
        try:
            yield
        finally:
            functorch.set_inplace_requires_grad_allowed(allowed)


def beneath_transforms(tensors: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    """Returns `tensors` and, inside a function transform, the tensors they wrap, level by level, and their tangents.

    Each of them may have an autograd node of its own. No public name unwraps them (2.11 to 2.13).
    """
    if not are_transforms_active():
        return tensors
    return [found for tensor in tensors for found in _beneath(tensor)]


def _beneath(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    yield tensor
    tangent = torch.autograd.forward_ad.unpack_dual(tensor).tangent
    if tangent is not None:
        yield from _beneath(tangent)
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        yield from _beneath(torch._C._functorch.get_unwrapped(tensor))
