"""The figure for an accelerator plans, measures, survives failures and writes its page, with a tiny stack on a CPU."""

import json
import math
import os
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from bench import __main__ as command
from bench.__main__ import ASKED_FOR, FIGURES, parse
from bench.device import page
from bench.device.cases import CASES, LARGE, PLAIN, SMALLER, TINY, systems_for
from bench.device.clock import Measured
from bench.device.figure import NO_TIME, jobs_of, measure, plan_for, results_of, stack_for
from bench.device.groups import Failed, Group, Ranks
from bench.device.lines import Lines, read
from bench.device.rows import Result, rows_of, unlike_losses
from bench.device.trace import idle_ms
from bench.models import num_bytes
from bench.pages import read_csv
from bench.peak import MIB
from bench.ranks import Conditions
from bench.systems import FSDP2, MEGATRON, SHERD
from bench.table import render

QUICK = Conditions(device="cpu", quick=True, rounds=2, minutes=5.0)


# End to end


@pytest.mark.slow
def test_quick_run_on_the_cpu_measures_each_system_and_writes_lines_and_page(tmp_path):
    lines, target = tmp_path / "lines", tmp_path / "page.md"
    target.write_text(f"above\n{page.BEGIN}\nold figures\n{page.END}\nbelow\n")
    figure = measure(replace(QUICK, cases=("accumulate", "graph"), lines=lines))
    assert figure.sound
    by_name = {row.figure: row for row in figure.rows}
    systems = [system.name for system in systems_for(CASES["accumulate"], True, False)]
    for what in ("step", "host", "allocated in forward", "allocated in backward", "allocated in optimizer"):
        row = by_name[f"8 fake ranks, accumulate: {what}"]
        assert list(row.values) == systems, what
        assert all(value > 0 for value in row.values.values()), what
    for name in systems:
        assert by_name[f"8 fake ranks, graph: {name}"].remark == "torch has no graphs for cpu"
    circumstances, results = read([lines])
    assert results == figure.samples["results"]
    page.write(target, circumstances, results)
    text = target.read_text()
    assert text.startswith("above\n")
    assert text.endswith("below\n")
    assert "old figures" not in text
    assert "torch has no graphs for cpu" in text
    head, *lines = read_csv(target.with_suffix(".csv"))
    assert [line[0] + ", " + line[1] for line in lines] == [row.figure for row in figure.rows]
    assert {len(line) for line in lines} == {len(head)}
    assert render(figure.rows)


# The plan


def devices(number: int, **fields) -> Conditions:
    class WithDevices(Conditions):
        num_devices = number

    return WithDevices(device="cuda", **fields)


def test_one_device_is_a_rank_of_fake_ones_and_several_are_real_ranks_first():
    alone, four = plan_for(devices(1)), plan_for(devices(4))
    kinds = [[(group.kind, group.num_ranks) for group, _ in plan] for plan in (alone, four)]
    assert kinds[0] == [("fake", 2), ("fake", 64), ("fake", 8)]
    # A silent group shows what is exposed.
    assert kinds[1] == [("real", 4), ("silent", 4), ("real", 4), *kinds[0]]
    cases = [list(dict.fromkeys(job.case.name for job in jobs)) for _, jobs in alone]
    assert cases == [["plain"], ["plain"], list(CASES)]
    assert {job.case.name for _, jobs in four[3:] for job in jobs} == {"plain"}
    assert plan_for(devices(4, groups=("fake",))) == alone


