"""Groups: the parameters of a unit that share dtypes and trainability, and the shard buffer that holds their shards.

Parameters of a unit that differ (mixed dtypes, frozen layers) go to different groups; a group needs no rule.

A large unit on a device with streams is cut into parts of neighbouring parameters, each a group:

    registered     norm  qkv  out  up  down           groups    | norm qkv out | up | down |
    in backward                                       freed            3rd       2nd   1st

Backward comes to the parts from the last to the first. A part's unsharded parameters are freed once its gradients are
there, so that not all parameters and all gradients of the unit are in memory together. If shards rest in host memory, a
part of the next unit is gathered in its place. Small tensors (norms, biases) share the first part, whose gradients come
last: a norm that is registered behind the weights, and used before them, would keep its part in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from operator import is_
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sherd._torch import (
    REDUCES_IN_GRAD_DTYPE,
    local_tensor,
    move_hooks,
    replace_class,
    set_grad_dtype,
    spec_of,
    swap_devices,
)
from sherd.comm.agreement import groups_of
from sherd.comm.mesh import DataMesh
from sherd.comm.streams import Streams, wait_for_steps
from sherd.comm.transport import Sizes, parts
from sherd.engine.state.fetching import FetchedShard, RestingPlace, fetch_into
from sherd.engine.state.parameter import ShardedParameter, as_sharded
from sherd.errors import UnsupportedError, WriteBackError
from sherd.layout.extent import Extent
from sherd.layout.packing import Packing, pack
from sherd.layout.placement import Shape
from sherd.policy import MixedPrecisionPolicy
from sherd.schedule.moments import MemoryKind as Memory
from sherd.tensor.placement import in_dtype
from sherd.tensor.ragged import as_dtensor, own_view, storages_of
from sherd.tensor.sharded import rest_on

if TYPE_CHECKING:
    from sherd.engine.state.masters import Masters

PADDING_VALUE = 42
"""Fills the padding between and behind runs, so that a leak is seen at once."""

ALONE_BYTES = 4 << 20
"""Tensors of at least this size, unsharded, may have a group of their own."""

MOST_PARTS = 4
"""Of one unit. With more, messages become small while the largest tensor still bounds what is freed."""

SMALL = 16
"""A tensor of less than this fraction of a part, 1/16, goes to the first part."""


# Which parameters share a group


@dataclass(frozen=True, slots=True)
class GroupKey:
    """The properties that the parameters of one group share.

    `param_dtype` and `grad_dtype` are the parameters' own, as in `ShardedParameter`. `gathers_itself`: the tensor has
    its own all-gather. `owned_gradients`: each full gradient is reduced to one rank.
    `plan_id` is None for tensors cut by themselves, else the plan that cut them into runs: runs of two plans do not fit
    one buffer.
    """

    dtype: torch.dtype
    param_dtype: torch.dtype | None
    grad_dtype: tuple[torch.dtype | None, ...]
    trainable: bool
    gathers_itself: bool
    plan_id: int | None
    mesh: DataMesh
    owned_gradients: bool

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the unsharded parameters."""
        # Nothing else is cast: complex numbers would lose their imaginary part, and integers their meaning.
        return self.param_dtype if self.dtype.is_floating_point and self.param_dtype is not None else self.dtype

    @property
    def gradient_dtype(self) -> torch.dtype:
        (wanted,) = self.grad_dtype or (self.dtype,)
        return self.compute_dtype if wanted is None else wanted


def group_key_of(parameter: ShardedParameter) -> GroupKey:
    resting = parameter.resting
    plan_id = parameter.plan_id if parameter.cut.in_line else None
    owned_gradients = parameter.gradient_owner is not None
    return GroupKey(
        resting.dtype,
        parameter.param_dtype,
        parameter.grad_dtype,
        parameter.requires_grad,
        _gathers_itself(resting),
        plan_id,
        parameter.mesh,
        owned_gradients,
    )


