"""A step in chunks: optimizer state and masters that rest elsewhere come for the step of their chunk, and go.

    to the step      chunk 1   chunk 2   chunk 3   chunk 4
    the step                   chunk 1   chunk 2   chunk 3   chunk 4
    back                                 chunk 1   chunk 2   chunk 3   chunk 4

Copies in both directions are on lanes of their own, so compute waits for the first chunk only, and at most `IN_FLIGHT`
chunks have their state where the step is. Between steps `optimizer.state` has it where it rests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sherd._torch import dynamo_disabled, new_dtensor, replace_class, spec_of, swap_devices
from sherd.comm.agreement import gathered_along, groups_of
from sherd.comm.streams import Handoff, streams_for
from sherd.engine import Group
from sherd.errors import ScratchError
from sherd.layout.extent import Extent
from sherd.optim.on_disk import Staged, vectors_on
from sherd.policy import Disk
from sherd.tensor.local_step import LocalStep, SteppedSpan, of_no_parameter
from sherd.tensor.placement import in_dtype
from sherd.tensor.ragged import as_dtensor, local_part, own_view
from sherd.tensor.sharded import rest_on
from sherd.tensor.state_kind import State, copy_of

IN_FLIGHT = 3
"""One chunk that comes, one that is stepped, one that goes."""

CHUNK_NUMEL = 1 << 22
"""The most elements of a shard buffer in one chunk, a multiple of 8. Their AdamW state is 32 MiB, and copies of it last
longer than the host's calls."""

Lists = Sequence[Sequence[torch.Tensor]]
"""The tensors that an optimizer steps, by parameter group."""

States = MutableMapping[torch.Tensor, State]
Run = Callable[[Lists, States], None]
"""Has the optimizer step these lists, with this state."""


class Chunk(ABC):
    """The tensors that are stepped together."""

    def begin(self) -> None:  # noqa: B027  # most have nothing to note
        """Note the state before the step."""

    def read(self) -> None:  # noqa: B027  # few have anything on a disk
        """Begin to read what rests on a disk."""

    @abstractmethod
    def fetch(self, async_op: bool) -> None:
        """Bring what rests elsewhere, on the current stream."""

    @abstractmethod
    def step(self, run: Run) -> None:
        """Step what was brought."""

    @abstractmethod
    def store(self, async_op: bool) -> None:
        """Take back to where it rests what the step has left, on the current stream."""

    def write(self, gone: Handoff) -> None:  # noqa: B027
        """Begin to write what rests on a disk, once `gone` says that it is in host memory."""

    @abstractmethod
    def drop(self, gone: Handoff) -> None:
        """Free what was brought. `gone`: it is back."""


@dynamo_disabled  # each chunk has tensors of its own, for which a compiled step would be compiled again
def step_chunks(chunks: Sequence[Chunk], groups: Sequence[Group], run: Run, num_moments: int = 0) -> Handoff | None:
    """Step the chunks in order, each while the next one comes and the one before goes back.

    Args:
        chunks: none on a rank that has nothing of the groups.
        groups: those of which something comes, on all ranks.
        run: steps lists with their state.
        num_moments: how many vectors of state the step is about to make for each shard buffer.

    Returns:
        The handoff of the last copy back; None if there was none. What rests on a disk is there.

    Raises:
        ScratchError: on all ranks, if a disk of one has failed.
    """
    device = groups[0].device
    places = [place for group in groups for place in (group.place.state, group.place.masters)]
    disks = {place.path: place for place in places if isinstance(place, Disk)}
    if not disks:
        return _step_chunks(chunks, device, run)
    last, failure = None, None
    try:
        for path, each in disks.items() if num_moments else ():
            of_disk = [group for group in groups if group.place.state == Disk(path)]
            sizes = [group.shard_numel * max(group.grad_dtype.itemsize, group.dtype.itemsize) for group in of_disk]
            vectors_on(each).require(num_moments * sum(sizes))
        last = _step_chunks(chunks, device, run)
        for each in disks.values():
            vectors_on(each).settle()
    except ScratchError as error:
        failure = error
    axes = dict.fromkeys(axis for group in groups for axis in groups_of(group.mesh))
    for said in gathered_along(axes, failure and failure.args[0], "optimizer state on disks"):
        if said is not None:
            raise ScratchError(said) from failure
    return last


