"""A program that ends in many ways, started as ranks by test_start.py; a rank that waits says so by a file."""

import os
import signal
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    how, rank = sys.argv[1], os.environ["RANK"]
    if how == "crash" and rank == "1":
        raise ZeroDivisionError("on purpose")
    if how == "killed" and rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if how in ("stuck", "deaf", "waits"):
        Path(os.environ["BEGUN"], rank).touch()
        if how == "stuck" and rank == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(100)
    if how in ("2", "74", "130", "143"):
        sys.exit(int(how))
    print(f"rank {rank} of {os.environ['WORLD_SIZE']} was told {sys.argv[2:]}")
