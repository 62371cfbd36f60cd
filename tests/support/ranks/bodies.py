"""Tests whose body is what each rank does: `@on_threads(2)`, `@on_processes(2)`.

    @on_threads(2, front=FRONTS)
    def test_sharding_changes_no_name(front):
        assert [name for name, _ in sharded(chain(), front).named_parameters()] == NAMES

What the body asserts holds on every rank. Values of keywords are tried one after the other, in every combination, and
named when one fails. Other parameters of the body are those of `parametrize`, or fixtures.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from tests.support.ranks.failures import RanksFailed

Body = Callable[..., None]


def on_threads(*counts: int, **listed: Iterable[Any]) -> Callable[[Body], Body]:
    """Has threads of this process (`threads`) run the body, as many as each of `counts` says, in turn; with none, as
    many as the test's parameter `num_ranks` says. They share what the test is given."""

    def run(ranks: Any, body: Body, values: dict[str, Any]) -> None:
        __tracebackhide__ = True
        ranks.run(body, **values)

    return _on("threads", counts, listed, run)


def on_processes(*counts: int, timeout: float = 300.0, **listed: Iterable[Any]) -> Callable[[Body], Body]:
    """Has gloo processes (`world`) run the body, as `on_threads` has threads. What the test is given is pickled.

    Args:
        timeout: seconds after which ranks that are still busy have failed.
    """

    def run(ranks: Any, body: Body, values: dict[str, Any]) -> None:
        __tracebackhide__ = True
        ranks.run(_Named(body), values, timeout=timeout)

    return _on("world", counts, listed, run)


class _Named:
    """The body, found in a process by the name of its test, as pickle could not."""

    def __init__(self, body: Body) -> None:
        self.module, self.__qualname__ = body.__module__, body.__name__

    def __call__(self, values: dict[str, Any]) -> None:
        inspect.unwrap(getattr(importlib.import_module(self.module), self.__qualname__))(**values)


def _on(
    fixture: str,
    counts: tuple[int, ...],
    listed: dict[str, Iterable[Any]],
    run: Callable[[Any, Body, dict[str, Any]], None],
) -> Callable[[Body], Body]:
    combinations = [dict(zip(listed, values, strict=True)) for values in itertools.product(*listed.values())]
    assert combinations, "nothing would be tried"

    def decorated(body: Body) -> Body:
        @functools.wraps(body)
        def test(**given: Any) -> None:
            __tracebackhide__ = True
            ranks = given.pop(fixture)
            for num_ranks, chosen in itertools.product(counts or [given.pop("num_ranks")], combinations):
                try:
                    run(ranks(num_ranks), body, {**chosen, **given})
                except RanksFailed as error:
                    if not chosen:
                        raise
                    raise AssertionError(f"with {chosen} on {num_ranks} ranks: {error}") from None

        asked = [name for name in inspect.signature(body).parameters if name not in listed]
        names = [fixture, *([] if counts else ["num_ranks"]), *asked]
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return test

    return decorated
