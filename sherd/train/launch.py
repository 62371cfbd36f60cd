"""The launcher: `sherd train` starts its ranks on this machine, watches them, and tells how they ended.

torchrun starts them on several machines, and here too: its agent says nothing of what was saved, ends with code 1 after
a stop that saved, stops a run under nohup, and does not pass a second Ctrl-C on (docs/decisions, 049).
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from torch import distributed as dist

from sherd.train.codes import BAD_INPUT, NO_ROOM, NOT_SAVED, STOPPED
from sherd.train.ranks import LOOPBACK
from sherd.train.stop import LAUNCHER, SAVING_S, Stop, say

LOOK_S = 0.05
COMPLAINS = (1, -signal.SIGABRT)  # how a rank ends that lost another one
LAST_WORDS_S = 10.0  # of the other ranks, once one has crashed: their errors may say more
AGAIN_S = 1.0  # a Ctrl-C sooner after the first one is the same finger


def start(num_ranks: int, words: Sequence[str], stop: Stop | None = None, module: str = "sherd") -> int:
    """Run `python -m module words` on `num_ranks` ranks of this machine, and pass on what `stop` hears.

    Returns:
        0 when all went well; BAD_INPUT, NO_ROOM, STOPPED or NOT_SAVED when ranks left with it; else the exit code of
        the rank that failed first, whose traceback is on stderr.
    """
    # The ranks meet here, so that no port is chosen before it is taken.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    ranks = [_started([module, *words], _environment(number, num_ranks, store.port)) for number in range(num_ranks)]
    try:
        return _watch(ranks, stop or Stop())
    finally:
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):  # deep in a driver, it may be beyond reach
                    rank.wait(LAST_WORDS_S)


def _environment(number: int, num_ranks: int, port: int) -> dict[str, str]:
    """Returns the environment of a rank, by torchrun's names. What the user has set himself of the first four stays."""
    return {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_ranks)),
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # else a rank that lost the launcher shows frames of torch's store
        SAVING_S: _seconds_to_save(),
        **os.environ,
        **{"RANK": str(number), "WORLD_SIZE": str(num_ranks), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"},
        **{"LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": str(num_ranks)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 makes no store of its own
        LAUNCHER: str(os.getpid()),
    }


def _seconds_to_save() -> str:
    """Returns how long ranks that were told to stop may take: with a large model a step and a save are minutes."""
    return os.environ.get(SAVING_S, "120")


def _started(words: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """A rank's process, in a session of its own: a terminal's Ctrl-C and SIGHUP come to us alone."""
    return subprocess.Popen([sys.executable, "-u", "-m", *words], env=environment, start_new_session=True)


def _watch(ranks: list[subprocess.Popen[bytes]], stop: Stop) -> int:
    """Wait for the end of all ranks; returns the exit code. Says how they ended where they have not said it."""
    first: tuple[int, int] | None = None  # the rank that failed first, and its code
    told_at = failed_at = math.inf
    while True:
        now, codes = time.monotonic(), dict(enumerate(rank.poll() for rank in ranks))
        failed = [(number, code) for number, code in codes.items() if code]
        if failed and first is None:
            # Of those that we find together, who was killed or has left on purpose has brought down who complains.
            first, failed_at = min(failed, key=lambda each: each[1] in COMPLAINS), now
        running = [number for number, code in codes.items() if code is None]
        if not running or now - failed_at > LAST_WORDS_S:
            break
        if stop() and told_at == math.inf:
            told_at = now
            _tell([ranks[number] for number in running], stop)
        if _is_given_up(stop, now - told_at):
            say(f"gave up on rank{'s' * (len(running) > 1)} {', '.join(map(str, running))}")
            first = running[0], NOT_SAVED
            break
        time.sleep(LOOK_S)
    return 0 if first is None else _said(*first, was_told=told_at < math.inf)


def _tell(ranks: Sequence[subprocess.Popen[bytes]], stop: Stop) -> None:
    """Ask ranks to save and leave."""
    if stop.heard[0][0] == signal.SIGINT:
        if sys.stderr.isatty():
            print(file=sys.stderr)  # the terminal has put ^C next to the bar
        say("stopping; Ctrl-C again to give up without saving")
    for rank in ranks:
        rank.send_signal(signal.SIGTERM)


def _is_given_up(stop: Stop, seconds: float) -> bool:
    """Returns whether ranks are not to be waited for, so many seconds after they were told to stop."""
    if seconds < 0:  # they were not
        return False
    (_, first), *more = stop.heard
    again = any(number == signal.SIGINT and at > first + AGAIN_S for number, at in more)
    return again or seconds > float(_seconds_to_save())


def _said(number: int, code: int, was_told: bool) -> int:
    """Say how the run ended, if rank `number` has not said it; returns the exit code."""
    if code in (BAD_INPUT, NO_ROOM, STOPPED):
        return code
    if code == NOT_SAVED or (was_told and code == -signal.SIGTERM):
        say("stopped without saving; --resume goes on from the last checkpoint, if there is one")
        return NOT_SAVED
    how = f"with exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
    say(f"rank {number} ended, {how}; --resume goes on from the last checkpoint, if there is one")
    return code if code > 0 else 128 - code