def test_the_second_turn_is_in_the_opposite_order_and_megatron_is_measured_where_it_is_installed():
    jobs = jobs_of([PLAIN], Group("fake", 8), devices(1))
    names = [job.system.name for job in jobs]
    assert names == names[::-1]
    assert [job.turn for job in jobs] == [0] * (len(jobs) // 2) + [1] * (len(jobs) // 2)
    for is_installed in (True, False):
        assert (MEGATRON in systems_for(PLAIN, False, has_megatron=is_installed)) == is_installed


def test_the_large_stack_is_llama_3_8_b_but_for_grouped_keys_and_layers():
    assert [stack_for(devices(1)), stack_for(devices(1, quick=True))] == [LARGE, SMALLER]
    assert stack_for(Conditions("cpu")) is TINY
    assert CASES["offload"].stack_for(LARGE) is SMALLER
    assert CASES["offload"].stack_for(TINY) is TINY
    model = LARGE.on(torch.device("meta"), torch.bfloat16)
    assert len(model.blocks) == 8
    assert num_bytes(model) == 2 * (2 * 128256 * 4096 + 8 * (4 * 4096**2 + 3 * 4096 * 14336 + 2 * 4096) + 4096)


def test_the_figure_is_the_only_one_of_an_accelerator_and_asked_for_by_name_on_the_cpu(monkeypatch, capsys):
    assert FIGURES["device"] is measure
    assert parse(["--device", "cpu"]).only == [name for name in FIGURES if name not in ("device", *ASKED_FOR)]
    assert parse(["--device", "cpu", "--only", "device"]).only == ["device"]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    chosen = parse([])
    assert (chosen.device, chosen.only, chosen.minutes, chosen.rounds) == ("cuda", ["device"], 8.0, 5)
    assert parse(["--quick"]).minutes == 2.0
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        parse(["--device", "cuda"])
    assert "this torch sees no accelerator" in capsys.readouterr().err


def test_a_module_can_be_imported_and_its_function_called_before_the_device_is_looked_for(tmp_path, monkeypatch):
    (tmp_path / "out_of_tree.py").write_text("calls = []\ndef load():\n    calls.append(1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    chosen = parse(["--device", "cpu", "--import", "out_of_tree:load"])
    import out_of_tree

    assert out_of_tree.calls == [1]
    assert command.conditions_of(chosen).load == "out_of_tree:load"


# Ranks that fail


def answer(mesh, question):
    if question == "raise":
        raise ValueError("first line\nsecond line")
    if question == "die":
        os._exit(3)
    if question == "hang" and mesh.get_rank() == 0:
        time.sleep(60)
    return question, mesh.get_rank(), mesh.size()


def test_a_rank_that_raises_or_dies_says_so_in_a_line():
    with Ranks(Group("fake", 8), "cpu", "", answer) as ranks:
        assert ranks.ask("one", 60) == [("one", 0, 8)]
        with pytest.raises(Failed, match=r"^ValueError: first line \(test_device.py:\d+\)$"):
            ranks.ask("raise", 60)
        with pytest.raises(Failed, match=r"^the process died$"):
            ranks.ask("die", 60)


@pytest.mark.slow
def test_real_ranks_answer_in_order_and_one_that_hangs_is_given_up():
    with Ranks(Group("real", 2), "cpu", "", answer) as ranks:
        assert ranks.ask("one", 60) == [("one", 0, 2), ("one", 1, 2)]
        with pytest.raises(Failed, match="no answer within 1 s"):
            ranks.ask("hang", 1)


class FewJobs(AbstractContextManager):
    """Stands for `Ranks`: the job of FSDP2 fails, the others are measured in no time."""

    asked: ClassVar[list[list[str]]] = []
    """Systems, by the processes that were asked for them."""

    def __init__(self, *args):
        FewJobs.asked.append([])

    def __exit__(self, *error):
        pass

    def ask(self, job, seconds):
        FewJobs.asked[-1].append(job.system.name)
        if job.system is FSDP2:
            raise Failed("out of memory")
        return [measured_in(2.0)]


def test_a_failure_costs_one_system_its_row_and_the_others_go_on(monkeypatch):
    monkeypatch.setattr("bench.device.figure.Ranks", FewJobs)
    monkeypatch.setattr(FewJobs, "asked", [])
    group = Group("fake", 8)
    jobs = [job for job in jobs_of([PLAIN], group, devices(1)) if job.system in (FSDP2, SHERD)]
    results = list(results_of(group, jobs, devices(1), time.monotonic() + 60))
    assert [(each.system, each.why) for each in results] == [("FSDP2", "out of memory"), ("sherd", ""), ("sherd", "")]
    assert FewJobs.asked == [["FSDP2"], ["sherd", "sherd"]]


def test_what_the_time_does_not_reach_is_a_row_that_says_so():
    jobs = jobs_of([PLAIN, CASES["compile"]], Group("fake", 8), replace(QUICK))
    results = list(results_of(Group("fake", 8), jobs, QUICK, time.monotonic() - 1))
    assert [(each.case, each.why) for each in results] == [("plain", NO_TIME), ("compile", NO_TIME)]
    assert results[0].system == "FSDP1, FSDP2, sherd, Flat, wrapper"


# Rows


def measured_in(step: float, loss: float = 8.0) -> Measured:
    peaks = {"forward": 2 * MIB, "backward": 3 * MIB, "optimizer": MIB}
    return Measured([step, step], [1.0, 3.0], [1.0], 0.5, peaks, {}, 4 * MIB, loss)


def result(system: str, *ranks: Measured, **fields) -> Result:
    return replace(Result("real", 2, "plain", "a stack", system, 0, list(ranks)), **fields)


def test_rows_take_the_slowest_rank_the_mean_host_and_the_largest_peak():
    first, second = measured_in(10.0), replace(measured_in(12.0), host_ms=[3.0, 5.0], allocated={"backward": 5 * MIB})
    second.allocated.update(forward=MIB, optimizer=MIB)
    rows = {row.figure: row for row in rows_of([result("FSDP2", measured_in(24.0)), result("sherd", first, second)])}
    assert rows["2 ranks, plain: step"].values == {"FSDP2": 24.0, "sherd": 12.0}
    assert rows["2 ranks, plain: step"].ratios == {"sherd": 0.5}
    assert rows["2 ranks, plain: host"].values["sherd"] == 3.0
    assert rows["2 ranks, plain: compute idle"].values == {"sherd": 0.5, "FSDP2": 0.5}
    assert rows["2 ranks, plain: allocated in backward"].values == {"FSDP2": 3.0, "sherd": 5.0}
    assert rows["2 ranks, plain: reserved"].values == {"FSDP2": 4.0, "sherd": 4.0}
    step = rows["2 ranks, plain: step"]
    assert step.aims[0].verdict(step) == "<= 1: met"


def test_exposed_communication_is_what_a_silent_group_does_not_have():
    silent = [result("FSDP2", measured_in(20.0), kind="silent"), result("sherd", measured_in(9.0), kind="silent")]
    rows = rows_of([result("FSDP2", measured_in(24.0)), result("sherd", measured_in(10.0)), *silent])
    exposed = {row.figure: row for row in rows}["2 ranks, plain: exposed communication"]
    assert exposed.values == {"FSDP2": 4.0, "sherd": 1.0}
    assert exposed.ratios == {"sherd": 0.25}
    assert not any("silent" in row.figure for row in rows)


def test_a_system_that_failed_in_its_second_turn_has_a_reason_and_no_figures():
    again = result("sherd", why="the process died", turn=1)
    rows = rows_of([result("FSDP2", measured_in(4.0)), result("sherd", measured_in(3.0)), again])
    assert all("sherd" not in row.values for row in rows)
    assert (rows[-1].figure, rows[-1].remark) == ("2 ranks, plain: sherd", "the process died")


def test_compute_idles_where_the_busiest_stream_runs_nothing():
    def event(stream: int, start: float, length: float, kind: str = "kernel"):
        return {"ph": "X", "cat": kind, "ts": start, "dur": length, "args": {"stream": stream}}

    compute = [event(7, 1000, 2000), event(7, 2500, 1000), event(7, 5000, 1000)]
    others = [event(9, 500, 1000, "gpu_memcpy"), event(9, 6000, 500), {"ph": "X", "cat": "cpu_op", "ts": 0, "dur": 9e9}]
    assert idle_ms([*compute, *others]) == pytest.approx(0.5 + 1.5 + 0.5)
    assert idle_ms(others[-1:]) is None


def test_losses_of_a_real_group_must_agree_and_a_nan_does_not():
    same = [result("FSDP2", measured_in(1.0)), result("sherd", measured_in(1.0, loss=8.05))]
    assert unlike_losses(same) == ""
    assert unlike_losses([replace(each, kind="fake") for each in (*same, result("Flat", measured_in(1.0, 3.0)))]) == ""
    for loss in (8.5, math.nan):
        assert "sherd has" in unlike_losses([same[0], result("sherd", measured_in(1.0, loss=loss))])


# Lines and page


def test_lines_are_read_back_and_one_that_was_cut_off_is_left_out(tmp_path):
    file, results = tmp_path / "lines", [result("sherd", measured_in(1.0)), result("FSDP2", why="no memory")]
    lines = Lines(file)
    lines.begin(QUICK)
    for each in results:
        lines.add(each)
    with file.open("a") as cut:
        cut.write(json.dumps(asdict(results[0]))[:40])
    circumstances, found = read([file])
    assert found == results
    assert circumstances[0]["torch"] == torch.__version__


def test_the_page_of_the_repository_has_the_markers_and_a_page_without_is_refused(tmp_path):
    text = (Path(page.__file__).parents[2] / "docs/understand/benchmarks.md").read_text()
    assert text.index(page.BEGIN) < text.index(page.END)
    other = tmp_path / "other.md"
    other.write_text(f"{page.END} {page.BEGIN}")
    with pytest.raises(ValueError, match="nothing says where"):
        page.write(other, [], [])


def test_a_section_says_conditions_what_counts_what_a_case_is_and_has_a_table_for_each_group():
    circumstances = {
        "date": "2026-01-02", "device": "A GPU", "num_devices": 2, "driver": "570", "torch": "2.11", "cuda": "12.8",
        "nccl": "", "python": "3.11", "cores": 16, "load": 0.5, "steps": 5,
    }  # fmt: skip
    results = [result("FSDP2", measured_in(4.0)), result("sherd", measured_in(3.0))]
    text = page.section([circumstances], [*results, *(replace(each, kind="fake") for each in results)])
    assert "on 2026-01-02 on 2 x A GPU with torch 2.11, driver 570, cuda 12.8, Python 3.11, 16 CPU cores" in text
    assert "- step: from the end of one step" in text
    assert "- exposed" not in text
    assert f"- Case plain: {PLAIN.what}. Llama blocks, a stack." in text
    assert text.index("**2 ranks**") < text.index("**2 fake ranks**")
    assert text.count("| plain: step ") == 2  # the ratios of both
