"""The flat parameter: all shards of a group as one 1-D DTensor, for optimizers that see one parameter per unit.

    shard buffers      rank 0 | a a a a | b b |    rank 1 | b b b . | c c | . . |
    flat parameter           | a a a a | b b               b b b . | c c |

Padding between members is a part of the flat parameter. It is zero, so that no norm counts it and no optimizer moves
it. Padding after the last member is no part. Under tensor parallelism the flat parameter is placed on the
tensor-parallel axes, too: each rank has a vector of its parts of the members, and norms count one copy of members that
several ranks have.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, SupportsIndex, cast

import torch
from torch import nn

from sherd._torch import attributes_of, dispatches_itself, register_foreach_type, replace_class
from sherd.engine.state.group import Group
from sherd.engine.state.parameter import ShardedParameter, as_sharded, record_of
from sherd.errors import GradientError, StateError
from sherd.tensor.placement import in_dtype
from sherd.tensor.ragged import RaggedDTensor, as_dtensor, local_part, own_view, ragged_dtensor, unpickled
from sherd.tensor.table import Args, Aten, Kwargs
from sherd.tensor.tensor_parallel import merged_spec


class FlatParamShardMetadata(NamedTuple):
    """The members of a flat parameter that this rank holds elements of, one entry for each.

    Shapes, strides and numbers of elements are those of the unsharded member. `param_offsets` are the first and the
    last element held, counted in the flattened member. The fields are those of torch's FSDP1 record of the same name.
    """

    param_names: tuple[str, ...]
    param_shapes: tuple[torch.Size, ...]
    param_strides: tuple[tuple[int, ...], ...]
    param_contiguities: tuple[bool, ...]
    param_numels: tuple[int, ...]
    param_offsets: tuple[tuple[int, int], ...]


class FlatParameter(RaggedDTensor):
    """All parameters of one unit as one 1-D parameter, of which each rank holds a run; FSDP1's (Zhao et al. 2023).

    The `shape` is `(numel,)`: the parameters one after the other, with the padding between them. `to_local()` is this
    rank's run. A copy, or a flat parameter loaded from a file, is a vector that no unit uses.
    """

    _lacking: frozenset[int] = frozenset()
    """Of a gradient: the numbers of the parameters that have none."""

    def _lack(self, members: frozenset[int]) -> None:
        self._lacking = members

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch declares it is not as it calls it
        cls, func: Aten, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        """Run `func` as on a ragged tensor. The result of `model.to(...)` stays a flat parameter."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        return _as_flat(result) if func in _KEEP_CLASS and isinstance(args[0], FlatParameter) else result

    def __deepcopy__(self, memo: dict[int, object]) -> FlatParameter:
        return _as_flat(super().__deepcopy__(memo))

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        _, given = super().__reduce_ex__(protocol)
        return _unpickled, given

    def _take_attributes(self, attributes: Mapping[str, object]) -> None:
        vars(self).update(attributes)

    def shard_metadata(self) -> FlatParamShardMetadata:
        """Returns the parameters and elements that this rank holds. Raises `StateError` for a copy."""
        return self._shard.metadata()

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names, as seen from the wrapped module, in its order."""
        return self._shard.names

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        """The parameters' shapes, in the same order."""
        return self._shard.shapes

    @property
    def numels(self) -> tuple[int, ...]:
        """The parameters' numbers of elements, in the same order."""
        return tuple(shape.numel() for shape in self._shard.shapes)

    @property
    def _shard(self) -> FlatShard:
        record = record_of(self)
        if record is None:
            raise StateError(
                "this FlatParameter is a copy, or its model is gone: it knows nothing of the parameters it was made "
                "of; ask the one among the wrapped model's parameters()"
            )
        return _flat_of(record)


class FlatMember(RaggedDTensor):
    """The shard of a parameter that is in a flat one. Its gradient is a part of the flat one's."""

    @property
    def grad(self) -> torch.Tensor | None:
        """This rank's part of the gradient, a view; None if no rank has used the parameter."""
        record = record_of(self)
        return None if record is None else _flat_of(record).gradient_of(record)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if (record := record_of(self)) is not None:
            _flat_of(record).give_gradient(record, value)


for _class in (FlatParameter, FlatMember):
    dispatches_itself(_class)
    register_foreach_type(_class)

_KEEP_CLASS = {torch.ops.aten._to_copy.default, torch.ops.aten.empty_like.default, torch.ops.aten.detach.default}


def _as_flat(tensor: torch.Tensor) -> FlatParameter:
    tensor.__class__ = FlatParameter
    return cast(FlatParameter, tensor)


def _unpickled(*given: Any) -> FlatParameter:
    return _as_flat(unpickled(*given))


# `torch.load` makes only what is named here, unless it is told to trust the file.
torch.serialization.add_safe_globals([FlatParameter, _unpickled])