def _gathers_itself(local: torch.Tensor) -> bool:
    return hasattr(local, "fsdp_pre_all_gather")


def travels_alone(parameter: ShardedParameter | torch.Tensor, streams: Streams, surrounds: bool) -> bool:
    """Returns whether a tensor should have a group of its own.

    A large tensor should, on a device without streams or in a unit that `surrounds` others. Alone, the tensor is
    gathered straight into place and reduced from where autograd left its gradient. That saves the copies and costs one
    more collective. With streams such a gather cannot run ahead of compute (`weights.py`). But in a unit around others,
    the parameters before them (an embedding) and after them (a head) are used at opposite ends of the model: alone,
    the head is freed when backward begins, and no rows wait for the embedding's gradient.
    """
    is_apart = streams.in_host_order or surrounds
    return is_apart and is_large(parameter.shape.numel(), parameter.dtype)


def is_large(numel: int, dtype: torch.dtype) -> bool:
    """Returns whether to copy so many elements of a gradient costs more than a collective of their own."""
    return numel * dtype.itemsize >= ALONE_BYTES


@dataclass(frozen=True, slots=True)
class Batch:
    """The parameters of one future group.

    `is_part`: their unit is cut into parts for the sake of memory. `promoted`: the dtype that holds the gradients of
    all the unit's parameters of the same dtype and mesh.
    """

    parameters: tuple[ShardedParameter, ...]
    is_part: bool = False
    promoted: torch.dtype | None = None


def batches_of(
    parameters: Sequence[ShardedParameter], streams: Streams, surrounds: bool, as_one: bool, part_bytes: int | None
) -> list[Batch]:
    """Returns the groups to make of a unit's parameters.

    Args:
        parameters: all of the unit's.
        streams: the lanes of its device.
        surrounds: the unit has others inside.
        as_one: the user has a collective or a hook of their own, which must see the unit as one.
        part_bytes: the fewest bytes, unsharded, of a part; None leaves a unit in one part.
    """
    keys: dict[GroupKey, list[ShardedParameter]] = {}
    for parameter in parameters:
        keys.setdefault(group_key_of(parameter), []).append(parameter)
    batches: list[Batch] = []
    promoted: dict[tuple[DataMesh, torch.dtype, bool], torch.dtype] = {}
    for key in keys:
        alike, wanted = (key.mesh, key.dtype, key.trainable), key.gradient_dtype
        earlier = promoted.setdefault(alike, wanted)
        promoted[alike] = wanted if earlier == wanted else torch.promote_types(earlier, wanted)
    for key, members in keys.items():
        first = len(batches)
        together: list[ShardedParameter] = []
        alone: list[Batch] = []
        for parameter in members:
            # Runs are never in order: those of one plan share a buffer.
            is_apart = parameter.cut.in_order and not as_one
            if key.gathers_itself or (is_apart and travels_alone(parameter, streams, surrounds)):
                alone.append(Batch((parameter,)))
            else:
                together.append(parameter)
        # Parts save no memory where unsharded parameters are kept. Runs of one plan balance over the ranks together.
        is_freed_in_parts = key.plan_id is None and key.mesh.num_pieces > 1 and not key.mesh.keeps_unsharded
        if part_bytes is not None and not as_one and not streams.in_host_order and is_freed_in_parts:
            batches += _parts(together, part_bytes)
        elif together:
            batches.append(Batch(tuple(together)))
        batches += alone
        batches[first:] = [
            replace(each, promoted=promoted[key.mesh, key.dtype, key.trainable]) for each in batches[first:]
        ]
    return batches


