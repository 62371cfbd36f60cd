"""Does `sherd report` write the page, the trace and the picture, and refuse in one line what it cannot read?"""

import json
import subprocess
import sys

import pytest

from sherd.planning.files import to_json
from sherd.planning.report import perfetto, picture
from sherd.simulate.timeline import Lane, Peak, Timeline
from sherd.train.cli import main
from sherd.train.codes import BAD_INPUT, NO_ROOM
from tests.planning.made_up import timeline


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A file with a timeline, in a folder that is the current one."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "timeline.json"
    path.write_text(to_json(timeline()))
    return path


def test_a_timeline_becomes_a_page(kept, capsys):
    assert main(["report", str(kept)]) == 0
    assert (kept.parent / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "report.html" in capsys.readouterr().out


def test_a_folder_of_a_run_stands_for_the_timeline_in_it(kept):
    assert main(["report", str(kept.parent), "--out", "page.html"]) == 0
    assert (kept.parent / "page.html").exists()


def test_a_trace_and_a_picture_are_written_and_then_no_page_that_nobody_asked_for(kept):
    assert main(["report", str(kept), "--perfetto", "trace.json", "--png", "step.png"]) == 0
    assert json.loads((kept.parent / "trace.json").read_text())["traceEvents"]
    assert (kept.parent / "step.png").read_bytes().startswith(b"\x89PNG")
    assert not (kept.parent / "report.html").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["absent.json"], "absent.json: No such file"),
        (["."], "timeline.json: title: missing"),
        (["words.txt"], "words.txt: this is no JSON"),
        (["binary"], "binary: "),
        (["timeline.json", "--png", "step.gif"], "step.gif: the name of a picture ends in"),
    ],
)
def test_what_cannot_be_read_or_drawn_is_told_in_one_line(tmp_path, monkeypatch, capsys, words, told):
    monkeypatch.chdir(tmp_path)
    plain = json.loads(to_json(timeline(1)))
    (tmp_path / "good.json").write_text(json.dumps(plain))
    if words == ["."]:
        plain.pop("title")
    (tmp_path / "timeline.json").write_text(json.dumps(plain))
    (tmp_path / "words.txt").write_text("some words")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert main(["report", *words]) == BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sherd report: ")
    assert told in line


def test_a_page_that_cannot_be_written_is_told_in_one_line(kept, capsys):
    assert main(["report", str(kept), "--out", "absent/page.html"]) == NO_ROOM
    (line,) = capsys.readouterr().err.splitlines()
    assert "absent/page.html" in line


def test_the_command_loads_no_torch(kept):
    code = "import sys; from sherd.train.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, "report", str(kept)], check=True, stdout=subprocess.DEVNULL)


def test_a_trace_has_a_thread_for_each_lane_all_spans_and_memory():
    shown = timeline()
    events = perfetto(shown)["traceEvents"]
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(threads.values()) == [lane.value for lane in Lane]
    spans = [event for event in events if event["ph"] == "X"]
    assert [(threads[each["tid"]], each["cat"], each["args"]["bytes"]) for each in spans] == [
        (span.lane.value, span.name, span.nbytes) for span in shown.spans
    ]
    assert [each["ts"] for each in spans] == pytest.approx([1e6 * span.start for span in shown.spans])
    assert [each["dur"] for each in spans] == pytest.approx([1e6 * (span.end - span.start) for span in shown.spans])
    counters = [sum(event["args"].values()) for event in events if event["ph"] == "C"]
    assert max(counters) == shown.peak.nbytes
    assert spans[0]["name"].endswith("(root)")
    json.dumps(perfetto(shown), allow_nan=False)


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF")])
def test_a_picture_is_of_the_kind_that_its_name_says(tmp_path, name, start):
    picture(timeline(2), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)


def test_a_timeline_of_nothing_has_a_picture_and_a_trace(tmp_path):
    empty = Timeline(r"$\nothing{$", True, (), (), (), Peak(0, 0.0, "", {}, {}), 1.0)
    picture(empty, tmp_path / "a.png")
    assert perfetto(empty)["traceEvents"]


def test_without_matplotlib_the_command_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (tmp_path / "step.json").write_text(to_json(timeline(1)))
    assert main(["report", str(tmp_path / "step.json"), "--png", str(tmp_path / "a.png")]) == 2
    assert "needs matplotlib: pip install '.[viz]'" in capsys.readouterr().err
