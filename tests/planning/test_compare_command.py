"""Does `sherd compare` show two steps side by side and where they part, and refuse in one line what it cannot read?"""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from sherd.planning.files import to_json
from sherd.simulate.timeline import Change, Lane, Span
from sherd.train.cli import main
from sherd.train.codes import BAD_INPUT, NO_ROOM
from sherd.train.compare_command import compared
from tests.planning.made_up import ACTIVATION, HOSTILE, MIB, timeline


@pytest.fixture
def two(tmp_path, monkeypatch):
    """A plan, and a run's folder with what was recorded, slower."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text(to_json(timeline(3)))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/timeline.json").write_text(to_json(timeline(3, is_predicted=False, slow=2.0, title="run")))
    return tmp_path


def test_the_table_has_lanes_and_kinds_of_both(two, capsys):
    assert main(["compare", "plan.json", "run"]) == 0
    told = capsys.readouterr().out
    rows = {line[2:34].strip(): line[34:].split() for line in told.splitlines() if line.startswith("  ")}
    assert rows["all-gather, gather"][-1] == "2.00"
    assert rows["all"][-1] == rows["compute, forward"][-1] == "1.00"
    assert "llama-8b on 8 ranks (predicted) and run (recorded)" in told
    assert "no large difference in bytes" in told
    assert "first difference in seconds is (root): all-gather, gather: 3.10 ms and 6.20 ms" in told


def test_the_figures_are_there_as_json(two, capsys):
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
    slower = replace(plan, spans=(*plan.spans, Span(Lane.COMPUTE, "forward", 3, 0.0, plan.seconds)))
    assert compared(plan, slower)["parts"]["seconds"].startswith("layers.2: compute, forward: ")
    assert compared(plan, plan)["parts"] == {"bytes": "", "seconds": ""}
    assert compared(plan, longer, 0.99)["parts"]["bytes"] == ""


def test_names_may_hold_anything(two, capsys):
    (two / "odd.json").write_text(to_json(timeline(2, title=HOSTILE, prefix=HOSTILE)))
    assert main(["compare", "odd.json", "odd.json"]) == 0
    assert "größer" in capsys.readouterr().out


def test_the_page_has_both_steps(two):
    assert main(["compare", "plan.json", "run", "--out", "page.html"]) == 0
    assert (two / "page.html").read_text(encoding="utf-8").count("class=step ") == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["absent.json", "run"], "absent.json: No such file"),
        (["plan.json", "."], "timeline.json: No such file"),
        (["plan.json", "words.txt"], "words.txt: this is no JSON"),
        (["plan.json", "more.json"], "one timeline has 4 units and the other 5"),
        (["plan.json", "others.json"], "unit 1 is 'layers.0' in one timeline and 'blocks.0' in the other"),
        (["plan.json", "run", "--share", "2"], "'2' is no share from 0 to 1"),
        (["plan.json"], "required: TRACE"),
    ],
)
def test_what_cannot_be_compared_is_told_in_one_line(two, capsys, words, told):
    (two / "words.txt").write_text("some words")
    (two / "more.json").write_text(to_json(timeline(4)))
    (two / "others.json").write_text(to_json(timeline(3, prefix="blocks.")))
    assert main(["compare", *words]) == BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sherd compare: ")
    assert told in line


def test_a_page_that_cannot_be_written_is_told_in_one_line(two, capsys):
    assert main(["compare", "plan.json", "run", "--out", "absent/page.html"]) == NO_ROOM
    (line,) = capsys.readouterr().err.splitlines()
    assert "absent/page.html" in line


def test_the_command_loads_no_torch(two):
    code = "import sys; from sherd.train.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    words = ["compare", "plan.json", "run"]
    subprocess.run([sys.executable, "-c", code, *words], check=True, stdout=subprocess.DEVNULL)
