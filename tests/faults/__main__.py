"""The campaign by hand, docs/data/faults.csv and its summary: `python -m tests.faults --seeds 0:2000 --write`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("SHERD_FLIGHT_DIR", "")  # the records of ranks that are meant to fail are nobody's
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

from bench.pages import as_csv, written  # noqa: E402
from tests.faults.campaign import Verdict, drawn, run_all  # noqa: E402
from tests.faults.page import DATA, PAGE, bad_cases, rows, sections  # noqa: E402


def main() -> int:
    """Print each bad case, and the tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seeds", default="0:200", help="first:last")
    parser.add_argument("--show", action="store_true", help="print every case")
    parser.add_argument("--write", action="store_true", help=f"{DATA.name}, and the summary into {PAGE.name}")
    arguments = parser.parse_args()
    first, last = map(int, arguments.seeds.split(":"))
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed, verdict in run_all(range(first, last), Path(folder)):
            verdicts.append(verdict)
            if arguments.show or not verdict.is_good:
                bad = "known" if verdict.is_known else "BAD"
                said = "as it should" if verdict.is_good else f"{bad}\n{verdict.words}"
                print(f"{seed}: {drawn(seed)}: {verdict.outcome.value}, {verdict.seconds:.2f} s: {said}", flush=True)
    texts = sections(rows(verdicts)) | bad_cases(verdicts)
    if arguments.write:
        DATA.write_text(as_csv(rows(verdicts)))
        PAGE.write_text(written(PAGE.read_text(), texts))
    else:
        print(*texts.values(), sep="\n\n")
    bad = sum(not (verdict.is_good or verdict.is_known) for verdict in verdicts)
    print(f"{bad} of {len(verdicts)} cases are bad, and not known to be")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
