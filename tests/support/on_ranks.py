"""Tests whose body is what every rank does: `@on_threads(2)`, `@on_processes(2)`.

    @on_threads(2, front=FRONTS)
    def test_a_step_changes_no_name(front):
        names = [name for name, _ in chain().named_parameters()]
        model = sharded(chain(), front)
        ...

What keywords list is tried one after the other, in every combination, and named when it fails. Other parameters of the
body are values of `parametrize`, or fixtures.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any

Body = Callable[..., None]


def on_threads(num_ranks: int, **listed: Iterable[Any]) -> Callable[[Body], Body]:
    """On `num_ranks` threads of this process (`threads`), with each of the `listed` values."""

    def decorate(body: Body) -> Body:
        def run(ranks: Any, values: dict[str, Any]) -> None:
            __tracebackhide__ = True
            ranks(num_ranks).run(body, **values)

        return _test_of(body, "threads", run, listed)

    return decorate


def on_processes(num_ranks: int, *, timeout: float = 60.0, **listed: Iterable[Any]) -> Callable[[Body], Body]:
    """On `num_ranks` gloo processes (`world`), with each of the `listed` values, which are pickled."""

    def decorate(body: Body) -> Body:
        def run(ranks: Any, values: dict[str, Any]) -> None:
            __tracebackhide__ = True
            ranks(num_ranks).run(_call, body.__module__, body.__name__, values, timeout=timeout)

        return _test_of(body, "world", run, listed)

    return decorate


def _call(module: str, name: str, values: dict[str, Any]) -> None:
    """In a process: find the body by the name of its test, as pickle could not."""
    inspect.unwrap(getattr(importlib.import_module(module), name))(**values)


def _test_of(
    body: Body, fixture: str, run: Callable[[Any, dict[str, Any]], None], listed: dict[str, Iterable[Any]]
) -> Body:
    """Returns the test that hands `body` to ranks; it asks pytest for the ranks, and for what is not listed."""
    combinations = [dict(zip(listed, values, strict=True)) for values in itertools.product(*listed.values())]
    assert combinations, "nothing would be tried"

    @functools.wraps(body)
    def case(**given: Any) -> None:
        __tracebackhide__ = True
        ranks = given.pop(fixture)
        for chosen in combinations:
            try:
                run(ranks, {**chosen, **given})
            except Exception as error:
                if not chosen:
                    raise
                raise AssertionError(f"with {chosen}") from error

    asked = [name for name in inspect.signature(body).parameters if name not in listed]
    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in (fixture, *asked)]
    case.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return case
