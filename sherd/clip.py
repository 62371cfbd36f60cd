"""Gradient clipping by the norm of all gradients, under any placements.

Each rank reduces its shards of gradients to one number per set of process groups that shard them. Each process group
then has one all-reduce, even for ranks that hold no gradient:

    gradient            placements                 is joined over
    w   (6, 4)          Shard(0) on dp             dp
    u   (6, 4)          Shard(0), Shard(1)         dp, then tp
    n   (4,)            Replicate(), Shard(0)      tp
    b   (4,)            plain, or replicated       nothing: every rank has the gradient, which counts once
    flat, over tp       RaggedShard, VectorShard   dp, then tp; copies on several tp ranks count on the first
"""

from __future__ import annotations

import math
import types
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from sherd._torch import DTensorSpec, device_of, gradients_of, spec_of
from sherd.comm.groups import group_of
from sherd.engine import ShardedParameter, watcher
from sherd.errors import GradientError, MeshError, PolicyError, StateError
from sherd.tensor.exact_sums import ExactSum
from sherd.tensor.gather import counted_here
from sherd.tensor.placement import Layout, layout_of
from sherd.tensor.reduction_table import (
    SUM,
    ReductionRow,
    by_dtype,
    local_gradient_of,
    local_norms,
    norm_of_order,
    sum_dtype,
)
from sherd.tensor.vectors import VectorShard

Tensor = torch.Tensor
Groups = tuple[dist.ProcessGroup, ...]
PartOf = Callable[[Sequence[list[Tensor]]], Tensor]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    extra_groups: Sequence[dist.ProcessGroup] = (),
) -> Tensor:
    """Scale gradients in place so that the norm of all their elements, over all ranks, is at most `max_norm`.

    As `torch.nn.utils.clip_grad_norm_` (Pascanu et al., 2013), for any mixture of parameters: DTensors of torch and
    ragged DTensors, over several meshes of any number of axes, and plain tensors. Replicated tensors count once, and so
    do plain tensors, which must have the same gradient on all ranks. A collective: each process group that shards a
    parameter has one all-reduce.

    All ranks of a mesh give the same parameters. The parameters alone say which ranks take part, so that gradients may
    be missing on some ranks (they count as zeros there) and shards may be empty. Only a gradient that is sharded over
    an axis on which its parameter is replicated must exist on all ranks.

    Args:
        parameters: one tensor or many. A tensor that is given twice counts once. For one from before sharding, as an
            optimizer that was built then has it until its first step, its shard counts.
        max_norm: the largest norm that stays as it is.
        norm_type: the order p of the norm: any p > 0, inf for the largest magnitude, or 0 for the number of nonzero
            elements (torch gives the number of nonzero *tensors*).
        error_if_nonfinite: raise on all ranks, before any gradient is changed, if the norm is inf or nan.
        foreach: False scales the gradients one by one.
        extra_groups: process groups whose ranks hold gradients of other parameters, such as pipeline stages; the norm
            is over the gradients of all these ranks.

    Returns:
        The norm before clipping, the same on all ranks: a plain tensor without dimensions on the first parameter's
        device, float64 if a parameter is, else float32.

    Raises:
        GradientError: a gradient with a Partial placement; the norm is not finite and `error_if_nonfinite` is set.
        CommError: a rank has died, or did not come before the group's timeout.
        MeshError: a parameter is on a mesh that this rank is not in, or whose process group was destroyed.
        PolicyError: `norm_type` is negative or nan.
        StateError: `step_in_backward` steps a unit of the parameters before there is a norm.
    """
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    each_once = list({id(each): each for each in with_gradients("clip_grad_norm_", parameters)}.values())
    if not each_once and isinstance(parameters, types.GeneratorType):
        warnings.warn(
            "clip_grad_norm_ was given a generator without parameters (used up before?), so nothing is clipped; pass "
            "a list, or model.parameters() again for each call",
            stacklevel=3,
        )
    max_norm, power, fused = float(max_norm), float(norm_type), foreach is not False
    if not power >= 0:
        raise PolicyError(f"clip_grad_norm_(norm_type={norm_type}): expected a number of 0 or more, or inf")
    note_of_several("gradients are clipped to {} by the norm of order {} of {} tensors", (max_norm, power), each_once)
    gradients = _Gradients(each_once)
    norm = (_exact_norm if gradients.are_in_order else _total_norm)(gradients, power, fused, extra_groups)
    norm = norm.to(device=gradients.device, dtype=torch.float64 if gradients.is_wide else torch.float32)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise GradientError(
            f"the norm of order {power} of all gradients is {norm.item()}, so they cannot be clipped; look for "
            "the loss or layer that overflows, or pass error_if_nonfinite=False to scale by it anyway"
        )
    _scale(gradients.scaled, (max_norm / (norm + 1e-6)).clamp(max=1.0), fused)
    return norm


