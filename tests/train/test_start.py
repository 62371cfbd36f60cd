"""Are ranks started, and their ends told, as a user needs it; and do they refuse all together?"""

import os
import re
import signal
import threading
import time

import pytest
from torch import distributed as dist

from sherd.train import launch
from sherd.train.config import Config, InputError
from sherd.train.folder import claim
from sherd.train.launch import start
from sherd.train.ranks import on_rank_0, together
from sherd.train.stop import Stop
from tests.train.test_checkpoint import put


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())


def test_every_rank_gets_the_words_and_success_is_zero(capfd):
    assert start(2, "tests.train.ends", ["well", "--nproc", "2"]) == 0
    said = capfd.readouterr()
    assert sorted(said.out.splitlines()) == [f"rank {r} of 2 was told ['--nproc', '2']" for r in (0, 1)]
    assert said.err == ""


@pytest.mark.parametrize("code", [2, 74, 143])
def test_ranks_that_have_said_why_they_left_are_not_reported_again(capfd, code):
    assert start(2, "tests.train.ends", [str(code)]) == code
    assert capfd.readouterr().err == ""


def test_a_crash_shows_the_ranks_traceback_and_its_number(capfd):
    assert start(2, "tests.train.ends", ["crash"]) == 1
    said = capfd.readouterr().err
    assert "ZeroDivisionError: on purpose" in said
    assert said.endswith("sherd train: rank 1 ended, with exit code 1\n")


def test_a_killed_rank_is_told_with_the_signals_name(capfd):
    assert start(2, "tests.train.ends", ["killed"]) == 128 + signal.SIGKILL
    assert capfd.readouterr().err == "sherd train: rank 1 ended, killed by SIGKILL\n"


@pytest.mark.parametrize(
    ("how", "saved", "code", "said"),
    [
        ("killed", 40, 137, "rank 1 ended, killed by SIGKILL; step 40 is whole, --resume goes on from it"),
        ("killed", None, 137, "rank 1 ended, killed by SIGKILL; nothing was saved before"),
        ("130", 40, 130, "stopped without saving; step 40 is whole, --resume goes on from it"),
    ],
)
def test_the_last_line_says_what_can_be_gone_on_from(capfd, tmp_path, how, saved, code, said):
    if saved:
        put(tmp_path, saved)
    with claim(Config.of({"run": {"out": str(tmp_path)}})) as folder:
        assert start(2, "tests.train.ends", [how], folder) == code
    assert capfd.readouterr().err == f"sherd train: {said}\n"


def told(*numbers):
    """A `Stop` that hears these signals, one after another, once ranks have begun."""
    stop = Stop()

    def tell():
        for number in numbers:
            time.sleep(1.5)
            stop.heard.append((number, time.monotonic()))

    threading.Thread(target=tell, daemon=True).start()
    return stop


def test_a_rank_that_is_stopped_is_named_and_a_second_ctrl_c_ends_all(capfd, monkeypatch):
    monkeypatch.setattr(launch, "STILL_S", 0.4)
    monkeypatch.setattr(launch, "LONGEST_STILL_S", 0.4)
    before = time.monotonic()
    assert start(2, "tests.train.ends", ["stuck"], stop=told(signal.SIGINT, signal.SIGINT)) == 130
    assert time.monotonic() - before < 60
    first, *lines = capfd.readouterr().err.splitlines()
    stopped = r"rank 1 \(process \d+, stopped by SIGSTOP; SIGCONT lets it go on\)"
    assert re.fullmatch(rf"sherd train: waiting for {stopped}", first)
    assert "sherd train: stopping; Ctrl-C again to give up" in lines
    assert any(
        re.fullmatch(rf"sherd train: waiting for {stopped} since \d+ s; Ctrl-C again .*", each) for each in lines
    )
    assert lines[-2].startswith("sherd train: gave up on rank")
    assert lines[-1] == "sherd train: stopped without saving"


def test_ranks_that_do_not_leave_when_told_are_given_up_after_the_time_for_saving(capfd, monkeypatch):
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1")
    assert start(2, "tests.train.ends", ["deaf"], stop=told(signal.SIGTERM)) == 130
    assert "gave up on ranks 0, 1" in capfd.readouterr().err


def test_ranks_told_before_they_could_do_anything_have_saved_nothing(capfd):
    assert start(2, "tests.train.ends", ["waits"], stop=told(signal.SIGHUP)) == 130
    assert capfd.readouterr().err == "sherd train: stopped without saving\n"


def refuse_on_rank_1():
    def action():
        if dist.get_rank() == 1:
            raise InputError("rank 1 cannot")
        return "well"

    try:
        return together(action)
    except InputError as error:
        return str(error)


def test_what_one_rank_refuses_all_refuse_with_its_words(world):
    assert world(3).run(refuse_on_rank_1) == ["rank 1 cannot"] * 3


def own_ranks():
    return together(dist.get_rank), on_rank_0(dist.get_rank)


def test_together_gives_each_its_own_and_on_rank_0_gives_all_the_first_ones(world):
    assert world(2).run(own_ranks) == [(0, 0), (1, 0)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_noted_and_does_not_end_a_process_that_asks(number):
    before = signal.getsignal(number)
    with Stop() as stop:
        assert not stop()
        os.kill(os.getpid(), number)
        assert stop()
    assert signal.getsignal(number) == before


def test_a_signal_that_came_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop()
    finally:
        signal.signal(signal.SIGHUP, before)
