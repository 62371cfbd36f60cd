"""Hooks on saved tensors tell a unit that backward is in it, and have its parameters gathered before they are read.

    forward     autograd saves a tensor                 pack      notes the unit whose forward runs, and the group whose
                                                                  memory of a weight, or of a view of one
    backward    a node is about to read the tensor      unpack    tells the unit that backward is in it; has the weight
                                                                  gathered, if it was freed since


The hooks cover every way from a loss into a unit: through what its forward returned, whatever it is wrapped in, through
what forward left on a module, and through gradients of gradients. Hooks on outputs (`engine/run/hooks.py`) only start
the gather earlier, before the first node of the unit asks, and the next unit's gather behind it.

With `offload_activations` they also let the memory of other tensors go to the host, and bring it back (`offload.py`).

Hooks on saved tensors are stacked, and autograd calls the innermost ones only. Our hooks call the hooks below them.
Hooks that are put over ours inside of a unit (activation checkpointing) are called by ours, too.
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
    PackHook,
    PackHookAround,
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


class StorageOwner(ABC):
    """Parameters in memory that comes and goes.

    `unshard()` is called when backward is about to read them after they were freed. It raises `StateError` outside of
    backward, or if the user said that backward does not need them.
    """

    live: Live
    has_phases = False
    """Whether memory of one phase is away in the other."""

    def __init__(self, unshard: Callable[[], None]) -> None:
        # The views that autograd saved and has not read since. Unlike `num_saved_views` the number is the same on all
        # ranks, for it does not depend on when garbage is collected:
        # test_when_garbage_is_collected_does_not_say_when_ranks_gather.
        self.num_unread_views = 0
        self.view_mark = object()  # each view in autograd's hands refers to it
        self._own_references = sys.getrefcount(self.view_mark)
        self.unshard = unshard

    @property
    def num_saved_views(self) -> int:
        return sys.getrefcount(self.view_mark) - self._own_references

    @abstractmethod
    def is_parameter(self, tensor: torch.Tensor) -> bool:
        """Returns whether `tensor` is one of the parameters itself, not a view of one."""


class SavedView:
    """A saved tensor whose memory may be away: `bring` has it on the device, for compute to read."""

    __slots__ = ("_bring", "_view")

    def __init__(self, view: torch.Tensor, bring: Callable[[], None]) -> None:
        self._view, self._bring = view, bring

    def read(self) -> torch.Tensor:
        """Returns the tensor. It is a new view, as its reader may keep it."""
        self._bring()
        return self._view.detach()


Offload = Callable[[torch.Tensor, object], SavedView | None]
"""Returns the view to keep of a tensor that a unit saves; None: it stays. The other argument tells turns apart."""


class Reader(Protocol):
    """A unit, whose forward saves tensors."""

    is_entered: bool  # the unit knows that the present backward is in it
    is_recorded: bool  # autograd may be recording that backward
    is_under_other_hooks: bool  # `runs_under_other_hooks` was called
    offload: Offload | None  # what becomes of the tensors that the unit's forward saves, if they do not stay

    def enter_backward(self) -> None:
        """Note that backward is in the unit."""

    def runs_under_other_hooks(self) -> None:
        """Note that hooks of others get what the unit's forward saves, and may run a part of it again in backward."""


_owners: dict[int, weakref.ref[StorageOwner]] = {}
"""The owner of each storage, by the storage's address. A storage lives as long as its owner."""


def watch(storage: torch.UntypedStorage, owner: StorageOwner) -> None:
    """Know `storage` as the memory of `owner` from now on."""
    key = storage._cdata

    def forget(died: Any) -> None:
        if _owners.get(key) is died:  # else another storage got the address since
            del _owners[key]

    _owners[key] = weakref.ref(owner, forget)


def source_of(tensor: torch.Tensor) -> weakref.ref[StorageOwner] | None:
    """Returns the owner of the memory of `tensor`; None for memory of no unit."""
    try:
        if type(tensor) is not torch.Tensor and isinstance(tensor, DTensor):
            tensor = local_tensor(tensor)
        return _owners.get(storage_address(tensor))
    except (RuntimeError, NotImplementedError):  # sparse, or wrapped by a transform: it has no storage
        return None


