"""How long does a test wait for what processes do, on a machine whose cores have other work too?"""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE_S = 120


def waited_for(condition: Callable[[], T], what: str) -> T:
    """The first thing that is true of what `condition` returns."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"still not there after {PATIENCE_S} s: {what}"
        time.sleep(0.01)
    return found
