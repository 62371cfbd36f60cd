"""Check that all ranks hold the same optimizer state before it is gathered.

Otherwise a rank without some state would hang the others, or pair their collectives wrongly. A rank that holds no
element of a parameter may have no state for it, since optimizers may skip empty tensors. It is given empty parts, and
the numbers that the other ranks have.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from sherd.checkpoint.catalog import Entry
from sherd.checkpoint.relayout import around
from sherd.comm.mesh import DataMesh
from sherd.comm.objects import all_gather_objects
from sherd.engine import ShardedParameter
from sherd.errors import OptimStateError
from sherd.tensor.state_kind import State, StateKind, kind_of

PART, NUMBER, VALUE, OTHER = "a part of a tensor", "a number", "a value", "an object"
LIKE_PART = "a plain tensor of the shape of this rank's part"
"""A part if every rank has one like its part. Otherwise its shape is a coincidence, and it is an object."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of state as a rank describes it to the others. `value` is there if it is short."""

    kind: str
    dtype: torch.dtype | None = None
    value: object = None


@dataclass(frozen=True, slots=True)
class Holding:
    """A rank's part of one parameter: the number of elements, and the pieces of state (None if it has no state)."""

    numel: int
    pieces: dict[str, Piece] | None


def agree(entries: list[Entry], states: dict[int, State]) -> None:
    """Complete `states` (by the id of the entry), so that all ranks have the same keys for each of `entries`.

    Plain tensors that are parts become DTensors. All ranks that hold parts must call it.

    Raises:
        OptimStateError: ranks that hold elements of a parameter have different state for it. On all ranks.
    """
    by_mesh: dict[DataMesh | None, list[Entry]] = {}
    for entry in entries:
        if entry.spec is not None:
            record = ShardedParameter.of(entry.parameter)
            by_mesh.setdefault(None if record is None else record.mesh, []).append(entry)
    for mesh, sharded in by_mesh.items():
        by_rank = [[_holding(entry, states.get(id(entry))) for entry in sharded]]
        for group in () if mesh is None else mesh.piece_groups:
            gathered = all_gather_objects(by_rank, "the comparison of optimizer states", group)
            by_rank = [holdings for each in gathered for holdings in each]  # one rank after the other
        for entry, *holdings in zip(sharded, *by_rank, strict=True):
            state = _completed(entry, states.get(id(entry)), holdings)
            if state is not None:
                states[id(entry)] = state


def _holding(entry: Entry, state: State | None) -> Holding:
    pieces = None if state is None else {key: _piece(key, value, entry) for key, value in state.items()}
    return Holding(entry.local_shape.numel(), pieces)


def _piece(key: str, value: object, entry: Entry) -> Piece:
    if isinstance(value, torch.Tensor):
        kind = kind_of(key, value, entry.parameter.shape, entry.local_shape)
        if kind is StateKind.ELEMENTS:
            return Piece(PART if isinstance(value, DTensor) else LIKE_PART, value.dtype)
        if kind is StateKind.NUMBER:
            return Piece(NUMBER, value.dtype, value.item())
    if value is None or isinstance(value, bool | int | float | str):
        return Piece(VALUE, None, value)
    return Piece(OTHER, None, type(value).__name__)


def _completed(entry: Entry, state: State | None, holdings: list[Holding]) -> State | None:
    """Returns `state` with every piece that some rank has, in the order of the first rank that has state."""
    having = [rank for rank, holding in enumerate(holdings) if holding.pieces]
    if not having:
        return state
    by_rank = _resolved([holding.pieces or {} for holding in holdings])
    expected: dict[str, Piece] = {}
    for pieces in by_rank:
        for key, piece in pieces.items():
            expected.setdefault(key, piece)
    for rank, (holding, pieces) in enumerate(zip(holdings, by_rank, strict=True)):
        _check(entry.names[0], rank, holding.numel, pieces, expected, having[0])
    present = state or {}
    return {key: _as_piece(present, key, entry, piece) for key, piece in expected.items()}


def _resolved(by_rank: list[dict[str, Piece]]) -> list[dict[str, Piece]]:
    """Returns the pieces of each rank. A plain tensor that looks like a part has become a part or an object."""
    not_parts = {key for pieces in by_rank for key, piece in pieces.items() if piece.kind not in (LIKE_PART, PART)}

    def resolved(key: str, piece: Piece) -> Piece:
        if piece.kind != LIKE_PART:
            return piece
        return Piece(OTHER, None, "Tensor") if key in not_parts else Piece(PART, piece.dtype)

    return [{key: resolved(key, piece) for key, piece in pieces.items()} for pieces in by_rank]


def _check(name: str, rank: int, numel: int, pieces: dict[str, Piece], expected: dict[str, Piece], first: int) -> None:
    """Raise if the pieces of `rank`, which holds `numel` elements, are not those of `first` and of the other ranks."""
    for key, piece in expected.items():
        own = pieces.get(key)
        if own is None and (numel or piece.kind == OTHER):
            raise OptimStateError(
                f"{name}: rank {rank} keeps no {key!r} for it, which other ranks do; build the optimizer from the same "
                "parameters on all ranks, and step it on all or on none"
            )
        if own is not None and repr(own) != repr(piece):  # as text, where nan equals nan
            raise OptimStateError(
                f"{name}: Rank {rank} has different values for {key}: {_described(own)}. Other ranks: "
                f"{_described(piece)} (rank {first}); step the optimizer on all ranks or on none"
            )


def _described(piece: Piece) -> str:
    dtype = "" if piece.dtype is None else f" of {piece.dtype}"
    return piece.kind + dtype if piece.kind == PART else f"{piece.value}{dtype}"


def _as_piece(state: State, key: str, entry: Entry, piece: Piece) -> object:
    """Returns the value under `key`, a DTensor if it is a part. A rank that holds no element may have to make it."""
    if piece.kind == PART:
        assert entry.spec is not None, "plain parameters are not compared"
        if key not in state:
            empty = torch.empty(entry.local_shape, dtype=piece.dtype, device=entry.parameter.device)
            return around(empty, entry.spec)
        return state[key] if isinstance(state[key], DTensor) else around(state[key], entry.spec)
    if key in state:
        return state[key]
    return torch.tensor(piece.value, dtype=piece.dtype) if piece.kind == NUMBER else piece.value
