"""The plan of a step of full matrices: which rank computes each matrix, and which travel together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from sherd.comm.failures import ranks_in_short
from sherd.comm.objects import all_gather_objects
from sherd.engine import ShardedParameter
from sherd.errors import OptimizerError
from sherd.layout.extent import Extent, chunks
from sherd.layout.placement import Copies, Cut
from sherd.optim.exchange import (
    Batch,
    Bucket,
    MatrixItem,
    Part,
    Ring,
    TensorAxis,
    items_of,
    joined_items_of,
    numels_of,
    with_owners,
)
from sherd.optim.faults import StepFaults
from sherd.optim.matrix_state import Home
from sherd.tensor.ragged import local_part

Group = dict[str, Any]
"""A parameter group of an optimizer, options, or a state."""

BUCKET_BYTES = 32 << 20
"""The most that a rank sends in one exchange, unless that gives some ranks nothing to compute."""


def batch_of(parameter: torch.Tensor, rows: int = 0, name: str = "", tensor_parallel: str = "whole") -> Batch:
    """Returns the matrices that a parameter is made of: how many, and the rows and columns of each.

    Args:
        parameter: of 2 dims or more, sharded or not.
        rows: how many rows make a matrix; 0: all of them.
        name: the parameter's name in errors; "": as `ShardedParameter.name_of` says.
        tensor_parallel: as that of `MatrixOptimizer`.

    Raises:
        OptimizerError: it is no matrix, or has another number of rows.
    """
    record = ShardedParameter.of(parameter)
    name = name or ShardedParameter.name_of(parameter)
    if not parameter.is_floating_point() or parameter.dtype.itemsize == 1:
        raise OptimizerError(
            f"{name} is of {parameter.dtype}; a function of full matrices takes real numbers of 16 bits or more"
        )
    if parameter.layout is not torch.strided:
        raise OptimizerError(f"{name} is sparse; a function of full matrices takes dense ones")
    if record is None and isinstance(parameter, DTensor):
        raise OptimizerError(
            f"{name} is a {type(parameter).__name__} that no unit of sherd holds; shard its module with fully_shard"
        )
    if len(parameter.shape) < 2:
        raise OptimizerError(
            f"{name} has shape {tuple(parameter.shape)}, and is no matrix; leave it to another optimizer"
        )
    is_joined = record is None or tensor_axis_of(record, rows, name, tensor_parallel) is not None
    shape = parameter.shape if record is None or is_joined else record.shape
    number, height, width = shape if len(shape) == 3 else (1, shape[0], prod(shape[1:]))
    if rows:
        if height % rows:
            raise OptimizerError(
                f"{name} has {height} rows, which are not divisible into matrices of {rows}; give a number that divides"
            )
        number, height = number * (height // rows), rows
    return number, height, width


def tensor_axis_of(
    record: ShardedParameter, rows: int = 0, name: str = "", tensor_parallel: str = "whole"
) -> TensorAxis | None:
    """Returns the axis of tensor parallelism along which matrices are assembled; None where it cuts none of them.

    For the arguments see `batch_of`.

    Raises:
        OptimizerError: several axes cut the parameter, or an axis cuts it in neither rows nor columns.
    """
    spec = record.unsharded_spec
    if spec is None or tensor_parallel == "blockwise":
        return None
    cutting = [
        (axis, placement)
        for axis, placement in enumerate(spec.placements)
        if spec.mesh.size(axis) > 1 and not placement.is_replicate()
    ]
    if not cutting:
        return None
    axis, placement = cutting[0]
    dim, num_dims = getattr(placement, "dim", 0), len(spec.shape)
    if len(cutting) > 1 or type(placement) is not Shard or dim > (2 if num_dims == 3 else 1):
        raise OptimizerError(
            f"{name or record.name} is cut over tensor parallelism by {tuple(spec.placements)}; matrices are put "
            "together of the rows or columns of one axis: take tensor_parallel='blockwise', or another optimizer"
        )
    # Nothing is assembled where each rank has complete matrices: experts, or the rows of complete heads.
    if dim == 0 and (
        num_dims == 3 or (rows and not any(each.numel % rows for each in chunks(spec.shape[0], spec.mesh.size(axis))))
    ):
        return None
    names, mesh = spec.mesh.mesh_dim_names, record.shard_spec.mesh
    assert names and mesh.mesh_dim_names, "axes other than those of data parallelism have names"
    return TensorAxis(mesh, mesh.mesh_dim_names.index(names[axis]), dim)


class MatrixPlan:
    """The matrices of some groups, as they are sharded now: which rank computes each, and which travel together."""

    def __init__(self, groups: Sequence[Group], joins: bool = True, others: Iterable[MatrixPlan] = ()) -> None:
        """Plan, so that ranks have equal work in this plan and those of `others` that share no parameter with it.

        Without `joins`, matrices that are to be assembled from tensor-parallel parts are left out.
        """
        self.parameters = [parameter for group in groups for parameter in group["params"]]
        self.group_of = [at for at, group in enumerate(groups) for _ in group["params"]]
        self.by_group = [[i for i, of in enumerate(self.group_of) if of == at] for at in range(len(groups))]
        options = [options_of(groups[at]) for at in self.group_of]
        self.batches = [batch_of(each, *chosen) for each, chosen in zip(self.parameters, options, strict=True)]
        self._records = [ShardedParameter.of(parameter) for parameter in self.parameters]
        self.one_by_one = any(each is not None and each.mesh.sums_in_order for each in self._records)
        """Products of one matrix are rounded otherwise than those of several, and ranks own as many as there are ranks:
        where gradients have the same bits on any number of ranks, each matrix is computed by itself."""
        self._axes = [
            None if record is None else tensor_axis_of(record, *chosen)
            for record, chosen in zip(self._records, options, strict=True)
        ]
        self.is_stepped = [is_stepped(parameter) for parameter in self.parameters]
        """Whether each parameter is stepped. Nothing is exchanged for the others."""
        self._owners: dict[int, set[int]] = defaultdict(set)
        self._traveling: set[int] = set()
        self._owned: set[int] = set()
        self._has_begun = False
        self.homes: dict[int, Home] = {}
        """The owners of the states of parameters, by parameter number. A parameter without elements has none."""
        self.flops: dict[int, float] = defaultdict(float)
        """The work of each rank, in units of `MatrixItem.flops`, on matrices that have one owner."""
        self.local: list[tuple[MatrixItem, Extent]] = []
        """Items that are complete on this rank, with their elements in the local tensor; computed before exchanges."""
        self.buckets: list[Bucket] = []
        self.faults = StepFaults()
        ids, loads = set(map(id, self.parameters)), defaultdict[int, float](float)
        # All ranks have begun the same plans.
        for other in (each for each in others if each._has_begun and ids.isdisjoint(map(id, each.parameters))):
            for rank, flops in other.flops.items():
                loads[rank] += flops
        for ring, items in self._by_ring(self._joined_cuts() if joins else {}):
            owned = with_owners(items, ring, loads)
            self._divide(ring, owned)
            for index, own in groupby(owned, lambda item: item.index):
                self.homes[index] = self._home(index, list(own), ring)
        # A fault among few ranks is reported to more of them by later exchanges.
        self.buckets.sort(key=lambda bucket: len(bucket.ring.ranks))

    def _home(self, index: int, items: Sequence[MatrixItem], ring: Ring) -> Home:
        record = self._records[index]
        assert record is not None, "plain parameters have no ring"
        number, rows, _ = self.batches[index]
        if tuple(record.shape) != tuple(record.shard.shape) and self._axes[index] is None:
            number = record.shard.shape[0] // (1 if len(record.shape) == 3 else rows)
        return Home(number, items, ring, record.shard_spec)

    @property
    def traveling(self) -> set[int]:
        """The numbers of parameters for which something travels."""
        return self._traveling | self._owned

    def begins(self) -> bool:
        """Returns True once, before the first step by this plan."""
        self._has_begun, had = True, self._has_begun
        return not had

    def note_written(self) -> None:
        """Note that parameters were written after the hooks of optimizers have noted it."""
        stepped = [record for record in self._records if record is not None]
        torch.autograd.graph.increment_version([record.optimizer_param for record in stepped])
        for owner in {owner.id: owner for record in stepped if (owner := record.owner) is not None}.values():
            owner.shards_written()

    def computes_on(self, index: int) -> torch.device:
        """Returns the device on which a parameter's matrices are computed: its unit's, not that of resting shards."""
        record = self._records[index]
        return self.parameters[index].device if record is None else record.mesh.device

    def way_of(self, indices: Sequence[int]) -> str:
        """Returns where the matrices of some parameters are computed, and what travels for them, in words."""
        owners = sorted(set().union(*(self._owners[index] for index in indices)))
        if not owners and any(self._axes[index] is not None for index in indices):
            return "a rank of data and tensor parallelism; shards of gradients go there, those of updates come back"
        if not owners:
            return "complete on this rank; every rank computes it"
        who = f"ranks {ranks_in_short(owners)}" if len(owners) > 1 else f"rank {owners[0]}"
        if not self._traveling.isdisjoint(indices):
            return f"{who}; shards of gradients go there, those of updates come back"
        if not self._owned.isdisjoint(indices):
            return f"{who}; backward reduces gradients there, shards of updates come back"
        return f"{who}; nothing travels"

    def _joined_cuts(self) -> dict[int, list[Cut]]:
        """Returns how all parts of parameters that tensor parallelism cuts are cut. Collective over each such axis."""
        by_axis: dict[tuple[DeviceMesh, int], list[int]] = defaultdict(list)
        for index, axis in enumerate(self._axes):
            if axis is not None:
                by_axis[axis.mesh, axis.axis].append(index)
        found: dict[int, list[Cut]] = {}
        for (mesh, number), indices in by_axis.items():
            records = [self._records[index] for index in indices]
            own, what = [each and each.cut for each in records], "how tensor-parallel matrices are cut"
            # Parts may be of different sizes, so that no rank can work out the cuts of another.
            parts = all_gather_objects(own, what, mesh.get_group(number))
            found |= {index: list(cuts) for index, cuts in zip(indices, zip(*parts, strict=True), strict=True)}
        return found

    def _by_ring(self, joined: Mapping[int, Sequence[Cut]]) -> Iterable[tuple[Ring, list[MatrixItem]]]:
        """Returns the items of parameters that are sharded over the same ranks, for all such ranks.

        A plain parameter is complete on this rank. `joined` are the cuts of parts that are assembled.
        """
        ring_of: dict[tuple[int, DeviceMesh | None, int], Ring] = {}
        rings: dict[object, tuple[Ring, list[MatrixItem]]] = {}
        for index, (record, batch, axis) in enumerate(zip(self._records, self.batches, self._axes, strict=True)):
            if not self.is_stepped[index]:
                continue
            if record is None:
                everything = Extent(0, self.parameters[index].numel())
                # As if one rank held all of it, so that one kind of item serves both.
                plain = Copies(tuple(self.parameters[index].shape), 1, 0, (1,))
                self.local.append((MatrixItem(index, batch, (Part((plain, plain), everything, batch),)), everything))
                self.homes[index] = Home(batch[0], [self.local[-1][0]])
            elif axis is None or index in joined:
                # Units have meshes of their own, also over the same ranks. A mesh has many parameters.
                key = (id(record.mesh), None, 0) if axis is None else (id(record.mesh), axis.mesh, axis.axis)
                if key not in ring_of:
                    ring_of[key] = Ring(record.mesh, axis)
                ring = ring_of[key]
                _, items = rings.setdefault((tuple(ring.ranks), tuple(ring.holders)), (ring, []))
                if axis is None:
                    items += items_of(index, batch, (record.gradient_cut, record.cut), self.one_by_one)
                    if not batch[0]:
                        # Tensor parallelism leaves no matrix to this rank, but some to others.
                        self.homes[index] = self._home(index, [], ring)
                else:
                    num_items = batch[0] if self.one_by_one else len(ring.ranks)
                    items += joined_items_of(index, batch, joined[index], axis.dim, num_items)
        return rings.values()

    def _divide(self, ring: Ring, items: Sequence[MatrixItem]) -> None:
        """Put the items that travel into buckets, each of one dtype, whose gradients travel, or do not."""
        travelers: dict[tuple[bool, torch.dtype], list[tuple[float, MatrixItem]]] = defaultdict(list)
        complete, begins = list[tuple[float, MatrixItem]](), list[tuple[float, Bucket]]()
        for item in items:
            owner = ring.ranks[item.owner]
            self._owners[item.index].add(owner)
            numels = numels_of(item.parts, ring.holders)
            if [rank for rank, numel in enumerate(numels[1]) if numel] != [item.owner]:
                at_owner = numels[0][item.owner] == item.numel
                (self._owned if at_owner else self._traveling).add(item.index)
                dtype = local_part(self.parameters[item.index]).dtype
                travelers[at_owner, dtype].append((self.flops[owner], item))
            elif item.owner == ring.rank:
                complete.append((self.flops[owner], item))
            self.flops[owner] += item.flops
        longest = max((item.flops for item in items), default=0.0)
        for (_, dtype), waiting in travelers.items():
            bucket, filled, begun = list[MatrixItem](), 0, 0.0  # when owners come to it
            # In the order in which owners come to them, and as many as keep each owner busy: a rank that computes
            # nothing in a bucket waits for those that do (test_every_rank_computes_in_every_bucket_but_the_last).
            for start, item in sorted(waiting, key=lambda each: each[0]):
                nbytes = item.numel * dtype.itemsize
                if filled + nbytes > BUCKET_BYTES * len(ring.ranks) and start >= begun + longest:
                    begins.append((begun, Bucket(bucket, ring, dtype)))
                    bucket, filled, begun = [], 0, start
                bucket.append(item)
                filled += nbytes
            begins.append((begun, Bucket(bucket, ring, dtype)))
        self.buckets += [bucket for _, bucket in begins]
        for start, item in complete:  # in its turn, as no other rank is to wait until all of these are computed
            in_turn = [bucket.local for begun, bucket in begins if begun <= start]
            (in_turn[-1] if in_turn else self.local).append((item, item.held(ring.holders[ring.rank])))


def is_stepped(parameter: torch.Tensor) -> bool:
    record = ShardedParameter.of(parameter)  # a flat parameter is frozen or trained as one
    return (parameter if record is None else record).requires_grad or parameter.grad is not None


PlanKey = tuple[tuple[object, ...], ...]


def key_of(groups: Sequence[Group]) -> PlanKey:
    """Returns what a plan depends on, of each parameter."""
    return tuple(
        (at, *options_of(group), id(each), each.dtype, local_part(each).device, is_stepped(each), id(record), *cuts)
        for at, group in enumerate(groups)
        for each in group["params"]
        for record in [ShardedParameter.of(each)]
        for cuts in [() if record is None else (id(record.cut), record.gradient_owner)]
    )


def options_of(group: Group) -> tuple[int, str, str]:
    """Returns what `batch_of` is given of a group in addition to its parameters."""
    return group.get("rows", 0), "", group.get("tensor_parallel", "whole")
