"""The schedule of saved tensors: which ones rest in host memory until backward comes near. Pure; no tensors here.

A turn is the time in which one unit saves tensors without another one in between. Backward reads turns in reverse.

    turn of forward     1     2     3     4           turn of backward    4     3     2     1
    saved               a     b     c     d           read                d     c     b     a
    copied out                a     b     c           copied back               b     a
    freed                           a     b

So two turns are on the device at a time, and what `budget` lets stay: of earlier turns the newest ones, which backward
reads first. The last turn stays in any case, as no turn comes after it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable


class Residence:
    """The places of the saved storages of one device. A storage is known by a number, and belongs to turns.

    It is on the device alone at first; on both, once it is sent or fetched; on the host alone, once it is dropped.

    Attributes:
        turn: the present turn of saving. Turns count from 1.
        reading: the turn that backward reads.
    """

    def __init__(self) -> None:
        self.turn = 0
        self.reading: int | None = None
        self._before = 0
        """The turn that was saved before that one."""
        self._turns: list[int] = []
        """The turns that are the last one of some storage, in order."""
        self._of_turn: dict[int, dict[int, None]] = {}
        """The storages of which a turn is the last."""
        self._first: dict[int, int] = {}
        """The turn that saved a storage first, and so reads it last. Its keys are all storages there are."""
        self._last: dict[int, int] = {}
        self._on_device: dict[int, int] = {}
        """The bytes of the storages that are on the device alone, by their last turns."""
        self._on_both: dict[int, None] = {}
        self._earlier_bytes = self._present_bytes = 0
        """Of storages on the device alone, whose last turn is an earlier one, or the present one."""

    # Saving

    def begin(self) -> None:
        """Begin another turn of saving."""
        self.turn += 1
        self._earlier_bytes, self._present_bytes = self._earlier_bytes + self._present_bytes, 0

    def save(self, storage: int, nbytes: int) -> None:
        """Note that the present turn saves a storage."""
        if self._last.get(storage) == self.turn:
            return
        if storage not in self._first:
            self._first[storage] = self.turn
            self._on_device[storage] = nbytes
        elif storage in self._on_device:
            self._earlier_bytes -= nbytes
            self._on_device[storage] = self._on_device.pop(storage)  # as the newest
        if storage in self._last:
            self._leave_turn(storage)
        self._last[storage] = self.turn
        if self.turn not in self._of_turn:
            self._of_turn[self.turn] = {}
            self._turns.append(self.turn)
        self._of_turn[self.turn][storage] = None
        if storage in self._on_device:
            self._present_bytes += nbytes

    def to_send(self, budget: int, is_free: Callable[[int], bool]) -> list[int]:
        """Returns the storages of earlier turns, oldest first, that must go for the others to have `budget` bytes.

        A storage that something else keeps (`is_free` says no) joins the present turn: to send it would free nothing,
        and what keeps it may be gone by the next one.
        """
        too_many = self._earlier_bytes - budget
        going: list[int] = []
        kept: list[tuple[int, int]] = []
        for storage, nbytes in self._on_device.items():
            if too_many <= 0 or self._last[storage] == self.turn:
                break
            too_many -= nbytes
            if is_free(storage):
                going.append(storage)
            else:
                kept.append((storage, nbytes))
        for storage, nbytes in kept:
            self.save(storage, nbytes)
        return going

    def sent(self, storages: Iterable[int]) -> None:
        """Note that copies of `storages` are on the way to the host."""
        for storage in storages:
            self._count_off(storage)
            self._on_both[storage] = None

    def to_drop(self, in_backward: bool) -> list[int]:
        """Returns the storages that the device can drop, of those on both. Those stay that a backward reads next."""
        return [each for each in self._on_both if not (in_backward and self._is_near(each))]

    def dropped(self, storage: int) -> None:
        self._on_both.pop(storage, None)

    # Reading

    def is_away(self, storage: int) -> bool:
        return storage not in self._on_both and storage not in self._on_device

    def enter(self, turn: int) -> tuple[list[int], list[list[int]]]:
        """Begin to read `turn`. Returns the storages to drop, and those to fetch: of this turn, of the one before."""
        self.reading, at = turn, bisect_left(self._turns, turn)
        self._before = self._turns[at - 1] if at else turn
        near = dict.fromkeys((turn, self._before))
        fetched = [[each for each in self._of_turn.get(each_turn, ()) if self.is_away(each)] for each_turn in near]
        return self.to_drop(in_backward=True), fetched

    def fetched(self, storages: Iterable[int]) -> None:
        """Note that copies of `storages` are on the way to the device."""
        self._on_both.update(dict.fromkeys(storages))

    def forget(self, storage: int) -> None:
        """Note that nothing refers to a saved storage any more."""
        if storage not in self._last:
            return  # an exception came between its first tensor and `save`
        self._count_off(storage)
        self._leave_turn(storage)
        self._on_both.pop(storage, None)
        del self._first[storage], self._last[storage]

    def _is_near(self, storage: int) -> bool:
        """Returns whether the turn that backward reads needs the storage, or the turn before it."""
        return self._first[storage] <= (self.reading or 0) and self._last[storage] >= self._before

    def _count_off(self, storage: int) -> None:
        nbytes = self._on_device.pop(storage, 0)
        if self._last[storage] == self.turn:
            self._present_bytes -= nbytes
        else:
            self._earlier_bytes -= nbytes

    def _leave_turn(self, storage: int) -> None:
        turn = self._last[storage]
        del self._of_turn[turn][storage]
        if not self._of_turn[turn]:
            del self._of_turn[turn], self._turns[bisect_left(self._turns, turn)]
