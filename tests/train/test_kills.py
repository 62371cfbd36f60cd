"""A run that is killed, or told to stop, at any moment keeps what it has saved, and leaves nothing behind.

A handful of the moments that `python -m tests.train.kills` tries by the hundred; and what is said when there is nothing
to save.
"""

import contextlib
import os
import pty
import signal
import socket
import sys
import threading
import time

import pytest

from sherd.cli.terminal import outlive_the_terminal
from sherd.train.saved import folder_in, newest
from tests.support.ranks.forked import answer_of, sherd, start
from tests.train.kills import ENVIRONMENT, SAVING_S, STEPS, Moment, Run, never_killed, prepared, tried

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it looks for ranks in /proc")

TERM, HUP, KILL = signal.SIGTERM, signal.SIGHUP, signal.SIGKILL


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The losses of a run never killed, and how long its start takes."""
    with never_killed(tmp_path_factory.mktemp("whole") / "run") as found:
        yield found


# The signal of a run that trains on is in test_cli.py, the ends of ranks are in test_start.py.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "codes"),
    [
        (Moment("step", KILL, "launcher", 3, 0.5), {-9, 0}),  # 0: on a busy machine it comes too late
        (Moment("save", KILL, "all", 5, 0.3), {-9, 0}),
        (Moment("save", KILL, "rank 1", 3, 0.3), {0, 137}),
        (Moment("step", HUP, "launcher", 4, 0.1), {143, 0}),
        (Moment("sample", TERM, "launcher", 1, 0.1), {0}),
    ],
    ids=str,
)
def test_a_run_killed_at_any_moment_goes_on_as_if_nothing_was(whole, tmp_path, moment, codes):
    assert tried(tmp_path / "run", moment, *whole) in codes


ON_DISK = "masters@scratch"


# Of ranks alone, tests/optim/test_killed_on_disk.py has a hundred moments.
def test_a_run_with_state_on_a_disk_that_is_killed_leaves_no_scratch_and_goes_on_as_if_nothing_was(tmp_path):
    with never_killed(tmp_path / "never" / "run", ON_DISK) as found:
        tried(tmp_path / "run", Moment("step", KILL, "all", 5, 0.5), *found, ON_DISK)


@pytest.mark.slow
@pytest.mark.parametrize("number", [TERM, HUP, signal.SIGINT], ids=lambda number: number.name)
def test_a_start_that_is_told_to_stop_leaves_one_line_a_code_of_its_own_and_no_folder(tmp_path, number):
    for attempt in range(8):  # on a busy machine a signal may come when the start is over
        folder = tmp_path / f"run {attempt}"
        prepared(folder)
        run = Run(folder, "said")
        run.until(lambda run=run: len(run.ranks()) == 2)
        with contextlib.suppress(ProcessLookupError):
            os.kill(run.process.pid, number)
        code = run.end()
        if code not in (0, 143):
            break
    assert code == 130
    *before, last = run.words(".err").splitlines()
    assert before == (
        ["sherd train: stopping; Ctrl-C again to give up without saving"] if number == signal.SIGINT else []
    )
    assert last.startswith("sherd train: stopped without saving; ")
    assert not run.out.exists()


def test_a_rank_that_waits_for_others_leaves_at_once(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    process = start(lonely, ["train"], alone, folder=tmp_path, output=tmp_path / "said")
    while not (tmp_path / "waiting").exists():
        time.sleep(0.01)
    time.sleep(0.3)
    process.terminate()
    process.join(SAVING_S)
    assert process.exitcode == 130
    assert (tmp_path / "said.err").read_text() == "sherd train: stopped before the first step; nothing new was saved\n"


def lonely(words, environment):
    """The command `sherd` where another launcher's rank 0 would be, of a machine whose others never come."""
    from sherd.cli import main as cli
    from sherd.train import ranks

    os.environ.update(environment)
    meet = ranks.take_the_way_to_the_others
    ranks.take_the_way_to_the_others = lambda: (open("waiting", "w").close(), meet())
    cli.main(words)


@pytest.mark.slow
def test_a_run_whose_terminal_is_closed_saves_and_ends(tmp_path):
    folder = tmp_path / "run"
    prepared(folder)
    config = folder / "run.json"
    config.write_text(config.read_text().replace(f'"steps": {STEPS}', '"steps": 100000'))
    ours, theirs = pty.openpty()
    words = ["train", "--config", str(config), "--out", str(folder / "out")]
    process = start(on_terminal, os.ttyname(theirs), words, folder=folder, output=folder / "said")
    os.close(theirs)
    reader = threading.Thread(target=read_all, args=(ours,), daemon=True)
    reader.start()
    metrics = folder / "out" / "metrics.jsonl"
    while not metrics.exists() or '"step": 3,' not in metrics.read_text():
        assert process.is_alive()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGSTOP)  # so that ranks print into what is closed before they are told
    os.close(ours)
    time.sleep(0.3)
    with contextlib.suppress(ProcessLookupError):  # the system sends SIGCONT too, and by now all may be saved
        os.kill(process.pid, signal.SIGCONT)
    process.join(120)
    assert process.exitcode == 143
    assert newest(folder_in(folder / "out")).step >= 3


def on_terminal(name, words):
    """The command `sherd` in a session of its own, whose terminal has that name."""
    os.setsid()
    terminal = os.open(name, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(terminal, number)
    os.close(terminal)
    sherd(words, ENVIRONMENT)


def read_all(terminal):
    """A terminal that nobody reads fills up."""
    while True:
        try:
            if not os.read(terminal, 1 << 16):
                return
        except OSError:
            return


def printed_without_a_reader():
    read, write = os.pipe()
    os.dup2(write, 1)
    os.close(write)
    outlive_the_terminal()
    print("seen")
    seen = os.read(read, 100)
    os.close(read)
    for _ in range(3):
        print("lost")
    return seen


def test_prints_into_a_pipe_that_nobody_reads_any_more_are_lost_without_an_error():
    assert answer_of(printed_without_a_reader) == b"seen\n"
