"""Saved tensors that go to host memory in a simulated step, where `schedule/residence.py` says which ones, and when.

It follows the events of a micro-batch as `sherd/engine/moves/offload.py` follows autograd.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sherd.policy import SavedOnHost
from sherd.schedule.residence import Residence
from sherd.tools.simulate.sharded import Sharded
from sherd.tools.simulate.work import (
    Allocate,
    Alone,
    BackwardBegins,
    Enter,
    Event,
    Leave,
    Read,
    Release,
    Save,
    TensorKind,
)

LEAST = SavedOnHost().min_bytes
"""Tensors of fewer bytes stay on the device."""


@dataclass(frozen=True, slots=True)
class SavedCopy:
    """A copy of saved tensors, of these `sizes` in bytes, to host memory or back. `number` is its own."""

    number: int
    unit: int
    to_host: bool
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CopyWait:
    """Compute goes on once the copy of this number is done."""

    number: int
    unit: int


Change = SavedCopy | CopyWait | Allocate | Release


class SavedTensors:
    """The saved tensors of a micro-batch.

    Attributes:
        units: the units that save tensors there.
        away: the tensors whose memory is on the host alone.
    """

    def __init__(self, sharded: Sharded) -> None:
        self.units = {at for at, unit in enumerate(sharded.units) if unit.offload.activations == "host"}
        self._unit_of = sharded.unit_of
        self._residence = Residence()
        self._turn_is_over, self._in_backward, self._num_copies = True, False, 0
        self._alone: set[int] = set()
        self._saved: dict[int, int] = {}
        """The bytes of each saved tensor."""
        self._of_mark: dict[int, tuple[int, int]] = {}
        """The tensor of each mark, and the turn that has saved it."""
        self._copies: dict[int, int] = {}
        """The last copy of each tensor that compute has not waited for."""
        self.away: set[int] = set()

    def changes(self, event: Event, unit: int, sizes: Mapping[int, tuple[str, int, int]]) -> Iterator[Change]:
        """Yields what `event` brings about. `unit` runs; `sizes` end with the bytes of each tensor that is alive."""
        match event:
            case Enter(module) | Leave(module) if module in self._unit_of:
                self._turn_is_over = True
            case BackwardBegins():
                self._in_backward = True
            case Alone(tensor):
                self._alone.add(tensor)
            case Save(tensor, mark) if unit in self.units and sizes[tensor][-1] >= LEAST:
                if self._turn_is_over:
                    self._turn_is_over = False
                    yield from self._drop(self._residence.to_drop(self._in_backward), unit)
                    self._residence.begin()
                    going = self._residence.to_send(0, self._alone.__contains__)
                    yield from self._copy(going, unit, to_host=True)
                self._saved[tensor] = sizes[tensor][-1]
                self._residence.save(tensor, self._saved[tensor])
                self._of_mark[mark] = tensor, self._residence.turn
            case Read(mark) if mark in self._of_mark:
                yield from self._bring(*self._of_mark[mark], unit)
            case Release(tensor) if tensor in self._saved:
                yield from self._settle(tensor, unit)
                self._residence.forget(tensor)
                del self._saved[tensor]
            case _:
                pass

    def _bring(self, tensor: int, turn: int, unit: int) -> Iterator[Change]:
        if turn != self._residence.reading:
            self._turn_is_over = True
            no_more, near = self._residence.enter(turn)
            yield from self._drop(no_more, unit)
            for tensors in near:
                yield from self._copy(tensors, unit, to_host=False)
        if self._residence.is_away(tensor):
            yield from self._copy([tensor], unit, to_host=False)
        yield from self._settle(tensor, unit)

    def _copy(self, tensors: Sequence[int], unit: int, to_host: bool) -> Iterator[Change]:
        if not tensors:
            return
        for tensor in tensors:
            if tensor in self.away:
                self.away.remove(tensor)
                yield Allocate(tensor, self._saved[tensor], TensorKind.ACTIVATION)
        self._num_copies += 1
        self._copies |= dict.fromkeys(tensors, self._num_copies)
        (self._residence.sent if to_host else self._residence.fetched)(tensors)
        yield SavedCopy(self._num_copies, unit, to_host, tuple(self._saved[each] for each in tensors))

    def _drop(self, tensors: Sequence[int], unit: int) -> Iterator[Change]:
        for tensor in tensors:
            yield from self._settle(tensor, unit)
            self._residence.dropped(tensor)
            self.away.add(tensor)
            yield Release(tensor)

    def _settle(self, tensor: int, unit: int) -> Iterator[Change]:
        if tensor in self._copies:
            yield CopyWait(self._copies.pop(tensor), unit)
