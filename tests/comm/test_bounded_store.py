"""A store that does not answer does not keep its caller for ever."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from sherd.guard import bounded_store
from sherd.guard.bounded_store import BoundedStore


class Kept:
    """A store that waits in `get` until it is let go."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.may_answer = threading.Event()

    def set(self, key: str, value: str, /) -> None:
        self.values[key] = value

    def get(self, key: str, /) -> bytes:
        self.may_answer.wait()
        return self.values[key].encode()

    def add(self, key: str, amount: int, /) -> int:
        raise RuntimeError("the connection is closed")

    def check(self, keys: Sequence[str], /) -> bool:
        return all(key in self.values for key in keys)


def test_it_answers_as_the_store_does():
    store = Kept()
    store.may_answer.set()
    bounded = BoundedStore(store)
    bounded.set("a", "1")
    assert bounded.get("a") == b"1"
    assert [bounded.check(["a"]), bounded.check(["a", "b"])] == [True, False]
    with pytest.raises(RuntimeError, match="the connection is closed"):
        bounded.add("a", 1)


def test_a_store_that_is_silent_is_given_up_and_not_asked_again(monkeypatch):
    monkeypatch.setattr(bounded_store, "ANSWERS_WITHIN_S", 0.05)
    store = Kept()
    bounded = BoundedStore(store)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"has not answered for 0\.05 s"):
            bounded.get("a")
    with pytest.raises(RuntimeError, match="has not answered"):
        bounded.set("b", "2")
    assert store.values == {}
    store.may_answer.set()
