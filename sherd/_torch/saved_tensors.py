"""Private names of autograd's default hooks on saved tensors, which form one stack per thread."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from sherd._torch.writes import write_into

SavingHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""A pair of hooks: autograd calls the first with each tensor that it saves, and the second with the first one's result
when backward reads the tensor."""

_core: ModuleType = torch._C
_stack: ModuleType = torch._C._autograd
_push = _stack._push_saved_tensors_default_hooks


# Asked in every forward of a unit, so these are torch's own functions and not functions of ours around them.

saving_hooks: Callable[[], SavingHooks | None] = functools.partial(_stack._top_saved_tensors_default_hooks, True)
"""Returns the innermost default hooks in this thread. No public name tells (2.11 to 2.13)."""

may_hook_saving: Callable[[], bool] = _stack._saved_tensors_hooks_is_enabled
"""Whether default hooks may be pushed, which `torch.func.grad` and its kin forbid. No public name tells (2.11 to
2.13)."""


def push_saving_hooks(hooks: SavingHooks) -> None:
    """Push default hooks, as entering `torch.autograd.graph.saved_tensors_hooks` does. The public class works only as a
    `with` block (2.11 to 2.13)."""
    _push(*hooks)


storage_address: Callable[[torch.Tensor], int] = _core._storage_address
"""Returns the `_cdata` of the tensor's storage, without making a storage object, which takes longer. It raises
`RuntimeError` where there is none. No public name tells (2.11 to 2.13)."""

SAVE_NO_RESULT = frozenset(
    node
    for node in filter(inspect.isclass, vars(torch._C._functions).values())
    if {name for name in vars(node) if name.startswith("_raw_saved_")}
    <= {f"_raw_saved_{argument}" for argument in ("self", "other", "mat1", "mat2")}
)
"""The classes of such a `grad_fn` as saves arguments only, and not what it makes, unless that is written in place: the
names of attributes tell, for there is one for each tensor that is saved. No public name does (2.11 to 2.13)."""

pop_saving_hooks: Callable[[], None] = _stack._pop_saved_tensors_default_hooks
"""Pop the innermost default hooks, as leaving `torch.autograd.graph.saved_tensors_hooks` does (2.11 to 2.13)."""


class _TakenOff(threading.local):
    """The hooks that a function transform of this thread has taken off."""

    hooks: SavingHooks | None = None

    def put(self, hooks: SavingHooks) -> None:
        self.hooks = hooks

    def take(self) -> SavingHooks | None:
        hooks, self.hooks = self.hooks, None
        return hooks


def share_saving_hooks(are_ours: Callable[[SavingHooks], bool], around: Callable[[SavingHooks], SavingHooks]) -> None:
    """Let hooks for which `are_ours` is true share the stack with other users of it.

    - Hooks that others push over ours are replaced by what `around` makes of them.
    - `torch.func.grad` and its kin, which refuse to run inside of any hooks, take ours off for as long as they run.

    Nothing public does either (2.11 to 2.13). So three functions of torch are replaced, for the whole process; where no
    hooks are ours, the replacements do what the originals did.
    """
    push, disable, enable = (
        _stack._push_saved_tensors_default_hooks,
        _stack._saved_tensors_hooks_disable,
        _stack._saved_tensors_hooks_enable,
    )
    off = _TakenOff()

    def pushed(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
        top = saving_hooks()
        push(*(around((pack, unpack)) if top is not None and are_ours(top) else (pack, unpack)))

    def disabled(message: str, fail_if_non_empty: bool = True) -> None:
        top = saving_hooks()
        if top is not None and are_ours(top):
            pop_saving_hooks()
            off.put(top)
        disable(message, fail_if_non_empty)

    def enabled() -> None:
        enable()
        hooks = off.take()
        if hooks is not None:
            push(*hooks)

    write_into(_stack, "_push_saved_tensors_default_hooks", pushed)
    write_into(_stack, "_saved_tensors_hooks_disable", disabled)
    write_into(_stack, "_saved_tensors_hooks_enable", enabled)
