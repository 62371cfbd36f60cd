"""How are gradients clipped by the norm of all of them, wherever their pieces lie?

Each rank reduces what it holds to one number per set of process groups that shard it; each process group then has one
all-reduce, whatever this rank holds or lacks:

    gradient            lies as                    is joined over
    w   (6, 4)          Shard(0) on dp             dp
    u   (6, 4)          Shard(0), Shard(1)         dp, then tp
    n   (4,)            Replicate(), Shard(0)      tp
    b   (4,)            plain, or replicated       nothing: every rank has it, it counts once
    flat, over tp       RaggedShard, VectorShard   dp, then tp; what tp ranks have copies of counts at the first
"""

from __future__ import annotations

import math
import types
import warnings
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from sherd._torch import DTensorSpec, device_of, gradients_of, local_tensor, spec_of
from sherd.comm.failures import named
from sherd.comm.groups import group_of
from sherd.engine.state.parameter import record_of
from sherd.errors import GradientError, MeshError, PolicyError
from sherd.tensor.gather import counted_here
from sherd.tensor.placement import layout_of
from sherd.tensor.ragged import RaggedDTensor
from sherd.tensor.reductions import wide

Tensor = torch.Tensor
Groups = tuple[dist.ProcessGroup, ...]
Sort = tuple[Hashable, ...]
"""The mesh, by its id, and the types of the placements, which say what is sharded and what replicated."""


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

    As `torch.nn.utils.clip_grad_norm_`, for any mixture of parameters: DTensors of torch and ragged ones, over several
    meshes of any number of axes, and plain tensors. What is replicated counts once, and so do plain tensors, which must
    have the same gradient on all ranks. A collective: each process group that shards a parameter has one all-reduce.

    All ranks of a mesh give the same parameters. Who takes part is read off the parameters, so that gradients may be
    missing on some ranks (they count as zeros there) and pieces may be empty. Only a gradient that is sharded over an
    axis on which its parameter is not must be there on all ranks.

    Args:
        parameters: one tensor or many. One that is given twice counts once.
        max_norm: the largest norm that is left as it is.
        norm_type: the order p of the norm: any p > 0, inf for the largest magnitude, or 0 for the number of elements
            that are not zero (torch gives the number of *tensors* that are not zero).
        error_if_nonfinite: raise on all ranks, before any gradient is changed, if the norm is inf or nan.
        foreach: False goes through the gradients one by one.
        extra_groups: process groups whose ranks hold gradients of other parameters, such as pipeline stages; the norm
            is that of all.

    Returns:
        The norm before clipping, the same on all ranks: a plain tensor without dimensions on the first parameter's
        device, float64 if a parameter is, else float32.

    Raises:
        GradientError: a gradient with a Partial placement; the norm is not finite and `error_if_nonfinite` is set.
        CommError: a rank has died, or did not come before the group's timeout.
        MeshError: a parameter lies on a mesh that this rank is not in, or whose process group was destroyed.
        PolicyError: `norm_type` is negative or nan.
    """
    given = _listed(parameters)
    order = _Order(_power(norm_type))
    found = _read(given)
    total = _total(found, order, foreach is not False, extra_groups)
    norm = order.norm(total).to(device=found.device, dtype=_dtype(given))
    if error_if_nonfinite and not torch.isfinite(norm):
        raise GradientError(
            f"the norm of order {order.power} of all gradients is {norm.item()}, so they cannot be clipped; look for "
            "the loss or layer that overflows, or pass error_if_nonfinite=False to scale by it anyway"
        )
    _scale(found.scaled, (float(max_norm) / (norm + 1e-6)).clamp(max=1.0), foreach is not False)
    return norm


def _listed(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    if isinstance(parameters, Tensor):
        return [parameters]
    listed = list({id(each): each for each in parameters}.values())
    if not listed and isinstance(parameters, types.GeneratorType):
        warnings.warn(
            "clip_grad_norm_ was given a generator without parameters (used up before?), so nothing is clipped; pass "
            "a list, or model.parameters() anew for each call",
            stacklevel=4,
        )
    return listed


def _power(norm_type: float) -> float:
    power = float(norm_type)
    if not power >= 0:
        raise PolicyError(f"clip_grad_norm_(norm_type={norm_type}): expected a number of 0 or more, or inf")
    return power


def _dtype(parameters: Sequence[Tensor]) -> torch.dtype:
    """What the norm is given in; the parameters decide, since a gradient may be missing on one rank only."""
    wider = {torch.float64, torch.complex128}
    return torch.float64 if any(each.dtype in wider for each in parameters) else torch.float32


# Where the gradients lie


@dataclass(eq=False)
class _Found:
    """This rank's pieces of all gradients, as far as the norm counts them here, by the process groups that each is yet
    to be joined over; and all that is scaled.

    `devices`: where each group's collectives work, in the order in which all ranks call them. `device`: the first
    parameter's.
    """

    device: torch.device
    pieces: dict[Groups, list[Tensor]] = field(default_factory=dict)
    scaled: list[Tensor] = field(default_factory=list)
    devices: dict[dist.ProcessGroup, torch.device] = field(default_factory=dict)

    def enter(self, groups: Groups, devices: Sequence[torch.device]) -> None:
        """Take part in the collectives of `groups`, whether there is a gradient or not."""
        self.pieces.setdefault(groups, [])
        for group, device in zip(groups, devices, strict=True):
            self.devices.setdefault(group, device)

    def add(self, grad: Tensor, piece: Tensor, groups: Groups) -> None:
        """Take `piece`, what this rank holds of a gradient."""
        self.scaled.append(piece)
        if isinstance(grad, RaggedDTensor):
            self.pieces[groups] += counted_here(piece, layout_of(spec_of(grad)))
        else:
            self.pieces[groups].append(piece)


def _read(parameters: Sequence[Tensor]) -> _Found:
    found = _Found(parameters[0].device if parameters else torch.device("cpu"))
    groups_of: dict[Sort, Groups] = {}
    # First all parameters, then the gradients: so the order of the groups does not depend on what is missing here.
    for index, each in enumerate(parameters):
        _enter(found, groups_of, each, each, index)
    for index, (parameter, grad) in enumerate(zip(parameters, gradients_of(parameters), strict=True)):
        if grad is None:
            continue
        groups = _enter(found, groups_of, grad, parameter, index)
        found.add(grad, _piece(grad, parameter), groups)
    return found


def _enter(found: _Found, groups_of: dict[Sort, Groups], tensor: Tensor, parameter: Tensor, index: int) -> Groups:
    """The groups that `tensor`, the parameter or its gradient, is sharded over; read once for each sort of layout."""
    if not isinstance(tensor, DTensor):
        found.enter((), ())
        return ()
    spec = spec_of(tensor)
    sort = (id(spec.mesh), *map(type, spec.placements))
    known = groups_of.get(sort)
    if known is not None:
        return known
    if any(each.is_partial() for each in spec.placements):
        what = "it" if tensor is parameter else "its gradient"
        raise GradientError(
            f"{_name(parameter, index)}: {what} has placements {spec.placements}, so no rank knows any element of it; "
            "reduce it before clipping: p.grad = p.grad.redistribute(placements=p.placements)"
        )
    axes = _sharding_axes(spec, parameter, index)
    groups = tuple(group_of(spec.mesh, axis) for axis in axes)
    found.enter(groups, [device_of(spec.mesh)] * len(groups))
    groups_of[sort] = groups
    return groups


def _sharding_axes(spec: DTensorSpec, parameter: Tensor, index: int) -> list[int]:
    mesh = spec.mesh
    if mesh.get_coordinate() is None:
        raise MeshError(
            f"{_name(parameter, index)}: rank {dist.get_rank()} is not in its mesh {mesh}, and cannot know the norm of "
            "its gradient; give clip_grad_norm_ the parameters of this rank, and in extra_groups the process group "
            "that joins it with the ranks of the others"
        )
    return [axis for axis, each in enumerate(spec.placements) if not each.is_replicate() and mesh.size(axis) > 1]


def _name(parameter: Tensor, index: int) -> str:
    record = record_of(parameter)
    return f"parameter {index}, of shape {tuple(parameter.shape)}" if record is None else record.name


def _piece(grad: Tensor, parameter: Tensor) -> Tensor:
    """What this rank holds of a gradient, the memory itself; of a sparse one the values."""
    if isinstance(grad, DTensor):
        return local_tensor(grad)
    if not grad.is_sparse:
        return grad
    if not grad.is_coalesced():
        # An index that is there twice stands for the sum of both.
        grad = parameter.grad = grad.coalesce()
    return grad.values()


# The norm


@dataclass(frozen=True)
class _Order:
    """How a norm of order `power` is put together. Part of it: a vector of one element, the sum of powers, or of two
    for the largest magnitude: it, and whether there is a nan, which a MAX of some backends drops."""

    power: float

    @property
    def is_max(self) -> bool:
        return self.power == math.inf

    def part(self, norms: Tensor) -> Tensor:
        """The part that pieces with these norms make."""
        if not self.is_max:
            return (norms if self.power == 0 else norms**self.power).sum().reshape(1)
        largest = norms.amax()
        is_nan = largest.isnan()
        return torch.stack([torch.where(is_nan, torch.zeros_like(largest), largest), is_nan.to(largest.dtype)])

    def nothing(self, device: torch.device) -> Tensor:
        """The part of a rank that holds no element."""
        return torch.zeros(1 + self.is_max, dtype=wide(torch.float32, device), device=device)

    def together(self, parts: Sequence[Tensor]) -> Tensor:
        """Several parts as one."""
        if len(parts) == 1:
            return parts[0]
        stacked = torch.stack(list(parts))
        return stacked.amax(0) if self.is_max else stacked.sum(0)

    def join(self, parts: Tensor, group: dist.ProcessGroup) -> None:
        """The same parts of all ranks of `group`, in place."""
        with named("the norm of the gradients", group):
            dist.all_reduce(parts, op=dist.ReduceOp.MAX if self.is_max else dist.ReduceOp.SUM, group=group)

    def norm(self, part: Tensor) -> Tensor:
        """The norm that a part amounts to, without dimensions."""
        if self.is_max:
            return torch.where(part[1] > 0, math.nan, part[0])
        return part[0] if self.power == 0 else part[0] ** (1 / self.power)


def _total(found: _Found, order: _Order, foreach: bool, extra_groups: Sequence[dist.ProcessGroup]) -> Tensor:
    home = next(iter(found.devices.values()), found.device)
    parts = {groups: _part(pieces, order, foreach, home) for groups, pieces in found.pieces.items()}
    for group, device in found.devices.items():
        sharded = [groups for groups in parts if group in groups]
        joint = torch.stack([parts[groups] for groups in sharded]).to(device)
        order.join(joint, group)
        parts.update(zip(sharded, joint.to(home).unbind(), strict=True))
    total = order.together(list(parts.values()) or [order.nothing(home)])
    for group in extra_groups:
        # Their ranks may have other parameters, cut in other ways: only the sum is joined.
        order.join(total, group)
    return total


def _part(pieces: Sequence[Tensor], order: _Order, foreach: bool, home: torch.device) -> Tensor:
    """The part that pieces on this rank make, of any dtypes and devices."""
    parts = [
        order.part(torch.stack(_norms(alike, order.power, foreach)).to(device=home, dtype=wide(torch.float32, home)))
        for alike in _alike(pieces)
    ]
    return order.together(parts or [order.nothing(home)])


def _alike(pieces: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Those with elements, by device and dtype."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for each in pieces:
        if each.numel():
            found.setdefault((each.device, each.dtype), []).append(each)
    return found.values()


def _norms(pieces: list[Tensor], power: float, foreach: bool) -> list[Tensor]:
    """The norm of each; halves are added up in float32."""
    dtype = torch.float32 if pieces[0].dtype.itemsize < 4 else None
    if foreach:
        return list(torch._foreach_norm(pieces, power, dtype=dtype))
    return [torch.linalg.vector_norm(each, power, dtype=dtype) for each in pieces]


def _scale(pieces: Sequence[Tensor], factor: Tensor, foreach: bool) -> None:
    """Multiply all in place; by a factor of 1 too, for to look at it would wait for the device."""
    for alike in _alike(pieces):
        # Of the gradients' own type, for which there are fused kernels; but rounded to a half it would be up to 0.4 %
        # off, all one way.
        kind = alike[0].dtype.to_real()
        here = factor.to(device=alike[0].device, dtype=kind if kind.itemsize >= 4 else None)
        if foreach:
            torch._foreach_mul_(alike, here)
        else:
            for each in alike:
                each.mul_(here)
