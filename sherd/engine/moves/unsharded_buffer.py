"""The memory of a group's unsharded parameters, and the parameters in it, which are made once and stay the same
objects."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from operator import attrgetter, methodcaller

import torch
from torch import nn

from sherd._torch import increment_versions, set_versions, storage_uses
from sherd.comm.buffers import Buffer
from sherd.comm.streams import Lane
from sherd.engine.moves.buffer_views import copy_out
from sherd.engine.state.group import Group
from sherd.engine.state.parameter import ShardedParameter, hide_unsharded, show_unsharded
from sherd.layout.packing import Slot

IS_TRAINED = attrgetter("requires_grad")
ADDRESS = methodcaller("data_ptr")
VERSION = attrgetter("_version")


class Unsharded:
    """The unsharded `parameters` of `records`, and the `buffers` whose memory is freed under them. All-gathers fill
    `gathered`, of which there may be fewer.

    Where autograd has saved a parameter and a hook of ours saw it, reading it has it gathered first. Without a hook
    autograd compares versions, so these are one ahead for as long as the memory is gone. That is what becomes of a
    `ctx.weight` that was not kept by `save_for_backward`, in a gradient of a gradient:
    test_a_weight_kept_as_an_attribute_is_right_or_raises_in_a_gradient_of_a_gradient.
    """

    def __init__(self, records: Sequence[ShardedParameter], gathered: tuple[Buffer, ...]) -> None:
        self._records = records
        self.gathered = self.buffers = gathered
        self.parameters: list[nn.Parameter] = []
        self._is_ahead = False  # the parameters' versions are
        self._as_of: list[tuple[int, bool]] = []
        self.trained: list[bool] = []  # each parameter, as it was shown

    @property
    def num_foreign_views(self) -> int:
        """The number of tensors that share the memory besides those that are made here, autograd's and garbage among
        them, as far as that is known."""
        return 0

    def show(self, as_of: list[tuple[int, bool]]) -> None:
        """Show the parameters to the modules, `as_of` those versions of what the optimizer owns.

        A parameter that was written there is modified in place to autograd, too: a backward raises that reads it for a
        forward of before.
        """
        if self._is_ahead:
            set_versions(tuple(self.parameters), tuple(map((-1).__add__, map(VERSION, self.parameters))))
            self._is_ahead = False
        if as_of != self._as_of:
            stands = zip(self.parameters, cycle(as_of), cycle(self._as_of), strict=False)  # there may be one flat one
            increment_versions([parameter for parameter, now, then in stands if now[0] != then[0]])
            self._as_of = as_of
        show_unsharded(self._records, self.parameters)
        self.trained = list(map(IS_TRAINED, self.parameters))

    def hide(self) -> list[str]:
        """Show the shards instead. Returns the names of parameters that a user has given other values in a way that
        shards do not notice, as far as that is known."""
        hide_unsharded(self._records, self.parameters, self.trained)
        return []

    def free(self, lane: Lane | None = None) -> None:
        """Give the memory back: to the pool of `lane`, if it is that lane's, once compute has read it."""
        if lane is not None:
            lane.follow_compute()
        if self.parameters and not self._is_ahead:
            increment_versions(self.parameters)
            self._is_ahead = True
        for buffer in self.buffers:
            buffer.free()


class UnshardedBuffer(Unsharded):
    """The unsharded buffer, and the parameters cut from it, in one dtype. An all-gather in place fills `rows`."""

    def __init__(self, group: Group, dtype: torch.dtype) -> None:
        unsharded_memory = group.unsharded_memory
        self.buffer = (
            Buffer(group.packing.unsharded_numel, dtype, group.device)
            if unsharded_memory is None
            else Buffer.around(unsharded_memory)
        )
        super().__init__(group.parameters, (self.buffer,))
        flat = self.buffer.tensor
        self.rows = flat[: group.packing.gathered_numel]
        self.copy_out = copy_out(group.packing, flat)
        for parameter, slot in zip(group.parameters, group.packing.slots, strict=True):
            # Each from its own `.data`: its own version counter, so that refilling the buffer is no "modification by an
            # in-place operation" to autograd, while a user's change of one parameter still is.
            tensor = flat.data[slot.unsharded.start : slot.unsharded.start + slot.cut.numel].view(slot.cut.shape)
            self.parameters.append(nn.Parameter(parameter.as_unsharded(tensor), requires_grad=parameter.requires_grad))
        del tensor
        self._slots = group.packing.slots
        offsets = [_offset_of(*each, dtype) for each in zip(group.parameters, self._slots, strict=True)]
        # What a user's `.data = ...` can move, by index, and where it belongs.
        self._plain = [index for index, offset in enumerate(offsets) if offset is not None]
        self._movable = [self.parameters[index] for index in self._plain]
        self._offsets = [offset for offset in offsets if offset is not None]
        self._address = self.buffer.address
        self._own_uses = storage_uses(self._address)

    @property
    def num_foreign_views(self) -> int:
        return storage_uses(self._address) - self._own_uses - self.copy_out.num_late_views

    def hide(self) -> list[str]:
        """Show the shards instead. Parameters that a user has only moved are put back."""
        found = list(map(ADDRESS, self._movable))  # all in C, as it is asked in each free
        own = list(map(self.buffer.tensor.data_ptr().__add__, self._offsets))
        lost = []
        if found != own:
            moved = [index for index, is_at, of in zip(self._plain, found, own, strict=True) if is_at != of]
            lost = [self._records[index].name for index in moved if not self._put_back(index)]
        for record, parameter, instead in hide_unsharded(self._records, self.parameters, self.trained):
            if instead is None or not _are_same(instead, parameter):
                lost.append(record.name)
        return lost

    def _put_back(self, index: int) -> bool:
        """Give a parameter, which a user's `.data = ...` has given memory that no gather would fill, its own again.
        Returns whether there are the same values in it."""
        parameter, slot = self.parameters[index], self._slots[index]
        given = parameter.data
        parameter.data = self.buffer.tensor.data[slot.unsharded.start : slot.unsharded.start + slot.cut.numel].view(
            slot.cut.shape
        )
        return _are_same(given, parameter.data)


def _offset_of(parameter: ShardedParameter, slot: Slot, dtype: torch.dtype) -> int | None:
    """Returns where in the buffer its bytes begin: None for a DTensor, which is not given memory in this way, and for
    what has no elements."""
    is_plain = parameter.unsharded_spec is None and parameter.restored is None
    return slot.unsharded.start * dtype.itemsize if is_plain and slot.cut.numel else None


def _are_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    alike = type(tensor) is type(other) and (tensor.shape, tensor.dtype) == (other.shape, other.dtype)
    return alike and tensor.device == other.device and torch.equal(tensor, other)
