"""Does a run tell what it does, in terminals, in files, and without the packages that make it pretty?"""

import json
import sys

import pytest
import torch

from sherd.train.report import PlainDisplay, Report, RichDisplay, peak_memory

RECORD = {
    "step": 3,
    "steps": 10,
    "loss": 2.5,
    "tokens_per_second": 12345.6,
    "peak_bytes": 3 * 2**20,
    "seconds_left": 75.4,
}


def test_plain_lines_hold_every_figure(capsys):
    PlainDisplay().progress(3, RECORD)
    assert capsys.readouterr().out == "step      3/10  loss 2.500  12,346 tokens/s  3 MiB  1:15 left\n"


def test_plain_lines_leave_out_steps_that_follow_at_once_but_not_the_last(capsys):
    display = PlainDisplay()
    for step in range(1, 11):
        display.progress(step, RECORD)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["1/10", "10/10"]


def test_before_the_steps_are_counted_neither_their_number_nor_the_time_left_is_made_up(capsys):
    PlainDisplay().progress(1, {**RECORD, "steps": 0, "seconds_left": None})
    line = capsys.readouterr().out
    assert line.startswith("step      1/?")
    assert line.endswith("?:?? left\n")


def test_a_terminal_gets_a_bar_with_the_same_figures(capsys):
    pytest.importorskip("rich")
    display = RichDisplay()
    display.progress(3, RECORD)
    display.say("a [line] of text")
    display.close()
    said = capsys.readouterr().out
    assert "a [line] of text" in said
    assert "3/10" in said


def test_a_terminal_without_rich_gets_plain_lines_and_one_hint(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with Report(tmp_path) as report:
        report.step(**RECORD)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "for a progress bar: pip install '.[cli]' in the folder of sherd's sources"
    assert lines[1].startswith("step      3/10")


def test_metrics_are_one_json_object_per_line_and_a_second_report_adds_to_them(tmp_path):
    for step in (1, 2):
        with Report(tmp_path) as report:
            report.write("step", step=step, loss=1.0)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"event": "step", "step": s, "loss": 1.0} for s in (1, 2)]


def test_the_curve_is_a_picture_and_takes_a_step_done_twice_once(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    with Report(tmp_path) as report:
        for step, loss in ((1, 8.0), (2, 7.0), (2, 6.0)):
            report.write("step", step=step, loss=loss)
        report.write("evaluation", step=2, bits=6.5)
        report.finish("text", 1.9)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "sample.txt").read_text() == "text"


def test_without_matplotlib_one_line_says_how_to_get_the_picture(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with Report(tmp_path) as report:
        report.finish("text", None)
    assert (
        capsys.readouterr().out
        == "for a picture of the loss curve: pip install '.[viz]' in the folder of sherd's sources\n"
    )


def test_peak_memory_is_in_bytes():
    assert 50 * 2**20 < peak_memory(torch.device("cpu")) < 2**40
