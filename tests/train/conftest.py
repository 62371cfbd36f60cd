"""What every test of the command finds ready."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def hang_ups_are_heard() -> Iterator[None]:
    """A hang-up does what it does in a terminal, also in a test run under nohup, which ignores it for all processes
    that it starts."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
