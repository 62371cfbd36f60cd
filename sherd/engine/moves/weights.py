"""A group's parameters between sharded and unsharded: gathered, shown to the modules, freed.

    SHARDED ──gather──▶ GATHERING ──wait──▶ UNSHARDED ──free──▶ SHARDED
                            ▲                   │
                            └─gather─ SHRUNK ◀──┘ shrink

Unsharded parameters are made once, as views of one buffer whose storage comes and goes under them. Reading one while
the storage is gone kills the process, so the modules show shards at all other times
(`test_whole_parameters_are_freed_after_forward_and_after_backward`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from operator import attrgetter, methodcaller

import torch
import torch.distributed as dist
from torch import nn

from sherd._torch import increment_versions, set_grad_dtype, set_versions, storage_uses, will_get_gradient
from sherd.comm.buffers import Buffer
from sherd.comm.failures import own_rank
from sherd.comm.mesh import DataMesh
from sherd.comm.streams import CommStream, Handoff, Streams
from sherd.comm.transport import CopyIntoPlace, Pending, Sizes, Transport, cut, parts
from sherd.engine.moves import saved
from sherd.engine.moves.buffer_plan import BufferPlan, Fill
from sherd.engine.moves.buffer_views import copy_out, tensor_in
from sherd.engine.state.fetching import fetch_into
from sherd.engine.state.group import Group
from sherd.engine.state.parameter import ShardedParameter, hide_unsharded, show_unsharded
from sherd.errors import StateError, in_short
from sherd.policy import Codec
from sherd.schedule.moments import MemoryKind
from sherd.schedule.state import Live
from sherd.tensor.ragged import local_part

# Asked of all parameters of a group in each gather and free, so C does the asking.
STAND = attrgetter("_version", "requires_grad")
"""Returns how many writes in place a parameter has seen, and whether it is trained."""

_log = logging.getLogger("sherd")
_told: list[str] = []

IS_TRAINED = attrgetter("requires_grad")
ADDRESS = methodcaller("data_ptr")
VERSION = attrgetter("_version")

MOVES = {
    Live.SHARDED: {Live.GATHERING},
    Live.GATHERING: {Live.UNSHARDED, Live.SHARDED},
    Live.UNSHARDED: {Live.SHARDED, Live.SHRUNK},
    Live.SHRUNK: {Live.GATHERING, Live.SHARDED},
}


class Position:
    """The position of one group's parameters (`live`), and its legal moves."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.live = Live.SHARDED

    def move(self, to: Live) -> None:
        """Go to `to`. Raises `StateError` if the table has no such move."""
        # The table is read here as well as in `require_move`, so that a legal move costs no second call.
        if to not in MOVES[self.live]:
            self.require_move(to)
        self.live = to

    def require_move(self, to: Live) -> None:
        """Raise `StateError`, with both names, if the table has no move to `to`."""
        if to not in MOVES[self.live]:
            raise StateError(f"parameters of {self._name} cannot go from {self.live.name} to {to.name}")


# The memory of unsharded parameters


