"""The weights of one parameter whose tensor subclass has an all-gather of its own.

The subclass says which tensors are gathered, and makes the unsharded tensor of them. The protocol is torch's, as fp8,
int8 and NF4 tensors implement it on the shard's local tensor:

    fsdp_pre_all_gather(mesh[, outer_size, outer_stride, module, mp_policy][, *, phase]) -> (tensors to send, metadata)
    fsdp_post_all_gather(gathered, metadata, param_dtype)              -> (unsharded tensor, tensors to free with it)
    fsdp_post_all_gather(gathered, metadata, param_dtype, out=unsharded) -> None, the second time and later
    fsdp_should_release_all_gather_outputs_after_post_all_gather()           -> True: `gathered` may be freed after it

A subclass may have planes that only forward or only backward reads, and then sends those of the `phase`: "forward",
"backward" or "both". Each phase has gathered buffers of its own; the unsharded tensor stays one object, to which the
subclass gives the planes that came. Tensors that were written for FSDP2 ask the state of their module instead, of which
`_torch.GatherState` has the part that they read.

Ranks with shards of other sizes may send tensors of other sizes: at the first gather they tell each other how large.

For a smaller mesh of k ranks (`reshard_after_forward=k`) each rank keeps a k-th of every gathered tensor as it came.
Only the subclass knows what the tensors mean; k such parts in a row are the same bytes, which it gets again:

    sent by rank  0 1 2 3     gathered  | 0 1 2 3 |     kept, k = 2  0: | 0 1 |  1: | 2 3 |  2: | 0 1 |  3: | 2 3 |
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from sherd._torch import GatherState, increment_versions
from sherd.comm.buffers import Buffer
from sherd.comm.mesh import DataMesh
from sherd.comm.objects import all_gather_objects
from sherd.comm.streams import Streams
from sherd.comm.transport import Sizes, Transport, cut
from sherd.engine.moves import saved
from sherd.engine.moves.buffer_plan import BufferPlan
from sherd.engine.moves.weights import VERSION, Flight, Unsharded, Weights
from sherd.engine.state.group import Group
from sherd.engine.state.parameter import ShardedParameter
from sherd.errors import PlacementError
from sherd.layout.placement import Cut
from sherd.layout.runs import Runs
from sherd.policy import MixedPrecisionPolicy
from sherd.tensor.gather import shard_of
from sherd.tensor.ragged import local_part


@dataclass(frozen=True, slots=True)
class _Terms:
    """The shape of each tensor that a rank sends, and the subclass's `metadata` for `fsdp_post_all_gather`."""

    shapes: tuple[torch.Size, ...]
    metadata: Any


Phase = Literal["forward", "backward", "both"]
"""The phase of a step that reads what a gather brings: `"both"` if it is kept from forward to backward, or rerun."""


class _Planes:
    """The `buffers` that gathers of one phase fill.

    Attributes:
        given: the buffers as the subclass gets them. Their versions, which autograd compares where it saved one for
            backward, are their own: an all-gather that fills the buffers again leaves them alone.
        sizes: how many elements of each tensor the ranks send.
    """

    def __init__(self, sizes: tuple[Sizes, ...], dtypes: Sequence[torch.dtype], device: torch.device) -> None:
        self.sizes = sizes
        self.buffers = tuple(Buffer(sum(of), dtype, device) for of, dtype in zip(sizes, dtypes, strict=True))
        with torch.inference_mode(False):
            self.given = tuple(buffer.tensor.data for buffer in self.buffers)
        self._as_of: list[tuple[int, bool]] = []
        self._arrived: tuple[int, ...] = ()

    def arrived(self, as_of: list[tuple[int, bool]]) -> None:
        """Note that the buffers are filled: modified in place, if shards were, as in `Unsharded.show`."""
        if as_of != self._as_of:
            increment_versions(self.given)
            self._as_of = as_of
        self._arrived = self._now

    @property
    def _now(self) -> tuple[int, ...]:
        return tuple(map(VERSION, self.given))

    @property
    def are_as_gathered(self) -> bool:
        """Whether the subclass has left the buffers as they came."""
        return self._arrived == self._now