# The gradients


def with_gradients(call: str, parameters: Iterable[Tensor]) -> list[Tensor]:
    """Returns `parameters`, with shards for those from before sharding. StateError: backward has stepped some."""
    found = []
    for parameter in parameters:
        record = ShardedParameter.of(parameter)
        if record is not None:
            if (owner := record.owner) is not None and owner.steps_in_backward:
                raise StateError(
                    f"{call} needs all gradients, and step_in_backward steps {record.name} before they are there; call "
                    "remove() on what step_in_backward returned, and the step waits for this call"
                )
            is_shard = parameter is record.shard or parameter is record.optimizer_param
            if not is_shard and parameter is not record.places[0].shown:  # which would be unsharded
                parameter = record.shard
        found.append(parameter)
    return found


def note_of_several(what: str, values: Sequence[object], parameters: Iterable[Tensor]) -> None:
    """Note what is done to the gradients of `parameters`, for ranks to compare: `values`, and of how many tensors.

    A tensor of which one rank holds all elements is that rank's business.
    """
    records = [record for each in parameters if (record := ShardedParameter.of(each)) is not None]
    several = [record for record in records if record.is_on_several_ranks]
    owners = dict.fromkeys(each.owner.id for each in several if each.owner is not None)
    watcher.note(what, (*values, len(several)), list(owners))


class _Gradients:
    """This rank's shards of all gradients.

    device: the first parameter's device.
    are_in_order: some are added up in the order of ranks, so their norm is, too.
    is_wide: a parameter has 64 bits. The parameters decide, since a gradient may be missing on one rank only.
    devices: the device of each process group's collectives, in the order in which all ranks call them.
    counted: the shards that the norm counts on this rank, by the process groups that join the norm.
    scaled: the shards that are to be scaled, including shards that the norm counts on another rank.

    `counted` and `scaled` have lists of nonempty shards, each list of one dtype and device.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.device = parameters[0].device if parameters else torch.device("cpu")
        self.is_wide = False
        records = (ShardedParameter.of(each) for each in parameters)
        self.are_in_order = any(record is not None and record.mesh.sums_in_order for record in records)
        self.devices: dict[dist.ProcessGroup, torch.device] = {}
        self.counted: dict[Groups, list[list[Tensor]]] = {}
        self.scaled: list[list[Tensor]] = []
        self._known: dict[tuple[Hashable, Layout | None], tuple[Groups, list[Tensor]]] = {}
        # First all parameters, then the gradients, so that the order of the groups does not depend on the gradients
        # that are missing on this rank. By id, since most tensors with one layout share the spec object.
        lists: dict[int, list[Tensor]] = {}
        for index, parameter in enumerate(parameters):
            layout_key = _spec_or_dtype(parameter)
            if id(layout_key) not in lists:
                lists[id(layout_key)] = self._list_of(layout_key, parameter, index, "it")
                self.is_wide |= parameter.dtype in (torch.float64, torch.complex128)
        for index, (grad, parameter) in enumerate(zip(gradients_of(parameters), parameters, strict=True)):
            if grad is not None:
                layout_key = _spec_or_dtype(grad)
                if id(layout_key) not in lists:
                    lists[id(layout_key)] = self._list_of(layout_key, parameter, index, "its gradient")
                lists[id(layout_key)].append(local_gradient_of(grad, parameter))
        for (_, layout), (groups, pieces) in self._known.items():
            sorted_pieces = by_dtype(pieces)
            self.scaled += sorted_pieces
            if layout is not None:
                sorted_pieces = by_dtype(part for piece in pieces for part in counted_here(piece, layout))
            self.counted.setdefault(groups, []).extend(sorted_pieces)

    def _list_of(self, layout_key: DTensorSpec | torch.dtype, parameter: Tensor, index: int, what: str) -> list[Tensor]:
        """Returns the list for shards with the layout of `layout_key`, and notes the groups that shard the tensor.

        `what` is, for errors, "it" for the parameter, or "its gradient".
        """
        spec = None if isinstance(layout_key, torch.dtype) else layout_key
        types = () if spec is None else (id(spec.mesh), *map(type, spec.placements))
        key = types, layout_of(spec) if spec is not None and VectorShard in types else None
        if key not in self._known:
            groups: Groups = ()
            if spec is not None:
                _require_known(spec, what, parameter, index)
                sharded = [axis for axis, placement in enumerate(spec.placements) if not placement.is_replicate()]
                groups = tuple(group_of(spec.mesh, axis) for axis in sharded if spec.mesh.size(axis) > 1)
                self.devices |= dict.fromkeys(groups, device_of(spec.mesh))
            self._known[key] = groups, []
        return self._known[key][-1]


def _spec_or_dtype(tensor: Tensor) -> DTensorSpec | torch.dtype:
    return spec_of(tensor) if isinstance(tensor, DTensor) else tensor.dtype


def _require_known(spec: DTensorSpec, what: str, parameter: Tensor, index: int) -> None:
    """Raise if this rank cannot know the norm of its shard: the spec is Partial, or this rank is not in the mesh."""
    record = ShardedParameter.of(parameter)
    name = f"parameter {index}, of shape {tuple(parameter.shape)}" if record is None else record.name
    if any(placement.is_partial() for placement in spec.placements):
        raise GradientError(
            f"{name}: {what} has placements {spec.placements}, so no rank knows any element of it; "
            "reduce it before clipping: p.grad = p.grad.redistribute(placements=p.placements)"
        )
    if spec.mesh.get_coordinate() is None:
        raise MeshError(
            f"{name}: rank {dist.get_rank()} is not in its mesh {spec.mesh}, and cannot know the norm of "
            "its gradient; give clip_grad_norm_ the parameters of this rank, and in extra_groups the process group "
            "that joins it with the ranks of the others"
        )


# The norm


def _total_norm(gradients: _Gradients, power: float, fused: bool, extra_groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """Returns the norm of all elements on all ranks, 0-D."""
    row = norm_of_order(power)
    home = next(iter(gradients.devices.values()), gradients.device)
    return row.finish(_joined(gradients, row, lambda lists: _part(lists, row, power, fused, home), home, extra_groups))


def _joined(
    gradients: _Gradients,
    row: ReductionRow,
    part_of: PartOf,
    home: torch.device,
    extra_groups: Sequence[dist.ProcessGroup],
) -> Tensor:
    """Returns the joined parts of all ranks, `part_of(lists)` for this rank's lists of shards."""
    purpose = "the norm of the gradients"
    parts = {groups: part_of(lists) for groups, lists in gradients.counted.items()}
    for group, device in gradients.devices.items():
        sharded = [groups for groups in parts if group in groups]
        joint = torch.stack([parts[groups] for groups in sharded]).to(device)
        row.join(joint, [group], purpose)
        parts.update(zip(sharded, joint.to(home).unbind(), strict=True))
    total = row.fold(torch.stack(list(parts.values()) or [part_of([])], -1), -1)
    # The ranks of these groups may have other parameters, cut in other ways, so only the total is joined.
    return row.join(total, extra_groups, purpose)


