"""Copied into a package with probes, as `sherd/_reached.py`: writes down which test reaches which mutant's place."""

import os

_known: set[tuple[int, str]] = set()


def reached(number: int) -> None:
    """Append this test and the mutant's number to the file that SHERD_REACHED names, once in a process."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    if (number, test) not in _known and "SHERD_REACHED" in os.environ:
        _known.add((number, test))
        # One write of a short line at the end of a file: lines of several processes do not mix.
        with open(os.environ["SHERD_REACHED"], "a") as file:
            file.write(f"{number}\t{test}\n")
