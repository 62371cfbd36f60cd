"""Do all ranks keep the same state, so that gathering it neither hangs nor mixes? They tell each other before.

A rank that has no part of a parameter may have no state for it either: optimizers may skip what has no elements. It
then gets empty parts, and the numbers that the others have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from sherd.checkpoint.catalog import NamedState
from sherd.checkpoint.relayout import around, local_shape
from sherd.comm.mesh import DataMesh
from sherd.comm.objects import all_gather_objects
from sherd.engine.state.parameter import record_of
from sherd.errors import OptimStateError
from sherd.tensor.state_kind import StateKind, kind_of

State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sign:
    """What a rank says of one piece of its state: the kind of thing that it is, its dtype, and its value if short."""

    kind: str
    dtype: torch.dtype | None = None
    value: Any = None


@dataclass(frozen=True, slots=True)
class Outline:
    """What a rank says of what it keeps for one parameter: how many elements it holds; None for no state at all."""

    numel: int
    signs: dict[str, Sign] | None


PARTS, NUMBER, VALUE, OTHER = "a part of a tensor", "a number", "a value", "an object"
ALIKE = "a plain tensor of the shape of this rank's part"
"""A part too, if all ranks say so of theirs; else it is of this shape by chance."""


def _sign(key: str, value: Any, owned: NamedState) -> Sign:
    kind = kind_of(key, value, owned.parameter.shape, local_shape(owned))
    if kind is StateKind.ELEMENTS:
        return Sign(PARTS if isinstance(value, DTensor) else ALIKE, value.dtype)
    if kind is StateKind.NUMBER:
        return Sign(NUMBER, value.dtype, value.item())
    if value is None or isinstance(value, bool | int | float | str):
        return Sign(VALUE, None, value)
    return Sign(OTHER, None, type(value).__name__)


def agree(owned: list[NamedState], states: dict[int, State]) -> None:
    """See to it that all ranks have the same keys for everything in `owned`, and DTensors for what is cut as it is.

    `states` are by the id of the Owned. All ranks that shard it must call it.

    Raises:
        OptimStateError: they differ where they hold something. On all of them.
    """
    by_mesh: dict[DataMesh | None, list[NamedState]] = {}
    for each in owned:
        if each.spec is not None:
            by_mesh.setdefault(_mesh_of(each), []).append(each)
    for mesh, members in by_mesh.items():
        told = [[_outline(each, states.get(id(each))) for each in members]]
        for group in () if mesh is None else mesh.piece_groups:
            told = _told_by_all(told, group)
        for at, each in enumerate(members):
            state = _completed(each, states.get(id(each)), [rank[at] for rank in told])
            if state is not None:
                states[id(each)] = state


def _mesh_of(owned: NamedState) -> DataMesh | None:
    record = record_of(owned.parameter)
    return None if record is None else record.mesh


def _told_by_all(told: list[list[Outline]], group: dist.ProcessGroup) -> list[list[Outline]]:
    """What each rank of `group` was told, one after the other."""
    by_rank: list[list[list[Outline]]] = all_gather_objects(told, "the comparison of optimizer states", group)
    return [each for its in by_rank for each in its]


def _outline(owned: NamedState, state: State | None) -> Outline:
    signs = None if state is None else {key: _sign(key, value, owned) for key, value in state.items()}
    return Outline(local_shape(owned).numel(), signs)


def _completed(owned: NamedState, state: State | None, told: list[Outline]) -> State | None:
    """`state` with all that some rank has, in the order in which the first one has it."""
    having = [rank for rank, each in enumerate(told) if each.signs]
    if not having:
        return state
    told = _resolved(told)
    expected: dict[str, Sign] = {}
    for rank in having:
        for key, sign in (told[rank].signs or {}).items():
            expected.setdefault(key, sign)
    for rank, each in enumerate(told):
        _check(owned, rank, each, expected, having[0])
    present = state or {}
    return {
        key: _as_told(present[key], owned, sign) if key in present else _made(owned, sign)
        for key, sign in expected.items()
    }


def _resolved(told: list[Outline]) -> list[Outline]:
    """The same, where tensors that are alike are parts or not."""
    kinds: dict[str, set[str]] = {}
    for each in told:
        for key, sign in (each.signs or {}).items():
            kinds.setdefault(key, set()).add(sign.kind)
    parts = {key for key, found in kinds.items() if found <= {ALIKE, PARTS}}

    def resolved(key: str, sign: Sign) -> Sign:
        if sign.kind != ALIKE:
            return sign
        return Sign(PARTS, sign.dtype) if key in parts else Sign(OTHER, None, "Tensor")

    return [
        Outline(each.numel, each.signs and {key: resolved(key, sign) for key, sign in each.signs.items()})
        for each in told
    ]


def _as_told(value: Any, owned: NamedState, sign: Sign) -> Any:
    if sign.kind != PARTS or isinstance(value, DTensor):
        return value
    assert owned.spec is not None, "what is plain is not agreed on"
    return around(value, owned.spec)


def _check(owned: NamedState, rank: int, told: Outline, expected: dict[str, Sign], first: int) -> None:
    name = owned.names[0]
    for key, sign in expected.items():
        found = None if told.signs is None else told.signs.get(key)
        if found is None and (told.numel or sign.kind == OTHER):
            raise OptimStateError(
                f"{name}: rank {rank} keeps no {key!r} for it, which other ranks do; build the optimizer from the same "
                "parameters on all ranks, and step it on all or on none"
            )
        if found is not None and repr(found) != repr(sign):  # as text, where nan is nan
            raise OptimStateError(
                f"{name}: Rank {rank} has different values for {key}: {_said(found)}. Other ranks: {_said(sign)} (rank "
                f"{first}); step the optimizer on all ranks or on none"
            )


def _said(sign: Sign) -> str:
    dtype = "" if sign.dtype is None else f" of {sign.dtype}"
    return sign.kind + dtype if sign.kind == PARTS else f"{sign.value}{dtype}"


def _made(owned: NamedState, sign: Sign) -> Any:
    if sign.kind == PARTS:
        assert owned.spec is not None, "what is plain is not agreed on"
        device = owned.parameter.device
        return around(torch.empty(local_shape(owned), dtype=sign.dtype, device=device), owned.spec)
    return torch.tensor(sign.value, dtype=sign.dtype) if sign.kind == NUMBER else sign.value
