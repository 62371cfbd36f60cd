"""The launcher: `sherd train` starts its ranks on this machine, watches them, and tells how they ended.

Not through torchrun's agent: it takes SIGHUP from nohup, answers a second Ctrl-C with nothing, and says of a stop
neither what was saved nor which rank it waits for.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from torch import distributed as dist

from sherd.train.codes import BAD_INPUT, NO_ROOM, NOT_SAVED, STOPPED
from sherd.train.config import Config
from sherd.train.device import default_ranks, require_ranks
from sherd.train.folder import HELD, RunFolder, claim
from sherd.train.ranks import LOOPBACK
from sherd.train.saved import going_on, place_in
from sherd.train.stop import LAUNCHER, SAVING_S, Stop, say

__all__ = ["launch", "start"]

LOOK_S = 0.05
COMPLAINS = (1, -signal.SIGABRT)  # how a rank ends that lost another one
LAST_WORDS_S = 10.0  # of the other ranks, once one has crashed: their errors may say more
STILL_S = 10.0  # after which a rank that stands still is told of; then after twice as long, and so on
LONGEST_STILL_S = 80.0
AGAIN_S = 1.0  # a Ctrl-C sooner after the first one is the same finger


def launch(args: argparse.Namespace, words: list[str], config: Config, stop: Stop) -> int:
    """Start the ranks of `config`, each of which reads `words` anew. Returns the exit code, as `start` does.

    Raises:
        InputError: too few or too many ranks, or a folder that cannot be written or is in use.
    """
    num_ranks: int = args.nproc if args.nproc is not None else config.run.ranks or default_ranks(config)
    require_ranks(num_ranks, config)
    stop()  # from here on we wait for ranks
    with claim(config) as folder:
        if not args.quiet:
            print(f"starting {num_ranks} rank{'s' if num_ranks > 1 else ''} ...", flush=True)
        code = start(num_ranks, "sherd", [*words, "--out", str(folder.path)], folder, stop)
        if code != 0:
            folder.drop_if_empty()
        return code


def start(
    num_ranks: int, module: str, words: list[str], folder: RunFolder | None = None, stop: Stop | None = None
) -> int:
    """Run `python -m module words` on `num_ranks` ranks of this machine, and pass on what `stop` hears.

    Returns:
        0 when all went well; BAD_INPUT, NO_ROOM, STOPPED or NOT_SAVED when ranks left with it; else the exit code of
        the rank that failed first, whose traceback is on stderr.
    """
    # The ranks meet here, so that no port is chosen before it is taken.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    everywhere = _environment(num_ranks, store.port, folder)
    ranks = [
        _Rank(number, module, words, {**everywhere, "RANK": str(number), "LOCAL_RANK": str(number)}, folder)
        for number in range(num_ranks)
    ]
    try:
        return _Watch(ranks, folder.path if folder else None, stop or Stop()).until_the_end()
    finally:
        for rank in ranks:
            rank.kill()


def _environment(num_ranks: int, port: int, folder: RunFolder | None) -> dict[str, str]:
    """Returns the environment of all ranks. What the user has set himself of the first three stays."""
    return {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_ranks)),
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # else a rank that lost the launcher shows frames of torch's store
        SAVING_S: _seconds_to_save(),
        **os.environ,
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 makes no store of its own
        LAUNCHER: str(os.getpid()),
        **({HELD: str(folder.lock)} if folder else {}),
    }


def _seconds_to_save() -> str:
    """Returns how long ranks that were told to stop may take: with a large model a step and a save are minutes."""
    return os.environ.get(SAVING_S, "120")


class _Rank:
    """A rank's process, in a session of its own: a terminal's Ctrl-C and SIGHUP come to us alone."""

    def __init__(
        self, number: int, module: str, words: Sequence[str], environment: dict[str, str], folder: RunFolder | None
    ) -> None:
        self.number = number
        # All ranks hold the lock: while one of them may still write, nobody else does.
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", module, *words],
            env=environment,
            start_new_session=True,
            pass_fds=(folder.lock,) if folder else (),
        )

    @property
    def code(self) -> int | None:
        """As `subprocess` has it: -N when signal N has killed it; None while it runs."""
        return self.process.poll()

    @property
    def is_stopped(self) -> bool:
        """Whether SIGSTOP or a debugger holds it (Linux)."""
        try:
            state = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return False
        return state in "Tt"

    def tell(self) -> None:
        """Ask it to save and leave."""
        if self.code is None:
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it now, and what it has started."""
        if self.code is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # deep in a driver, it may be beyond reach
                self.process.wait(LAST_WORDS_S)


