"""How can a rank end? A program of that many ways, started as ranks by test_start.py."""

import os
import signal
import sys
import time

if __name__ == "__main__":
    how, rank = sys.argv[1], os.environ["RANK"]
    if how == "crash" and rank == "1":
        raise ZeroDivisionError("on purpose")
    if how == "killed" and rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stuck" and rank == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if how in ("stuck", "deaf", "waits"):
        print("waiting", flush=True)
        time.sleep(100)
    if how in ("2", "74", "130", "143"):
        sys.exit(int(how))
    print(f"rank {rank} of {os.environ['WORLD_SIZE']} was told {sys.argv[2:]}")
