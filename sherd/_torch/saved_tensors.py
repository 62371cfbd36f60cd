"""Private names of autograd's default hooks on saved tensors, which form one stack per thread."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from sherd._torch.tensors import write_into

SavingHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""Two hooks: pack, called with each tensor that autograd saves, and unpack, called with its result in backward."""


class PackHook(functools.partial[Any]):
    """A pack hook of ours: what a unit sets up for itself is not the user's. It keeps no user's hooks below.

    Selective checkpointing warns of hooks around it, but passes by hooks that have these two names (2.14, 2.15).
    """

    _checkpoint_internal = True
    _user_hooks: SavingHooks | None = None


class PackHookAround(PackHook):
    """A pack hook of ours around another one, its last argument: it is the user's if that one is."""

    @property
    def _checkpoint_internal(self) -> bool:  # type: ignore[override]
        return getattr(self.args[-1], "_checkpoint_internal", False)

    @property
    def _user_hooks(self) -> SavingHooks | None:  # type: ignore[override]
        hooks: SavingHooks | None = self.args[-1]._user_hooks
        return hooks


_core: ModuleType = torch._C
_stack: ModuleType = torch._C._autograd
_push = _stack._push_saved_tensors_default_hooks


# Every forward of a unit calls these, so they are torch's own functions without functions of ours around them.

saving_hooks: Callable[[], SavingHooks | None] = functools.partial(_stack._top_saved_tensors_default_hooks, True)
"""Returns this thread's innermost default hooks, which no public name gives (2.11 to 2.15)."""

may_hook_saving: Callable[[], bool] = _stack._saved_tensors_hooks_is_enabled
"""Returns whether default hooks may be pushed, which `torch.func.grad` and its kin forbid (private to 2.15)."""


def push_saving_hooks(hooks: SavingHooks) -> None:
    """Push default hooks as `torch.autograd.graph.saved_tensors_hooks` does, which works only in `with` (to 2.15)."""
    _push(*hooks)


storage_address: Callable[[torch.Tensor], int] = _core._storage_address
"""Returns the `_cdata` of the tensor's storage without making a storage object (private from 2.11 to 2.15).

Raises:
    RuntimeError: the tensor has no storage.
"""

SAVE_NO_RESULT = frozenset(
    node
    for node in filter(inspect.isclass, vars(torch._C._functions).values())
    if {name for name in vars(node) if name.startswith("_raw_saved_")}
    <= {f"_raw_saved_{argument}" for argument in ("self", "other", "mat1", "mat2")}
)
"""The classes of `grad_fn` that save arguments only and not their result, unless the operation writes in place.

Each saved tensor has an attribute, whose name says which one it is. No public name does (2.11 to 2.15).
"""

pop_saving_hooks: Callable[[], None] = _stack._pop_saved_tensors_default_hooks
"""Pops the innermost default hooks, as leaving `torch.autograd.graph.saved_tensors_hooks` does (2.11 to 2.15)."""


class _HooksTakenOff(threading.local):
    """The hooks that a function transform of this thread has taken off."""

    hooks: SavingHooks | None = None

    def put(self, hooks: SavingHooks) -> None:
        self.hooks = hooks

    def take(self) -> SavingHooks | None:
        hooks, self.hooks = self.hooks, None
        return hooks


def share_saving_hooks(are_ours: Callable[[SavingHooks], bool], around: Callable[[SavingHooks], SavingHooks]) -> None:
    """Let hooks for which `are_ours` is true share the stack with hooks of others.

    - Hooks that others push over ours are replaced by the result of `around`.
    - `torch.func.grad` and its kin, which refuse to run inside of any hooks, take ours off for as long as they run.

    Nothing public does either (2.11 to 2.15). So three functions of torch are replaced, for the entire process; where
    no hooks are ours, the replacements do what the originals do.
    """
    push, disable, enable = (
        _stack._push_saved_tensors_default_hooks,
        _stack._saved_tensors_hooks_disable,
        _stack._saved_tensors_hooks_enable,
    )
    off = _HooksTakenOff()

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