class FlatShard:
    """The flat parameter of one group, and its members."""

    def __init__(self, group: Group) -> None:
        self.names = tuple(record.name for record in group.parameters)
        self.shapes = tuple(record.shape for record in group.parameters)
        self._pieces = tuple(slot.cut.piece(group.mesh.piece) for slot in group.packing.slots)
        held = (slot.held(group.mesh.piece) for slot in group.packing.slots)
        self.everyone = frozenset(range(len(self.names)))
        # The number of each member, by the id of its record, and its extent in this rank's run.
        self.places = {id(each): place for each, place in zip(group.parameters, enumerate(held), strict=True)}
        mesh, together = group.mesh, group.packing.runs_together
        extents = (slot.unsharded for slot in group.packing.slots)
        members = [(record.unsharded_spec, extent) for record, extent in zip(group.parameters, extents, strict=True)]
        spec = merged_spec(mesh, together, group.dtype, members, group.name)
        local = own_view(group.shard_buffer[: together.local_numel(mesh.piece)])
        for gap in group.packing.gaps_of(mesh.piece):
            local[gap.start : gap.stop].zero_()
        # `nn.Parameter(...)` keeps the class of its data, whatever its type says: the result is a RaggedDTensor.
        flat = _as_flat(nn.Parameter(ragged_dtensor(local, spec), requires_grad=group.parameters[0].requires_grad))
        flat._take_attributes(_common_attributes([record.shard for record in group.parameters], self.names))
        self.parameter = cast(nn.Parameter, flat)
        for record in group.parameters:
            replace_class(as_sharded(record.shard), FlatMember, record.shard_spec)

    def gradient_of(self, record: ShardedParameter) -> torch.Tensor | None:
        """Returns a member's part of the flat parameter's gradient, a view; None if the member has none."""
        full, (number, extent) = self.parameter.grad, self.places[id(record)]
        if full is None or number in _as_flat(full)._lacking:
            return None
        part = local_part(full)[extent.start : extent.stop].view(record.local.shape)
        return as_dtensor(part, in_dtype(record.shard_spec, part.dtype))

    @torch.no_grad()
    def give_gradient(self, record: ShardedParameter, value: torch.Tensor | None) -> None:
        """Copy a member's gradient into the flat parameter's, which ends with the last member's."""
        (number, extent), full = self.places[id(record)], self.parameter.grad
        if full is None and value is None:
            return
        given = record.local if value is None else local_part(value)
        if given.shape != record.local.shape:
            raise GradientError(
                f"{record.name}: .grad was set to {tuple(given.shape)} on this rank; set it to this rank's part, of "
                f"shape {tuple(record.local.shape)}, or to None"
            )
        lacking = self.everyone if full is None else _as_flat(full)._lacking
        full = torch.zeros_like(self.parameter, dtype=given.dtype) if full is None else full
        if value is not None:
            local_part(full)[extent.start : extent.stop].copy_(given.reshape(-1))
        lacking = lacking | {number} if value is None else lacking - {number}
        _as_flat(full)._lack(lacking)
        self.parameter.grad = None if lacking == self.everyone else full

    def metadata(self) -> FlatParamShardMetadata:
        members = zip(self.names, self.shapes, self._pieces, strict=True)
        on_rank = [(name, shape, piece) for name, shape, piece in members if piece.numel]
        return FlatParamShardMetadata(
            tuple(name for name, _, _ in on_rank),
            tuple(shape for _, shape, _ in on_rank),
            tuple(tuple(prod(shape[at + 1 :]) for at in range(len(shape))) for _, shape, _ in on_rank),
            (True,) * len(on_rank),
            tuple(shape.numel() for _, shape, _ in on_rank),
            tuple((piece.start, piece.stop - 1) for _, _, piece in on_rank),
        )


def note_gradients(flat: FlatParameter, arrived: frozenset[int], is_first: bool) -> None:
    """Note the members whose gradients have been added to that of `flat`, or are the first in it."""
    gradient, shard = _as_flat(cast(torch.Tensor, flat.grad)), flat._shard
    if is_first:
        gradient._lack(shard.everyone - arrived)
        return
    for number, extent in shard.places.values():
        if number in gradient._lacking:
            # Not when it was dropped: a step that waits for other ranks reads it until backward is over.
            local_part(gradient)[extent.start : extent.stop].zero_()
    gradient._lack(gradient._lacking - arrived)


def _flat_of(record: ShardedParameter) -> FlatShard:
    assert isinstance(record.flat, FlatShard), "its shard is in a flat parameter"
    return record.flat


def _common_attributes(shards: Sequence[nn.Parameter], names: Sequence[str]) -> dict[str, object]:
    """Returns the attributes that users set alike on all parameters. Warns of the others, which are lost."""
    written = [attributes_of(shard) for shard in shards]
    common = {
        key: value
        for key, value in written[0].items()
        if all(key in other and _are_same(value, other[key]) for other in written)
    }
    lost = [f"{key} of {name}" for name, own in zip(names, written, strict=True) for key in own if key not in common]
    if lost:
        warnings.warn(
            f"{', '.join(lost[:8])}{' and others' if len(lost) > 8 else ''}: attributes of parameters that become one "
            "flat parameter, which has them only where all its parameters have the same. Code that reads them there, "
            "to make parameter groups, sees none: pass use_orig_params=True, or wrap these parameters apart",
            stacklevel=2,
        )
    return common


def _are_same(value: object, other: object) -> bool:
    return value is other or (isinstance(value, bool | int | float | str | tuple) and bool(value == other))
