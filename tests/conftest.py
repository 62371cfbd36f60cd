"""What does every test find ready? Ranks: processes (`world`) and threads (`threads`); see tests/ranks.py."""

import os
import sys
from collections.abc import Callable, Iterator

# Before torch is imported, here and in the ranks: one thread each, or four ranks on two cores fight for them.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
# Without it gloo asks the resolver for this machine's name, which is slow or fails where there is no network.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")

import pytest  # noqa: E402

from tests import ranks  # noqa: E402


def pytest_collection_finish(session: pytest.Session) -> None:
    if any("world" in getattr(item, "fixturenames", ()) for item in session.items):
        ranks.warm_up()


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], ranks.Processes]]:
    """`world(n).run(fn, ...)` runs fn on n gloo processes, 1 to 4; the results, index = rank."""
    pools = ranks.Pools()
    yield pools.world
    pools.stop()


@pytest.fixture(scope="session")
def threads() -> Callable[[int], ranks.Threads]:
    """`threads(n).run(fn, ...)` runs fn on n threads, 1 to 8; the results, index = rank."""
    return ranks.threads
