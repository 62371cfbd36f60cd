"""Search for programs that fail: `python -m tests.random_programs --seeds 0:5000 --ranks 2,3,4 --minutes 10`."""

from __future__ import annotations

import argparse
import os
import sys
import time

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("SHERD_FLIGHT_DIR", "")  # the records of ranks that are meant to fail are nobody's
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")

from tests.random_programs.programs import draw, shown  # noqa: E402
from tests.random_programs.search import Failing, failing, shrunk  # noqa: E402
from tests.support.ranks import Pools  # noqa: E402

TOGETHER = 10


def main() -> int:
    """Print each program that fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.random_programs", description=__doc__)
    parser.add_argument("--seeds", default="0:200", help="first:last, or a list")
    parser.add_argument("--ranks", default="", help="numbers of ranks, in turn; each seed's own if left out")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--shrink", type=float, default=0.0, help="seconds to shrink each failing program")
    arguments = parser.parse_args()
    first, _, last = arguments.seeds.partition(":")
    seeds = range(int(first), int(last)) if last else [int(each) for each in first.split(",")]
    ranks = [int(each) for each in arguments.ranks.split(",")] if arguments.ranks else [None]
    programs = [draw(each, ranks[each % len(ranks)]) for each in seeds]
    pools, until, tried, failed = Pools(), time.monotonic() + 60 * arguments.minutes, 0, []
    for num_ranks in sorted({each.num_ranks for each in programs}):
        alike = [each for each in programs if each.num_ranks == num_ranks]
        for at in range(0, len(alike), TOGETHER):
            if time.monotonic() > until:
                break
            tried += len(alike[at : at + TOGETHER])
            for found in failing(pools.world, alike[at : at + TOGETHER]):
                failed.append(found.program.seed)
                tell(found)
                if arguments.shrink and found.kind != "invalid":
                    print("--- shrunk")
                    tell(shrunk(pools.world, found, arguments.shrink))
    pools.stop()
    print(f"\n{len(failed)} of {tried} programs fail, of seeds: {failed}")
    return len(failed) > 0


def tell(found: Failing) -> None:
    print(f"\n=== seed {found.program.seed}: {found.kind}\n{shown(found.program)}\n{found.said}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
