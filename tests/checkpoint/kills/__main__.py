"""The campaign by hand: `python -m tests.checkpoint.kills --seeds 0:1000`."""

from __future__ import annotations

import argparse
import os
import sys
import time

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

from tests.checkpoint.kills.campaign import TOGETHER, Verdict, run_all  # noqa: E402
from tests.checkpoint.kills.cases import Act  # noqa: E402

HEADINGS = ("what happens", "cases", "starts", "it happened", "saves done", "checkpoints damaged", "wrong", "longest")


def row(act: str, of: list[Verdict]) -> str:
    """Returns the line of the table for what happened in these cases."""
    counts = [
        (1, len(each.case.moments), each.num_reached, each.num_done, each.num_damaged, len(each.wrong) > 0)
        for each in of
    ]
    sums = " | ".join(str(sum(column)) for column in zip(*counts, strict=True))
    return f"| {act} | {sums} | {max(each.seconds for each in of):.1f} s |"


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
    print(f"| {' | '.join(HEADINGS)} |\n{'|---' * len(HEADINGS)}|")
    for act in Act:
        if of := [each for each in verdicts if each.case.act is act]:
            print(row(act.value, of))
    print(row("all", verdicts))
    bad = sum(bool(each.wrong) for each in verdicts)
    print(f"{bad} of {len(verdicts)} cases are bad; {time.monotonic() - begun:.0f} s")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
