"""A group's parameters between shard and whole: gathered, shown to the modules, freed.

    SHARDED ──gather──▶ GATHERING ──wait──▶ WHOLE ──free──▶ SHARDED
                            ▲                 │
                            └─gather─ SHRUNK ◀┘ shrink

Unsharded parameters are cut once from one buffer whose storage comes and goes under them. Reading one while the storage
is gone kills the process, so the modules show shards at all other times
(`test_whole_parameters_are_freed_after_forward_and_after_backward`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from sherd._torch import will_get_gradient
from sherd.comm.buffers import Buffer
from sherd.comm.streams import Handoff, Streams
from sherd.comm.transport import CopyIntoPlace, Pending, Transport
from sherd.engine.moves import saved
from sherd.engine.moves.buffer_views import copy_out
from sherd.engine.state.group import Group
from sherd.engine.state.parameter import ShardedParameter, hide_unsharded, show_unsharded
from sherd.errors import StateError
from sherd.layout.packing import Slot
from sherd.schedule.moments import MemoryKind
from sherd.schedule.state import Live


@dataclass(frozen=True, slots=True)
class _Flight:
    """An all-gather under way, of the shards as of `version`. `rows` is None when it writes the unsharded buffer
    itself; `land`, if given, puts this rank's own part there."""

    handoff: Handoff
    source: torch.Tensor
    version: int
    rows: torch.Tensor | None = None
    copy_into_place: CopyIntoPlace | None = None


class _UnshardedBuffer:
    """The unsharded buffer, and the parameters cut from it, in one dtype."""

    def __init__(self, group: Group, dtype: torch.dtype) -> None:
        unsharded_memory = group.unsharded_memory
        self.buffer = (
            Buffer(group.packing.unsharded_numel, dtype, group.device)
            if unsharded_memory is None
            else Buffer.around(unsharded_memory)
        )
        flat = self.buffer.tensor
        self.copy_out = copy_out(group.packing, flat)
        self.parameters = []
        for parameter, slot in zip(group.parameters, group.packing.slots, strict=True):
            # Each from its own `.data`: its own version counter, so that refilling the buffer is no "modification by an
            # in-place operation" to autograd, while a user's change of one parameter still is.
            tensor = flat.data[slot.unsharded.start : slot.unsharded.start + slot.cut.numel].view(slot.cut.shape)
            self.parameters.append(nn.Parameter(parameter.as_unsharded(tensor), requires_grad=parameter.requires_grad))
        del tensor
        self._slots = group.packing.slots
        offsets = [_offset_of(*each, dtype) for each in zip(group.parameters, self._slots, strict=True)]
        self._plain = [
            (index, parameter, offset)
            for index, (parameter, offset) in enumerate(zip(self.parameters, offsets, strict=True))
            if offset is not None
        ]
        self.guard = saved.Guard(self.parameters)
        self.own_uses = self.buffer.uses

    def free(self) -> None:
        """Give the memory back, unless the shards are in it."""
        if self.buffer.is_ours:
            self.guard.raise_up()
            self.buffer.free()

    def moved(self) -> list[int]:
        """The parameters that a user's `.data = ...` has given memory which no gather would fill."""
        start = self.buffer.tensor.data_ptr()
        return [index for index, parameter, offset in self._plain if parameter.data_ptr() != start + offset]

    def put_back(self, index: int) -> bool:
        """Give a parameter its own memory again; whether there are the same values in it."""
        parameter, slot = self.parameters[index], self._slots[index]
        given = parameter.data
        parameter.data = self.buffer.tensor.data[slot.unsharded.start : slot.unsharded.start + slot.cut.numel].view(
            slot.cut.shape
        )
        return _are_same(given, parameter.data)


def _offset_of(parameter: ShardedParameter, slot: Slot, dtype: torch.dtype) -> int | None:
    """Where in the buffer its bytes begin; None for a DTensor, which is not given memory in this way, and for what has
    no elements."""
    is_plain = parameter.unsharded_spec is None and parameter.restored is None
    return slot.unsharded.start * dtype.itemsize if is_plain and slot.cut.numel else None