def _parts(parameters: Sequence[ShardedParameter], part_bytes: int) -> list[Batch]:
    """Returns `parameters` in parts of about equal bytes, each of at least `part_bytes`, or in one part if too few."""
    sizes = [each.shape.numel() * each.dtype.itemsize for each in parameters]
    num_parts = min(MOST_PARTS, sum(sizes) // part_bytes)
    if num_parts < 2:
        return [Batch(tuple(parameters))] if parameters else []
    is_large = [size * SMALL * num_parts >= sum(sizes) for size in sizes]
    parts = [[each for each, large in zip(parameters, is_large, strict=True) if not large]]
    least = max(part_bytes, sum(compress(sizes, is_large)) / num_parts)
    filled = 0
    for parameter, size in zip(compress(parameters, is_large), compress(sizes, is_large), strict=True):
        if filled >= least:
            parts.append([])
            filled = 0
        parts[-1].append(parameter)
        filled += size
    if filled < part_bytes and len(parts) > 1:
        parts[-2:] = [parts[-2] + parts[-1]]
    return [Batch(tuple(part), len(parts) > 1) for part in parts]


# The memory of shards


class ShardMemory:
    """The memory of one group's optimizer parameters, as it was when they became views of the shard buffer.

        the user does                                  the user finds                       sherd does
        w.data -= ..., w.data.copy_(...), nn.init...   new values in the shard buffer       nothing
        w.data = ...                                   new values, which w copied itself    nothing
        torch.utils.swap_tensors(w, other)             another local tensor                 copies the values into w

    torch counts the writes to `versioned`: none of them if one optimizer parameter was made in inference mode.
    """

    def __init__(self, records: Sequence[ShardedParameter]) -> None:
        self._records = records
        self.note()

    def note(self) -> None:
        """Remember the optimizer parameters, which may be other objects than before, and their memory."""
        self._optimizer_params = [as_sharded(record.optimizer_param) for record in self._records]
        self.versioned = [] if any(map(torch.is_inference, self._optimizer_params)) else self._optimizer_params
        self._locals = [record.resting for record in self._records]

    @property
    def are_taken(self) -> bool:
        """True if every optimizer parameter has the memory that it was given."""
        # Every forward asks, so C does most of it.
        try:
            now = list(map(local_tensor, self._optimizer_params))
        except AttributeError:  # one is no DTensor any more
            return False
        return all(map(is_, now, self._locals))

    @torch.no_grad()
    def settle(self) -> None:
        """Copy values from other memory into the shard buffer, and make the optimizer parameters views of it again.

        A parameter with another dtype or device is left as it is: the unit is regrouped.

        Raises:
            WriteBackError: a parameter was swapped with a tensor of another layout.
        """
        for record, local in zip(self._records, self._locals, strict=True):
            optimizer_param: torch.Tensor = record.optimizer_param
            placements = record.shard_spec.placements
            is_alike = isinstance(optimizer_param, DTensor) and (
                record.flat is not None or spec_of(optimizer_param).placements == placements
            )
            if not is_alike:
                raise WriteBackError(
                    f"{record.name} was swapped with a {type(optimizer_param).__name__} that is not sharded as it is "
                    f"({placements}); swap it with a parameter of the same layout, or give the module a new one, "
                    "module.weight = nn.Parameter(value)"
                )
            given = record.resting
            if given is local or type(given) is not torch.Tensor or type(local) is not torch.Tensor or local.is_meta:
                continue
            if (given.shape, given.dtype, given.device) == (local.shape, local.dtype, local.device):
                wait_for_steps()
                local.copy_(given)
                rest_on(as_sharded(optimizer_param), local)
                record.keep_grad_dtype()
        self.note()


def give_memory(record: ShardedParameter, parameter: nn.Parameter, local: torch.Tensor) -> None:
    """Make `local` the memory of `parameter`, the shard or the flat parameter of `record`.

    A DTensor takes gradients only on the device that it was made on. If `module.to()` or `to_empty()` moved `parameter`
    away from where shards rest, it is brought back, and stays the same object.

    Raises:
        UnsupportedError: `parameter` must be brought back, but has a gradient, or a user holds it.
    """
    sharded = as_sharded(parameter)
    if not local.is_meta and parameter.device != local.device:
        if parameter.grad is not None:
            raise UnsupportedError(
                f"{record.name} was moved to {parameter.device} with its gradient; its shard rests on {local.device}. "
                "Call zero_grad() before a model with shards in host memory is moved"
            )
        moved = as_dtensor(local, spec_of(sharded))
        moved.requires_grad_(parameter.requires_grad)
        # The swap exchanges the hooks, too, so they come back to `parameter` with it.
        move_hooks(parameter, moved)
        try:
            swap_devices(sharded, moved)
        except RuntimeError as error:
            raise UnsupportedError(
                f"{record.name} is on {parameter.device}, its shard rests on {local.device}, and it cannot be brought "
                f"back ({error}). Leave the model where it was when it was sharded"
            ) from error
    rest_on(sharded, local)
    record.claim(parameter)


def _hold(record: ShardedParameter, part: torch.Tensor) -> None:
    """Make `part`, of a flat parameter's memory, that of a member's shard, which stays the same object."""
    shard, spec = as_sharded(record.shard), in_dtype(record.shard_spec, part.dtype)
    if (shard.dtype, shard.device) != (part.dtype, part.device):
        swap_devices(shard, as_dtensor(part, spec))
    replace_class(shard, type(shard), spec)
    rest_on(shard, part)
    shard.requires_grad_(record.requires_grad)


# A group


def _arriving(key: GroupKey, reduce_dtype: torch.dtype, is_wanted: bool) -> tuple[torch.dtype | None, ...]:
    """Returns the `grad_dtype` of unsharded parameters, in a tuple that is empty if it is theirs.

    Before torch 2.15 autograd rounds gradients to the dtype of compute, unless a user has set another one. Since then a
    gradient that is reduced in a wider dtype than compute's may come in any, and is widened when it is copied for the
    reduction. `is_wanted`: no policy asks for `reduce_dtype`, so autograd rounds to what the user wants, if that is
    neither the one nor the other.
    """
    compute, wanted = key.compute_dtype, key.gradient_dtype
    if not (REDUCES_IN_GRAD_DTYPE or key.grad_dtype):
        return ()
    if (is_wanted and key.grad_dtype == (None,)) or (wanted if is_wanted else reduce_dtype).itemsize > compute.itemsize:
        return (None,)
    return (wanted,) if is_wanted and wanted not in (compute, reduce_dtype) else ()


@dataclass(frozen=True, slots=True)
class OptimizerParam:
    """A parameter of the optimizer and its place in the shard buffer: one shard, or the flat parameter of all shards.

    `shape` is that of this rank's part. `members` are the indices of the group's parameters in it, `gaps` the extents
    within it that belong to none.
    """

    record: ShardedParameter
    extent: Extent
    shape: Shape
    members: frozenset[int]
    gaps: tuple[Extent, ...] = ()

    @property
    def parameter(self) -> nn.Parameter:
        return self.record.optimizer_param

    @property
    def name(self) -> str:
        more = len(self.members) - 1
        return self.record.name + (f" (and {more} more, flat)" if more else "")


class Group:
    """Parameters that are gathered in one all-gather and reduced in one reduce-scatter.

    Attributes:
        shard_buffer: this rank's shards, 1-D, `packing.shard_numels[mesh.piece]` elements. The local tensors of the
            `optimizer_params` are views of it, so that the optimizer writes what the next all-gather sends.
        sizes: the lengths of all ranks' shard buffers.
        shard_sizes: how much each rank of the shard axis sends. Equal to `sizes`, unless replicas own parts of a shard
            (`fetched`).
        is_offloaded: the shards rest in another memory than that of the device that computes.
        unsharded_memory: the unsharded buffer if it is never freed; then the shard buffer is a part of it.
        num_flags: flags that travel with the gradients, one for each tensor. A large tensor that is alone has none: it
            is sent from where autograd left its gradient. It has a flag where some ranks may lack a gradient: under
            `divergence="join"`, and in a part of a unit (`is_part`).
        trainable: the parameters were trained when the group was made.
        is_one_piece: nothing is cut, so the shard buffer holds the unsharded parameters.
        reduce_dtype: the dtype in which gradients are reduced, `grad_dtype` that of the shards' `.grad` after it.
        takes_any_gradient: the `grad_dtype` is None, so that gradients are reduced in the dtype that they come in, if
            it is wider than `reduce_dtype`; and the shards get them in this dtype.
        arriving: the `grad_dtype` of the unsharded parameters, in a tuple, which is empty if it is theirs.
        gradient_packing: the layout of reduced gradients, and the rows that are reduced. It is `packing`, unless
            gradients go to owners. `gradients` are their places in it.
        masters: what an optimizer steps in the place of bfloat16 shards, if their policy says so.
    """

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        precision: MixedPrecisionPolicy,
        place: RestingPlace,
        is_part: bool = False,
        promoted: torch.dtype | None = None,
    ) -> None:
        self.parameters, key = tuple(parameters), group_key_of(parameters[0])
        self.mesh = mesh = self.parameters[0].mesh
        self.place, self.is_offloaded = place, place.is_elsewhere
        self.packing: Packing = pack([each.cut for each in self.parameters], mesh.num_pieces)
        self.is_one_piece = mesh.num_pieces == 1
        self.sizes = Sizes(self.packing.shard_numels)
        self.shard_sizes = self.sizes.together(mesh.num_owners)
        self.dtype, self.compute_dtype, self.trainable = key.dtype, key.compute_dtype, key.trainable
        asked = precision.reduce_dtype if self.dtype.is_floating_point else None
        self.reduce_dtype = asked or promoted or key.gradient_dtype
        self.takes_any_gradient = asked is None and key.grad_dtype == (None,)
        self.grad_dtype = self.reduce_dtype if key.grad_dtype == (None,) else key.gradient_dtype
        if precision.keep_low_precision_grads:
            # As in FSDP1: the dtype of compute, or of the reduction where nothing is cut. On any number of ranks one.
            self.grad_dtype = self.compute_dtype if mesh.sums_in_order or not self.is_one_piece else self.reduce_dtype
        is_mastered = key.trainable or any(each.masters for each in self.parameters)
        has_masters = place.masters is not None and is_mastered and self.dtype is torch.bfloat16
        if has_masters and not key.grad_dtype:
            self.grad_dtype = torch.float32
        self.arriving = _arriving(key, self.reduce_dtype, asked is None)
        if (reduction := mesh.comm.reduce) is not None:
            self.reduce_dtype = reduction.row_dtype(self.reduce_dtype)
            self.takes_any_gradient = self.takes_any_gradient and reduction.wire is None
        if mesh.comm.reduce_replicas is not None:  # which gets what the shard axis has summed
            summed = self.reduce_dtype if reduction is None else reduction.sum_dtype(self.reduce_dtype)
            mesh.comm.reduce_replicas.row_dtype(summed)
        self.device = mesh.device
        self.gathers_itself = key.gathers_itself
        first = self.parameters[0]
        is_one_large = len(self.parameters) == 1 and is_large(first.shape.numel(), first.dtype)
        may_lack = is_part or mesh.comm.divergence == "join"
        # In a block with small gradients a flag would round them to 0: such units reduce unused parameters, too.
        has_none = mesh.comm.encodes_gradients or (is_one_large and not may_lack)
        self.num_flags = 0 if has_none else len(self.parameters)
        is_fetched = mesh.shards_replicas or (place.keeps_copies and not self.gathers_itself)
        self.fetched = FetchedShard(self.sizes.of(mesh.pieces_of(mesh.shard_rank)), mesh) if is_fetched else None
        # What was read from a disk, or encoded, is a copy, too.
        is_other = place.disk is not None or mesh.gather_codec is not None
        self.keeps_copies = mesh.keeps_unsharded or is_fetched or is_other
        self.unsharded_memory: torch.Tensor | None = None
        self.version = 0
        self.optimizer_params = self._optimizer_params()
        self.gradient_packing, self.gradients = self.packing, self.optimizer_params
        if self.parameters[0].gradient_owner is not None:
            self.gradient_packing = pack([each.gradient_cut for each in self.parameters], mesh.num_pieces)
            self.gradients = self._shards_in(self.gradient_packing)
        self.shard_buffer = self._keep_shard() if self.gathers_itself else self._gather_shards_into_one_buffer()
        if key.grad_dtype or self.grad_dtype != self.dtype:
            for parameter in (each.parameter for each in self.optimizer_params):
                takes_any = key.grad_dtype == (None,) or (has_masters and not key.grad_dtype)
                set_grad_dtype(parameter, None if takes_any else self.grad_dtype)
        self.masters = self._make_masters() if has_masters else None
        for record in self.parameters if self.masters is None else ():
            record.have_masters(None, Extent(0, 0))  # `module.to()` has given it another dtype
        # Last, because it remembers the memory that the lines above have given to the optimizer parameters.
        self.shard_memory = ShardMemory([optimizer_param.record for optimizer_param in self.optimizer_params])

    def _make_masters(self) -> Masters:
        """Returns masters with the values that the parameters' masters had in another group."""
        from sherd.engine.state.masters import Masters  # seldom needed, so loaded late: tests/test_storeys.py

        held = list(zip(self.parameters, (slot.held(self.mesh.piece) for slot in self.packing.slots), strict=True))
        is_near = self.place.masters == "device" or self.shard_buffer.is_meta
        rests_on = self.shard_buffer.device if is_near else torch.device("cpu")
        low = self.place.zeros(self.shard_numel, torch.int16, rests_on)
        masters = Masters(self.shard_buffer, held, low)
        for record, own in held:
            if record.masters is not None and not self.shard_buffer.is_meta:
                before, extent = record.masters
                masters.put(own, before.of_weights(extent, self.shard_buffer[own.start : own.stop]))
            record.have_masters(masters, own)
        return masters

    def _optimizer_params(self) -> tuple[OptimizerParam, ...]:
        if self.is_flat:
            rank = self.mesh.piece
            used, members = self.used, frozenset(range(len(self.parameters)))
            gaps = tuple(gap for gap in self.packing.gaps_of(rank) if gap.stop <= used.numel)
            return (OptimizerParam(self.parameters[0], used, (used.numel,), members, gaps),)
        return self._shards_in(self.packing)

    def _shards_in(self, packing: Packing) -> tuple[OptimizerParam, ...]:
        rank = self.mesh.piece
        return tuple(
            OptimizerParam(record, slot.held(rank), slot.cut.local_shape(rank), frozenset((index,)))
            for index, (record, slot) in enumerate(zip(self.parameters, packing.slots, strict=True))
        )

    def stepped(self) -> Iterator[tuple[nn.Parameter, Extent]]:
        """Yields the parameters that optimizers may step, with their places: the members of a flat parameter, too."""
        yield from ((each.parameter, each.extent) for each in self.optimizer_params)
        for record, slot in zip(self.parameters, self.packing.slots, strict=True) if self.is_flat else ():
            yield record.shard, slot.held(self.mesh.piece)

    def hangs_on(self, optimizer_param: OptimizerParam, module_ids: Collection[int]) -> bool:
        """Returns whether a member of `optimizer_param` is registered at one of the modules with these ids."""
        places = (place for index in optimizer_param.members for place in self.parameters[index].places)
        return any(place.module_id in module_ids for place in places)

    @property
    def is_as_computed(self) -> bool:
        """True if shards have the dtype of compute, and rest in its memory."""
        is_near = self.place.device == self.device and self.place.disk is None
        return is_near and self.compute_dtype == self.dtype

    @property
    def is_brought(self) -> bool:
        """True if something of the group comes from elsewhere for its optimizer step."""
        return self.place.brings_state or self.masters is not None or self.place.disk is not None

    @property
    def is_flat(self) -> bool:
        return self.parameters[0].flat is not None

    @property
    def used(self) -> Extent:
        """The extent of the shard buffer without the padding behind runs."""
        return Extent(0, self.packing.runs_together.local_numel(self.mesh.piece))

    @property
    def name(self) -> str:
        """The name for messages: the first parameter, and how many more there are."""
        more = len(self.parameters) - 1
        return self.parameters[0].name + (f" (and {more} more)" if more else "")

    def source(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the buffer that this rank sends along the shard axis, in `dtype`: `[shard_sizes[mesh.shard_rank]]`.

        Collective over the replicate axis if replicas own parts of a shard that were written since the last call.
        """
        if self.fetched is not None:
            return self.fetched.around(self.shard_buffer, dtype, self.version)
        piece = self.shard_buffer if self.place.disk is None else self.at_hand()
        piece = piece.to(self.device, non_blocking=True) if self.is_offloaded else piece
        return piece if dtype == self.dtype else piece.to(dtype)

    def write_source(self, rows: torch.Tensor) -> torch.Tensor:
        """Write `source(rows.dtype)` into this rank's part of `rows`, `[packing.gathered_numel]`. Returns the part."""
        mesh = self.mesh
        start = self.packing.starts[mesh.pieces_of(mesh.shard_rank).start]
        part = rows[start : start + self.shard_sizes[mesh.shard_rank]]
        fetch_into(part, self.at_hand())
        return part

    def at_hand(self) -> torch.Tensor:
        """Returns the shard buffer, or what was read of it if it rests on a disk: then all ranks must call this.

        Raises:
            ScratchError: on all ranks, if one could not read its own.
        """
        if self.place.disk is None or self.shard_buffer.is_meta:
            return self.shard_buffer
        from sherd.on_disk import vectors_on  # seldom needed, so loaded late: tests/test_storeys.py

        return vectors_on(self.place.disk).at_hand(self, self.place.pinned, groups_of(self.mesh))

    def mark_shards_written(self) -> None:
        """Note that the shards were, or may be, written: copies of them are stale. All ranks must call it together."""
        self.version += 1
        if self.masters is not None:
            self.masters.note_step()

    def pieces_of(self, rank: int, shard: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields each part of `shard`, which `rank` of the shard axis sent, with the number of the part."""
        if self.fetched is None:
            yield rank, shard
            return
        pieces = self.mesh.pieces_of(rank)
        yield from zip(pieces, parts(shard, self.sizes.of(pieces)), strict=True)

    def held(self) -> Iterator[tuple[Memory, torch.Tensor]]:
        if self.unsharded_memory is not None:
            yield (Memory.SHARDS if self.is_one_piece else Memory.UNSHARDED), self.unsharded_memory
            return
        if self.place.disk is None and (self.fetched is None or not self.fetched.has_piece(self.shard_buffer)):
            yield Memory.SHARDS, self.shard_buffer
        for shard in self.fetched.held() if self.fetched is not None else ():
            yield Memory.SHARDS, shard

    @property
    def shard_bytes(self) -> int:
        """Bytes of this rank's shards: of the tensors that one consists of, if it gathers itself."""
        shard = self.shard_buffer
        return sum(each.nbytes() for each in storages_of(shard)) if self.gathers_itself else shard.nbytes

    @property
    def unsharded_bytes(self) -> int:
        return 0 if self.unsharded_memory is not None else self.packing.unsharded_numel * self.compute_dtype.itemsize

    @property
    def is_in_buffer(self) -> bool:
        """True if every optimizer parameter is still its view of the shard buffer, and got no all-gather of its own."""
        if self.gathers_itself:
            return self.parameters[0].local is self.shard_buffer
        if any(_gathers_itself(each.resting) for each in self.parameters):
            return False
        return all(
            self.has_at(optimizer_param.extent.start, optimizer_param.record.resting)
            for optimizer_param in self.optimizer_params
        )

    def has_at(self, start: int, local: torch.Tensor) -> bool:
        """Returns whether `local` is the part of the shard buffer that begins at element `start`."""
        if local.device != self.shard_buffer.device or local.dtype != self.dtype:
            return False
        address = self.shard_buffer.data_ptr() + start * self.dtype.itemsize
        # An empty tensor has the address 0, wherever it is.
        return local.is_meta or local.numel() == 0 or local.data_ptr() == address

    def _gather_shards_into_one_buffer(self) -> torch.Tensor:
        rank = self.mesh.piece
        shard_buffer = self._empty_shard_buffer(self.parameters[0].resting.device)
        if self.packing.is_cut_into_runs and not shard_buffer.is_meta:
            # Gaps within a flat parameter are zero, for its norm.
            gaps_within = {gap for optimizer_param in self.optimizer_params for gap in optimizer_param.gaps}
            for gap in self.packing.gaps_of(rank):
                if gap not in gaps_within:
                    shard_buffer[gap.start : gap.stop].fill_(PADDING_VALUE)
        for optimizer_param in self.optimizer_params:
            extent = optimizer_param.extent
            # Not a plain slice: torch cannot save a DTensor around a tensor with an offset, and a file with a slice
            # would hold all of the buffer (test_a_sharded_state_survives_a_file_of_its_own_on_each_rank).
            view = own_view(shard_buffer[extent.start : extent.stop]).view(optimizer_param.shape)
            if not shard_buffer.is_meta:
                view.copy_(optimizer_param.record.resting)
            give_memory(optimizer_param.record, optimizer_param.parameter, view)
        for record, slot in zip(self.parameters, self.packing.slots, strict=True):
            if record.flat is not None:
                extent = slot.held(rank)
                view = own_view(shard_buffer[extent.start : extent.stop]).view(slot.cut.local_shape(rank))
                _hold(record, view)
        return shard_buffer

    def _empty_shard_buffer(self, device: torch.device) -> torch.Tensor:
        """Returns memory for this rank's shards: a buffer of its own, or a part of one that holds other ranks' too."""
        place, mesh, packing = self.place, self.mesh, self.packing
        if self.is_as_computed and packing.direct and (mesh.keeps_unsharded or mesh.num_pieces == 1):
            self.unsharded_memory = place.empty(packing.unsharded_numel, self.dtype, device)
            start = packing.starts[mesh.pieces_of(mesh.shard_rank).start]
            shard = self.unsharded_memory[start : start + self.shard_sizes[mesh.shard_rank]]
        elif self.is_as_computed and self.fetched is not None:
            shard = place.empty(self.fetched.numel, self.dtype, device)
        else:
            return place.empty(self.shard_numel, self.dtype, device, f"parameters of {self.name}")
        return own_view(shard if self.fetched is None else self.fetched.holding(shard))

    def _keep_shard(self) -> torch.Tensor:
        (parameter,) = self.parameters
        local = parameter.local
        # Copied, so that the user's full tensor is freed. A tensor whose all-gather was set on the object is the memory
        # of a shard already.
        if not local.is_meta and "fsdp_pre_all_gather" not in vars(local):
            local = self.place.copy_of(local)
        give_memory(parameter, parameter.shard, local)
        return local

    @property
    def trained(self) -> list[ShardedParameter]:
        """The parameters that are trained now; `trainable` is as the group was made."""
        return [parameter for parameter in self.parameters if parameter.requires_grad]

    @property
    def shard_numel(self) -> int:
        return self.packing.shard_numels[self.mesh.piece]