def _step_chunks(chunks: Sequence[Chunk], device: torch.device, run: Run) -> Handoff | None:
    if not chunks:
        return None
    come, go = streams_for(device).all_reduce, streams_for(device).reduce
    came: list[Handoff] = []
    gone: list[Handoff] = []

    def fetch(number: int) -> None:
        if number < len(chunks):
            earlier = number - IN_FLIGHT
            came.append(come.run(chunks[number].fetch, drop(earlier) if earlier >= 0 else None))

    def drop(number: int) -> Handoff:
        # What the lane brought is its memory, which it may hand out again: not before the copy back has read it.
        chunks[number].drop(gone[number])
        return gone[number]

    for chunk in chunks:
        chunk.begin()
    for chunk in chunks[: IN_FLIGHT - 1]:
        chunk.read()
    come.follow_compute()
    for number in range(IN_FLIGHT - 1):
        fetch(number)
    for number, chunk in enumerate(chunks):
        for ahead in chunks[number + IN_FLIGHT - 1 : number + IN_FLIGHT]:
            ahead.read()
        came[number].wait()
        chunk.step(run)
        go.follow_compute()
        gone.append(go.run(chunk.store))
        if number:
            chunks[number - 1].write(gone[number - 1])
        fetch(number + IN_FLIGHT - 1)
    chunks[-1].write(gone[-1])
    for number in range(max(0, len(chunks) - IN_FLIGHT), len(chunks)):
        drop(number)
    return come.run(lambda async_op: None, gone[-1])


def _near(value: Any, device: torch.device) -> Any:
    """Returns a tensor of state on `device`; numbers, and tensors without dims, are where the step reads them."""
    if not isinstance(value, torch.Tensor) or not value.ndim or (local := local_part(value)).device == device:
        return value
    return _around(local.to(device, non_blocking=True), value)


