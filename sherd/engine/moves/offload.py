"""Saved tensors in host memory: copies out and back, behind compute. `schedule/residence.py` says which ones, and when.

    forward     pack      the storage is known, once for all tensors that share it; a turn's begin sends older ones out
    backward    unpack    a turn's begin fetches its storages, and those of the turn that is read next

Storages are emptied and filled again in place, so tensors stay what they were, also views and DTensors. A storage is
emptied only if all that refer to it are here. The memory is compute's throughout: compute waits for a copy before the
memory is freed or read, and a copy waits for what compute has queued. The host never waits. Copies follow one another
on one lane, so that host memory can be used again at once.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial

import torch
from torch.distributed.tensor import DTensor

from sherd._torch import are_transforms_active, in_backward, local_tensor, storage_address, storage_uses
from sherd.comm.streams import Handoff, copy_lane, is_capturing
from sherd.engine.moves.saved import Offload, SavedView
from sherd.policy import SavedOnHost
from sherd.schedule.residence import Residence


class HostBuffers:
    """Buffers in host memory, kept from step to step. There are never more bytes than were in use at once."""

    def __init__(self) -> None:
        self._idle: dict[tuple[int, bool], list[torch.Tensor]] = {}

    def take(self, nbytes: int, pinned: bool) -> torch.Tensor:
        """Returns a buffer of `nbytes`, uint8."""
        if not self._idle.get((nbytes, pinned)):
            self._idle.clear()  # steps have changed, and may never need these again
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        return self._idle[nbytes, pinned].pop()

    @property
    def nbytes(self) -> int:
        """The bytes of buffers that are in no use."""
        return sum(buffer.nbytes for idle in self._idle.values() for buffer in idle)

    def give_back(self, buffer: torch.Tensor, pinned: bool) -> None:
        self._idle.setdefault((buffer.nbytes, pinned), []).append(buffer)


_Dead = tuple[int, torch.Tensor | None, bool]
"""The address of a dead `_Stored`, its buffer in host memory, and whether that is pinned."""


class _Stored:
    """A storage that units have saved, with the last copy of it. `views` are all saved tensors; nothing else has them.

    `dead` is told when no saved tensor is left.
    """

    def __init__(self, address: int, storage: torch.UntypedStorage, pinned: bool, dead: deque[_Dead]) -> None:
        self.address, self.nbytes, self.views = address, storage.nbytes(), list[torch.Tensor]()
        self._storage, self._pinned, self._dead = storage, pinned, dead
        self._host: torch.Tensor | None = None
        self._copy: Handoff | None = None

    @property
    def is_ours(self) -> bool:
        """Whether nothing but saved tensors refers to the storage."""
        return storage_uses(self.address) == len(self.views) + 1

    def memory(self, buffers: HostBuffers) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the memory on the device, which is allocated if it was emptied, and that on the host, as uint8."""
        if self._storage.nbytes() != self.nbytes:
            self._storage.resize_(self.nbytes)
        if self._host is None:
            self._host = buffers.take(self.nbytes, self._pinned)
        return torch.empty(0, dtype=torch.uint8, device=self._storage.device).set_(self._storage), self._host

    def is_copied(self, copy: Handoff) -> None:
        """Note that `copy` is queued, from the memory or into it."""
        self._copy = copy

    def settle(self) -> None:
        """Order compute behind the last copy."""
        if self._copy is not None:
            self._copy.wait()

    def empty(self) -> None:
        """Free the memory on the device."""
        self.settle()
        self._storage.resize_(0)

    def __del__(self) -> None:
        self.settle()  # or compute would get memory that is still copied: test_a_graph_that_is_dropped_gives_it_back
        # Told later: the garbage collector comes in the middle of anything, and on any thread.
        self._dead.append((self.address, self._host, self._pinned))


