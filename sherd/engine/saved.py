"""Which parameters will backward read? It is known where autograd saves them, and where it is about to read them again.

    forward     autograd saves a weight, or a view of one     pack      notes whose memory that is
    backward    a node is about to read it                    unpack    has the unit gathered, if it was freed since

That covers every way from a loss into a unit: through what its forward returned, whatever that was wrapped in, through
what it has left on a module, and through gradients of gradients. Hooks on outputs (`engine/hooks.py`) only have the
unit gathered before the first of its nodes asks.

Hooks on saved tensors are stacked, and autograd calls the innermost ones only: ours hand on to those they are put over.
Activation checkpointing and `save_on_cpu` inside of a unit's forward are put over ours. What these save they make
again, or have copied.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from sherd._torch import (
    SavingHooks,
    in_backward,
    local_tensor,
    may_hook_saving,
    pop_saving_hooks,
    push_saving_hooks,
    saving_hooks,
    transforms_take_off,
)
from sherd.errors import GradientError


class Source(Protocol):
    """Parameters in memory that comes and goes. `num_saved_views`: how many views of them autograd holds;
    `num_unread_views`: how many it has saved and not read since. The second is the same on all ranks, for it does not
    depend on when garbage is collected: test_when_garbage_is_collected_does_not_say_when_ranks_gather."""

    num_saved_views: int
    num_unread_views: int

    def is_parameter(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is one of the parameters itself, not a view of one."""

    def require_unsharded(self) -> None:
        """Backward is about to read them: have them unsharded; raise if they cannot be."""


_sources: dict[int, weakref.ref[Source]] = {}
"""By the address of a storage (which lives as long as its source does): whose memory that is."""


def watch(storage: torch.UntypedStorage, source: Source) -> None:
    """Know `storage` as the memory of `source` from now on."""
    key = storage._cdata

    def forget(died: Any) -> None:
        if _sources.get(key) is died:  # else another storage has got the address since
            del _sources[key]

    _sources[key] = weakref.ref(source, forget)


def source_of(tensor: torch.Tensor) -> weakref.ref[Source] | None:
    """Whose memory `tensor` lies in; None for all that is no parameter of a unit."""
    try:
        if type(tensor) is not torch.Tensor and isinstance(tensor, DTensor):
            tensor = local_tensor(tensor)
        return _sources.get(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse, or wrapped by a transform: it has no storage
        return None


# What is saved


class _Part:
    """A parameter that was saved, or a view of one. `kept`: what is kept of it: itself at `version`, or what the hooks
    below ours have made of it."""

    __slots__ = ("_counts", "_source", "_was_read", "kept", "shape", "version")

    def __init__(self, tensor: torch.Tensor, kept: Any, source: weakref.ref[Source]) -> None:
        self.kept = kept
        self.shape = tensor.shape
        self.version = tensor._version
        self._source = source
        owner = source()
        self._was_read = False
        self._counts = owner is not None and not owner.is_parameter(tensor)
        if owner is not None and self._counts:
            owner.num_saved_views += 1
            owner.num_unread_views += 1

    def __del__(self) -> None:
        owner = self._source()
        if owner is not None and self._counts:
            owner.num_saved_views -= 1

    def read(self) -> Any:
        """What was kept, once the parameter is there to be read."""
        owner = self._source()
        if owner is None:
            raise GradientError(
                f"backward needs a parameter of shape {tuple(self.shape)} of a sharded model that was deleted, moved "
                "or cast since its forward; keep the model as it is until backward is done"
            )
        owner.require_unsharded()
        if self._counts and not self._was_read:
            self._was_read = True
            owner.num_unread_views -= 1
        if torch.is_grad_enabled() and in_backward():
            # With `create_graph` a backward saves what the next one will read. The engine restores the stack of hooks
            # after each node, so what is pushed here ends with the node that reads.
            begin_watching()
        return self.kept


def _pack(tensor: torch.Tensor) -> _Part | tuple[torch.Tensor, int]:
    source = source_of(tensor)
    if source is not None:
        return _Part(tensor, tensor, source)
    # Not itself, unless it is a leaf: it may be the result of the very node that saves it, and the two would keep each
    # other alive. test_a_graph_without_a_backward_is_freed_at_once.
    kept = tensor if tensor.is_leaf else tensor.detach()
    return kept, kept._version


def _unpack(saved: _Part | tuple[torch.Tensor, int]) -> torch.Tensor:
    tensor, version = (saved.read(), saved.version) if isinstance(saved, _Part) else saved
    if tensor._version != version:
        raise GradientError(
            f"a tensor of shape {tuple(tensor.shape)} that backward needs has been modified by an inplace operation "
            f"since it was saved in forward: it is at version {tensor._version} instead of {version}"
        )
    return tensor


def _pack_through(outer: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
    source = source_of(tensor)
    packed = outer(tensor)
    return packed if source is None else _Part(tensor, packed, source)


def _unpack_through(outer: Callable[[Any], torch.Tensor], saved: Any) -> torch.Tensor:
    return outer(saved.read() if type(saved) is _Part else saved)


_HOOKS: SavingHooks = (_pack, _unpack)


def _is_ours(hooks: SavingHooks) -> bool:
    pack = hooks[0]
    return pack is _pack or (isinstance(pack, functools.partial) and pack.func is _pack_through)


@functools.cache
def _let_transforms_in() -> None:
    """A forward may call `torch.func.grad`, which refuses to run inside of hooks like ours."""
    transforms_take_off(_is_ours)


def begin_watching() -> bool:
    """Have autograd tell us what it saves from here on; whether somebody has to `end_watching`."""
    if not torch.is_grad_enabled() or not may_hook_saving():
        return False
    _let_transforms_in()
    outer = saving_hooks()
    if outer is None:
        push_saving_hooks(_HOOKS)
    elif _is_ours(outer):
        return False
    else:
        pack, unpack = outer
        push_saving_hooks((functools.partial(_pack_through, pack), functools.partial(_unpack_through, unpack)))
    return True


def end_watching() -> None:
    """Undo what `begin_watching` has done; nothing, where somebody has left hooks of his own behind."""
    top = saving_hooks()
    if top is not None and _is_ours(top):
        pop_saving_hooks()
