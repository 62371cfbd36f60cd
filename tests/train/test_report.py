"""A run tells what it does, in terminals, in files, and without the packages that make it pretty."""

import json
import sys

import pytest

from sherd.train.report import Bar, Lines, Report

RECORD = {
    "step": 3,
    "steps": 10,
    "loss": 2.5,
    "gradient_norm": 0.523,
    "learning_rate": 2e-3,
    "tokens_per_second": 12345.6,
    "peak_bytes": 3 * 2**20,
    "seconds_left": 75.4,
}


def test_plain_lines_hold_every_figure_with_its_unit_and_leave_out_steps_that_follow_at_once_but_not_the_last(capsys):
    Lines().progress(3, RECORD)
    assert capsys.readouterr().out == (
        "step      3/10  loss 1.733 nats  2.500 bits  12,346 tokens/s  lr 2.0e-03  gradient norm 0.52  "
        "rank 0 holds 3 MiB  1 min left\n"
    )
    display = Lines()
    for step in range(1, 11):
        display.progress(step, RECORD)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["1/10", "10/10"]
    # Before the steps are counted neither their number nor the time left is made up.
    Lines().progress(1, {**RECORD, "steps": 0, "seconds_left": None})
    line = capsys.readouterr().out
    assert line.startswith("step      1/?")
    assert line.endswith("  ? left\n")


def test_the_time_that_is_left_is_said_in_hours_minutes_or_seconds(capsys):
    for seconds, words in (
        (0, "0 s"),
        (59.6, "1 min"),
        (75, "1 min"),
        (4273, "1 h 11 min"),
        (2.4e6, "666 h 40 min"),
    ):
        Lines().progress(3, {**RECORD, "seconds_left": seconds})
        assert capsys.readouterr().out.endswith(f"  {words} left\n")


def test_what_is_said_when_no_steps_follow_stands_below_the_bar(capsys, tmp_path, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with Report(tmp_path) as report:
        report.begin(0, 10)
        report.write("step", **RECORD)
        report.over()
        report.say("stopped after step 3")
    last = [line for line in capsys.readouterr().out.splitlines() if line.strip()][-1]
    assert "stopped after step 3" in last


def show_a_bar(said=None):
    """Of a run of ten steps, of which the third is told."""
    display = Bar()
    display.begin(0, 10)
    display.progress(3, RECORD)
    if said:
        display.say(said)
    display.close()


def test_a_terminal_gets_a_bar_with_the_same_figures_which_knows_the_number_of_steps_before_the_first(capsys):
    pytest.importorskip("rich")
    show_a_bar("a [line] of text")
    said = capsys.readouterr().out
    assert "a [line] of text" in said
    assert "3/10" in said
    display = Bar()
    display.begin(0, 30)
    display.close()
    assert " 0/30" in capsys.readouterr().out


def test_a_bar_fits_a_terminal_of_60_columns_and_longer_lines_are_left_for_it_to_break(capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")  # a dumb one has 80 columns, whatever it says
    monkeypatch.setenv("COLUMNS", "60")
    show_a_bar()
    last = capsys.readouterr().out.rstrip("\n").rpartition("\n")[2].rstrip()
    assert len(last) <= 60
    assert "loss 1.733 nats" in last
    Bar().say("try " + "word " * 20)
    assert capsys.readouterr().out.count("\n") == 1


def test_a_quiet_report_shows_nothing_and_writes_everything_and_a_second_one_adds_to_it(tmp_path, capsys):
    with Report(tmp_path, quiet=True) as report:
        report.begin(0, 10)
        report.say("words")
        report.write("step", **RECORD)
    with Report(tmp_path, quiet=True) as report:
        report.write("evaluation", step=4, bits=1.0)
    assert capsys.readouterr().out == ""
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (first["event"], first["step"]) == ("step", 3)
    assert second == {"event": "evaluation", "step": 4, "bits": 1.0}


def test_without_rich_a_terminal_gets_plain_lines_and_a_hint(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with Report(tmp_path) as report:
        report.write("step", **RECORD)
    hint, step = capsys.readouterr().out.splitlines()
    assert hint == "for a progress bar: pip install rich"
    assert step.startswith("step      3/10")


def test_after_a_line_that_a_crash_has_cut_the_next_record_is_on_a_line_of_its_own(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"event": "step", "step": 1}\n{"event": "step", "st')
    with Report(tmp_path, quiet=True) as report:
        report.write("evaluation", step=2, bits=7.0)
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["bits"] == 7.0