class SavedMemory:
    """The tensors that units have saved on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lane = copy_lane(device)
        self._buffers = HostBuffers()
        self._residence = Residence()
        self._stored: weakref.WeakValueDictionary[int, _Stored] = weakref.WeakValueDictionary()
        self._dead: deque[_Dead] = deque()
        self._turn: object = None

    def keep(self, terms: SavedOnHost, tensor: torch.Tensor, turn: object) -> SavedView | None:
        """Returns a saved `tensor` whose memory may go to the host; None for one that stays where it is.

        Small tensors stay, those on another device, those of classes that may have several storages, and those that a
        function transform or a graph that is being captured makes. `turn` is another object for another unit.
        """
        local = local_tensor(tensor) if type(tensor) is DTensor else tensor
        if type(local) is not torch.Tensor or local.device != self._device or local.layout is not torch.strided:
            return None
        if are_transforms_active() or is_capturing(self._device):
            return None
        address, storage = storage_address(local), local.untyped_storage()
        if storage.nbytes() < max(terms.min_bytes, 1) or not storage.resizable():
            return None
        self._bury()
        if turn is not self._turn:
            self._begin(turn, terms.budget)
        stored = self._stored.get(address)
        if stored is None:
            stored = self._stored[address] = _Stored(address, storage, terms.pin_memory, self._dead)
        self._residence.save(address, stored.nbytes)
        view = tensor.detach()
        stored.views.append(view)
        return SavedView(view, partial(self._bring, stored, self._residence.turn))

    def _bring(self, stored: _Stored, turn: int) -> None:
        """Have the memory of `stored`, which `turn` saved, on the device for compute to read, and what is read next."""
        self._bury()
        residence = self._residence
        if turn != residence.reading:
            self._turn = None  # what backward saves here for another backward is no part of earlier turns
            no_more, near = residence.enter(turn)
            self._drop(no_more)
            for storages in near:
                self._copy(storages, to_host=False)
        if residence.is_away(stored.address):
            self._copy([stored.address], to_host=False)
        stored.settle()

    @property
    def nbytes(self) -> int:
        """The bytes of buffers in host memory, those included that wait for their next use."""
        self._bury()
        stored = (each._host for each in list(self._stored.values()))
        return self._buffers.nbytes + sum(buffer.nbytes for buffer in stored if buffer is not None)

    def _begin(self, turn: object, budget: int) -> None:
        """Begin a turn of saving: send out what is more than earlier turns may have on the device."""
        self._turn = turn
        self._drop(self._residence.to_drop(in_backward()))
        self._residence.begin()
        self._copy(self._residence.to_send(budget, self._is_free), to_host=True)

    def _is_free(self, address: int) -> bool:
        stored = self._stored.get(address)
        return stored is not None and stored.is_ours

    def _copy(self, addresses: Sequence[int], to_host: bool) -> None:
        """Queue copies of storages, to the host or back to the device."""
        found = self._alive(addresses)
        if found:
            pairs = [stored.memory(self._buffers) for stored in found]
            self._lane.follow_compute()
            copy = self._lane.run(partial(_copy_all, pairs, to_host))
            (self._residence.sent if to_host else self._residence.fetched)(addresses)
            for stored in found:
                stored.is_copied(copy)

    def _drop(self, addresses: Sequence[int]) -> None:
        for stored in self._alive(addresses):
            if stored.is_ours:
                stored.empty()
                self._residence.dropped(stored.address)

    def _alive(self, addresses: Sequence[int]) -> list[_Stored]:
        return [stored for each in addresses if (stored := self._stored.get(each)) is not None]

    def _bury(self) -> None:
        """Forget the storages to which no saved tensor refers any more."""
        while self._dead:
            address, host, pinned = self._dead.popleft()
            self._residence.forget(address)
            if host is not None:
                self._buffers.give_back(host, pinned)


def _copy_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], to_host: bool, _: bool) -> None:
    for device, host in pairs:
        (host if to_host else device).copy_(device if to_host else host, non_blocking=True)


_by_device: dict[torch.device, SavedMemory] = {}


def saved_on_host(device: torch.device) -> int:
    """Returns the bytes of host memory that this process has for tensors that units on `device` save."""
    return _by_device[device].nbytes if device in _by_device else 0


def offload_on(device: torch.device, terms: SavedOnHost) -> Offload:
    """Returns what units on `device`, an accelerator, do with saved tensors on `terms`."""
    if device not in _by_device:
        _by_device[device] = SavedMemory(device)
    return partial(_by_device[device].keep, terms)