class _Unsharded(Unsharded):
    """The unsharded `tensor` that the subclass made of the planes of the first gather, and the `planes` of each phase.

    Attributes:
        gathered: the buffers of the phase that was gathered last.
        named: tensors with memory of their own that the subclass named when it made `tensor`.
    """

    tensor: torch.Tensor | None = None

    def __init__(self, records: Sequence[ShardedParameter]) -> None:
        super().__init__(records, ())
        self.planes: dict[Phase, _Planes] = {}
        self.named: tuple[Buffer, ...] = ()

    def turn_to(self, phase: Phase, planes: _Planes) -> None:
        """Have the `planes` of `phase` be those that are gathered."""
        self.buffers += () if phase in self.planes else planes.buffers
        self.planes[phase], self.gathered = planes, planes.buffers

    def keep(self, tensor: torch.Tensor, inner: tuple[torch.Tensor, ...], parameter: nn.Parameter) -> None:
        """Keep `tensor`, whose memory is that of `inner`, shown to the modules as `parameter`.

        A tensor without memory of its own may get new attributes from later gathers, as a scale. They must get to the
        object that modules see, which is what torch's FSDP2 gives the subclass. A tensor with memory has a version,
        which refilling must leave alone.
        """
        has_memory = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        self.tensor = tensor if has_memory else local_part(parameter)
        known = {buffer.address for buffer in self.gathered}
        self.named = tuple(buffer for buffer in map(Buffer.of, inner) if buffer.address not in known)
        self.buffers += self.named
        self.parameters = [parameter]


