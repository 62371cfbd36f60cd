"""A step a group at a time: optimizer state and masters that rest elsewhere come for the step of their group, and go.

    to the step      group 1   group 2   group 3   group 4
    the step                   group 1   group 2   group 3   group 4
    back                                 group 1   group 2   group 3   group 4

Copies in both directions are on lanes of their own, so compute waits for the first group only, and at most `IN_FLIGHT`
groups have their state where the step is. Between steps `optimizer.state` has it where it rests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sherd._torch import new_dtensor, replace_class, spec_of, swap_devices
from sherd.comm.streams import Handoff, streams_for
from sherd.engine import Group
from sherd.engine.state.masters import Masters
from sherd.tensor.local_step import params_replaced
from sherd.tensor.placement import in_dtype
from sherd.tensor.ragged import as_dtensor, local_part, own_view
from sherd.tensor.sharded import rest_on
from sherd.tensor.state_kind import State

IN_FLIGHT = 3
"""One group that comes, one that is stepped, one that goes."""

States = MutableMapping[torch.Tensor, State]


def _around(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns `local` as a tensor of the kind of `like`, which has its layout."""
    return new_dtensor(type(like), local, spec_of(like)) if isinstance(like, DTensor) else local


class Chunk:
    """What is stepped together.

    Args:
        lists: what the optimizer steps, by parameter group: parameters, or parts of them.
        groups: the groups that all of it is in, whose state comes; none for what has its state where it is stepped.
        are_shards: the optimizer steps the shards themselves, which are float32 meanwhile where they have masters.
    """

    def __init__(
        self, lists: Sequence[Sequence[torch.Tensor]], groups: Sequence[Group] = (), are_shards: bool = False
    ) -> None:
        self.lists, self.groups, self._are_shards = lists, groups, are_shards
        self._stepped = [each for own in lists for each in own]
        self.state: States = defaultdict(dict)
        """The state of `_stepped` where the step is."""
        self._masters: list[tuple[Masters, torch.Tensor, torch.Tensor]] = []
        self._brought: dict[int, Any] = {}
        self._has_new = False  # memory that was not brought here

    def fetch(self, resting: Mapping[torch.Tensor, State], async_op: bool) -> None:
        """Bring what rests elsewhere, on the current stream."""
        for each in self._stepped:
            if each in resting:
                self.state[each] = {key: self._near(value) for key, value in resting[each].items()}
        masters = [group.masters for group in self.groups if group.masters is not None]
        self._masters = [(each, self._near(each.low), self._near(each.carries)) for each in masters]

    def _near(self, value: Any) -> Any:
        """Returns a tensor of state where the step is; numbers, and tensors without dims, are there."""
        if not self.groups or not isinstance(value, torch.Tensor) or not value.ndim:
            return value
        local, device = local_part(value), self.groups[0].shard_buffer.device
        if local.device != device:
            value = _around(local.to(device, non_blocking=True), value)
            self._brought[id(value)] = value
        return value

    @contextmanager
    def lent_to(self, optimizer: Optimizer) -> Iterator[None]:
        """Within this context `optimizer` has this chunk alone, and masters have their values."""
        with ExitStack() as stack:
            for masters, low, carries in self._masters:
                stack.enter_context(masters.lent(low, carries))
            for group in self.groups if self._are_shards else ():
                stack.enter_context(_stepped_as_masters(group))
            stack.enter_context(params_replaced(optimizer, self.lists, self.state))
            yield

    def store(self, resting: States, async_op: bool) -> None:
        """Take back to where it rests what the step has left, on the current stream."""
        for each in self._stepped:
            if each in self.state:
                before = resting.get(each, {})
                resting[each] = {key: self._far(value, before.get(key)) for key, value in self.state[each].items()}
        for masters, low, carries in self._masters:
            for near, far in ((low, masters.low), (carries, masters.carries)):
                if near is not far:
                    far.copy_(near, non_blocking=True)

    def _far(self, value: Any, before: Any) -> Any:
        """Returns `value` where it rests: `before`, with its values, or a new tensor."""
        if not self.groups or not isinstance(value, torch.Tensor) or not value.ndim:
            return value
        local, place = local_part(value), self.groups[0].place
        if not place.brings_state:
            return value
        self._has_new |= id(value) not in self._brought
        if isinstance(before, torch.Tensor):
            far = local_part(before)
            if (far.shape, far.dtype, far.device.type) == (local.shape, local.dtype, "cpu") and (
                far.is_pinned() or not place.pinned
            ):
                far.copy_(local, non_blocking=True)
                return before
        return _around(torch.empty_like(local, device="cpu", pin_memory=place.pinned).copy_(local, non_blocking=True), value)

    def drop(self, gone: Handoff) -> None:
        """Free what was brought, and, once `gone` is done, what the step has made, which is compute's memory."""
        if self._has_new:
            gone.wait()
        self.state, self._masters, self._brought, self._has_new = defaultdict(dict), [], {}, False


@contextmanager
def _stepped_as_masters(group: Group) -> Iterator[None]:
    """Within this context the shards of `group`, the same objects, are its masters in float32."""
    swapped: list[tuple[DTensor, DTensor, torch.Tensor]] = []
    try:
        for each in group.optimizer_params if group.masters is not None else ():
            assert group.masters is not None
            shard, extent = each.record.optimizer_param, each.extent
            assert isinstance(shard, DTensor), "shards are DTensors"
            values = own_view(group.masters.values[extent.start : extent.stop]).view(each.shape)
            other = as_dtensor(values, in_dtype(spec_of(shard), torch.float32)).requires_grad_(shard.requires_grad)
            gradient, local = shard.grad, local_part(shard)
            _exchange(shard, other, values)
            shard.grad = gradient
            swapped.append((shard, other, local))
        yield
    finally:
        for shard, other, local in swapped:
            is_dropped = shard.grad is None
            _exchange(shard, other, local)
            if is_dropped:
                shard.grad = None


def _exchange(shard: DTensor, other: DTensor, local: torch.Tensor) -> None:
    """Give `shard` the dtype and the gradient of `other`, and `local` as its memory."""
    swap_devices(shard, other)
    replace_class(shard, type(shard), in_dtype(spec_of(shard), local.dtype))
    rest_on(shard, local)


def step_chunks(chunks: Sequence[Chunk], resting: States, step: Callable[[Chunk], None]) -> Handoff:
    """Step the chunks in order, by `step(chunk)`, each while the next one comes and the one before goes back.

    Returns the handoff of the last copy back.
    """
    streams = streams_for(next(each.groups[0].device for each in chunks if each.groups))
    come, go = streams.all_reduce, streams.reduce
    came: list[Handoff] = []
    gone: list[Handoff] = []

    def fetch(number: int) -> None:
        if number < len(chunks):
            earlier = number - IN_FLIGHT
            came.append(come.run(partial(chunks[number].fetch, resting), drop(earlier) if earlier >= 0 else None))

    def drop(number: int) -> Handoff:
        # What the lane brought is its memory, which it may hand out again: not before the copy back has read it.
        chunks[number].drop(gone[number])
        return gone[number]

    come.follow_compute()
    for number in range(IN_FLIGHT - 1):
        fetch(number)
    for number, chunk in enumerate(chunks):
        came[number].wait()
        step(chunk)
        go.follow_compute()
        gone.append(go.run(partial(chunk.store, resting)))
        fetch(number + IN_FLIGHT - 1)
    for number in range(max(0, len(chunks) - IN_FLIGHT), len(chunks)):
        drop(number)
    return come.run(lambda async_op: None, gone[-1])
