"""What every test finds ready: ranks that are processes (`world`) or threads (`threads`), and the cases of a suite."""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Before torch is imported, here and in the ranks: one thread each, or four ranks on two cores fight for them.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
# Without it gloo asks the resolver for this machine's name, which is slow or fails where there is no network.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")

# Where ranks write what they have done when a collective fails, as many tests have them do.
if "SHERD_FLIGHT_DIR" not in os.environ:
    FLIGHTS = tempfile.TemporaryDirectory(prefix="sherd-flight-", ignore_cleanup_errors=True)
    os.environ["SHERD_FLIGHT_DIR"] = FLIGHTS.name

import hypothesis  # noqa: E402
import pytest  # noqa: E402
from hypothesis.internal.conjecture import providers  # noqa: E402

from tests.support import suites  # noqa: E402

if TYPE_CHECKING:
    # It imports torch, which the process that only hands out the tests has no use for.
    from tests.support import ranks


DEVICE = Path(__file__).parent / "device"
SHARES = 10  # of the cases that a quick run leaves out


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=("sim", "cuda"),
        help="the accelerator for tests/gpu: the simulated one (simdevice), or CUDA; default: CUDA if there is one",
    )
    parser.addoption(
        "--suite",
        choices=suites.SUITES,
        default="quick",
        help="which cases: one of each function, all, or also more random ones; see tests/support/suites.py",
    )
    parser.addoption(
        "--share",
        metavar="K/N",
        help="also share K of N of the cases that a quick run leaves out; `commit`: the tenth that this commit draws",
    )
    parser.addoption("--shard", metavar="K/N", help="of the suite only shard K of N, for several machines")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "front(capability): the one test of a capability that README lists")
    config.addinivalue_line("markers", "slow: never in a quick run")
    config.addinivalue_line("markers", "pairs: every pair of values of the test's parameters will do")
    config.addinivalue_line("markers", "values: every value of each of the test's parameters will do")
    suites.begin(config.getoption("--suite"))
    repeatable = config.getoption("--suite") != "thorough"
    if repeatable:
        # hypothesis draws also from the constants of all modules that are imported by then: other tests decide.
        providers._get_local_constants = lambda: providers._local_constants
    hypothesis.settings.register_profile(
        "sherd", deadline=None, derandomize=repeatable, max_examples=suites.examples(100)
    )
    hypothesis.settings.load_profile("sherd")


def pytest_report_header(config: pytest.Config) -> str:
    shared = chosen_share(config)
    also = f", and share {shared[0]} of {shared[1]} of the other cases" if shared else ""
    return f"suite: {config.getoption('--suite')}{also}"


@functools.cache
def chosen_share(config: pytest.Config) -> tuple[int, int] | None:
    """The number of the share and how many there are; None without `--share`."""
    word = config.getoption("--share")
    if word == "commit":
        log = subprocess.run(
            ["git", "log", "--first-parent", "--format=%H"],
            cwd=config.rootpath,
            capture_output=True,
            text=True,
            check=True,
        )
        return suites.share_of_commit(log.stdout.split(), SHARES), SHARES
    return None if word is None else fraction(word)


def fraction(word: str) -> tuple[int, int]:
    """Returns the two numbers of `word`, as in "3/10"."""
    number, _, count = word.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(count)):
        raise pytest.UsageError(f"{word!r}: expected K/N, as 3/10")
    return int(number), int(count)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without `--device=sim`, tests/device is left out: it changes `torch.accelerator` for the whole process."""
    return True if collection_path == DEVICE and config.getoption("--device") != "sim" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # A case that is asked for by its name is always tried.
    if not any("::" in word for word in config.args):
        kept = set(suites.SELECTED[config.getoption("--suite")](items))
        if shared := chosen_share(config):
            kept.update(suites.drawn(suites.usual(items), *shared))
        if shard := config.getoption("--shard"):
            kept.intersection_update(suites.drawn(items, *fraction(shard)))
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    # Files that wait first, then those with the most cases, so that at the end no worker is left alone with one.
    cases = Counter(item.path for item in items)
    waiting = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in waiting, -cases[item.path]))


def pytest_collection_finish(session: pytest.Session) -> None:
    if any("world" in getattr(item, "fixturenames", ()) for item in session.items):
        from tests.support import ranks

        ranks.warm_up()
    # What is imported and collected by now stays. Frozen, it costs the collections to come nothing.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pools(request: pytest.FixtureRequest) -> Iterator[ranks.Pools]:
    """The ranks of this session, which print where `pytest -s` asks for it."""
    from tests.support import ranks

    made = ranks.Pools(quiet=request.config.getoption("capture") != "no")
    yield made
    made.stop()


@pytest.fixture(scope="session")
def world(pools: ranks.Pools) -> Callable[[int], ranks.Processes]:
    """`world(n).run(fn, ...)` runs fn on n gloo processes, 1 to 4; the results, index = rank."""
    return pools.world


@pytest.fixture(scope="session")
def threads(pools: ranks.Pools) -> Callable[[int], ranks.Threads]:
    """`threads(n).run(fn, ...)` runs fn on n threads, 1 to 8; the results, index = rank."""
    return pools.threads


@pytest.fixture
def torchrun_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torchrun sets for one rank alone. The default group that is made of it goes with the test."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # its agent keeps the store, as here
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
