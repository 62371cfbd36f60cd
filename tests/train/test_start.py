"""Ranks are started, and their ends told, as a user needs it; and they refuse all together."""

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
from tests.support.ranks.bodies import on_threads
from tests.support.refusals import refusal
from tests.train.test_checkpoint import put


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())


def test_every_rank_gets_the_words_and_success_is_zero(capfd):
    assert start(2, "tests.train.ends", ["well", "--nproc", "2"]) == 0
    said = capfd.readouterr()
    assert sorted(said.out.splitlines()) == [f"rank {r} of 2 was told ['--nproc', '2']" for r in (0, 1)]
    assert said.err == ""


def test_a_crash_shows_the_ranks_traceback_and_its_number_and_what_ranks_have_said_is_not_reported_again(capfd):
    assert start(2, "tests.train.ends", ["crash"]) == 1
    said = capfd.readouterr().err
    assert "ZeroDivisionError: on purpose" in said
    assert said.endswith("sherd train: rank 1 ended, with exit code 1\n")
    for code in (2, 74, 143):
        assert start(2, "tests.train.ends", [str(code)]) == code
        assert capfd.readouterr().err == ""


KILLED = "rank 1 ended, killed by SIGKILL"


def test_the_last_line_names_the_signal_and_says_what_can_be_gone_on_from(capfd, tmp_path):
    assert start(2, "tests.train.ends", ["killed"]) == 128 + signal.SIGKILL
    assert capfd.readouterr().err == f"sherd train: {KILLED}\n"
    for how, step, code, said in (
        ("killed", None, 137, f"{KILLED}; nothing was saved before"),
        ("killed", 40, 137, f"{KILLED}; step 40 is whole, --resume goes on from it"),
        ("130", 40, 130, "stopped without saving; step 40 is whole, --resume goes on from it"),
    ):
        if step:
            put(tmp_path, step)
        with claim(Config.of({"run": {"out": str(tmp_path)}})) as folder:
            assert start(2, "tests.train.ends", [how], folder) == code
        assert capfd.readouterr().err == f"sherd train: {said}\n"


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
def test_a_rank_that_is_stopped_is_named_and_a_second_ctrl_c_ends_all(capfd, monkeypatch, told):
    monkeypatch.setattr(launch, "STILL_S", 0.4)
    monkeypatch.setattr(launch, "LONGEST_STILL_S", 0.4)
    before = time.monotonic()
    assert start(2, "tests.train.ends", ["stuck"], stop=told(signal.SIGINT, signal.SIGINT)) == 130
    assert time.monotonic() - before < 60
    first, *lines = capfd.readouterr().err.splitlines()
    stopped = r"rank 1 \(process \d+, stopped by SIGSTOP; SIGCONT lets it go on\)"
    assert re.fullmatch(rf"sherd train: waiting for {stopped}", first)
    assert "sherd train: stopping; Ctrl-C again to give up without saving" in lines
    waiting = re.compile(rf"sherd train: waiting for {stopped} since \d+ s; Ctrl-C again .*")
    assert any(map(waiting.fullmatch, lines))
    assert lines[-2].startswith("sherd train: gave up on rank")
    assert lines[-1] == "sherd train: stopped without saving"


@pytest.mark.slow  # it waits
def test_ranks_told_to_leave_have_saved_nothing_and_are_given_up_after_the_time_for_saving(capfd, monkeypatch, told):
    assert start(2, "tests.train.ends", ["waits"], stop=told(signal.SIGHUP)) == 130
    assert capfd.readouterr().err == "sherd train: stopped without saving\n"
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1")
    assert start(2, "tests.train.ends", ["deaf"], stop=told(signal.SIGTERM)) == 130
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
    assert launch._environment(2, 1, None)["TORCH_CPP_LOG_LEVEL"] == "ERROR"
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    assert launch._environment(2, 1, None)["TORCH_CPP_LOG_LEVEL"] == "INFO"