def _around(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns `local` as a tensor of the kind of `like`, which has its layout."""
    return new_dtensor(type(like), local, spec_of(like)) if isinstance(like, DTensor) else local


def _far(value: Any, before: Any, group: Group) -> Any:
    """Returns a tensor of state where it rests: `before`, with its values, if that is fit, else a new one."""
    if not _is_vector(value):
        return value
    local, place, pinned = local_part(value), group.place.state, group.place.pinned
    disk = vectors_on(place) if isinstance(place, Disk) else None
    if isinstance(before, torch.Tensor):
        far = local_part(before)
        is_fit = (far.shape, far.dtype, far.device.type) == (local.shape, local.dtype, "cpu")
        if is_fit and (disk.has(far) if disk is not None else far.is_pinned() or not pinned):
            far.copy_(local, non_blocking=True)
            return before
    if disk is not None:
        far = disk.empty(f"state of {group.name}", local.numel(), local.dtype).view(local.shape)
    else:
        far = torch.empty_like(local, device="cpu", pin_memory=pinned)
    return _around(far.copy_(local, non_blocking=True), value)


def _is_vector(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


# Ranges of shard buffers


class SpanState:
    """The state of one span, where it rests."""

    def __init__(self, span: SteppedSpan, group: Group, states: States) -> None:
        self.span, self._group, self._states = span, group, states
        self._before: State = {}
        place = group.place.state
        self._disk = vectors_on(place) if isinstance(place, Disk) else None
        self._staged: dict[tuple[int, str], Staged] = {}
        self._to_write: dict[tuple[int, str], torch.Tensor] = {}

    def begin(self) -> None:
        """Note the state before the step. What was loaded, or made with the optimizer, goes to where it rests."""
        state, masters = self._states.get(self.span.flat, {}), self._group.masters
        for key, value in state.items():
            if _is_vector(value):
                # An optimizer makes state for parameters in bfloat16, and steps float32.
                given = value.float() if masters is not None and value.dtype is self._group.dtype else value
                if given is not value or not self._is_in_place(value):
                    state[key] = self._empty(key, given).copy_(given)
        # Parts of a span are stepped one after another, each with its own count of steps.
        self._before = {key: value if _is_vector(value) else copy_of(value) for key, value in state.items()}
        self._staged.clear()
        self._to_write.clear()

    def read(self, start: int, stop: int) -> None:
        """Begin to read the state of a part of the span."""
        pinned = self._group.place.pinned and self._group.shard_buffer.device.type != "cpu"
        for key, value in self._before.items():
            if self._disk is not None and _is_vector(value):
                self._staged[start, key] = self._disk.read(value, start, stop, pinned)

    def near(self, start: int, stop: int) -> State:
        """Returns the state of a part of the span where the step is."""
        return {key: self._near(start, stop, key, value) for key, value in self._before.items()}

    def _near(self, start: int, stop: int, key: str, value: Any) -> Any:
        if not _is_vector(value):
            return copy_of(value)
        staged = self._staged.get((start, key))
        return _near(value[start:stop] if staged is None else staged.wait(), self._group.shard_buffer.device)

    def put(self, start: int, state: State) -> None:
        """Keep the `state` that a step has left of the part from `start` on."""
        kept = self._states[self.span.flat]
        for key, value in state.items():
            own = kept.get(key)
            if not _is_vector(value):
                if isinstance(own, torch.Tensor):
                    own.copy_(value)
                else:
                    kept[key] = value
                continue
            if own is None:
                own = kept[key] = self._empty(key, value)
            if self._disk is None:
                part = own[start : start + len(value)]
            elif (start, key) in self._staged:
                part = self._to_write[start, key] = self._staged.pop((start, key)).buffer
            else:
                part = self._to_write[start, key] = torch.empty_like(value, device="cpu")
            if part.data_ptr() != value.data_ptr():
                part.copy_(value, non_blocking=True)

    def write(self, start: int) -> None:
        """Begin to write what the step has left of the part from `start` on."""
        for key in [key for at, key in self._to_write if at == start]:
            assert self._disk is not None
            self._disk.write(self._states[self.span.flat][key], start, self._to_write.pop((start, key)))

    def _is_in_place(self, value: torch.Tensor) -> bool:
        place = self._group.place
        if self._disk is not None:
            return self._disk.has(value)
        if not place.brings_state:
            return value.device == self._group.shard_buffer.device
        return value.device.type == "cpu" and (value.is_pinned() or not place.pinned)

    def _empty(self, key: str, like: torch.Tensor) -> torch.Tensor:
        numel, dtype = self.span.flat.numel(), like.dtype
        if self._disk is not None:
            return self._disk.empty(f"{key} of {self._group.name}", numel, dtype)
        return self._group.place.belonging(self._group.place.state, self._group.shard_buffer, numel, dtype)


class MastersOnDisk:
    """The low bits and carries of one group in scratch files, for one range of the shard buffer at a time."""

    def __init__(self, group: Group, disk: Disk) -> None:
        assert group.masters is not None
        self._masters, self._disk, self._name = group.masters, vectors_on(disk), group.name

    def begin(self) -> None:
        """Put them there before the first step. Raises ScratchError."""
        masters = self._masters
        if not self._disk.has(masters.low):
            own = [(each.numel(), each.dtype) for each in (masters.low, masters.carries)]
            low, carries = (self._disk.empty(f"masters of {self._name}", *each) for each in own)
            masters.rest_in(low, carries)

    def _places(self, extent: Extent) -> list[tuple[torch.Tensor, int, int]]:
        low, carries = self._masters.low, self._masters.carries
        return [(low, extent.start, extent.stop), (carries, extent.start // 8, -(-extent.stop // 8))]

    def read(self, extent: Extent, pinned: bool) -> list[Staged]:
        return [self._disk.read(vector, start, stop, pinned) for vector, start, stop in self._places(extent)]

    def write(self, extent: Extent, staged: Sequence[Staged]) -> None:
        for (vector, start, _), each in zip(self._places(extent), staged, strict=True):
            self._disk.write(vector, start, each.buffer)


class RangeChunk(Chunk):
    """The parts of one group's spans in a range of the shard buffer, for an element-wise optimizer.

    Args:
        group: the group.
        extent: the range; it begins at a multiple of 8.
        spans: all spans of the group.
        num_lists: the number of the optimizer's parameter groups.
        on_disk: the group's masters, if they are on a disk.
    """

    def __init__(
        self,
        group: Group,
        extent: Extent,
        spans: Sequence[SpanState],
        num_lists: int,
        on_disk: MastersOnDisk | None,
    ) -> None:
        self._group, self._extent, self._num_lists, self._on_disk = group, extent, num_lists, on_disk
        self._device = group.shard_buffer.device
        self._parts: list[tuple[SpanState, int, int]] = []  # the range in the span, of each span
        self._shift: list[int] = []  # where it begins in the range
        for each in spans:
            begin = int(each.span.flat.storage_offset() - each.span.buffer.storage_offset())
            start, stop = max(begin, extent.start), min(begin + each.span.flat.numel(), extent.stop)
            if start < stop:
                self._parts.append((each, start - begin, stop - begin))
                self._shift.append(start - extent.start)
        self._states: list[State] = []
        self._brought: list[State] = []
        self._staged: list[Staged] = []
        self._masters: tuple[torch.Tensor, torch.Tensor] | None = None

    def __bool__(self) -> bool:
        return bool(self._parts)

    def begin(self) -> None:
        for each, start, _ in self._parts:
            if start == 0:
                each.begin()
        if self._on_disk is not None:
            self._on_disk.begin()

    def read(self) -> None:
        for each, start, stop in self._parts:
            each.read(start, stop)
        if self._on_disk is not None:
            self._staged = self._on_disk.read(self._extent, self._group.place.pinned and self._device.type != "cpu")

    def fetch(self, async_op: bool) -> None:
        self._states = [each.near(start, stop) for each, start, stop in self._parts]
        self._brought = [dict(state) for state in self._states]
        if self._group.masters is not None:
            low, carries = [each.wait() for each in self._staged] or self._group.masters.at(self._extent)
            self._masters = _near(low, self._device), _near(carries, self._device)

    def step(self, run: Run) -> None:
        weights = self._group.shard_buffer[self._extent.start : self._extent.stop]
        masters, values = self._group.masters, weights
        if masters is not None and self._masters is not None:
            values = masters.joined(self._extent, *self._masters)
        lists: list[list[torch.Tensor]] = [[] for _ in range(self._num_lists)]
        lent: States = defaultdict(dict)
        for (each, start, stop), shift, state in zip(self._parts, self._shift, self._states, strict=True):
            part = nn.Parameter(values[shift : shift + stop - start].detach())
            assert each.span.flat.grad is not None, "only shards with a gradient are in a span"
            part.grad = each.span.flat.grad[start:stop]
            lists[each.span.group_index].append(part)
            lent[part] = state
        run(lists, lent)
        if masters is not None and self._masters is not None:
            masters.split_into(self._extent, values, *self._masters)

    def store(self, async_op: bool) -> None:
        for (each, start, _), state in zip(self._parts, self._states, strict=True):
            each.put(start, state)
        if self._group.masters is not None and self._masters is not None:
            rests = [each.buffer for each in self._staged] or self._group.masters.at(self._extent)
            for kept, near in zip(rests, self._masters, strict=True):
                if kept.device != near.device:
                    kept.copy_(near, non_blocking=True)

    def write(self, gone: Handoff) -> None:
        if self._on_disk is not None or isinstance(self._group.place.state, Disk):
            gone.wait_on_host()
        for each, start, _ in self._parts:
            each.write(start)
        if self._on_disk is not None:
            self._on_disk.write(self._extent, self._staged)

    def drop(self, gone: Handoff) -> None:
        for now, brought in zip(self._states, self._brought, strict=True):
            if any(_is_vector(value) and value is not brought.get(key) for key, value in now.items()):
                gone.wait()  # the step has made it, so it is compute's memory
                break
        self._states, self._brought, self._staged, self._masters = [], [], [], None


def chunks_of(local: LocalStep, by_group: Sequence[tuple[Group, Sequence[SteppedSpan]]]) -> list[Chunk]:
    """Returns the chunks of a local step: ranges of the groups whose state comes, then all that is where it is stepped.

    Spans without elements, of shards that are empty on this rank, count their steps there too.
    """
    chunks: list[Chunk] = []
    in_ranges: set[int] = set()
    for group, spans in by_group:
        states = [SpanState(span, group, local.state) for span in spans if group.is_brought and span.flat.numel()]
        starts = range(0, group.shard_numel, CHUNK_NUMEL) if states else ()
        extents = [Extent(start, min(CHUNK_NUMEL, group.shard_numel - start)) for start in starts]
        place = group.place.masters
        on_disk = MastersOnDisk(group, place) if states and group.masters and isinstance(place, Disk) else None
        of_group = [RangeChunk(group, extent, states, len(local.parts), on_disk) for extent in extents]
        chunks += [each for each in of_group if each]
        in_ranges.update(id(each.span.flat) for each in states)
    rest = [[each for each in own if id(each) not in in_ranges] for own in local.parts]
    return [*chunks, Shards(rest, local.state)] if any(rest) else chunks


# Shards


class Shards(Chunk):
    """Parameters themselves, or parts of them, which are stepped as they are; masters as float32 shards meanwhile.

    Args:
        lists: what the optimizer steps.
        resting: the optimizer's state.
        groups: the groups of which something comes; none if all is where the step is.
    """

    def __init__(self, lists: Lists, resting: States, groups: Sequence[Group] = ()) -> None:
        self._lists, self._resting, self._groups = lists, resting, groups
        self._stepped = [each for own in lists for each in own]
        stepped = [(each.parameter, group) for group in groups for each in group.optimizer_params]
        stepped += [(each.shard, group) for group in groups for each in group.parameters]  # of a flat parameter
        self._group_of = {id(each): group for each, group in stepped}
        self._state: dict[Any, State] = defaultdict(dict)
        self._brought: dict[int, Any] = {}
        self._masters: list[tuple[Group, torch.Tensor, torch.Tensor]] = []
        self._swapped = ExitStack()

    def begin(self) -> None:
        for group in self._groups:
            if group.masters is not None and isinstance(group.place.masters, Disk):
                MastersOnDisk(group, group.place.masters).begin()

    def fetch(self, async_op: bool) -> None:
        self._state |= of_no_parameter(self._resting)
        for each in self._stepped:
            if each in self._resting:
                # Also that of a span without elements, which may be a part of state that rests elsewhere.
                device = local_part(each).device
                state = self._state[each] = {key: _near(value, device) for key, value in self._resting[each].items()}
                self._brought |= {id(value): value for value in state.values()}
        for group in self._groups:
            if group.masters is not None:
                device, masters = group.shard_buffer.device, group.masters
                self._masters.append((group, _near(masters.low, device), _near(masters.carries, device)))

    def step(self, run: Run) -> None:
        with self._swapped:
            self._swap()
            run(self._lists, self._state)

    def _swap(self) -> None:
        for group, low, carries in self._masters:
            self._swapped.enter_context(_stepped_as_masters(group, low, carries))

    def around_closure(self, closure: Callable[[], object]) -> Callable[[], object]:
        """Returns `closure`, inside of which the shards are shards: it computes a loss and new gradients."""

        def with_shards() -> object:
            self._swapped.close()
            for group, _, _ in self._masters:
                assert group.masters is not None
                group.masters.note_step()
            loss = closure()
            self._swap()
            return loss

        return with_shards

    def store(self, async_op: bool) -> None:
        for each in self._stepped:
            if each in self._state:
                before, group = self._resting.get(each, {}), self._group_of.get(id(each))
                now = self._state[each]
                if group is not None and group.place.brings_state:
                    now = {key: _far(value, before.get(key), group) for key, value in now.items()}
                self._resting[each] = now
        self._resting.update(of_no_parameter(self._state))
        for group, low, carries in self._masters:
            assert group.masters is not None
            for near, far in ((low, group.masters.low), (carries, group.masters.carries)):
                if near is not far:
                    far.copy_(near, non_blocking=True)

    def drop(self, gone: Handoff) -> None:
        made = (value for each in self._stepped for value in self._state.get(each, {}).values())
        if any(id(value) not in self._brought for value in made):
            gone.wait()  # the step has made it, so it is compute's memory
        self._state, self._masters, self._brought = defaultdict(dict), [], {}


@contextmanager
def _stepped_as_masters(group: Group, low: torch.Tensor, carries: torch.Tensor) -> Iterator[None]:
    """Within this context the shards of `group`, the same objects, are its masters in float32."""
    assert group.masters is not None
    all_of_it = Extent(0, group.shard_numel)
    values = group.masters.joined(all_of_it, low, carries)
    swapped: list[tuple[DTensor, DTensor, torch.Tensor]] = []
    try:
        for each, extent in group.stepped():
            shard: Any = each
            part = own_view(values[extent.start : extent.stop]).view(local_part(shard).shape)
            other = as_dtensor(part, in_dtype(spec_of(shard), torch.float32))
            other.requires_grad_(shard.requires_grad)
            gradient, local = shard.grad, local_part(shard)
            _exchange(shard, other, part)
            shard.grad = None if gradient is None else gradient.to(torch.float32)
            swapped.append((shard, other, local))
        yield
        group.masters.split_into(all_of_it, values, low, carries)
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
