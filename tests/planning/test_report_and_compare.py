"""`sherd report` writes the page, the trace and the picture of a step, `sherd compare` shows two steps side by side and
where they part, and both refuse in one line what they cannot read."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from sherd.cli.main import main
from sherd.cli.report import compared
from sherd.tools.plan.files import to_json
from sherd.tools.report import perfetto, picture
from sherd.tools.simulate.timeline import Change, Lane, LaneSpan, Peak, Timeline
from sherd.train.codes import NO_ROOM
from tests.planning.made_up import ACTIVATION, HOSTILE, MIB, timeline
from tests.support.commands import refusal


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder: in it are a plan, and a run's folder with what was recorded, slower."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text(to_json(timeline(3)))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/timeline.json").write_text(to_json(timeline(3, is_predicted=False, slow=2.0, title="run")))
    return tmp_path


def test_a_timeline_becomes_a_page_and_a_folder_of_a_run_stands_for_the_timeline_in_it(folder, capsys):
    for of in ("run/timeline.json", "run"):
        assert main(["report", of]) == 0
        page = folder / "run/report.html"
        assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
        assert "report.html" in capsys.readouterr().out
        page.unlink()


def test_a_trace_and_a_picture_are_written_and_then_no_page_that_nobody_asked_for(folder):
    assert main(["report", "plan.json", "--perfetto", "trace.json", "--png", "step.png"]) == 0
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert (folder / "step.png").read_bytes().startswith(b"\x89PNG")
    assert not (folder / "report.html").exists()
    assert main(["report", "plan.json", "--out", "page.html"]) == 0
    assert (folder / "page.html").exists()


def test_what_cannot_be_read_drawn_or_written_is_told_in_one_line(folder, capsys):
    (folder / "words.txt").write_text("some words")
    (folder / "binary").write_bytes(b"\xff\xfe\x00")
    untitled = json.loads((folder / "plan.json").read_text())
    del untitled["title"]
    (folder / "timeline.json").write_text(json.dumps(untitled))
    for words, told in (
        (["absent.json"], "absent.json: No such file"),
        (["."], "timeline.json: title: missing"),
        (["words.txt"], "words.txt: this is no JSON"),
        (["binary"], "binary: "),
        (["plan.json", "--png", "step.gif"], "step.gif: the name of a picture ends in"),
    ):
        assert told in refusal(capsys, "report", *words), words
    assert "absent/page.html" in refusal(capsys, "report", "plan.json", "--out", "absent/page.html", code=NO_ROOM)


@pytest.mark.usefixtures("folder")
def test_the_commands_load_no_torch():
    code = "import sys; from sherd.cli.main import main\n"
    code += "for words in (['report', 'run'], ['compare', 'plan.json', 'run']):\n    assert main(words) == 0\n"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


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


def test_a_picture_is_of_the_kind_that_its_name_says_and_one_of_nothing_is_drawn_too(tmp_path):
    for name, start in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF")):
        picture(timeline(2), tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)
    empty = Timeline(r"$\nothing{$", True, (), (), (), Peak(0, 0.0, "", {}, {}), 1.0)
    picture(empty, tmp_path / "empty.png")
    assert perfetto(empty)["traceEvents"]


def test_a_picture_names_cluster_limit_and_answer_and_has_no_empty_lanes(tmp_path):
    facts = {"cluster": "8 x H100, on 1 node", "memory": "9.00 GiB of 10.0 GiB: tight"}
    whole = replace(timeline(2), facts=facts, lines={"taken with the driver": 9 << 30, "limit": 10 << 30})
    shown = replace(whole, spans=tuple(each for each in whole.spans if each.lane is not Lane.COPY))
    rc_context = pytest.importorskip("matplotlib").rc_context
    with rc_context({"svg.fonttype": "none"}):  # words stay words
        picture(shown, tmp_path / "a.svg")
    drawn = (tmp_path / "a.svg").read_text()
    for words in (*facts.values(), "limit 10.0 GiB", "taken with the driver 9.00 GiB", Lane.COMPUTE.value):
        assert words in drawn, words
    assert Lane.COPY.value not in drawn
    assert Lane.MATRICES.value not in drawn


def test_without_plotly_or_matplotlib_the_commands_say_what_to_install(folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert "needs matplotlib: pip install matplotlib" in refusal(capsys, "report", "plan.json", "--png", "a.png")
    for words in (
        ["report", "plan.json"],
        ["compare", "plan.json", "run", "--out", "page.html"],
        ["plan", "gpt2.json", "--report", "page.html"],
    ):
        assert "a page needs plotly: pip install plotly" in refusal(capsys, *words), words
    assert main(["report", "plan.json", "--perfetto", "trace.json"]) == 0, "no page is asked for"


# Two steps


@pytest.mark.usefixtures("folder")
def test_a_table_and_json_have_the_figures_of_both(capsys):
    assert main(["compare", "plan.json", "run"]) == 0
    told = capsys.readouterr().out
    rows = {line[2:34].strip(): line[34:].split() for line in told.splitlines() if line.startswith("  ")}
    assert rows["all-gather, gather"][-1] == "2.00"
    assert rows["all"][-1] == rows["compute, forward"][-1] == "1.00"
    assert "llama-8b on 8 ranks (predicted) and run (recorded)" in told
    assert "no large difference in bytes" in told
    assert "first difference in seconds is (root): all-gather, gather: 3.10 ms and 6.20 ms" in told
    assert main(["compare", "plan.json", "run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    one, other = timeline(3), timeline(3, slow=2.0)
    assert found["seconds"]["step"] == [one.seconds, other.seconds]
    assert found["peak"]["all"] == [one.peak.nbytes, other.peak.nbytes]
    assert found["parts"]["bytes"] == ""


def test_the_first_unit_and_kind_that_differ_are_named():
    plan = timeline(3)
    longer = replace(plan, changes=(*plan.changes, Change(plan.seconds, ACTIVATION, 2, 900 * MIB)))
    assert compared(plan, longer)["parts"]["bytes"].startswith("layers.1: activations: ")
    slower = replace(plan, spans=(*plan.spans, LaneSpan(Lane.COMPUTE, "forward", 3, 0.0, plan.seconds)))
    assert compared(plan, slower)["parts"]["seconds"].startswith("layers.2: compute, forward: ")
    assert compared(plan, plan)["parts"] == {"bytes": "", "seconds": ""}
    assert compared(plan, longer, 0.99)["parts"]["bytes"] == ""


def test_the_page_has_both_steps_and_names_may_hold_anything(folder, capsys):
    assert main(["compare", "plan.json", "run", "--out", "page.html"]) == 0
    assert (folder / "page.html").read_text(encoding="utf-8").count('stackgroup":"3"') > 0
    (folder / "odd.json").write_text(to_json(timeline(2, title=HOSTILE, prefix=HOSTILE)))
    assert main(["compare", "odd.json", "odd.json"]) == 0
    assert "größer" in capsys.readouterr().out


def test_what_cannot_be_compared_is_told_in_one_line(folder, capsys):
    (folder / "words.txt").write_text("some words")
    (folder / "more.json").write_text(to_json(timeline(4)))
    (folder / "others.json").write_text(to_json(timeline(3, prefix="blocks.")))
    for words, told in (
        (["absent.json", "run"], "absent.json: No such file"),
        (["plan.json", "."], "timeline.json: No such file"),
        (["plan.json", "words.txt"], "words.txt: this is no JSON"),
        (["plan.json", "more.json"], "one timeline has 4 units and the other 5"),
        (["plan.json", "others.json"], "unit 1 is 'layers.0' in one timeline and 'blocks.0' in the other"),
        (["plan.json", "run", "--share", "2"], "2.0 is out of its limits; it must be a share from 0 to 1"),
        (["plan.json"], "required: TRACE"),
    ):
        assert told in refusal(capsys, "compare", *words), words
    words = ["compare", "plan.json", "run", "--out", "absent/page.html"]
    assert "absent/page.html" in refusal(capsys, *words, code=NO_ROOM)
