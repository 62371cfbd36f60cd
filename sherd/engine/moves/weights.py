"""A group's parameters between sharded and unsharded: gathered, shown to the modules, freed.

    SHARDED ──gather──▶ GATHERING ──wait──▶ UNSHARDED ──free──▶ SHARDED
                            ▲                   │
                            └─gather─ SHRUNK ◀──┘ shrink

Unsharded parameters are cut once from one buffer whose storage comes and goes under them. Reading one while the storage
is gone kills the process, so the modules show shards at all other times
(`test_whole_parameters_are_freed_after_forward_and_after_backward`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import nn

from sherd._torch import will_get_gradient
from sherd.comm.buffers import Buffer
from sherd.comm.streams import Handoff, Streams
from sherd.comm.transport import CopyIntoPlace, Pending, Transport
from sherd.engine.moves import saved
from sherd.engine.moves.buffer_plan import BufferPlan, Fill
from sherd.engine.moves.kept_part import KeptPart
from sherd.engine.moves.unsharded_buffer import Unsharded, UnshardedBuffer
from sherd.engine.state.group import Group
from sherd.engine.state.offload import fetch_into
from sherd.errors import StateError
from sherd.schedule.moments import MemoryKind
from sherd.schedule.state import Live


@dataclass(frozen=True, slots=True)
class Flight:
    """An all-gather under way, of the shards as of `version`. `sources` is what it reads. `rows` is None when it writes
    the unsharded buffer itself; `copy_into_place`, if given, puts this rank's own part there."""

    handoff: Handoff
    sources: tuple[torch.Tensor, ...]
    version: int
    rows: torch.Tensor | None = None
    copy_into_place: CopyIntoPlace | None = None


@dataclass(frozen=True, slots=True)
class _Handoffs:
    """Several all-gathers under way. What they read is held until compute has waited for them."""

    handoffs: tuple[Handoff, ...]
    sources: tuple[torch.Tensor, ...]

    def wait(self) -> None:
        """Order compute after all of them."""
        for handoff in self.handoffs:
            handoff.wait()

    def wait_on_host(self) -> None:
        """Block the caller until all of them are done."""
        for handoff in self.handoffs:
            handoff.wait_on_host()


STAND = attrgetter("_version", "requires_grad")
"""Returns how many writes in place a parameter has seen, and whether it is trained. All in C, as every gather asks."""

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
        if to not in MOVES[self.live]:
            self.require_move(to)
        self.live = to

    def require_move(self, to: Live) -> None:
        """Raise `StateError`, with both names, if the table has no move to `to`."""
        if to not in MOVES[self.live]:
            raise StateError(f"parameters of {self._name} cannot go from {self.live.name} to {to.name}")


