"""Stores beside torch's: one whose calls end, where torch's wait for an answer without a timeout, also over a link that
was cut; and one that is connected for as long as it is needed, because one process has the connections of all ranks."""

from __future__ import annotations

import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sherd._torch import Store

T = TypeVar("T")

ANSWERS_WITHIN_S = 3.0


class _Beside(ABC):
    """The calls of a store, each of which is made by `_do`. They raise RuntimeError if the store is gone."""

    @abstractmethod
    def _do(self, call: Callable[[Store], T]) -> T:
        """Returns what `call` does with the store."""

    def set(self, key: str, value: str, /) -> None:
        """As the store's, as all of these."""
        self._do(lambda store: store.set(key, value))

    def get(self, key: str, /) -> bytes:
        """As the store's."""
        return self._do(lambda store: store.get(key))

    def add(self, key: str, amount: int, /) -> int:
        """As the store's."""
        return self._do(lambda store: store.add(key, amount))

    def check(self, keys: Sequence[str], /) -> bool:
        """As the store's."""
        return self._do(lambda store: store.check(list(keys)))

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """As the store's."""
        return self._do(lambda store: store.compare_set(key, expected, desired))


class StoreOnDemand(_Beside):
    """A store that is connected by the first call, and by the first one after each `hang_up`."""

    def __init__(self, connect: Callable[[], Store]) -> None:
        self._connect = connect
        self._connected: Store | None = None

    def hang_up(self) -> None:
        """Let go of the connection; a call of another thread may still be using it."""
        self._connected = None

    def _do(self, call: Callable[[Store], T]) -> T:
        store = self._connected
        if store is None:
            store = self._connected = self._connect()
        return call(store)


class BoundedStore(_Beside):
    """`store`, for a main thread. Once it has not answered for `ANSWERS_WITHIN_S`, each call raises at once.

    One thread makes the calls, and stays with one that does not end: this is for what ranks do when something is wrong.
    It is not started for each call: an error that is raised in the main thread meanwhile (`Watchdog`) could leave
    Python's own lock on threads locked.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._asked: queue.SimpleQueue[_Asked | None] | None = None
        self._is_silent = False

    def _do(self, call: Callable[[Store], T]) -> T:
        if self._asked is None:
            self._asked = queue.SimpleQueue()
            weakref.finalize(self, self._asked.put, None)
            threading.Thread(target=_answer, args=(self._asked, self._store), name="sherd store", daemon=True).start()
        answers: queue.SimpleQueue[T | Exception] = queue.SimpleQueue()
        if not self._is_silent:
            self._asked.put((call, answers))
        try:
            outcome = answers.get(timeout=0 if self._is_silent else ANSWERS_WITHIN_S)
        except queue.Empty:
            self._is_silent = True
            raise RuntimeError(
                f"the store of the default process group has not answered for {ANSWERS_WITHIN_S:g} s; the process that "
                "has it, or the link to it, is gone"
            ) from None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


_Asked = tuple[Callable[[Store], Any], "queue.SimpleQueue[Any]"]


def _answer(asked: queue.SimpleQueue[_Asked | None], store: Store) -> None:
    while (each := asked.get()) is not None:
        call, answers = each
        try:
            answers.put(call(store))
        except Exception as error:
            answers.put(error)
        del call, answers, each