class Unsharded:
    """The unsharded `parameters` of `records`, and the `buffers` under them, some or all of which all-gathers fill.

    Where a hook of ours saw autograd save a parameter, the parameter is gathered before backward reads it. Without a
    hook autograd compares versions, so the versions are one ahead while the memory is gone. A `ctx.weight` that was not
    kept by `save_for_backward` then raises, in a gradient of a gradient:
    test_a_weight_kept_as_an_attribute_is_right_or_raises_in_a_gradient_of_a_gradient.
    """

    def __init__(self, records: Sequence[ShardedParameter], gathered: tuple[Buffer, ...]) -> None:
        self._records = records
        self.gathered = self.buffers = gathered
        self.parameters: list[nn.Parameter] = []
        self._versions: tuple[int, ...] = ()  # of the parameters when the memory went, if it is gone
        self._as_of: list[tuple[int, bool]] = []
        self.trained: list[bool] = []  # whether each parameter required a gradient when it was shown

    @property
    def num_foreign_views(self) -> int:
        """0: nothing is known of other tensors in the memory."""
        return 0

    def show(self, as_of: list[tuple[int, bool]]) -> None:
        """Show the parameters to the modules.

        `as_of` is the `STAND` of each optimizer parameter when the gather started. If an optimizer parameter was
        written since the last gather, autograd must see its unsharded form as modified in place: a backward raises
        that reads it for an earlier forward.
        """
        if self._versions:
            # The version that autograd saw: the same values are gathered again, so a backward may read them.
            set_versions(tuple(self.parameters), self._versions)
            self._versions = ()
        if as_of != self._as_of:
            # `cycle`: all parameters may be members of one flat parameter.
            stands = zip(self.parameters, cycle(as_of), cycle(self._as_of), strict=False)
            increment_versions([parameter for parameter, now, then in stands if now[0] != then[0]])
            self._as_of = as_of
        show_unsharded(self._records, self.parameters)
        self.trained = list(map(IS_TRAINED, self.parameters))

    def hide(self) -> list[str]:
        """Show the shards to the modules. Returns the parameters whose new values no shard got, where known."""
        hide_unsharded(self._records, self.parameters, self.trained)
        return []

    def free(self, lane: CommStream | None = None, keeps_storage: bool = False) -> None:
        """Free the memory, or with `keeps_storage` only its contents.

        If it is `lane`'s, its pool gets it, or the next gather writes it, once compute has read it.
        """
        if lane is not None:
            lane.follow_compute()
        if not self._versions:
            self._versions = tuple(map(VERSION, self.parameters))
            increment_versions(self.parameters)
        for buffer in () if keeps_storage else self.buffers:
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
        self._slots = group.packing.slots
        # What a user's `.data = ...` can move, by index, and the byte where it belongs. It cannot move a DTensor.
        self._plain: list[int] = []
        self._offsets: list[int] = []
        for index, (parameter, slot) in enumerate(zip(group.parameters, self._slots, strict=True)):
            # Each from its own `.data`: its own version counter, so that refilling the buffer is no "modification by an
            # in-place operation" to autograd, while a user's change of one parameter still is.
            tensor = tensor_in(flat.data, slot)
            self.parameters.append(nn.Parameter(parameter.as_unsharded(tensor), requires_grad=parameter.requires_grad))
            if parameter.shown_spec is None and parameter.restored is None and slot.cut.numel:
                self._plain.append(index)
                self._offsets.append(slot.unsharded.start * dtype.itemsize)
        del tensor  # or `storage_uses` would count it
        self._movable = [self.parameters[index] for index in self._plain]
        self._address = self.buffer.address
        # Counted when all views of ours are made, and before any other can exist.
        self._own_uses = storage_uses(self._address)

    @property
    def num_foreign_views(self) -> int:
        """The number of tensors in the memory that were not made here: autograd's, and garbage among them."""
        return storage_uses(self._address) - self._own_uses - self.copy_out.num_late_views

    def hide(self) -> list[str]:
        """Show the shards to the modules, and put back parameters that a user's `.data = ...` moved."""
        addresses = list(map(ADDRESS, self._movable))
        own = list(map(self.buffer.tensor.data_ptr().__add__, self._offsets))
        lost = []
        if addresses != own:
            moved = [index for index, at, of in zip(self._plain, addresses, own, strict=True) if at != of]
            lost = [self._records[index].name for index in moved if not self._put_back(index)]
        for record, parameter, instead in hide_unsharded(self._records, self.parameters, self.trained):
            is_frozen = instead is not None and not (instead.requires_grad or parameter.requires_grad)
            if instead is None or not _are_same(instead, parameter, but_for_rounding=is_frozen):
                lost.append(record.name)
        return lost

    def _put_back(self, index: int) -> bool:
        """Give a parameter its memory in the buffer again. Returns whether the other memory has the same values."""
        parameter, slot = self.parameters[index], self._slots[index]
        given = parameter.data
        parameter.data = tensor_in(self.buffer.tensor.data, slot)
        return _are_same(given, parameter.data)