class Weights(saved.Source):
    """One group's parameters. `watch(index, parameter)` is told of each unsharded parameter once, when it is made."""

    def __init__(
        self,
        group: Group,
        streams: Streams,
        watch: Callable[[int, nn.Parameter], None],
        unshard: Callable[[], None],
    ) -> None:
        super().__init__(group.name, unshard)
        self.group = group
        self._streams = streams
        self._watch = watch
        # In each dtype that was asked for, and in that of the last gather. Made at the first gather: a model that is
        # only built or loaded has none.
        self._buffers: dict[torch.dtype, _UnshardedBuffer] = {}
        self._made: _UnshardedBuffer | None = None
        self._ids: set[int] = set()  # of the unsharded parameters in all of them
        self._dtype = group.compute_dtype
        self._flight: _Flight | None = None
        self._versions: dict[torch.dtype, int] = {}
        self._part: torch.Tensor | None = None
        self._part_group: dist.ProcessGroup | None = None
        # Rows may be gathered into the unsharded buffer, of which they are the first bytes then. With streams,
        # compute's memory cannot be written ahead of compute.
        self._may_be_rows = group.packing.is_cut_into_runs or (group.packing.direct and streams.in_host_order)
        # Whether the unsharded buffer is the gather lane's memory, which writes it ahead of compute, or compute's own.
        self._lane_owns_buffer = False

    def _make(self) -> _UnshardedBuffer:
        """Make the unsharded buffer in the present dtype, and the parameters in it."""
        # Outside inference mode too: what is made in it can never be written in training.
        with torch.no_grad(), torch.inference_mode(False):
            made = self._buffers[self._dtype] = _UnshardedBuffer(self.group, self._dtype)
            made.free()
        for index, parameter in enumerate(made.parameters):
            self.group.parameters[index].share_attributes(parameter)
            self.group.parameters[index].claim(parameter)
            self._watch(index, parameter)
            self._ids.add(id(parameter))
        if not self.group.mesh.keeps_unsharded and made.buffer.is_ours:
            saved.watch(made.buffer.tensor.untyped_storage(), self)
        return made

    @property
    def _present(self) -> _UnshardedBuffer:
        """The unsharded buffer in the dtype of the last gather."""
        assert self._made is not None, "it is made when the first gather is started"
        return self._made

    @property
    def is_unread(self) -> bool:
        """Whether backward has read all views of the parameters that forward has saved.

        Autograd saves a parameter it needs as it is, or a view of it, `w.t()` or `w.detach()`; only views count here.
        """
        return self.num_unread_views <= 0

    @property
    def is_viewed(self) -> bool:
        """Whether somebody else than autograd seems to have a view of the parameters, which freeing them would leave
        without memory. It may also be garbage that waits to be collected."""
        made = self._made
        if made is None or not made.buffer.is_ours or self.group.mesh.keeps_unsharded:
            return False
        return made.buffer.uses > made.own_uses + made.copy_out.num_late_views + self.num_saved_views

    @property
    def awaits_gradients(self) -> bool:
        """Whether the present backward will bring a gradient for one of the parameters."""
        made = self._made
        return made is not None and any(each.requires_grad and will_get_gradient(each) for each in made.parameters)

    def is_parameter(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is one of the unsharded parameters itself, not a view of one."""
        return id(tensor) in self._ids

    def end_backward(self) -> None:
        """What backward has not read by now it will not read: it was not on the way from the loss."""
        self.num_unread_views = 0

    def bump_versions(self) -> None:
        """Let autograd notice, in a backward to come, that the parameters have other values than in its forward."""
        for unsharded in self._buffers.values():
            for parameter in unsharded.parameters:
                torch.autograd.graph.increment_version(parameter)

    def held(self) -> Iterator[tuple[MemoryKind, torch.Tensor]]:
        """Everything whose memory is in its hands now, freed buffers too: what a memory report counts."""
        yield from self.group.held()
        if self._made is not None:
            yield MemoryKind.UNSHARDED, self._made.buffer.tensor
        if self._part is not None:
            yield MemoryKind.PART, self._part
        if self._flight is not None:
            yield MemoryKind.SENT, self._flight.source
            if self._flight.rows is not None:
                yield MemoryKind.ROWS, self._flight.rows

    def fills_itself(self, transport: Transport) -> bool:
        """Whether an all-gather by `transport` needs no rows: it writes the unsharded buffer."""
        if transport.shares_memory:
            return True
        return self._gathers_each(transport) or (self._may_be_rows and not transport.brings_memory)

    def _gathers_each(self, transport: Transport) -> bool:
        """Whether every tensor is gathered by itself, straight to its place in the unsharded buffer."""
        is_possible = self.group.packing.is_in_order and not self.group.mesh.shards_replicas
        return transport.coalesces and is_possible and not self._may_be_rows

    def gather(self, transport: Transport, full_precision: bool = False) -> None:
        """Start the all-gather, from the shards or from the part that was kept; in the shards' own dtype if told so."""
        if self.live is Live.SHARDED:
            self._dtype = self.group.dtype if full_precision else self.group.compute_dtype
            self._made = self._buffers.get(self._dtype) or self._make()
        if self.live is Live.SHRUNK:
            self._gather_part()
        elif self._is_up_to_date():
            self._flight = _Flight(
                self._streams.gather.run(lambda async_op: None), self.group.shard_buffer, self.group.version
            )
        elif transport.shares_memory:
            self._gather_onto(transport)
        else:
            self._gather_rows(transport)
        self.move(Live.GATHERING)

    def _is_up_to_date(self) -> bool:
        """Whether the unsharded parameters are there still, or are the shards."""
        group = self.group
        if group.is_one_piece and group.unsharded_memory is not None:
            return True
        return group.mesh.keeps_unsharded and self._versions.get(self._dtype) == group.version

    def _gather_rows(self, transport: Transport) -> None:
        """Into rows, that are copied out later; into the unsharded buffer itself where they are the same thing."""
        group, unsharded = self.group, self._present
        packing = group.packing
        gathers_each = self._gathers_each(transport)
        in_place = gathers_each or (self._may_be_rows and not transport.brings_memory)
        self._lane_owns_buffer = in_place
        flight: list[torch.Tensor] = []

        def start(async_op: bool) -> Pending | None:
            source = group.source(self._dtype)
            if in_place:
                unsharded.buffer.allocate()
                rows = unsharded.buffer.tensor[: packing.gathered_numel]
            else:
                rows = transport.empty(packing.gathered_numel, self._dtype, group.device)
            flight.extend((source, rows))
            if gathers_each:
                return transport.all_gather_each(*unsharded.copy_out.strips(source), async_op)
            return transport.all_gather(rows, source, group.shard_sizes, async_op)

        handoff = self._streams.gather.run(start)
        source, rows = flight
        self._flight = _Flight(handoff, source, group.version, None if in_place else rows)

    def _gather_onto(self, transport: Transport) -> None:
        """Copied into the unsharded buffer from where the ranks have it, which happens as late as in `wait`: a gather
        that runs ahead takes no memory for what it will bring."""
        unsharded, source, own = self._present, self.group.source(self._dtype), self.group.mesh.shard_rank

        def copy_into_place(rank: int, part: torch.Tensor) -> None:
            unsharded.buffer.allocate()
            for piece, its in self.group.pieces_of(rank, part):
                unsharded.copy_out.copy_into_place(piece, its)

        def copy_others_into_place(rank: int, part: torch.Tensor) -> None:
            if rank != own:  # this rank's part comes at once, and has time
                copy_into_place(rank, part)

        handoff = self._streams.gather.run(
            lambda async_op: transport.all_gather_onto(copy_others_into_place, source, self.group.shard_sizes, async_op)
        )
        self._flight = _Flight(handoff, source, self.group.version, copy_into_place=copy_into_place)

    def _gather_part(self) -> None:
        """Equal parts of the unsharded buffer itself were kept, so they are gathered straight into place."""
        unsharded, part, part_group = self._present, self._part, self._part_group
        assert part is not None, "a shrunk group keeps its part"
        transport = self.group.mesh.transport_of(part_group)
        if not self._lane_owns_buffer:
            unsharded.buffer.allocate()

        def start(async_op: bool) -> Pending | None:
            unsharded.buffer.allocate()
            return transport.all_gather(
                unsharded.buffer.tensor,
                part,
                (part.numel(),) * (unsharded.buffer.tensor.numel() // part.numel()),
                async_op,
            )

        # The part is compute's memory, and so may be the buffer.
        self._streams.gather.follow_compute()
        self._flight = _Flight(self._streams.gather.run(start), part, self.group.version)
        self._part = self._part_group = None

    def wait(self) -> None:
        """Let compute go on only with the unsharded parameters in place, and show them to the modules."""
        flight, unsharded = self._flight, self._present
        assert flight is not None, "an all-gather is waited for once it was started"
        flight.handoff.wait()
        if flight.copy_into_place is not None:
            flight.copy_into_place(self.group.mesh.shard_rank, flight.source)
        if flight.rows is not None:
            unsharded.buffer.allocate()
            unsharded.copy_out(flight.rows)
            # `rows` is the gather lane's memory and goes back to its pool below: not before compute has copied it out.
            # test_rows_return_to_the_gather_lane_after_compute_has_read_them.
            self._streams.gather.follow_compute()
        # Not when it was started: one that is freed while it is under way has brought nothing.
        # test_what_is_kept_whole_is_renewed_after_a_gather_that_nobody_waited_for.
        self._versions[self._dtype] = flight.version
        self._flight = None
        self.move(Live.UNSHARDED)
        unsharded.guard.take_down()
        show_unsharded(self.group.parameters, unsharded.parameters)

    def free(self) -> None:
        """Show the shards again and give the memory back, whatever the state."""
        if self.live is Live.SHARDED:
            return
        lost = self._hide() if self.live is Live.UNSHARDED else []
        if self._flight is not None:
            self._flight.handoff.wait()
            self._flight = None
        self._part = self._part_group = None
        self._free_unsharded()
        self.move(Live.SHARDED)
        _require_none_lost(lost)

    def _hide(self) -> list[str]:
        """Show the shards. The names of parameters that a user has given other values in a way that shards do not
        notice; what was only moved is put back."""
        unsharded = self._present
        lost = [self.group.parameters[index].name for index in unsharded.moved() if not unsharded.put_back(index)]
        for record, parameter, instead in hide_unsharded(self.group.parameters, unsharded.parameters):
            if not _are_same(instead, parameter):
                lost.append(record.name)
        return lost

    def _free_unsharded(self) -> None:
        if self.group.mesh.keeps_unsharded:
            return
        if self._lane_owns_buffer:
            # The buffer goes back to the lane's pool: not before compute has read it.
            self._streams.gather.follow_compute()
        self._present.free()

    def shrink(self, size: int) -> None:
        """Show the shards, and keep this rank's part of the whole for a mesh of `size` ranks."""
        unsharded = self._present
        mesh = self.group.mesh
        numel = unsharded.buffer.tensor.numel() // size
        start = mesh.shard_rank % size * numel
        self._part = unsharded.buffer.tensor[start : start + numel].clone()
        self._part_group = mesh.smaller_group(size)
        lost = self._hide()
        self._free_unsharded()
        self.move(Live.SHRUNK)
        _require_none_lost(lost)


def _are_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    alike = type(tensor) is type(other) and (tensor.shape, tensor.dtype) == (other.shape, other.dtype)
    return alike and tensor.device == other.device and torch.equal(tensor, other)


def _require_none_lost(names: list[str]) -> None:
    if names:
        raise StateError(
            f"{', '.join(names)} had .data set, or another Parameter put in its place, while it was whole, which is a "
            "copy of the shards. FSDP does not support changing the parameters between forward and backward: change "
            "them between steps, or in sherd.unsharded(model)"
        )