def with_own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Returns `tensor`, or a copy if its memory is that of an unsharded parameter, which is freed after forward."""
    return tensor if source_of(tensor) is None else tensor.clone()


class _Running(threading.local):
    """The units whose forwards are under way in this thread, innermost last. The first entry, None, is no unit."""

    def __init__(self) -> None:
        # Per thread: on a device autograd runs backward, and with it recomputed forwards, on a thread of its own.
        self.units: list[Reader | None] = [None]
        self.turn: object = None  # another object whenever the innermost unit changes


_running = _Running()


def is_running(unit: Reader) -> bool:
    return unit in _running.units


# What is saved


# A list and a tuple, not classes: there are hundreds in a step.

_Part = list[Any]
"""A saved parameter, or view of one: the owner of its memory, its shape, the mark of a view, whether it is unread."""

_Saved = tuple[Any, int | None, Reader | None, _Part | None]
"""A saved tensor: the tensor, or a `SavedView` of it, or what other hooks made of it; the version of the tensor, None
under other hooks; the unit whose forward was running; and for a parameter, its `_Part`."""

_PLAIN = frozenset((torch.Tensor, nn.Parameter))


def _pack(running: Sequence[Reader | None], tensor: torch.Tensor, may_offload: bool = True) -> _Saved:
    """Keep `tensor`. The last entry of `running` is the unit whose forward runs."""
    # As few calls as can be: test_calls.py counts them.
    version, unit, owner_ref = tensor._version, running[-1], None
    if tensor.__class__ in _PLAIN:
        try:
            if (address := storage_address(tensor)) in _owners:
                owner_ref = _owners[address]
        except (RuntimeError, KeyError):  # as in `source_of`; or the owner died this moment
            pass
    else:
        owner_ref = source_of(tensor)
    if owner_ref is not None:
        part: _Part = [owner_ref, tensor.shape, None, False]
        owner = owner_ref()
        if owner is not None and (tensor.__class__ is torch.Tensor or not owner.is_parameter(tensor)):
            part[2:] = owner.view_mark, True
            owner.num_unread_views += 1
        return tensor, version, unit, part
    if unit is not None and unit.offload is not None and may_offload:
        view = unit.offload(tensor, _running.turn)
        if view is not None:
            return view, version, unit, None
    if (version or tensor.grad_fn.__class__ not in SAVE_NO_RESULT) and not tensor.is_leaf:
        # The tensor may be the result of the very node that saves it, and the two would keep each other alive:
        # test_a_graph_without_a_backward_is_freed_at_once.
        tensor = tensor.detach()
    return tensor, version, unit, None


def _unpack(saved: _Saved) -> Any:
    """Returns the kept tensor for a node that is about to read it. A parameter is gathered first.

    Raises:
        GradientError: the parameter is gone, or the tensor was changed in place.
    """
    kept, version, unit, part = saved
    # A graph that is kept refers to the owner weakly, or it would keep the shards of a deleted model alive.
    owner: StorageOwner | None = None if part is None else part[0]()
    if part is not None and owner is None:
        raise GradientError(
            f"backward needs a parameter of shape {tuple(part[1])} of a sharded model that was deleted, moved or cast "
            "since its forward; keep the model as it is until backward is done"
        )
    if (unit is None or not unit.is_entered or unit.is_recorded) and in_backward():
        if unit is not None and not unit.is_entered:
            unit.enter_backward()
        if torch.is_grad_enabled() and saving_hooks() is None:
            # With `create_graph` a backward saves tensors for the next one. Autograd restores the stack of hooks after
            # each node, so hooks that are pushed here end with the node that reads.
            push_saving_hooks(_hooks([unit]))
    if part is not None and owner is not None:
        if owner.live is not Live.UNSHARDED:
            owner.unshard()
        if part[3]:
            part[3] = False
            owner.num_unread_views -= 1
            if owner.has_phases and kept.numel() and not kept.untyped_storage().nbytes():
                raise GradientError(
                    f"backward needs a tensor of shape {tuple(kept.shape)} that was gathered for forward alone; save "
                    "the weight for backward, not what is inside of it: its planes are those of backward then"
                )
    if kept.__class__ is SavedView:
        kept = kept.read()
    # Autograd compares no versions of what hooks unpack, so the comparison is made here:
    # test_a_loss_of_before_a_step_cannot_be_differentiated_after_it_but_what_was_not_stepped_can.
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
    _, _, unit, part = _pack(running, tensor, False)
    if unit is not None and not unit.is_under_other_hooks:
        unit.runs_under_other_hooks()
    if part is not None and part[3] and in_backward():
        # A forward that runs again in backward saves tensors for the nodes of the first forward. Its own nodes never
        # run, so nothing reads this view: test_a_unit_inside_of_a_checkpoint_is_freed_before_its_reduction.
        part[3] = False
        part[0]().num_unread_views -= 1
    return kept, None, unit, part


def _unpack_through(other: Callable[[Any], torch.Tensor], saved: _Saved) -> torch.Tensor:
    return other(_unpack(saved))


def _hooks(running: Sequence[Reader | None]) -> SavingHooks:
    return PackHook(_pack, running), _unpack


def _around(hooks: SavingHooks) -> SavingHooks:
    pack, unpack = hooks  # of others
    return PackHookAround(_pack_through, _running.units, pack), functools.partial(_unpack_through, unpack)


def _is_ours(hooks: SavingHooks) -> bool:
    return isinstance(hooks[0], PackHook)


@functools.cache
def share_saving() -> None:
    """Let forwards push hooks of their own, and call `torch.func.grad`, which refuses to run inside of any hooks."""
    share_saving_hooks(_is_ours, _around)


def begin_watching(unit: Reader) -> bool:
    """Begin a forward of `unit`: have autograd tell us what it saves. Returns the argument for `end_watching`."""
    _running.units.append(unit)
    _running.turn = object()
    if not torch.is_grad_enabled() or not may_hook_saving():
        return False
    share_saving()
    outer = saving_hooks()
    # Our hooks of the unit around this one look at the last entry of `_running.units`, which is this unit from now on.
    if outer is not None and _is_ours(outer):
        return False
    push_saving_hooks(_hooks(_running.units) if outer is None else _around(outer))
    return True


def end_watching(has_pushed: bool) -> None:
    _running.units.pop()
    _running.turn = object()
    top = saving_hooks() if has_pushed else None
    if top is not None and _is_ours(top):  # else a user left hooks of their own behind
        pop_saving_hooks()
