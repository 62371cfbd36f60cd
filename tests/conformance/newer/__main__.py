"""Runs the programs of this folder: `python -m tests.conformance.newer [NAME...]`. Fails where a behaviour is wrong."""

import os
import subprocess
import sys
from pathlib import Path

# Behaviours that torch's own FSDP gets wrong, too (2.14, CPU and gloo).
NOT_ASKED = {
    "cast_after_a_backward_as_a_plain_module",
    "divide_factor_of_the_root_alone",
    "divide_factor_with_replicas",
    "divide_factor_with_replicas_of_one_rank_with_sums",
    "reset_iter_state_discards_what_was_accumulated",
}


def main() -> None:
    here = Path(__file__).parent
    names = sys.argv[1:] or sorted(each.stem for each in here.glob("[a-z]*.py") if each.stem != "behaviours")
    num_wrong = 0
    for name in names:
        command = [sys.executable, "-c", f"from {__package__}.behaviours import main; main({name!r})"]
        said = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        verdicts = [line.split(maxsplit=2) for line in said.stdout.splitlines()]
        asked = [each for each in verdicts if each[0] in ("ok", "FAIL") and each[1] not in NOT_ASKED]
        wrong = [each for each in asked if each[0] == "FAIL"]
        num_wrong += len(wrong) + (not asked)
        print(f"{name}: {len(asked) - len(wrong)} right of {len(asked)}", flush=True)
        for _, behaviour, why in wrong:
            print(f"  LOST {behaviour}: {why}", flush=True)
    if num_wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
