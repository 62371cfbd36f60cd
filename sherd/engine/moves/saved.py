"""Hooks on saved tensors tell a unit that backward is in it, and have its parameters gathered before they are read.

    forward     autograd saves a tensor                 pack      notes whose forward is running, and of a weight, or a
                                                                  view of one, whose memory that is
    backward    a node is about to read it              unpack    tells the unit that backward is in it; has the weight
                                                                  gathered, if it was freed since

That covers every way from a loss into a unit: through what its forward returned, whatever that was wrapped in, through
what it has left on a module, and through gradients of gradients. Hooks on outputs (`engine/hooks.py`) only have the
unit gathered before the first of its nodes asks, and the next one behind it.

Hooks on saved tensors are stacked, and autograd calls the innermost ones only. Ours hand on to those they are put over,
and those that are put over ours (activation checkpointing inside of a unit) are called by ours.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sherd._torch import (
    SAVE_NO_RESULT,
    SavingHooks,
    in_backward,
    local_tensor,
    may_hook_saving,
    pop_saving_hooks,
    push_saving_hooks,
    saving_hooks,
    share_saving_hooks,
    storage_address,
)
from sherd.errors import GradientError
from sherd.schedule.state import Live


class Source(ABC):
    """Parameters in memory that comes and goes. `unshard()` is called when backward is about to read them and they were
    freed. It raises `StateError` where there is no backward, or the user has said that it does not need them.

    `num_unread_views`: how many views of them autograd has saved and not read since. Unlike `num_saved_views` this is
    the same on all ranks, for it does not depend on when garbage is collected:
    test_when_garbage_is_collected_does_not_say_when_ranks_gather.
    """

    live: Live

    def __init__(self, unshard: Callable[[], None]) -> None:
        self.num_unread_views = 0
        self.view_mark = object()  # is held by each view that autograd holds
        self._own_references = sys.getrefcount(self.view_mark)
        self.unshard = unshard

    @property
    def num_saved_views(self) -> int:
        """How many views of the parameters autograd holds."""
        return sys.getrefcount(self.view_mark) - self._own_references

    @abstractmethod
    def is_parameter(self, tensor: torch.Tensor) -> bool:
        """Returns whether `tensor` is one of the parameters itself, not a view of one."""


class Reader(Protocol):
    """A unit, whose forward saves tensors. `is_entered`: it knows that the present backward has come to it.
    `is_recorded`: autograd may be recording that backward. `is_under_other_hooks`: it was told so."""

    is_entered: bool
    is_recorded: bool
    is_under_other_hooks: bool

    def enter_backward(self) -> None:
        """Backward has come to it."""

    def runs_under_other_hooks(self) -> None:
        """Hooks of others have been given what its own forward saves: they may run a part of it again in backward."""


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
    """Returns the parameters in whose memory `tensor` lies; None for a tensor that is no part of a unit's."""
    try:
        if type(tensor) is not torch.Tensor and isinstance(tensor, DTensor):
            tensor = local_tensor(tensor)
        return _sources.get(storage_address(tensor))
    except (RuntimeError, NotImplementedError):  # sparse, or wrapped by a transform: it has no storage
        return None


def with_own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Returns `tensor`; of a unit's own parameter, or a view of it, a copy, whose memory does not go after forward."""
    return tensor if source_of(tensor) is None else tensor.clone()


class _Running(threading.local):
    """The units whose forwards are under way in this thread, innermost last, above None for there being none."""

    def __init__(self) -> None:
        self.units: list[Reader | None] = [None]


_running = _Running()


def is_running(unit: Reader) -> bool:
    """Returns whether a forward of `unit` is under way in this thread."""
    return unit in _running.units


# What is saved


_Part = list[Any]
"""A parameter that was saved, or a view: whose memory it is, its shape, the mark of a view, whether that is unread."""

_Saved = tuple[Any, int | None, Reader | None, _Part | None]
"""A tensor that was saved: what is kept of it, itself or what other hooks have made of it; the version of the first;
the unit whose forward was running; and of a parameter, which part that is. No class: there are hundreds in a step."""

_PLAIN = frozenset((torch.Tensor, nn.Parameter))