def _are_same(tensor: torch.Tensor, other: torch.Tensor, but_for_rounding: bool = False) -> bool:
    alike = type(tensor) is type(other) and (tensor.shape, tensor.dtype) == (other.shape, other.dtype)
    if not alike or tensor.device != other.device or not (but_for_rounding and tensor.is_floating_point()):
        return alike and tensor.device == other.device and torch.equal(tensor, other)
    # peft adds an adapter to a frozen weight for one forward, and subtracts it again: values a little off the shards'.
    apart = torch.linalg.vector_norm(tensor - other, dtype=torch.float32)
    norm = torch.linalg.vector_norm(other, dtype=torch.float32)
    return bool(apart <= torch.finfo(tensor.dtype).eps ** 0.75 * norm)


class KeptPart:
    """A copy of this rank's part of each gathered buffer, kept after forward (`reshard_after_forward=size`).

    In backward a smaller mesh of `size` ranks gathers the parts. Collective at first: the smaller mesh needs a process
    group.
    """

    def __init__(self, buffers: Sequence[Buffer], mesh: DataMesh, size: int) -> None:
        self.sizes = [cut(buffer.tensor.numel(), size) for buffer in buffers]
        # Cloned, because the gathered buffer is freed in place as soon as the part is kept.
        self.tensors = tuple(
            parts(buffer.tensor, sizes)[mesh.shard_rank % size].clone()
            for buffer, sizes in zip(buffers, self.sizes, strict=True)
        )
        self.transport = mesh.transport_of(mesh.smaller_group(size))


# All-gathers


@dataclass(frozen=True, slots=True)
class Flight:
    """An all-gather under way, of the shards as of `version`."""

    handoff: Handoff
    sources: tuple[torch.Tensor, ...]  # the tensors that it reads
    version: int
    rows: torch.Tensor | None = None  # the tensor that it fills, unless that is the unsharded buffer itself
    copy_into_place: CopyIntoPlace | None = None  # copies this rank's own part, where the all-gather does not
    uncounted: tuple[torch.Tensor, ...] = ()  # tensors that it reads, and of which a memory report does not know


