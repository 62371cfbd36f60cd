"""The campaign by hand: `python -m tests.checkpoint.kills --seeds 0:1000`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import defaultdict

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

from tests.checkpoint.kills.campaign import TOGETHER, Verdict, run_all  # noqa: E402


def table(verdicts: list[Verdict]) -> str:
    """Returns the verdicts by what happened."""
    by_act: dict[str, list[Verdict]] = defaultdict(list)
    for each in verdicts:
        by_act[each.case.act.value].append(each)
    lines = ["| what happens | cases | starts | it happened | saves done | checkpoints damaged | wrong | longest |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for act, of in [*by_act.items(), ("all", verdicts)]:
        numbers = (
            len(of),
            sum(len(each.case.moments) for each in of),
            sum(each.num_reached for each in of),
            sum(each.num_done for each in of),
            sum(each.num_damaged for each in of),
            sum(bool(each.wrong) for each in of),
        )
        longest = max(each.seconds for each in of)
        lines.append(f"| {act} | {' | '.join(map(str, numbers))} | {longest:.1f} s |")
    return "\n".join(lines)


def main() -> int:
    """Print each bad case, and the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.checkpoint.kills", description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="first:last")
    parser.add_argument("--show", action="store_true", help="print every case")
    parser.add_argument("--together", type=int, default=TOGETHER, help="cases that run at a time")
    arguments = parser.parse_args()
    first, last = map(int, arguments.seeds.split(":"))
    verdicts: list[Verdict] = []
    begun = time.monotonic()
    for seed, verdict in run_all(range(first, last), arguments.together):
        verdicts.append(verdict)
        if arguments.show or verdict.wrong:
            said = "\n  ".join(("BAD", *verdict.wrong)) if verdict.wrong else "as it should"
            print(f"{seed}: {verdict.case}: {verdict.seconds:.2f} s: {said}", flush=True)
    print(table(verdicts))
    bad = sum(bool(each.wrong) for each in verdicts)
    print(f"{bad} of {len(verdicts)} cases are bad; {time.monotonic() - begun:.0f} s")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