def _pack(running: Sequence[Reader | None], tensor: torch.Tensor) -> _Saved:
    """Keep `tensor`. The last one in `running` is the unit whose forward runs."""
    # As few calls as can be: test_calls.py counts them.
    version, source = tensor._version, None
    if tensor.__class__ in _PLAIN:
        try:
            if (address := storage_address(tensor)) in _sources:
                source = _sources[address]
        except (RuntimeError, KeyError):  # as in `source_of`; or it died this moment
            pass
    else:
        source = source_of(tensor)
    if source is not None:
        part: _Part = [source, tensor.shape, None, False]
        owner = source()
        if owner is not None and (tensor.__class__ is torch.Tensor or not owner.is_parameter(tensor)):
            part[2:] = owner.view_mark, True
            owner.num_unread_views += 1
        return tensor, version, running[-1], part
    if (version or tensor.grad_fn.__class__ not in SAVE_NO_RESULT) and not tensor.is_leaf:
        # It may be the result of the very node that saves it, and the two would keep each other alive:
        # test_a_graph_without_a_backward_is_freed_at_once.
        tensor = tensor.detach()
    return tensor, version, running[-1], None


def _unpack(saved: _Saved) -> Any:
    """Returns what was kept, now that a node is about to read it, once a parameter is there to be read. Raises
    `GradientError` if the parameters are gone, or it was changed in place."""
    kept, version, unit, part = saved
    owner: Source | None = None if part is None else part[0]()
    if part is not None and owner is None:
        raise GradientError(
            f"backward needs a parameter of shape {tuple(part[1])} of a sharded model that was deleted, moved or cast "
            "since its forward; keep the model as it is until backward is done"
        )
    if (unit is None or not unit.is_entered or unit.is_recorded) and in_backward():
        if unit is not None and not unit.is_entered:
            unit.enter_backward()
        if torch.is_grad_enabled() and saving_hooks() is None:
            # With `create_graph` a backward saves what the next one will read. The engine restores the stack of hooks
            # after each node, so what is pushed here ends with the node that reads.
            push_saving_hooks(_hooks([unit]))
    if part is not None and owner is not None:
        if owner.live is not Live.UNSHARDED:
            owner.unshard()
        if part[3]:
            part[3] = False
            owner.num_unread_views -= 1
    if version is not None and kept._version != version:
        raise GradientError(
            f"a tensor of shape {tuple(kept.shape)} that backward needs has been modified by an inplace operation "
            f"since it was saved in forward: it is at version {kept._version} instead of {version}"
        )
    return kept


def _pack_through(
    running: Sequence[Reader | None], other: Callable[[torch.Tensor], Any], tensor: torch.Tensor
) -> _Saved:
    kept = other(tensor)
    _, _, unit, part = _pack(running, tensor)
    if unit is not None and not unit.is_under_other_hooks:
        unit.runs_under_other_hooks()
    if part is not None and part[3] and in_backward():
        # What runs again in backward for hooks of others gives them what the nodes of forward will read; its own never
        # run: test_a_unit_inside_of_a_checkpoint_is_freed_before_its_reduction.
        part[3] = False
        part[0]().num_unread_views -= 1
    return kept, None, unit, part


def _unpack_through(other: Callable[[Any], torch.Tensor], saved: _Saved) -> torch.Tensor:
    return other(_unpack(saved))


def _hooks(running: Sequence[Reader | None]) -> SavingHooks:
    """Hooks of ours, for forwards of the units `running`."""
    return functools.partial(_pack, running), _unpack


def _around(hooks: SavingHooks) -> SavingHooks:
    """Hooks of ours that call others."""
    pack, unpack = hooks
    return functools.partial(_pack_through, _running.units, pack), functools.partial(_unpack_through, unpack)


def _is_ours(hooks: SavingHooks) -> bool:
    pack = hooks[0]
    return isinstance(pack, functools.partial) and pack.func in (_pack, _pack_through)


@functools.cache
def _share_the_stack() -> None:
    """A forward may push hooks of its own, and call `torch.func.grad`, which refuses to run inside of any."""
    share_saving_hooks(_is_ours, _around)


def begin_watching(unit: Reader) -> bool:
    """The forward of `unit` begins: have autograd tell us what it saves from here on. Returns what `end_watching` is to
    be told."""
    _running.units.append(unit)
    if not torch.is_grad_enabled() or not may_hook_saving():
        return False
    _share_the_stack()
    outer = saving_hooks()
    if outer is not None and _is_ours(outer):
        return False
    push_saving_hooks(_hooks(_running.units) if outer is None else _around(outer))
    return True


def end_watching(has_pushed: bool) -> None:
    """The forward that began last is over."""
    _running.units.pop()
    top = saving_hooks() if has_pushed else None
    if top is not None and _is_ours(top):  # else somebody has left hooks of his own behind
        pop_saving_hooks()
