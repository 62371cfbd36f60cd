"""A run tells what it does, in terminals, in files, and without the packages that make it pretty."""

import json
import sys

import pytest

from sherd.train.report import PlainDisplay, RichDisplay, RunReport, points, records

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
    PlainDisplay().progress(3, RECORD)
    assert capsys.readouterr().out == (
        "step      3/10  loss 1.733 nats  2.500 bits  12,346 tokens/s  lr 2.0e-03  gradient norm 0.52  "
        "rank 0 holds 3 MiB  1 min left\n"
    )
    display = PlainDisplay()
    for step in range(1, 11):
        display.progress(step, RECORD)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["1/10", "10/10"]
    # Before the steps are counted neither their number nor the time left is made up.
    PlainDisplay().progress(1, {**RECORD, "steps": 0, "seconds_left": None})
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
        PlainDisplay().progress(3, {**RECORD, "seconds_left": seconds})
        assert capsys.readouterr().out.endswith(f"  {words} left\n")


def test_what_is_said_when_no_steps_follow_stands_below_the_bar(capsys, tmp_path, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with RunReport(tmp_path) as report:
        report.begin(0, 10)
        report.step(**RECORD)
        report.over()
        report.say("stopped after step 3")
    last = [line for line in capsys.readouterr().out.splitlines() if line.strip()][-1]
    assert "stopped after step 3" in last


def show_a_bar(said=None):
    """Of a run of ten steps, of which the third is told."""
    display = RichDisplay()
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
    display = RichDisplay()
    display.begin(0, 30)
    display.close()
    assert " 0/30" in capsys.readouterr().out


def test_a_bar_fits_its_terminal_and_drops_the_figures_that_matter_least(capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")  # a dumb one has 80 columns, whatever it says
    for columns in (40, 51, 80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        show_a_bar()
        last = capsys.readouterr().out.rstrip("\n").rpartition("\n")[2].rstrip()
        assert len(last) <= columns
        assert "loss 1.733 nats" in last, columns
        assert last.endswith("3/10 loss 1.733 nats  2.500 bits 1 min left") == (columns == 51)
        assert ("lr 2.0e-03" in last, "rank 0 holds 3 MiB" in last) == (columns >= 80, columns >= 120)
    # A line longer than the terminal is left for it to break, so that it can be copied.
    monkeypatch.setenv("COLUMNS", "50")
    RichDisplay().say("try " + "word " * 20)
    assert capsys.readouterr().out.count("\n") == 1


def test_a_quiet_report_shows_nothing_and_writes_everything_and_a_second_one_adds_to_it(tmp_path, capsys):
    with RunReport(tmp_path, quiet=True) as report:
        report.begin(0, 10)
        report.say("words")
        report.step(**RECORD)
        report.finish("text", None)
    with RunReport(tmp_path, quiet=True) as report:
        report.write("evaluation", step=4, bits=1.0)
    assert capsys.readouterr().out == ""
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (first["event"], first["step"]) == ("step", 3)
    assert second == {"event": "evaluation", "step": 4, "bits": 1.0}
    assert (tmp_path / "sample.txt").read_text() == "text"


def test_without_rich_or_matplotlib_a_terminal_gets_plain_lines_and_a_hint_for_each(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for name in ("rich.progress", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with RunReport(tmp_path) as report:
        report.step(**RECORD)
        report.finish("text", None)
    hint, step, *others = capsys.readouterr().out.splitlines()
    assert hint == "for a progress bar: pip install rich"
    assert step.startswith("step      3/10")
    assert others == [
        "for a picture of the loss curve: pip install matplotlib",
        f"written   sample.txt, metrics.jsonl in {tmp_path}",
    ]


def test_the_curve_is_a_picture_and_takes_a_step_done_twice_once(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    with RunReport(tmp_path) as report:
        for step, loss in ((1, 8.0), (2, 7.0), (2, 6.0)):
            report.write("step", step=step, loss=loss)
        report.write("evaluation", step=2, bits=6.5)
        report.finish("text", 1.9)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "sample.txt").read_text() == "text"


def test_after_a_cut_line_the_next_record_is_on_a_line_of_its_own_and_the_cut_one_is_passed_over(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "metrics.jsonl").write_text(
        '{"event": "step", "step": 1, "loss": 8.0}\n{"event": "step", "step": 2, "lo'
    )
    with RunReport(tmp_path) as report:
        report.write("step", step=2, loss=7.0)
        report.finish("text", None)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert points(list(records(lines)), "step", "loss") == {1: 8.0, 2: 7.0}
    assert capsys.readouterr().out.splitlines()[0] == f"note   {tmp_path}/metrics.jsonl has 1 damaged line, passed over"


def test_what_was_done_after_the_step_that_a_run_went_on_from_does_not_count():
    read = [{"event": "step", "step": step, "loss": float(step)} for step in range(1, 9)]
    read += [{"event": "start", "step": 4}, {"event": "step", "step": 5, "loss": 50.0}]
    assert points(read, "step", "loss") == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 50.0}


@pytest.mark.parametrize("step", [1, 61, 204, 1305])
def test_a_bar_shows_the_step_whole_in_a_terminal_of_any_width(step, capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    for columns in range(44, 180, 4):
        monkeypatch.setenv("COLUMNS", str(columns))
        display = RichDisplay()
        display.begin(0, 4000)
        display.progress(step, RECORD | {"steps": 4000})
        display.close()
        last = capsys.readouterr().out.rstrip("\n").rpartition("\n")[2]
        assert f"{step}/4000" in last, columns
