"""A store whose calls end, where torch's wait for an answer without a timeout, also over a link that was cut."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sherd._torch import Store

T = TypeVar("T")

ANSWERS_WITHIN_S = 3.0


class BoundedStore:
    """A `store` for a main thread: once it has not answered for `ANSWERS_WITHIN_S`, each call raises at once.

    All calls raise RuntimeError if the store is gone, or does not answer.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._calls: queue.SimpleQueue[_Call | None] | None = None
        self._is_silent = False

    def set(self, key: str, value: str, /) -> None:
        self._do(lambda store: store.set(key, value))

    def get(self, key: str, /) -> bytes:
        return self._do(lambda store: store.get(key))

    def add(self, key: str, amount: int, /) -> int:
        return self._do(lambda store: store.add(key, amount))

    def check(self, keys: Sequence[str], /) -> bool:
        return self._do(lambda store: store.check(list(keys)))

    def _do(self, call: Callable[[Store], T]) -> T:
        # One thread makes all calls, and stays with a call that does not end. A thread for each call would not do:
        # an error that the watchdog raises in the main thread during a start could leave Python's own lock on threads
        # locked.
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            weakref.finalize(self, self._calls.put, None)
            threading.Thread(
                target=_make_calls, args=(self._calls, self._store), name="sherd store", daemon=True
            ).start()
        answers: queue.SimpleQueue[T | Exception] = queue.SimpleQueue()
        if not self._is_silent:
            self._calls.put((call, answers))
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


_Call = tuple[Callable[[Store], Any], "queue.SimpleQueue[Any]"]


def _make_calls(calls: queue.SimpleQueue[_Call | None], store: Store) -> None:
    while (item := calls.get()) is not None:
        call, answers = item
        try:
            answers.put(call(store))
        except Exception as error:
            answers.put(error)
        del call, answers, item  # or the thread holds the caller's objects until the next call