def _exact_norm(gradients: _Gradients, power: float, fused: bool, extra_groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """Returns the same norm, with the same bits on any number of ranks.

    Raises:
        PolicyError: an order other than 0, 1, 2 or inf.
    """
    if power in (0.0, math.inf):
        return _total_norm(gradients, power, fused, extra_groups)
    if power not in (1.0, 2.0):
        raise PolicyError(
            f"clip_grad_norm_(norm_type={power}): gradients are added up in the order of ranks, and only the norms of "
            "order 0, 1, 2 and inf have the same bits on any number of ranks"
        )
    largest = _total_norm(gradients, math.inf, fused, extra_groups).double()
    exact = ExactSum(largest**power)

    def part_of(lists: Sequence[list[Tensor]]) -> Tensor:
        return exact.parts([shard for each in lists for shard in each], int(power))

    total = exact.total(_joined(gradients, SUM, part_of, largest.device, extra_groups))
    return total ** (1 / power)


def _part(lists: Sequence[list[Tensor]], row: ReductionRow, power: float, fused: bool, home: torch.device) -> Tensor:
    """Returns the number that this rank sends for its shards."""
    dtype = sum_dtype(torch.float32, home)
    norms = [torch.stack(local_norms(each, power, fused)).to(device=home, dtype=dtype) for each in lists]
    return row.fold(row.send(torch.cat(norms or [row.nothing(dtype, home).reshape(1)])), -1)


def _scale(lists: Sequence[list[Tensor]], factor: Tensor, fused: bool) -> None:
    """Multiply all shards in place, also by a factor of 1: reading the factor would wait for the device."""
    for pieces in lists:
        # A factor of the gradients' own dtype has fused kernels. A half-precision factor would be rounded by up to
        # 0.4 %, in one direction for all elements, so half-precision gradients are multiplied by the wider factor.
        dtype = pieces[0].dtype.to_real()
        local_factor = factor.to(device=pieces[0].device, dtype=dtype if dtype.itemsize >= 4 else None)
        if fused:
            torch._foreach_mul_(pieces, local_factor)
        else:
            for piece in pieces:
                piece.mul_(local_factor)
