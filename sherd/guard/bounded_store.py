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
    """`store`, for a main thread. Once it has not answered for `ANSWERS_WITHIN_S`, each call raises at once.

    One thread makes the calls, and stays with one that does not end: this is for what ranks do when something is wrong.
    It is not started for each call: an error that is raised in the main thread meanwhile (`Watchdog`) could leave
    Python's own lock on threads locked.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._asked: queue.SimpleQueue[_Asked | None] | None = None
        self._is_silent = False

    def set(self, key: str, value: str, /) -> None:
        """As the store's, as all of these; they raise RuntimeError if it is gone."""
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
