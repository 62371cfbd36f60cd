"""Tests whose body is what each rank does."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

Test = Callable[..., None]


def on_threads(num_ranks: int) -> Callable[[Test], Test]:
    """Has the body of the test below run on each of so many ranks that are threads. Each is given the test's parameters
    and fixtures, the same objects."""

    def decorate(body: Test) -> Test:
        @functools.wraps(body)
        def on_each(threads: Callable[[int], Any], **given: Any) -> None:
            threads(num_ranks).run(body, **given)

        names = ["threads", *inspect.signature(body).parameters]
        by_name = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        on_each.__signature__ = inspect.Signature(by_name)
        return on_each

    return decorate