class _Watch:
    """Waits for the end of all ranks, and says what the user should know meanwhile and afterwards."""

    def __init__(self, ranks: list[_Rank], out: Path | None, stop: Stop) -> None:
        self._ranks, self._out, self._stop = ranks, out, stop
        self._running = list(ranks)
        self._first: tuple[int, int] | None = None  # the rank that failed first, and its code
        self._told_at = self._failed_at = self._said_at = 0.0
        self._still = STILL_S

    def until_the_end(self) -> int:
        """Returns the exit code."""
        self._said_at = time.monotonic()
        while self._running:
            time.sleep(LOOK_S)
            self._note_the_ends()
            if not self._running:
                break
            now = time.monotonic()
            if self._stop() and not self._told_at:
                self._told_at = self._said_at = now
                self._still = STILL_S / 2
                if self._stop.heard[0][0] == signal.SIGINT:
                    if sys.stderr.isatty():
                        print(file=sys.stderr)  # the terminal has put ^C beside the bar
                    say("stopping; Ctrl-C again to give up without saving")
                for rank in self._running:
                    rank.tell()
            if self._given_up(now):
                say(f"gave up on {_named(self._running)}")
                self._first = (self._running[0].number, NOT_SAVED)
                break
            if self._failed_at and now - self._failed_at > LAST_WORDS_S:
                break
            self._tell_who_stands_still(now)
        return self._end()

    def _note_the_ends(self) -> None:
        ended = [(rank.number, rank.code) for rank in self._running if rank.code is not None]
        self._running = [rank for rank in self._running if rank.code is None]
        failed = [(number, code) for number, code in ended if code]
        if failed and self._first is None:
            # Of those that we find together, who was killed or has left on purpose has brought down who complains.
            self._first = min(failed, key=lambda each: each[1] in COMPLAINS)
            self._failed_at = time.monotonic()

    def _given_up(self, now: float) -> bool:
        if not self._told_at:
            return False
        (_, first), *more = self._stop.heard
        again = [number for number, at in more if number == signal.SIGINT and at > first + AGAIN_S]
        return bool(again) or now - self._told_at > float(_seconds_to_save())

    def _tell_who_stands_still(self, now: float) -> None:
        if now - self._said_at < self._still:
            return
        self._said_at = now
        stopped = [rank for rank in self._running if rank.is_stopped]
        if not stopped and not self._told_at:
            return
        self._still = min(2 * self._still, LONGEST_STILL_S)
        who = _named(stopped or self._running)
        if stopped:
            who += f" (process {stopped[0].process.pid}, stopped by SIGSTOP; SIGCONT lets it go on)"
        since = (
            f" since {round(now - self._told_at)} s; Ctrl-C again to give up without saving" if self._told_at else ""
        )
        say(f"waiting for {who}{since}")

    def _end(self) -> int:
        """Say how the run ended, where its ranks have not said it."""
        if self._first is None:
            return 0
        number, code = self._first
        if code in (BAD_INPUT, NO_ROOM, STOPPED):
            return code
        saved = going_on(place_in(self._out)) if self._out else ""
        if code == NOT_SAVED or (self._told_at and code == -signal.SIGTERM):
            say(f"stopped without saving{saved}")
            return NOT_SAVED
        how = f"with exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
        say(f"rank {number} ended, {how}{saved}")
        return code if code > 0 else 128 - code


def _named(ranks: Sequence[_Rank]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(rank.number) for rank in ranks)}"