class Weights(Position, saved.Source):
    """One group's parameters. `watch(index, parameter)` is told of each unsharded parameter once, when it is made."""

    def __init__(
        self,
        group: Group,
        plan: BufferPlan,
        streams: Streams,
        watch: Callable[[int, nn.Parameter], None],
        unshard: Callable[[], None],
    ) -> None:
        Position.__init__(self, group.name)
        saved.Source.__init__(self, unshard)
        self.group = group
        self.plan = plan
        self._streams = streams
        self._watch = watch
        # In each dtype that was asked for, and in that of the last gather. Made at the first gather: a model that is
        # only built or loaded has none.
        self._by_dtype: dict[torch.dtype, UnshardedBuffer] = {}
        self.made: Unsharded | None = None
        self._ids: set[int] = set()  # of all unsharded parameters that were made
        self._dtype = group.compute_dtype
        self._flight: Flight | None = None
        self.as_of: list[tuple[int, bool]] = []  # `STAND` of each optimizer parameter at the last gather from shards
        self._versions: dict[torch.dtype, int] = {}
        self._part: KeptPart | None = None
        # Whether the unsharded buffer is the gather lane's memory, which writes it ahead of compute, or compute's own.
        self._lane_owns_buffer = False
        self._transport: Transport | None = None  # of the last gather, and the way in which it fills the buffer
        self._fill = Fill.FROM_ROWS

    def _make(self) -> UnshardedBuffer:
        """Make the unsharded buffer in the present dtype, and the parameters in it."""
        # Outside inference mode too: what is made in it can never be written in training.
        with torch.no_grad(), torch.inference_mode(False):
            made = self._by_dtype[self._dtype] = UnshardedBuffer(self.group, self._dtype)
            if made.buffer.is_ours:
                made.free()
        for index, parameter in enumerate(made.parameters):
            self._adopt(index, parameter)
        if self.plan.frees_unsharded:
            saved.watch(made.buffer.tensor.untyped_storage(), self)
        return made

    def _adopt(self, index: int, parameter: nn.Parameter) -> None:
        """Make `parameter` the unsharded form of the group's parameter `index`."""
        record = self.group.parameters[index]
        record.share_attributes(parameter)
        record.claim(parameter)
        self._watch(index, parameter)
        self._ids.add(id(parameter))

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
        made = self.made
        if made is None or not self.plan.frees_unsharded:
            return False
        return made.num_foreign_views > self.num_saved_views

    @property
    def is_in_flight(self) -> bool:
        """Whether an all-gather was started and not waited for."""
        return self._flight is not None

    @property
    def awaits_gradients(self) -> bool:
        """Whether the present backward will bring a gradient for one of the parameters."""
        made = self.made
        return made is not None and any(each.requires_grad and will_get_gradient(each) for each in made.parameters)

    def is_parameter(self, tensor: torch.Tensor) -> bool:
        """Returns whether `tensor` is one of the unsharded parameters itself, not a view of one."""
        return id(tensor) in self._ids

    def end_backward(self) -> None:
        """Forget what was saved. Views that backward has not read were not on the way from the loss."""
        self.num_unread_views = 0

    def drop_gradients(self) -> None:
        """Drop gradients of the parameters that nobody has taken, as an exception came in between."""
        for made in self._by_dtype.values():
            for parameter in made.parameters:
                parameter.grad = None

    def held(self) -> Iterator[tuple[MemoryKind, torch.Tensor]]:
        """Yields everything whose memory is in its hands now, freed buffers too: what a memory report counts."""
        yield from self.group.held()
        for buffer in self.made.buffers if self.made is not None else ():
            yield MemoryKind.UNSHARDED, buffer.tensor
        for part in self._part.tensors if self._part is not None else ():
            yield MemoryKind.PART, part
        if self._flight is not None:
            if self._flight.rows is not None:
                yield MemoryKind.ROWS, self._flight.rows
            for source in self._flight.sources:  # it may be a part of the rows
                yield MemoryKind.SENT, source

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of the unsharded parameters, unless the shards are a part of them."""
        return self.group.unsharded_bytes

    def part_bytes(self, size: int) -> int:
        """Returns the bytes of the part that is kept for a mesh of `size` ranks."""
        return self.group.packing.unsharded_numel // size * self.group.compute_dtype.itemsize

    def gather(self, transport: Transport, full_precision: bool = False) -> None:
        """Start the all-gather, from the shards or from the part that was kept; in the shards' own dtype if told so."""
        self.move(Live.GATHERING)
        part, self._part = self._part, None
        if part is None:
            self.as_of = list(map(STAND, self.group.shard_memory.versioned))
            self._gather_shards(transport, full_precision)
        else:
            handoff = self._gather_into_buffers(part.transport, part.tensors, part.size)
            self._flight = Flight(handoff, part.tensors, self.group.version)

    def _gather_shards(self, transport: Transport, full_precision: bool) -> None:
        """Start an all-gather of the shards, and make the buffers for it if there are none yet."""
        group, plan = self.group, self.plan
        self._dtype = group.dtype if full_precision else group.compute_dtype
        made = self.made = self._by_dtype.get(self._dtype) or self._make()
        if transport is not self._transport:
            self._transport, self._fill = transport, plan.fill_by(transport)
        if plan.is_never_gathered or (not plan.frees_unsharded and self._versions.get(self._dtype) == group.version):
            handoff = self._streams.gather.run(lambda async_op: None)
            self._flight = Flight(handoff, (group.shard_buffer,), group.version)
        elif self._fill is Fill.FROM_RANKS:
            self._flight = self._gather_from_ranks(transport, made)
        else:
            self._flight = self._gather_rows(transport, made)

    def _gather_rows(self, transport: Transport, made: UnshardedBuffer) -> Flight:
        """Start to gather rows that are copied out later, or the unsharded buffer itself where it needs no rows."""
        group = self.group
        in_place = self._fill is not Fill.FROM_ROWS
        is_copied = group.fetched is None and (group.is_offloaded or group.dtype != self._dtype)
        self._lane_owns_buffer = in_place
        flight: list[torch.Tensor] = []

        def start(async_op: bool) -> Pending | None:
            source = None if is_copied else group.source(self._dtype)
            if in_place:
                made.buffer.allocate()
                rows = made.rows
            else:
                rows = transport.empty(group.packing.gathered_numel, self._dtype, group.device)
            flight.append(rows)
            if self._fill is Fill.TENSOR_BY_TENSOR:
                return transport.all_gather_each(*self._strips(made, source), async_op)
            if source is None:
                source = group.write_source(rows)
            flight.append(source)
            return transport.all_gather(rows, source, group.shard_sizes, async_op)

        handoff = self._streams.gather.run(start)
        return Flight(handoff, tuple(flight[1:]), group.version, None if in_place else flight[0])

    def _strips(
        self, made: UnshardedBuffer, source: torch.Tensor | None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns the place of each tensor in the unsharded buffer, and what this rank sends of it: its strip of
        `source`, or of that place, where it is copied to from the shard."""
        group = self.group
        places, shards = made.copy_out.strips(group.shard_buffer if source is None else source)
        if source is not None:
            return places, shards
        strips = [place.view(group.packing.num_ranks, -1)[group.mesh.shard_rank] for place in places]
        for strip, shard in zip(strips, shards, strict=True):
            fetch_into(strip, shard)
        return places, strips

    def _gather_from_ranks(self, transport: Transport, made: UnshardedBuffer) -> Flight:
        """Have the unsharded buffer filled from where the ranks have their shards, as late as in `wait`: a gather that
        runs ahead takes no memory for what it will bring."""
        source, own = self.group.source(self._dtype), self.group.mesh.shard_rank

        def copy_into_place(rank: int, part: torch.Tensor) -> None:
            made.buffer.allocate()
            for piece, its in self.group.pieces_of(rank, part):
                made.copy_out.copy_into_place(piece, its)

        def copy_others_into_place(rank: int, part: torch.Tensor) -> None:
            if rank != own:  # this rank's part comes at once, and has time
                copy_into_place(rank, part)

        handoff = self._streams.gather.run(
            lambda async_op: transport.all_gather_onto(copy_others_into_place, source, self.group.shard_sizes, async_op)
        )
        return Flight(handoff, (source,), self.group.version, copy_into_place=copy_into_place)

    def _gather_into_buffers(self, transport: Transport, sources: tuple[torch.Tensor, ...], num_ranks: int) -> Handoff:
        """Start to fill each buffer with every rank's tensor of the same place in `sources`."""
        made, lane = self.made, self._streams.gather
        assert made is not None, "it is made when the first gather is started"
        for buffer in made.gathered if not self._lane_owns_buffer else ():
            buffer.allocate()
        # The sources are compute's memory, and so may be the buffers.
        lane.follow_compute()
        pairs = zip(made.gathered, sources, strict=True)
        return _Handoffs(tuple(lane.run(_filling(transport, *pair, num_ranks)) for pair in pairs), sources)

    def wait(self) -> None:
        """Let compute go on only with the unsharded parameters in place, and show them to the modules."""
        self.require_move(Live.UNSHARDED)
        flight, made = self._flight, self.made
        assert flight is not None and made is not None, "an all-gather is waited for once it was started"
        self._land(flight)
        self._flight = None
        self.live = Live.UNSHARDED
        made.show(self.as_of)

    def _land(self, flight: Flight) -> None:
        """Let compute go on once the all-gather is done, and make the unsharded parameters of what has come."""
        flight.handoff.wait()
        made = self._by_dtype[self._dtype]
        if flight.copy_into_place is not None:
            flight.copy_into_place(self.group.mesh.shard_rank, *flight.sources)
        if flight.rows is not None:
            made.buffer.allocate()
            made.copy_out(flight.rows)
            # `rows` is the gather lane's memory and goes back to its pool with the flight: not before compute has
            # copied it out. test_rows_return_to_the_gather_lane_after_compute_has_read_them.
            if not self._streams.in_host_order:
                self._streams.gather.follow_compute()
        # Not when it was started: until it has landed, it has brought nothing.
        # test_what_is_kept_whole_is_renewed_after_a_gather_that_nobody_waited_for.
        self._versions[self._dtype] = flight.version

    def free(self) -> None:
        """Show the shards again and give the memory back, whatever the state."""
        if self.live is Live.SHARDED:
            return
        made = self.made
        lost = made.hide() if made is not None and self.live is Live.UNSHARDED else []
        if self._flight is not None:
            if self.plan.frees_unsharded:
                self._flight.handoff.wait()
            else:
                self._land(self._flight)  # as where somebody waits for it: the ranks that do will not gather it again
            self._flight = None
        self._part = None
        self.live = Live.SHARDED  # from wherever they are
        if made is not None and self.plan.frees_unsharded:  # there is none if the first gather has failed
            made.free(self._streams.gather if self._lane_owns_buffer else None)
        if lost:
            raise _of_lost(lost)

    def shrink(self, size: int) -> None:
        """Show the shards, and keep this rank's part of what was gathered for a mesh of `size` ranks."""
        made = self.made
        assert made is not None, "only what was gathered is shrunk"
        self._part = KeptPart(made.gathered, self.group.mesh, size) if self._may_keep_part else None
        self.move(Live.SHRUNK)
        lost = made.hide()
        if self.plan.frees_unsharded:
            made.free(self._streams.gather if self._lane_owns_buffer else None)
        if lost:
            raise _of_lost(lost)

    @property
    def _may_keep_part(self) -> bool:
        """Whether the buffers still hold what has come. If not, all shards are gathered again."""
        return True


def _filling(
    transport: Transport, buffer: Buffer, source: torch.Tensor, num_ranks: int
) -> Callable[[bool], Pending | None]:
    def start(async_op: bool) -> Pending | None:
        buffer.allocate()
        return transport.all_gather(buffer.tensor, source, (source.numel(),) * num_ranks, async_op)

    return start


def _of_lost(names: list[str]) -> StateError:
    return StateError(
        f"{', '.join(names)} had .data set, or another Parameter or None put in its place, while it was whole, which "
        "is a copy of the shards. FSDP does not support changing the parameters between forward and backward: change "
        "them between steps, or in sherd.unsharded(model)"
    )
