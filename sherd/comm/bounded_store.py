"""Stores beside torch's: one whose calls end, where torch's wait for an answer without a timeout, also over a link that
was cut; and one that is connected for as long as it is needed, because one process has the connections of all ranks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from sherd._torch import Store

T = TypeVar("T")


class StoreOnDemand:
    """What `connect` gives, from a call on until `hang_up`. Each call raises RuntimeError if the store is gone."""

    def __init__(self, connect: Callable[[], Store]) -> None:
        self._connect = connect
        self._connected: Store | None = None

    def hang_up(self) -> None:
        """Let go of the connection; a call of another thread may still be using it."""
        self._connected = None

    def _now(self) -> Store:
        store = self._connected
        if store is None:
            store = self._connected = self._connect()
        return store

    def set(self, key: str, value: str, /) -> None:
        """As the store's."""
        self._now().set(key, value)

    def get(self, key: str, /) -> bytes:
        """As the store's."""
        return self._now().get(key)

    def add(self, key: str, amount: int, /) -> int:
        """As the store's."""
        return self._now().add(key, amount)

    def check(self, keys: list[str], /) -> bool:
        """As the store's."""
        return self._now().check(keys)

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """As the store's."""
        return self._now().compare_set(key, expected, desired)


ANSWERS_WITHIN_S = 3.0


class BoundedStore:
    """`store`, for a main thread. Once it has not answered for `ANSWERS_WITHIN_S`, each call raises at once.

    A thread makes each call, and stays with one that does not end: this is for what ranks do when something is wrong.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._is_silent = False

    def set(self, key: str, value: str, /) -> None:
        """As the store's. Raises RuntimeError also if there is no answer, as all of them do."""
        self._ended(partial(self._store.set, key, value))

    def get(self, key: str, /) -> bytes:
        """As the store's."""
        return self._ended(partial(self._store.get, key))

    def add(self, key: str, amount: int, /) -> int:
        """As the store's."""
        return self._ended(partial(self._store.add, key, amount))

    def check(self, keys: Sequence[str], /) -> bool:
        """As the store's."""
        return self._ended(partial(self._store.check, list(keys)))

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """As the store's."""
        return self._ended(partial(self._store.compare_set, key, expected, desired))

    def _ended(self, call: Callable[[], T]) -> T:
        """Returns what `call` does, if it ends in time."""
        ended: queue.SimpleQueue[T | Exception] = queue.SimpleQueue()

        def run() -> None:
            try:
                ended.put(call())
            except Exception as error:
                ended.put(error)

        if not self._is_silent:
            threading.Thread(target=run, name="sherd store", daemon=True).start()
        try:
            outcome = ended.get(timeout=0 if self._is_silent else ANSWERS_WITHIN_S)
        except queue.Empty:
            self._is_silent = True
            raise RuntimeError(
                f"the store of the default process group has not answered for {ANSWERS_WITHIN_S:g} s; the process that "
                "has it, or the link to it, is gone"
            ) from None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome
