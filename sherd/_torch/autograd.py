"""Private names of autograd: the backward pass under way, hooks on gradients, function transforms, version counters."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch.autograd import Variable

set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""Switches autograd's recording on or off. `torch.no_grad` calls it too, after ten other calls (2.11 to 2.15)."""


def in_backward() -> bool:
    """Returns whether this thread is inside a backward pass, which no public name says (2.11 to 2.15)."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the present backward pass ends without an error. No public name (2.11 to 2.15).

    It is dropped then. Autograd's thread of a device keeps what is queued until it runs again, long after backward has
    returned: a deleted model would stay.
    """
    # The iterator of a list drops it at its end; `methodcaller` makes no call of Python's.
    calls = map(operator.methodcaller("__call__"), [callback])
    Variable._execution_engine.queue_callback(functools.partial(list[object]().extend, calls))


def will_get_gradient(leaf: torch.Tensor) -> bool:
    """Returns whether the present backward pass will accumulate a gradient in `leaf`.

    A pass of `torch.autograd.grad` accumulates nothing. No public name says which leaves a pass reaches (2.11 to 2.15).
    """
    with outside_transforms():
        node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        executes: bool = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # `torch.autograd.grad` for this very leaf
        return False
    return executes


def gradient_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], torch.Tensor | None]]:
    """Returns the hooks given to `tensor.register_hook`. No public name lists them (2.11 to 2.15)."""
    return list((tensor._backward_hooks or {}).values())


hooks_on_gradient: Callable[[torch.Tensor], tuple[object, object]]
hooks_on_gradient = operator.attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
"""Returns a tensor's two dicts of gradient hooks; each is empty or None without hooks. No public name (2.11 to 2.15).

It runs in C alone, because every reduction calls it.
"""


def after_accumulation_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
    """Returns the hooks given to `tensor.register_post_accumulate_grad_hook`, which no public name lists (to 2.15)."""
    return list((getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values())


def exchangeable_hook(
    tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]
) -> Callable[[Callable[[torch.Tensor], None]], None]:
    """Register a post-accumulate-grad hook on `tensor`. Returns a function that puts another hook in its place.

    That function runs in C. A public handle only removes its hook, and registering again takes ten times as long (2.11
    to 2.15).
    """
    handle = tensor.register_post_accumulate_grad_hook(hook)
    hooks: dict[int, Callable[[torch.Tensor], None]] = handle.hooks_dict_ref()
    return functools.partial(hooks.__setitem__, handle.id)


def move_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Give `target` the gradient hooks of `source`. The hooks' handles then remove them from `target` too.

    No public call copies hooks (2.11 to 2.15).
    """
    if source._backward_hooks:
        target._backward_hooks = source._backward_hooks
    if hooks := getattr(source, "_post_accumulate_grad_hooks", None):
        target._post_accumulate_grad_hooks = hooks


increment_versions: Callable[[Sequence[torch.Tensor]], None] = torch._C._increment_version
"""Adds 1 to the version counter of each tensor. Every gather calls it; the public one is Python (2.11 to 2.15)."""

set_versions: Callable[[tuple[torch.Tensor, ...], tuple[int, ...]], None] = (
    torch._C._autograd._unsafe_set_version_counter
)
"""Sets the version counter of each tensor. The public `increment_version` adds 1 only (2.11 to 2.15)."""


_UNCHANGED = contextlib.nullcontext()


are_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Returns whether this thread runs a function under `torch.func.jvp`, `vmap` and the like (private to 2.15)."""


def outside_transforms() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which tensors are ordinary ones, also inside `torch.func.jvp`, `vmap` and the like.

    Function transforms have no public way out (2.11 to 2.15).
    """
    # Outside of transforms, which is nearly always, one context serves all callers.
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
    """Returns `tensors`; inside a function transform also all tensors that they wrap, and their tangents.

    Each of these may have an autograd node of its own. No public name unwraps them (2.11 to 2.15).
    """
    if not are_transforms_active():
        return tensors
    return [beneath for tensor in tensors for beneath in _beneath(tensor)]


def _beneath(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    yield tensor
    tangent = torch.autograd.forward_ad.unpack_dual(tensor).tangent
    if tangent is not None:
        yield from _beneath(tangent)
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        yield from _beneath(torch._C._functorch.get_unwrapped(tensor))