class Weights(Position, saved.StorageOwner):
    """One group's parameters.

    Args:
        watch: called once for each unsharded parameter when it is made, as `watch(index, parameter)`.
        unshard: called when backward is about to read parameters that were freed.
    """

    def __init__(
        self,
        group: Group,
        plan: BufferPlan,
        streams: Streams,
        watch: Callable[[int, nn.Parameter], None],
        unshard: Callable[[], None],
    ) -> None:
        Position.__init__(self, group.name)
        saved.StorageOwner.__init__(self, unshard)
        self.group = group
        self.plan = plan
        self._streams = streams
        self._watch = watch
        # In each dtype that was asked for. Made at the first gather: a model that is only built or loaded has none.
        self._by_dtype: dict[torch.dtype, UnshardedBuffer] = {}
        self.made: Unsharded | None = None  # in the dtype of the last gather
        # Of all unsharded parameters. They live as long as this object, so no other tensor gets one of these ids.
        self._ids: set[int] = set()
        self._dtype = group.compute_dtype
        self._flight: Flight | None = None
        self.as_of: list[tuple[int, bool]] = []  # `STAND` of each optimizer parameter at the last gather from shards
        self._versions: dict[torch.dtype, int] = {}
        self._part: KeptPart | None = None
        # The gather lane writes its own memory ahead of compute. Memory of compute's own must be written by compute.
        self._lane_owns_buffer = False
        self._transport: Transport | None = None  # of the last gather
        self._fill = Fill.FROM_ROWS  # by that transport
        self._encoded: tuple[int, torch.Tensor] | None = None  # this rank's shard, and its version

    def _make(self) -> UnshardedBuffer:
        """Make the unsharded buffer in the present dtype, and the parameters in it."""
        # Outside inference mode: a tensor made inside can never be written in training.
        with torch.no_grad(), torch.inference_mode(False):
            unsharded = self._by_dtype[self._dtype] = UnshardedBuffer(self.group, self._dtype)
            # The memory served to make the views. The first gather allocates it again, on the stream that writes it.
            if unsharded.buffer.is_ours:
                unsharded.free()
        for index, parameter in enumerate(unsharded.parameters):
            self._adopt(index, parameter)
        if self.plan.frees_unsharded:
            saved.watch(unsharded.buffer.tensor.untyped_storage(), self)
        return unsharded

    def _adopt(self, index: int, parameter: nn.Parameter) -> None:
        record, arriving = self.group.parameters[index], self.group.arriving
        record.share_attributes(parameter)
        if arriving:
            set_grad_dtype(parameter, *arriving)
        record.claim(parameter)
        self._watch(index, parameter)
        self._ids.add(id(parameter))

    @property
    def is_unread(self) -> bool:
        """True if backward has read all views of the parameters that forward saved.

        Autograd saves a parameter itself, or a view such as `w.t()` or `w.detach()`; only the views are counted.
        """
        return self.num_unread_views <= 0

    @property
    def is_viewed(self) -> bool:
        """True if something other than autograd seems to have a view, which freeing would leave without memory.

        The view may also be garbage that waits to be collected.
        """
        unsharded = self.made
        if unsharded is None or not self.plan.frees_unsharded:
            return False
        return unsharded.num_foreign_views > self.num_saved_views

    @property
    def is_in_flight(self) -> bool:
        return self._flight is not None

    @property
    def awaits_gradients(self) -> bool:
        """True if the present backward will bring a gradient for one of the parameters."""
        parameters = () if self.made is None else self.made.parameters
        return any(each.requires_grad and will_get_gradient(each) for each in parameters)

    def is_parameter(self, tensor: torch.Tensor) -> bool:
        """Returns whether `tensor` is one of the unsharded parameters itself, not a view of one."""
        return id(tensor) in self._ids

    def end_backward(self) -> None:
        """Forget saved views. Backward did not read the remaining ones: no path from the loss leads through them."""
        self.num_unread_views = 0

    def drop_gradients(self) -> None:
        """Drop gradients of the unsharded parameters. After an exception they are never taken."""
        for unsharded in self._by_dtype.values():
            for parameter in unsharded.parameters:
                parameter.grad = None

    def held(self) -> Iterator[tuple[MemoryKind, torch.Tensor]]:
        """Yields every buffer, freed ones too: what a memory report counts."""
        yield from self.group.held()
        for buffer in self.made.buffers if self.made is not None else ():
            yield MemoryKind.UNSHARDED, buffer.tensor
        for part in self._part.tensors if self._part is not None else ():
            yield MemoryKind.PART, part
        if self._flight is not None:
            if self._flight.rows is not None:
                yield MemoryKind.ROWS, self._flight.rows
            for source in self._flight.sources:  # may be a part of the rows
                yield MemoryKind.SENT, source
        if self._encoded is not None:
            yield MemoryKind.SENT, self._encoded[1]

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of the unsharded parameters, unless the shards are a part of them."""
        return self.group.unsharded_bytes

    @property
    def rows_bytes(self) -> int:
        """Bytes of the rows, in compute's dtype, where the all-gather does not fill the unsharded buffer itself."""
        return self.plan.row_bytes

    def sent_bytes(self, times: int) -> int:
        """Returns the bytes of this rank's shards, unencoded, that `times` gathers of a step send to one rank."""
        return self.group.shard_sizes[self.group.mesh.shard_rank] * self.group.compute_dtype.itemsize * times

    def part_bytes(self, size: int) -> int:
        """Returns the bytes of the part to keep for a mesh of `size` ranks."""
        return self.group.packing.unsharded_numel // size * self.group.compute_dtype.itemsize

    def gather(self, transport: Transport, full_precision: bool = False) -> None:
        """Start the all-gather, from the kept part if there is one, else from the shards.

        `full_precision`: gather in the shards' dtype, not in compute's.
        """
        self.move(Live.GATHERING)
        part, self._part = self._part, None
        if part is None:
            self.as_of = list(map(STAND, self.group.shard_memory.versioned))
            self._gather_shards(transport, full_precision)
        else:
            handoff = self._gather_into_buffers(part.transport, part.tensors, part.sizes)
            self._flight = Flight(handoff, part.tensors, self.group.version)

    def _gather_shards(self, transport: Transport, full_precision: bool) -> None:
        """Start an all-gather of the shards. Make the buffers at the first one."""
        group, plan = self.group, self.plan
        self._dtype = group.dtype if full_precision else group.compute_dtype
        unsharded = self.made = self._by_dtype.get(self._dtype) or self._make()
        if transport is not self._transport:
            self._transport, self._fill = transport, plan.fill_by(transport)
        # All ranks skip this all-gather together, because all of them note writes together (`mark_shards_written`).
        if plan.is_never_gathered or (not plan.frees_unsharded and self._versions.get(self._dtype) == group.version):
            handoff = self._streams.gather.run(lambda async_op: None)
            self._flight = Flight(handoff, (group.shard_buffer,), group.version)
        elif self._fill is Fill.FROM_RANKS:
            self._flight = self._gather_from_ranks(transport, unsharded)
        else:
            is_encoded = self._fill is Fill.ENCODED and not (full_precision or self.is_unencoded)
            self._flight = self._gather_rows(transport, unsharded, plan.codec if is_encoded else None)

    def _gather_rows(self, transport: Transport, unsharded: UnshardedBuffer, codec: Codec | None) -> Flight:
        """Start to gather the rows, which are copied out or decoded later, or the unsharded buffer itself."""
        group = self.group
        sizes, numel, dtype = group.shard_sizes, group.packing.gathered_numel, self._dtype
        if codec is not None:
            sizes, dtype = Sizes(map(codec.num_bytes, sizes)), torch.uint8
            numel = sum(sizes)
        in_place = self._fill not in (Fill.FROM_ROWS, Fill.ENCODED)
        is_copied = group.fetched is None and (group.is_offloaded or group.dtype != self._dtype)
        self._lane_owns_buffer = in_place
        flight: list[torch.Tensor] = []

        def start(async_op: bool) -> Pending | None:
            if codec is not None:
                source: torch.Tensor | None = self._encoded_by(codec)
            else:
                source = None if is_copied else group.source(self._dtype)
            # `start` runs on the gather lane, so the memory is the lane's: a gather that runs ahead of compute may
            # write it.
            if in_place:
                unsharded.buffer.allocate()
                rows = unsharded.rows
            else:
                rows = transport.empty(numel, dtype, group.device)
            flight.append(rows)
            if self._fill is Fill.TENSOR_BY_TENSOR:
                return transport.all_gather_each(*self._strips(unsharded, source), async_op)
            if source is None:
                source = group.write_source(rows)
            flight.append(source)
            return transport.all_gather(rows, source, sizes, async_op)

        handoff = self._streams.gather.run(start)
        return Flight(handoff, tuple(flight[1:]), group.version, None if in_place else flight[0])

    def _encoded_by(self, codec: Codec) -> torch.Tensor:
        """Returns this rank's shard, encoded once for all gathers until shards are written."""
        version, errors = self.group.version, self.group.mesh.wire_errors["gather", "shard"]
        if self._encoded is None or self._encoded[0] != version:
            from sherd.codecs import encode_parts  # of few policies, so loaded late

            own = self.shard_to_encode()
            self._encoded = version, encode_parts(codec, own, [own.numel()])[0]
            if errors.listeners:
                errors.note(codec, own, self._encoded[1], [own.numel()])
        return self._encoded[1]

    @property
    def is_unencoded(self) -> bool:
        """Whether gathers do without their codec, whose errors were above the limit."""
        return self.group.mesh.wire_errors["gather", "shard"].is_unencoded

    def shard_to_encode(self) -> torch.Tensor:
        """Returns this rank's shard as it is encoded. Collective over the replicas that own parts of it."""
        group = self.group
        own = group.source(group.dtype if group.fetched is None else group.compute_dtype)
        return _without_padding(group, own)

    def _decode(self, codec: Codec, encoded: torch.Tensor, unsharded: UnshardedBuffer) -> None:
        """Fill the unsharded buffer with what `encoded` holds, one rank's part after the other."""
        group = self.group
        if self.plan.may_be_rows:
            from sherd.codecs import decode_parts  # of few policies, so loaded late

            decode_parts(codec, encoded, group.shard_sizes, unsharded.rows)
            return
        lengths = list(map(codec.num_bytes, group.shard_sizes))
        for rank, of_rank in enumerate(parts(encoded, lengths)):
            part = torch.empty(group.shard_sizes[rank], dtype=self._dtype, device=group.device)
            codec.decode(of_rank, part)
            for piece, elements in group.pieces_of(rank, part):
                unsharded.copy_out.copy_into_place(piece, elements)
            del part, elements  # or they would be held while the next rank's part is decoded

    def _strips(
        self, unsharded: UnshardedBuffer, source: torch.Tensor | None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns the place of each tensor in the unsharded buffer, and the strip of it that this rank sends.

        The strips are parts of `source`. Without a source the shards are copied into the places, whose parts they are.
        """
        group = self.group
        places, shards = unsharded.copy_out.strips(group.at_hand() if source is None else source)
        if source is not None:
            return places, shards
        strips = [place.view(group.packing.num_ranks, -1)[group.mesh.shard_rank] for place in places]
        for strip, shard in zip(strips, shards, strict=True):
            fetch_into(strip, shard)
        return places, strips

    def _gather_from_ranks(self, transport: Transport, unsharded: UnshardedBuffer) -> Flight:
        """Have the unsharded buffer filled from the ranks' own memory, in `wait`.

        A gather that runs ahead then takes no memory for its result.
        """
        source, own = self.group.source(self._dtype), self.group.mesh.shard_rank

        def copy_into_place(rank: int, part: torch.Tensor) -> None:
            unsharded.buffer.allocate()
            for piece, elements in self.group.pieces_of(rank, part):
                unsharded.copy_out.copy_into_place(piece, elements)

        def copy_others_into_place(rank: int, part: torch.Tensor) -> None:
            if rank != own:  # this rank's part is local: `_land` copies it
                copy_into_place(rank, part)

        handoff = self._streams.gather.run(
            lambda async_op: transport.all_gather_onto(copy_others_into_place, source, self.group.shard_sizes, async_op)
        )
        return Flight(handoff, (source,), self.group.version, copy_into_place=copy_into_place)

    def _gather_into_buffers(
        self, transport: Transport, sources: tuple[torch.Tensor, ...], sizes: Sequence[Sizes]
    ) -> Handoff:
        """Start to fill each gathered buffer with all ranks' tensors, of `sizes`, of the same place in `sources`."""
        unsharded, lane = self.made, self._streams.gather
        assert unsharded is not None, "it is made when the first gather is started"

        buffers = unsharded.gathered

        def start(async_op: bool) -> Pending | None:
            for buffer in buffers:
                buffer.allocate()
            return transport.all_gather_several([each.tensor for each in buffers], sources, sizes, async_op)

        for buffer in buffers if not self._lane_owns_buffer else ():
            buffer.allocate()
        # The sources are compute's memory, and so may be the buffers:
        # test_a_kept_part_is_compute_memory_so_its_gather_waits_for_compute.
        lane.follow_compute()
        return lane.run(start)

    def wait(self) -> None:
        """Let compute go on only with the unsharded parameters in place, and show them to the modules."""
        # Checked before the landing and noted after it. An error in between leaves the flight, which `free` gives up.
        self.require_move(Live.UNSHARDED)
        flight, unsharded = self._flight, self.made
        assert flight is not None and unsharded is not None, "an all-gather is waited for once it was started"
        self._land(flight)
        self._flight = None
        self.live = Live.UNSHARDED
        unsharded.show(self.as_of)

    def _land(self, flight: Flight) -> None:
        """Order compute after the all-gather, and fill the unsharded buffer where the all-gather did not."""
        flight.handoff.wait()
        unsharded = self._by_dtype[self._dtype]
        if flight.copy_into_place is not None:
            flight.copy_into_place(self.group.mesh.shard_rank, *flight.sources)
        if flight.rows is not None:
            # Only now, on compute's stream: while the gather ran ahead there were the rows alone.
            unsharded.buffer.allocate()
            if self.plan.codec is not None and flight.rows.dtype is torch.uint8:
                self._decode(self.plan.codec, flight.rows, unsharded)
            else:
                unsharded.copy_out(flight.rows)
            # `rows` is the gather lane's memory and goes back to its pool with the flight: not before compute has
            # copied it out. test_rows_return_to_the_gather_lane_after_compute_has_read_them.
            if not self._streams.in_host_order:
                self._streams.gather.follow_compute()
        if not self._versions and own_rank() == 0:
            self._tell_of_seeds(unsharded)
        # Noted here, not at the start: a gather that is never waited for fills nothing.
        # test_what_is_kept_whole_is_renewed_after_a_gather_that_nobody_waited_for.
        self._versions[self._dtype] = flight.version

    def _tell_of_seeds(self, unsharded: UnshardedBuffer) -> None:
        """Log, once in a process, that ranks have cut different weights into one model."""
        mesh = self.group.mesh
        brings_values = self._transport is mesh.shard_transport and mesh.shard_group is not None
        brings_values = brings_values and self.plan.codec is None
        if not brings_values or dist.get_backend(mesh.shard_group) == "fake":
            return  # nothing is sent, or a user's collective, which may round
        pairs = zip(self.group.parameters, unsharded.parameters, strict=True)
        other = [record.name for record, parameter in pairs if record.began_otherwise(local_part(parameter))]
        if other and not _told:
            _told.append(other[0])
            _log.warning(
                "%s: ranks have built the model with different weights, and each has cut its part of its own; seed all "
                "ranks alike before the model is built (torch.manual_seed), or broadcast the weights of rank 0",
                in_short(other),
            )

    def free(self, keeps_storage: bool = False) -> None:
        """Show the shards again, and free the memory unless it `keeps_storage`, whatever the state."""
        if self.live is Live.SHARDED:
            return
        unsharded = self.made
        lost = unsharded.hide() if unsharded is not None and self.live is Live.UNSHARDED else []
        if self._flight is not None:
            if self.plan.frees_unsharded:
                # Waited for, though the result is not read: without streams gloo's threads may still write the memory
                # that is freed below, and with streams the lane may still read sources that are compute's.
                self._flight.handoff.wait()
            else:
                # As on the ranks that wait for it, which will not gather it again.
                self._land(self._flight)
            self._flight = None
        self._part = None
        self.live = Live.SHARDED  # from wherever they are
        if unsharded is not None and self.plan.frees_unsharded:  # None if the first gather failed
            unsharded.free(self._streams.gather if self._lane_owns_buffer else None, keeps_storage)
        # Raised last, when the memory is free and the shards are shown, so that the program may go on:
        # test_other_values_for_a_whole_parameter_are_refused_and_training_goes_on_with_what_the_shards_have.
        if lost:
            raise _of_lost(lost)

    def shrink(self, size: int, keeps_storage: bool = False) -> None:
        """Show the shards, and keep this rank's part of the gathered buffers for a mesh of `size` ranks."""
        unsharded = self.made
        assert unsharded is not None, "only what was gathered is shrunk"
        keeps_part = self.group.mesh.shard_axis is not None and self._may_keep_part
        self._part = KeptPart(unsharded.gathered, self.group.mesh, size) if keeps_part else None
        self.move(Live.SHRUNK)
        lost = unsharded.hide()
        if self.plan.frees_unsharded:
            unsharded.free(self._streams.gather if self._lane_owns_buffer else None, keeps_storage)
        if lost:
            raise _of_lost(lost)

    @property
    def _may_keep_part(self) -> bool:
        """True if the gathered buffers are unchanged. If not, backward gathers all shards again."""
        return True


def _without_padding(group: Group, shard: torch.Tensor) -> torch.Tensor:
    """Returns `shard`, as `group.source` gives it, with zeros in the place of padding: a copy, if there is padding."""
    pieces = group.mesh.pieces_of(group.mesh.shard_rank)
    starts = (group.packing.starts[piece] - group.packing.starts[pieces.start] for piece in pieces)
    by_piece = zip(pieces, starts, strict=True)
    padding = [gap.shifted(start) for piece, start in by_piece for gap in group.packing.gaps_of(piece)]
    shard = shard.detach().clone() if padding else shard
    for gap in padding:
        shard[gap.start : gap.stop].zero_()
    return shard


def _of_lost(names: list[str]) -> StateError:
    return StateError(
        f"{', '.join(names)} had .data set, or another Parameter or None put in its place, while unsharded: "
        "a copy of the shards. FSDP does not support changing the parameters between forward and backward: change "
        "them between steps, or in sherd.unsharded(model)"
    )