class SelfGatheredWeights(Weights):
    """The weights of a group of one such parameter. Only the subclass knows its views and its dtype."""

    made: _Unsharded | None

    def __init__(
        self,
        group: Group,
        plan: BufferPlan,
        streams: Streams,
        precision: MixedPrecisionPolicy,
        watch: Callable[[int, nn.Parameter], None],
        unshard: Callable[[], None],
    ) -> None:
        super().__init__(group, plan, streams, watch, unshard)
        (self._record,) = group.parameters
        # As torch's, without the function: the choice that it made for this parameter.
        self._precision = replace(precision, param_dtype=self._record.param_dtype, param_dtype_override_fn=None)
        self._releases = _releases_gathered(self._record.name, self._record.local)
        self._terms: _Terms | None = None
        self.phase: Phase = "both"
        self.brought: Phase = "both"  # by the last gather, if the tensor tells phases apart

    def be_read_in(self, phase: Phase) -> None:
        """Note the phase that reads what is gathered next."""
        self.phase = phase

    @property
    def is_unread(self) -> bool:
        """False: only the subclass knows which tensors share memory with the unsharded one."""
        return False

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of all tensors that the subclass named, in the larger phase; before the first gather, of all shards."""
        if self.made is None:
            return self.group.shard_bytes * self.group.packing.num_ranks
        named = {buffer.address: buffer.nbytes for buffer in self.made.named}
        return sum(named.values()) + (0 if self._releases else self._gathered_bytes)

    @property
    def rows_bytes(self) -> int:
        """Bytes of gathered tensors that are freed once the subclass has made the unsharded one of them."""
        return self._gathered_bytes if self._releases else 0

    @property
    def _gathered_bytes(self) -> int:
        phases = () if self.made is None else self.made.planes.values()
        return max((sum(buffer.nbytes for buffer in planes.buffers) for planes in phases), default=0)

    def sent_bytes(self, times: int) -> int:
        """Returns the bytes of this rank's planes that `times` gathers of a step send to one rank, as far as known."""
        if self.made is None or not self.has_phases:
            return self.group.shard_bytes * times
        planes, rank = self.made.planes, self.group.mesh.shard_rank
        phases: tuple[Phase, ...] = ("both",) if times == 1 else ("forward", "backward")
        sent = [planes.get(phase, planes[self.brought]) for phase in phases]
        pairs = (pair for each in sent for pair in zip(each.sizes, each.buffers, strict=True))
        return sum(sizes[rank] * buffer.tensor.itemsize for sizes, buffer in pairs)

    def part_bytes(self, size: int) -> int:
        """Returns the bytes of the part to keep for a mesh of `size` ranks; 0 before the first gather."""
        gathered, at = self.made.gathered if self.made is not None else (), self.group.mesh.shard_rank % size
        return sum(cut(each.tensor.numel(), size)[at] * each.tensor.element_size() for each in gathered)

    def _gather_shards(self, transport: Transport, full_precision: bool) -> None:
        """Ask the subclass what to send, and start to send it. The subclass chooses the dtype."""
        group = self.group
        local = self._record.local
        tensors, metadata = self._ask(
            local if local.device == group.device else local.to(group.device, non_blocking=True)
        )
        sources = tuple(tensor.contiguous().view(-1) for tensor in tensors)
        if self.made is None:
            self.made = _Unsharded(group.parameters)
        planes = self.made.planes.get(self.brought)
        if planes is None:
            sizes = self._agreed([source.numel() for source in sources])
            planes = _Planes(sizes, [source.dtype for source in sources], group.device)
            for buffer in planes.buffers:
                saved.watch(buffer.tensor.untyped_storage(), self)
        self.made.turn_to(self.brought, planes)
        self.has_phases = self.has_phases or self.brought != "both"
        self._terms = _Terms(tuple(tensor.shape for tensor in tensors), metadata)
        handoff = self._gather_into_buffers(transport, sources, planes.sizes)
        self._flight = Flight(handoff, (), group.version, uncounted=sources)

    def _agreed(self, own: list[int]) -> tuple[Sizes, ...]:
        """Returns how many elements of each tensor the ranks send, of which this rank sends `own`.

        Raises:
            PlacementError: ranks send other numbers of tensors.
        """
        mesh, num_ranks = self.group.mesh, self.group.packing.num_ranks
        if mesh.shard_group is None or len(set(map(self._record.cut.local_shape, range(num_ranks)))) == 1:
            return tuple(Sizes((numel,) * num_ranks) for numel in own)
        of_ranks = all_gather_objects(own, f"the sizes of what {self._record.name} gathers", mesh.shard_group)
        if len({*map(len, of_ranks)}) > 1:
            raise PlacementError(
                f"{self._record.name}: fsdp_pre_all_gather returned {[*map(len, of_ranks)]} tensors on the ranks; have "
                "it return equally many on each"
            )
        return tuple(map(Sizes, zip(*of_ranks, strict=True)))

    def _ask(self, local: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Call `fsdp_pre_all_gather` with as many arguments as it takes: its older form takes the mesh alone."""
        mesh, taken = self.group.mesh.shard_mesh, dict(inspect.signature(local.fsdp_pre_all_gather).parameters)
        terms = {"phase": self.phase} if taken.pop("phase", None) else {}
        state = None
        if len(taken) == 1:
            tensors, metadata = local.fsdp_pre_all_gather(mesh, **terms)
        else:
            shape, holder = self._record.shape, self._record.holder()
            stride = torch.empty(shape, device="meta").stride()
            state = GatherState.of(holder, self.phase)
            tensors, metadata = local.fsdp_pre_all_gather(mesh, shape, stride, holder, self._precision, **terms)
        self.brought = self.phase if terms or (state is not None and state.was_read) else "both"
        return tuple(tensors), metadata

    def _land(self, flight: Flight) -> None:
        """Have the subclass make the unsharded parameter of the gathered tensors."""
        flight.handoff.wait()
        unsharded, terms = self.made, self._terms
        assert unsharded is not None and terms is not None, "an all-gather is waited for once it was started"
        planes = unsharded.planes[self.brought]
        gathered = tuple(each.view(-1, *shape[1:]) for each, shape in zip(planes.given, terms.shapes, strict=True))
        # Before the subclass gets the buffers. If it writes in them, a part of them would be of no use in backward.
        planes.arrived(self.as_of)
        if unsharded.tensor is not None:
            for buffer in unsharded.named:
                buffer.allocate()
            with torch.no_grad():
                self._finish(gathered, terms.metadata, out=unsharded.tensor)
            self._release(unsharded)
            return
        # As in `Weights._make`: a tensor that is made inside of inference mode can never be written in training.
        with torch.inference_mode(False):
            tensor, inner = self._finish(gathered, terms.metadata)
            shape = self._record.shape
            if tensor.shape != shape:  # padded rows at the end
                tensor = torch.as_strided(tensor, shape, torch.empty(shape, device="meta").stride(), 0)
            # From `.data`: with a version counter of its own, which refilling `tensor` leaves alone (weights.py).
            shown = self._record.as_unsharded(tensor.data)
            unsharded.keep(tensor, inner, nn.Parameter(shown, requires_grad=self._record.requires_grad))
        self._adopt(0, *unsharded.parameters)
        for buffer in unsharded.named:
            saved.watch(buffer.tensor.untyped_storage(), self)
        self._release(unsharded)

    def _release(self, unsharded: _Unsharded) -> None:
        for buffer in unsharded.gathered if self._releases else ():
            buffer.free()

    def _finish(self, gathered: tuple[torch.Tensor, ...], metadata: Any, **out: torch.Tensor) -> Any:
        local: Any = self._record.local
        return local.fsdp_post_all_gather(gathered, metadata, self.group.compute_dtype, **out)

    @property
    def _may_keep_part(self) -> bool:
        """True if the gathered buffers are kept, unchanged by the subclass."""
        return not self._releases and self.made is not None and self.made.planes[self.brought].are_as_gathered

    def free(self, keeps_storage: bool = False) -> None:
        """Show the shard again, and free the memory unless it `keeps_storage`, whatever the state."""
        super().free(keeps_storage)
        self._terms = None


RELEASES = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


def _releases_gathered(name: str, tensor: torch.Tensor) -> bool:
    """Returns whether the subclass says that its unsharded tensor shares no memory with the gathered ones."""
    answer = getattr(tensor, RELEASES)() if hasattr(tensor, RELEASES) else False
    if not isinstance(answer, bool):
        raise PlacementError(f"{name}: {RELEASES} of a {type(tensor).__name__} returned {answer!r}; expected a bool")
    return answer


def require_can_gather_itself(name: str, tensor: torch.Tensor, cut: Cut, mesh: DataMesh) -> None:
    """Raise `PlacementError` if `tensor` has half an all-gather of its own, or `cut` or `mesh` does not suit it."""
    begins, ends = hasattr(tensor, "fsdp_pre_all_gather"), hasattr(tensor, "fsdp_post_all_gather")
    if begins != ends or (hasattr(tensor, RELEASES) and not begins):
        raise PlacementError(
            f"{name}: a {type(tensor).__name__} that gathers itself needs both fsdp_pre_all_gather and "
            f"fsdp_post_all_gather, also for {RELEASES}; define both"
        )
    if not begins:
        return
    _releases_gathered(name, tensor)
    if mesh.shards_replicas:
        raise PlacementError(
            f"{name}: a {type(tensor).__name__} gathers itself, from full shards, and replicas that own parts of a "
            "shard have none; let replicas be copies (placements='hsdp') in its unit"
        )
    if not (cut.by_rows if isinstance(cut, Runs) else cut.dim == 0):
        how = "into runs" if cut.in_line else f"on dim {cut.dim}"
        raise PlacementError(
            f"{name}: a {type(tensor).__name__} gathers itself and is cut between rows only, not {how}; let "
            "shard_placement_fn return Shard(0) or Blocks(rows) for it"
        )
    try:  # at the first forward `tensor` is the shard, which is cut already
        last = cut.num_ranks - 1
        is_cut = tensor.shape != cut.shape or shard_of(tensor, cut, last).shape[0] == cut.local_shape(last)[0]
    except (AssertionError, IndexError, NotImplementedError):  # what a subclass says of rows that it cannot cut
        is_cut = False
    if not is_cut:
        raise PlacementError(
            f"{name}: a {type(tensor).__name__} of shape {tuple(tensor.shape)} cannot be cut over {cut.num_ranks} "
            "ranks; give each rank equally many rows, with complete blocks of scales, or name it in ignored_params"
        )
