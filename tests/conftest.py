"""What does every test find ready? Ranks: processes (`world`) and threads (`threads`); see tests/ranks.py."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
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

import pytest  # noqa: E402

from tests import thorough  # noqa: E402

if TYPE_CHECKING:
    # It imports torch, which the process that only hands out the tests has no use for.
    from tests import ranks


DEVICE = Path(__file__).parent / "device"

# Files that take longest, or mostly wait. They go first, so that at the end no worker is left alone with one of them.
LONGEST = (
    "tests/device/test_train.py",
    "tests/device/test_watchdog.py",
    "tests/device/test_peaks.py",
    "tests/device/test_bench.py",
    "tests/gpu/test_random_settings.py",
    "tests/device/test_order.py",
    "tests/gpu/test_two_ranks.py",
    "tests/gpu/test_values.py",
    "tests/gpu/test_order_under_load.py",
    "tests/faults/test_campaign.py",
    "tests/machines/test_across.py",
    "tests/train/test_kills.py",
    "tests/train/test_cli.py",
    "tests/planning/test_axes.py",
    "tests/planning/test_plan.py",
    "tests/checkpoint/test_save_and_load.py",
    "tests/planning/test_plan_and_trace.py",
    "tests/parity/test_layouts.py",
    "tests/train/test_loop.py",
    "tests/engine/test_memory.py",
    "tests/planning/test_explaining.py",
    "tests/planning/test_plan_command.py",
    "tests/doctor/test_bandwidth.py",
    "tests/engine/test_lookups_between.py",
    "tests/divergence/test_step.py",
    "tests/checkpoint/test_every_layout.py",
    "tests/train/test_resume.py",
    "tests/wrapper/test_flat_two_axes.py",
    "tests/verify/test_equivalence.py",
    "tests/planning/test_published.py",
    "tests/tensor/test_axes.py",
    "tests/parity/test_ways_into_units.py",
    "tests/wrapper/test_optim_state.py",
    "tests/random_programs/test_random_programs.py",
    "tests/train/test_parallel.py",
    "tests/train/test_shard.py",
    "tests/tensor/test_optimizers.py",
    "tests/tensor_parallel/test_ragged_shards.py",
    "tests/test_examples.py",
    "tests/checkpoint/test_whole_states.py",
    "tests/checkpoint/test_load_state_dict.py",
    "tests/api/test_layouts_changed.py",
    "tests/tensor_parallel/test_training.py",
    "tests/tensor_parallel/test_checkpoints.py",
    "tests/tensor_parallel/test_smaller_mesh.py",
    "tests/strategies/test_equality.py",
    "tests/strategies/test_experts.py",
    "tests/parity/test_every_model.py",
    "tests/parity/test_compile.py",
    "tests/parity/test_oracle.py",
    "tests/bench/test_device.py",
    "tests/bench/test_bench.py",
    "tests/wrapper/test_oracle.py",
    "tests/wrapper/test_two_axes.py",
    "tests/tensor/test_checkpoints.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=("sim", "cuda"),
        help="the accelerator for tests/gpu: the simulated one of tests/device, or CUDA; default: CUDA if there is one",
    )
    parser.addoption(
        "--thorough",
        action="store_true",
        help="all combinations of parameters, and more random cases: see tests/thorough.py",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "pairs: every pair of values of the test's parameters will do")
    config.addinivalue_line("markers", "values: every value of each of the test's parameters will do")
    thorough.begin(config.getoption("--thorough"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without `--device=sim`, tests/device is left out: it changes `torch.accelerator` for the whole process."""
    return True if collection_path == DEVICE and config.getoption("--device") != "sim" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # A case that is asked for by its name is always tried.
    if not config.getoption("--thorough") and not any("::" in word for word in config.args):
        left = set(thorough.left_out(items))
        config.hook.pytest_deselected(items=list(left))
        items[:] = [item for item in items if item not in left]
    turns = {name: turn for turn, name in enumerate(LONGEST)}
    items.sort(key=lambda item: turns.get(item.nodeid.partition("::")[0], len(LONGEST)))


def pytest_collection_finish(session: pytest.Session) -> None:
    if any("world" in getattr(item, "fixturenames", ()) for item in session.items):
        from tests import ranks

        ranks.warm_up()
    # What is imported and collected by now stays. Frozen, it costs the collections to come nothing.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pools() -> Iterator[ranks.Pools]:
    """The ranks of this session."""
    from tests import ranks

    made = ranks.Pools()
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
