"""Ranks are started, and their ends told, as a user needs it; and they refuse all together."""

import os
import signal
import threading
import time

import pytest
from torch import distributed as dist

from sherd.train import launch
from sherd.train.config import InputError
from sherd.train.launch import start
from sherd.train.ranks import on_rank_0, together
from sherd.train.stop import Stop
from tests.support.ranks.bodies import on_threads
from tests.support.refusals import refusal


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())


RESUME = "--resume goes on from the last checkpoint, if there is one"


def ended(*words, stop=None):
    """The exit code of two ranks of the program with these words."""
    return start(2, words, stop, "tests.train.ends")


def test_every_rank_gets_the_words_and_success_is_zero(capfd):
    assert ended("well", "--nproc", "2") == 0
    said = capfd.readouterr()
    assert sorted(said.out.splitlines()) == [f"rank {r} of 2 was told ['--nproc', '2']" for r in (0, 1)]
    assert said.err == ""


def test_a_crash_shows_the_ranks_traceback_and_its_number_and_what_ranks_have_said_is_not_reported_again(capfd):
    assert ended("crash") == 1
    said = capfd.readouterr().err
    assert "ZeroDivisionError: on purpose" in said
    assert said.endswith(f"sherd train: rank 1 ended, with exit code 1; {RESUME}\n")
    for code in (2, 74, 143):
        assert ended(str(code)) == code
        assert capfd.readouterr().err == ""


def test_the_last_line_names_the_signal_and_says_what_can_be_gone_on_from(capfd):
    assert ended("killed") == 128 + signal.SIGKILL
    assert capfd.readouterr().err == f"sherd train: rank 1 ended, killed by SIGKILL; {RESUME}\n"
    assert ended("130") == 130
    assert capfd.readouterr().err == f"sherd train: stopped without saving; {RESUME}\n"


@pytest.fixture
def told(tmp_path, monkeypatch):
    """`told(SIGINT, ...)`: a `Stop` that hears these signals, one after another, once both ranks wait."""
    monkeypatch.setenv("BEGUN", str(tmp_path))

    def told_of(*numbers):
        stop = Stop()
        for of_earlier_ranks in tmp_path.iterdir():
            of_earlier_ranks.unlink()

        def tell():
            while len(list(tmp_path.iterdir())) < 2:
                time.sleep(0.01)
            for number in numbers:
                time.sleep(1.5)
                stop.heard.append((number, time.monotonic()))

        threading.Thread(target=tell, daemon=True).start()
        return stop

    return told_of


@pytest.mark.slow  # it waits
def test_a_second_ctrl_c_ends_all(capfd, told):
    before = time.monotonic()
    assert ended("stuck", stop=told(signal.SIGINT, signal.SIGINT)) == 130
    assert time.monotonic() - before < 60
    first, *_, gave_up, last = capfd.readouterr().err.splitlines()
    assert first == "sherd train: stopping; Ctrl-C again to give up without saving"
    assert gave_up == "sherd train: gave up on rank 1"
    assert last.startswith("sherd train: stopped without saving")


@pytest.mark.slow  # it waits
def test_ranks_told_to_leave_have_saved_nothing_and_are_given_up_after_the_time_for_saving(capfd, monkeypatch, told):
    assert ended("waits", stop=told(signal.SIGHUP)) == 130
    assert capfd.readouterr().err == f"sherd train: stopped without saving; {RESUME}\n"
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1")
    assert ended("deaf", stop=told(signal.SIGTERM)) == 130
    assert "gave up on ranks 0, 1" in capfd.readouterr().err


@on_threads(3)
def test_together_gives_each_its_own_on_rank_0_all_the_first_ones_and_what_one_refuses_all_refuse():
    def action():
        if dist.get_rank() == 1:
            raise InputError("rank 1 cannot")

    assert refusal(InputError, together, action) == "rank 1 cannot"
    assert (together(dist.get_rank), on_rank_0(dist.get_rank)) == (dist.get_rank(), 0)


def test_a_signal_is_noted_and_does_not_end_a_process_that_asks_and_one_that_came_ignored_stays_ignored():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        before = signal.getsignal(number)
        with Stop() as stop:
            assert not stop()
            os.kill(os.getpid(), number)
            assert stop(), number
        assert signal.getsignal(number) == before
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ranks_show_no_frames_of_torchs_store_unless_asked(monkeypatch):
    assert launch._environment(0, 2, 1)["TORCH_CPP_LOG_LEVEL"] == "ERROR"
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    assert launch._environment(0, 2, 1)["TORCH_CPP_LOG_LEVEL"] == "INFO"
