"""Search for programs that fail: `python -m tests.random_programs --seeds 0:5000 --ranks 2,3,4 --minutes 10`."""

from __future__ import annotations

import argparse
import collections
import os
import sys
import time

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")

from tests.random_programs.programs import Program, draw, features, shown, without  # noqa: E402
from tests.random_programs.search import Failing, failing, shrunk  # noqa: E402
from tests.support.ranks import Pools  # noqa: E402

TOGETHER = 10


def main() -> int:
    """Print each failing seed, and at the end which features failing programs have more often than others."""
    arguments = _arguments()
    first, _, last = arguments.seeds.partition(":")
    seeds = range(int(first), int(last)) if last else [int(each) for each in first.split(",")]
    ranks = [int(each) for each in arguments.ranks.split(",")] if arguments.ranks else None
    names = [each for each in arguments.without.split(",") if each]
    programs = [without(draw(each, ranks[each % len(ranks)] if ranks else None), names) for each in seeds]
    wanted = [each for each in arguments.with_.split(",") if each]
    programs = [each for each in programs if all(name in features(each) for name in wanted)]
    if arguments.show:
        for each in programs:
            print(shown(each))
        return 0
    pools, until = Pools(), time.monotonic() + 60 * arguments.minutes
    tried, found = _search(pools, programs, until, arguments.shrink)
    pools.stop()
    _summary(tried, found)
    return len(found) > 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.random_programs", description=__doc__)
    parser.add_argument("--seeds", default="0:200", help="first:last, or a list")
    parser.add_argument("--ranks", default="", help="numbers of ranks, in turn; each seed's own if left out")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--without", default="", help="features to switch off, by name")
    parser.add_argument("--with", dest="with_", default="", help="only programs that have all these features")
    parser.add_argument("--shrink", type=float, default=0.0, help="seconds to shrink each failing program")
    parser.add_argument("--show", action="store_true", help="print the programs and run none")
    return parser.parse_args()


def _search(pools: Pools, programs: list[Program], until: float, shrink: float) -> tuple[list[Program], list[Failing]]:
    tried: list[Program] = []
    found: list[Failing] = []
    for start in range(0, len(programs), TOGETHER * 4):
        chunk = programs[start : start + TOGETHER * 4]
        for num_ranks in sorted({each.num_ranks for each in chunk}):
            alike = [each for each in chunk if each.num_ranks == num_ranks]
            for at in range(0, len(alike), TOGETHER):
                if time.monotonic() > until:
                    return tried, found
                tried += alike[at : at + TOGETHER]
                for each in failing(pools.world, alike[at : at + TOGETHER]):
                    found.append(each)
                    _tell(pools, each, shrink)
    return tried, found


def _tell(pools: Pools, each: Failing, shrink: float) -> None:
    print(f"\n=== seed {each.program.seed}: {each.kind}\n{shown(each.program)}\n{_last_lines(each)}", flush=True)
    if shrink and each.kind != "invalid":
        smallest = shrunk(pools.world, each, shrink)
        print(f"--- shrunk\n{shown(smallest.program)}\n{_last_lines(smallest)}", flush=True)


def _last_lines(each: Failing) -> str:
    if each.kind in ("wrong", "invalid"):
        return each.said
    lines = [line for line in each.said.splitlines() if line and not line.startswith("    ")]
    if each.kind != "raised":  # where each rank is, the innermost first
        return "\n".join(line for line in lines if "/torch/" not in line or "distributed" in line)
    return "\n".join(line[:400] for line in lines if not line.startswith(" "))


def _summary(tried: list[Program], found: list[Failing]) -> None:
    kinds = collections.Counter(each.kind for each in found)
    print(f"\n{len(tried)} programs, failing: {dict(kinds)}")
    print("seeds:", " ".join(f"{each.program.seed}" for each in found))
    bad = [each.program for each in found if each.kind != "invalid"]
    if not bad:
        return
    with_it = collections.Counter(name for each in tried for name in features(each))
    failed = collections.Counter(name for each in bad for name in features(each))
    rates = sorted(((failed[name] / with_it[name], failed[name], name) for name in failed), reverse=True)
    for rate, count, name in rates[:12]:
        print(f"{name:28} fails in {count} of {with_it[name]} ({rate:.0%})")


if __name__ == "__main__":
    sys.exit(main())
