"""Saved tensors go to the host as newer ones come, and are back before backward reads them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sherd.schedule.residence import Residence


class Device:
    """Carries out what a residence asks for, and checks what it may ask for."""

    def __init__(self) -> None:
        self.residence = Residence()
        self.on_device: set[int] = set()
        self.on_host: set[int] = set()
        self.log: list[str] = []

    def forward(self, saved: dict[int, int], budget: int = 0, held: frozenset[int] = frozenset()) -> int:
        """A turn that saves storages, by their bytes. Returns the turn."""
        residence = self.residence
        self.drop([each for each in residence.to_drop(in_backward=False) if each not in saved and each not in held])
        residence.begin()
        going = residence.to_send(budget, lambda each: each not in held)
        assert set(going) <= self.on_device - self.on_host - held
        self.on_host.update(going)
        residence.sent(going)
        self.log += [f"send {each}" for each in going]
        for storage, nbytes in saved.items():
            residence.save(storage, nbytes)
            self.on_device.add(storage)
        return residence.turn

    def backward(self, turn: int, read: list[int]) -> None:
        if turn != self.residence.reading:
            gone, fetched = self.residence.enter(turn)
            self.drop(gone)
            for storages in fetched:
                self.fetch(storages)
        for storage in read:
            if self.residence.is_away(storage):
                self.fetch([storage])
            assert storage in self.on_device
            self.log.append(f"read {storage}")

    def fetch(self, storages: list[int]) -> None:
        assert set(storages) <= self.on_host - self.on_device
        self.on_device.update(storages)
        self.residence.fetched(storages)
        self.log += [f"fetch {each}" for each in storages]

    def drop(self, storages: list[int]) -> None:
        assert set(storages) <= self.on_host & self.on_device
        self.on_device.difference_update(storages)
        for each in storages:
            self.residence.dropped(each)
        self.log += [f"drop {each}" for each in storages]

    def forget(self, storages: list[int]) -> None:
        for each in storages:
            self.residence.forget(each)
        self.on_device.difference_update(storages)
        self.on_host.difference_update(storages)

    def said(self) -> str:
        log, self.log = self.log, []
        return ", ".join(log)


def test_the_last_two_turns_stay_and_each_other_comes_back_a_turn_ahead():
    device = Device()
    for turn in (1, 2, 3, 4):
        assert device.forward({turn: 10}) == turn
    assert device.said() == "send 1, drop 1, send 2, drop 2, send 3"
    for turn in (4, 3, 2, 1):
        device.backward(turn, [turn])
        device.forget([turn])
    assert device.said() == "read 4, fetch 2, read 3, fetch 1, read 2, read 1"


def test_what_fits_in_the_budget_stays_and_it_is_the_newest():
    device = Device()
    for turn in range(1, 6):
        device.forward({turn: 10}, budget=20)
    assert device.said() == "send 1, drop 1, send 2"
    assert device.on_device == {2, 3, 4, 5}


def test_a_storage_belongs_to_the_last_turn_that_saves_it_and_stays_for_the_first():
    device = Device()
    device.forward({1: 10, 2: 10})
    device.forward({2: 10, 3: 10}, held=frozenset({2}))  # a result of the first unit, which the second one reads
    device.forward({4: 10})
    device.forward({5: 10})
    assert device.said() == "send 1, drop 1, send 2, send 3, drop 2, drop 3, send 4"
    for turn, read in ((4, [5]), (3, [4]), (2, [3, 2])):
        device.backward(turn, read)
        device.forget(read if turn > 2 else [3])
    assert device.said() == "read 5, fetch 2, fetch 3, read 4, fetch 1, read 3, read 2"
    device.backward(1, [2, 1])
    assert device.said() == "read 2, read 1"


def test_what_something_else_keeps_is_offered_again_with_each_turn():
    device = Device()
    for turn in (1, 2, 3):
        device.forward({turn: 10}, held=frozenset({1}))
    assert device.said() == "send 2"
    device.forward({4: 10})
    assert device.said() == "drop 2, send 1, send 3"


def test_a_graph_that_is_kept_is_dropped_behind_backward_and_read_again():
    device = Device()
    for turn in range(1, 5):
        device.forward({turn: 10})
    for _ in range(2):
        for turn in (4, 3, 2, 1):
            device.backward(turn, [turn])
            assert len(device.on_device - {4}) <= 2  # the last turn has no copy


def test_a_backward_that_saves_keeps_what_it_reads_next():
    device = Device()
    for turn in range(1, 5):
        device.forward({turn: 10})
    device.backward(3, [3])
    assert device.residence.to_drop(in_backward=True) == []
    assert device.residence.to_drop(in_backward=False) == [3, 2]
    device.backward(2, [2])
    assert device.residence.to_drop(in_backward=True) == []
    assert 3 not in device.on_device


turns = st.lists(st.lists(st.integers(0, 11), max_size=4), min_size=1, max_size=12)


@given(turns, st.integers(0, 60), st.integers(0, 60), st.sets(st.integers(0, 11)), st.integers(1, 2))
def test_any_backward_finds_what_it_reads_and_a_larger_budget_sends_nothing_more(saved, budget, more, held, times):
    """A storage is as large as its number. What is held stays; the others fit in the budget but for two turns."""
    sent = []
    for allowed in (budget, budget + more):
        device, of_turn = Device(), []
        for storages in saved:
            there = {each: each for each in storages if each not in device.on_host or each in device.on_device}
            device.forward(there, allowed, frozenset(held))
            assert sum(device.on_device - device.on_host - held - set(there)) <= allowed
            of_turn.append(list(there))
        sent.append(set(device.on_host))
        for _ in range(times):
            for turn, read in reversed(list(enumerate(of_turn, 1))):
                device.backward(turn, read)
        device.forget(list(device.residence._first))
        left = {name: value for name, value in vars(device.residence).items() if name.startswith("_") and value}
        assert set(left) <= {"_before"}
    assert sent[1] <= sent[0]
