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

import torch
from torch import nn

from sherd._torch import will_get_gradient
from sherd.comm.streams import Handoff, Streams
from sherd.comm.transport import CopyIntoPlace, Pending, Transport
from sherd.engine.moves import saved
from sherd.engine.moves.buffer_plan import BufferPlan, Fill
from sherd.engine.moves.kept_part import KeptPart
from sherd.engine.moves.unsharded_buffer import UnshardedBuffer
from sherd.engine.state.group import Group
from sherd.errors import StateError
from sherd.schedule.moments import MemoryKind
from sherd.schedule.state import Live


@dataclass(frozen=True, slots=True)
class _Flight:
    """An all-gather under way, of the shards as of `version`. `rows` is None when it writes the unsharded buffer
    itself; `copy_into_place`, if given, puts this rank's own part there."""

    handoff: Handoff
    source: torch.Tensor
    version: int
    rows: torch.Tensor | None = None
    copy_into_place: CopyIntoPlace | None = None


MOVES = {
    Live.SHARDED: {Live.GATHERING},
    Live.GATHERING: {Live.UNSHARDED, Live.SHARDED},
    Live.UNSHARDED: {Live.SHARDED, Live.SHRUNK},
    Live.SHRUNK: {Live.GATHERING, Live.SHARDED},
}


class Position:
    """Where the parameters of one group are (`live`), and which moves are legal."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.live = Live.SHARDED

    def move(self, to: Live) -> None:
        """Go to `to`. Raises `StateError` if the table has no such move."""
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
        self._buffers: dict[torch.dtype, UnshardedBuffer] = {}
        self._made: UnshardedBuffer | None = None
        self._ids: set[int] = set()  # of the unsharded parameters in all of them
        self._dtype = group.compute_dtype
        self._flight: _Flight | None = None
        self._versions: dict[torch.dtype, int] = {}
        self._part: KeptPart | None = None
        self._transport: Transport | None = None  # of the last gather, and the way in which it fills the buffer
        self._fill = Fill.FROM_ROWS
        # Whether the unsharded buffer is the gather lane's memory, which writes it ahead of compute, or compute's own.
        self._lane_owns_buffer = False

    def _make(self) -> UnshardedBuffer:
        """Make the unsharded buffer in the present dtype, and the parameters in it."""
        # Outside inference mode too: what is made in it can never be written in training.
        with torch.no_grad(), torch.inference_mode(False):
            made = self._buffers[self._dtype] = UnshardedBuffer(self.group, self._dtype)
            made.free()
        for index, parameter in enumerate(made.parameters):
            self.group.parameters[index].share_attributes(parameter)
            self.group.parameters[index].claim(parameter)
            self._watch(index, parameter)
            self._ids.add(id(parameter))
        if self.plan.frees_unsharded:
            saved.watch(made.buffer.tensor.untyped_storage(), self)
        return made

    @property
    def _present(self) -> UnshardedBuffer:
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
        if made is None or not self.plan.frees_unsharded:
            return False
        return made.num_foreign_views > self.num_saved_views

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
            yield MemoryKind.PART, self._part.tensor
        if self._flight is not None:
            yield MemoryKind.SENT, self._flight.source
            if self._flight.rows is not None:
                yield MemoryKind.ROWS, self._flight.rows

    def gather(self, transport: Transport, full_precision: bool = False) -> None:
        """Start the all-gather, from the shards or from the part that was kept; in the shards' own dtype if told so."""
        was, group, plan = self.live, self.group, self.plan
        self.move(Live.GATHERING)
        if was is Live.SHARDED:
            self._dtype = group.dtype if full_precision else group.compute_dtype
            self._made = self._buffers.get(self._dtype) or self._make()
        if transport is not self._transport:
            self._transport, self._fill = transport, plan.fill_by(transport)
        if was is Live.SHRUNK:
            self._gather_part()
        elif plan.is_never_gathered or (not plan.frees_unsharded and self._versions.get(self._dtype) == group.version):
            self._flight = _Flight(self._streams.gather.run(lambda async_op: None), group.shard_buffer, group.version)
        elif self._fill is Fill.FROM_RANKS:
            self._gather_onto(transport)
        else:
            self._gather_rows(transport)

    def _gather_rows(self, transport: Transport) -> None:
        """Into rows, that are copied out later; into the unsharded buffer itself where they are the same thing."""
        group, unsharded, packing = self.group, self._present, self.group.packing
        in_place = self._fill is not Fill.FROM_ROWS
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
            if self._fill is Fill.TENSOR_BY_TENSOR:
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
        buffer, part = self._present.buffer, self._part
        assert part is not None, "a shrunk group keeps its part"
        if not self._lane_owns_buffer:
            buffer.allocate()
        # The part is compute's memory, and so may be the buffer.
        self._streams.gather.follow_compute()
        handoff = self._streams.gather.run(lambda async_op: part.gather(buffer, async_op))
        self._flight = _Flight(handoff, part.tensor, self.group.version)
        self._part = None

    def wait(self) -> None:
        """Let compute go on only with the unsharded parameters in place, and show them to the modules."""
        self.require_move(Live.UNSHARDED)
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
            if not self._streams.in_host_order:
                self._streams.gather.follow_compute()
        # Not when it was started: one that is freed while it is under way has brought nothing.
        # test_what_is_kept_whole_is_renewed_after_a_gather_that_nobody_waited_for.
        self._versions[self._dtype] = flight.version
        self._flight = None
        self.live = Live.UNSHARDED
        unsharded.show()

    def free(self) -> None:
        """Show the shards again and give the memory back, whatever the state."""
        if self.live is Live.SHARDED:
            return
        made = self._made
        lost = made.hide() if made is not None and self.live is Live.UNSHARDED else []
        if self._flight is not None:
            self._flight.handoff.wait()
            self._flight = None
        self._part = None
        self.live = Live.SHARDED  # from wherever they are
        if made is not None and self.plan.frees_unsharded:  # there is none if the first gather has failed
            made.free(self._streams.gather if self._lane_owns_buffer else None)
        if lost:
            raise _of_lost(lost)

    def shrink(self, size: int) -> None:
        """Show the shards, and keep this rank's part of the whole for a mesh of `size` ranks."""
        unsharded = self._present
        self._part = KeptPart(unsharded.buffer, self.group.mesh, size)
        self.move(Live.SHRUNK)
        lost = unsharded.hide()
        if self.plan.frees_unsharded:
            unsharded.free(self._streams.gather if self._lane_owns_buffer else None)
        if lost:
            raise _of_lost(lost)


def _of_lost(names: list[str]) -> StateError:
    return StateError(
        f"{', '.join(names)} had .data set, or another Parameter put in its place, while it was whole, which is a copy "
        "of the shards. FSDP does not support changing the parameters between forward and backward: change them "
        "between steps, or in sherd.unsharded(model)"
    )
