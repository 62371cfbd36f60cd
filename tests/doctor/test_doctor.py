"""`sherd doctor` sees what is wrong with a machine and its ranks, and says what to do about it."""

import collections
import json
import os
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from sherd import comm
from sherd.cli import doctor as command
from sherd.cli import main as cli
from sherd.comm.host.shared_memory import SharedMemory
from sherd.tools.doctor import machine, ranks
from sherd.tools.doctor.findings import FAILURE, OK, WARNING, Finding, as_json, as_table, exit_code
from tests.doctor.started import findings_of
from tests.support.commands import refusal
from tests.support.ranks.forked import sherd as be_sherd
from tests.support.ranks.forked import torchrun

GOOD = Finding("memory", "host", "16 GiB free")
DUBIOUS = Finding("memory", "/dev/shm", "0.1 GiB free", WARNING, "docker run --shm-size=8g")
BAD = Finding("ranks", "rank 1", "it has left no word", FAILURE, "look at stderr")


# The table, the JSON and the exit code


def test_the_table_shows_each_line_under_its_section_and_the_remedy_below():
    assert as_table([GOOD, BAD, DUBIOUS]).splitlines() == [
        "memory",
        "  ok      host                    16 GiB free",
        "  warning /dev/shm                0.1 GiB free",
        "                                  -> docker run --shm-size=8g",
        "ranks",
        "  failure rank 1                  it has left no word",
        "                                  -> look at stderr",
        "",
        "1 ok, 1 warning, 1 failure",
    ]


def test_the_json_holds_the_same_and_the_exit_code_is_that_of_the_worst_line():
    read = json.loads(as_json([GOOD, BAD]))
    assert read["verdict"] == "failure"
    assert [Finding(**each) for each in read["findings"]] == [GOOD, BAD]
    for findings, code, strict in (([GOOD], 0, 0), ([GOOD, DUBIOUS], 0, 1), ([DUBIOUS, BAD], 2, 2)):
        assert (exit_code(findings, strict=False), exit_code(findings, strict=True)) == (code, strict)


# One process


def test_each_line_about_a_machine_that_is_not_ok_has_a_remedy():
    findings = list(machine.of_the_machine(2, 1))
    assert {"environment", "memory", "accelerators", "backends"} <= {each.section for each in findings}
    assert {"python", "torch", "sherd", "host", "open files"} <= {each.name for each in findings}
    assert all(bool(each.remedy) == (each.verdict != OK) for each in findings)


VARIABLES = (
    ("GLOO_SOCKET_IFNAME", "lo", ""),
    ("GLOO_SOCKET_IFNAME", "nothing9", "there is no such interface"),
    ("NCCL_SOCKET_IFNAME", "^docker", ""),
    ("TORCH_DISTRIBUTED_DEBUG", "OFF", ""),
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "slow; unset it"),
    ("CUDA_LAUNCH_BLOCKING", "0", ""),
    ("CUDA_LAUNCH_BLOCKING", "1", "nothing overlaps"),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "ranks hang"),
    ("CUDA_VISIBLE_DEVICES", "", "hides all devices"),
    ("OMP_NUM_THREADS", "many", "a number"),
    ("RANK", "3", "LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT is missing"),
)


def test_a_variable_that_is_set_is_told_with_what_is_wrong_about_it():
    for name, value, remedy in VARIABLES:
        found = [each for each in machine.variables({name: value}) if remedy or each.name == name]
        assert [each.name for each in found] == [name]
        assert remedy in found[0].remedy, name
        assert found[0].verdict == (WARNING if remedy else OK), (name, value)


def test_little_shared_memory_few_files_too_many_threads_and_an_old_torch_are_told(monkeypatch):
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage(64 * machine.MIB, 0, 64 * machine.MIB))
    found = {each.name: each for each in machine.memory(10**6)}
    assert "--shm-size" in found["/dev/shm"].remedy
    assert "ulimit -n" in found["open files"].remedy
    usable = len(os.sched_getaffinity(0))
    (good, _), (bad, _) = machine.cores(2, max(1, usable // 2)), machine.cores(4, 4 * usable)
    assert bad.verdict == WARNING
    assert "OMP_NUM_THREADS=" in bad.remedy
    assert good.verdict == (OK if usable > 1 else WARNING)
    for version, verdict in (("2.9.1", FAILURE), ("2.99.0+cpu", WARNING), ("2.12.0", OK)):
        monkeypatch.setattr(torch, "__version__", version)
        assert next(each for each in machine.versions() if each.name == "torch").verdict == verdict


def test_a_load_above_the_cores_is_told(monkeypatch):
    every = os.cpu_count()
    for load, verdict in ((0.5 * every, OK), (1.5 * every, WARNING), (20 * every, WARNING)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        (told,) = (each for each in machine.cores(1, 1) if each.name == "load")
        assert told.verdict == verdict
        assert f"{load:.1f} on {every} cores" in told.value


# Ranks


def found_by_ranks():
    return list(ranks.of_the_ranks(300.0))


def test_two_ranks_find_their_transports_links_clocks_and_train(world):
    one, other = world(2).run(found_by_ranks)
    assert {(each.section, each.name, each.verdict) for each in one} == {
        (each.section, each.name, each.verdict) for each in other
    }
    assert [each for each in one if each.verdict == FAILURE] == []
    found = {each.name: each.value for each in one}
    assert found["ranks"].startswith("2 on 1 host(s)")
    assert found["transport"] == "auto is SharedMemory: gloo ranks that are all on one host"
    assert found["others"] == "usable: auto, torch, coalesced, gloo, shared_memory"
    assert "GB/s into each rank" in found["all-gather"]
    assert "GB/s into each rank" in found["reduce-scatter"]
    assert {"train in float32", "train in bfloat16"} <= {each.name for each in one if each.section == "self-test"}


def test_a_rank_alone_trains_too(world):
    (findings,) = world(1).run(found_by_ranks)
    assert "none: there is one rank" in [each.value for each in findings]
    assert [each for each in findings if each.verdict == FAILURE] == []


def spoilt(precision, model):
    shard(precision, model)
    model.head.weight.register_post_accumulate_grad_hook(lambda weight: weight.grad.mul_(1.5))


shard = ranks._shard


def slow_links():
    """What ranks find where a collective is far slower than a copy, and where it is not."""
    found = []
    for seconds, copied in ((1e-3, 20.0), (1e-1, 20.0), (1e-1, 0.5)):
        with (
            mock.patch.object(ranks, "slowest", lambda *_, seconds=seconds: seconds),
            mock.patch.object(ranks, "_copied_per_second", lambda copied=copied: copied),
        ):
            found.append([each.verdict for each in ranks.transports() if "GB/s" in each.value])
    return found, ranks._copied_per_second() > 0


def test_a_link_that_is_far_slower_than_a_copy_is_told(world):
    assert world(2).run(slow_links) == [([[OK] * 2, [WARNING] * 2, [OK] * 2], True)] * 2


def wrong_findings():
    """What a rank finds where they share no memory, where clocks differ, gradients are wrong, and versions differ."""
    now, rank = time.time, dist.get_rank()
    without = mock.patch.object(SharedMemory, "meet", return_value=None)
    # A transport that these ranks have is not made again.
    with without, mock.patch.dict(comm.transports._known, clear=True):
        transports = list(ranks.transports())
    with mock.patch.object(time, "time", side_effect=lambda: now() + 5 * rank):
        clocks = list(ranks.clocks())
    with mock.patch.object(ranks, "_shard", spoilt):
        trainings = list(ranks.self_test())
    with mock.patch.object(ranks, "__version__", f"0.{rank}"):
        return transports, clocks, trainings, list(ranks.who())


def test_what_is_wrong_between_ranks_is_told(world):
    found = world(2).run(wrong_findings)
    for _, (clock,), trainings, _ in found:
        assert clock.verdict == WARNING
        assert float(clock.value.split()[2]) == pytest.approx(5000, abs=100)
        assert [each.verdict for each in trainings] == [FAILURE, FAILURE]
        assert "gradient of head.weight" in trainings[0].value
    transports, _, _, (_, versions) = found[0]
    (transport,) = (each for each in transports if each.name == "transport")
    assert transport.verdict == WARNING
    assert "auto is Gloo" in transport.value
    assert "cannot map one another's memory" in transport.remedy
    assert "not shared_memory" in transports[1].value
    assert (versions.verdict, versions.value) == (FAILURE, "ranks run 0.0 and 0.1")


# The command


def test_bad_words_are_refused_in_one_line(capsys):
    for words, why in (
        ("--ranks 0", "argument --ranks: 0 is out of its limits"),
        ("--ranks two", "argument --ranks: 'two' has the wrong type; it must be a whole number"),
        ("--strikt", "unknown option --strikt; did you mean --strict?"),
        ("what.bin", "what.bin is no flight record"),
    ):
        assert refusal(capsys, "doctor", *words.split()).startswith(f"sherd doctor: {why}")


def test_ranks_that_leave_no_word_are_a_failure(capsys, monkeypatch):
    def started(num_ranks, words):
        folder = words[words.index("--into") + 1]
        with open(f"{folder}/0.json", "w") as file:
            json.dump([vars(GOOD)], file)
        return 139

    monkeypatch.setattr(command, "start", started)
    assert cli.main(["doctor", "--json"]) == 2
    findings = [Finding(**each) for each in json.loads(capsys.readouterr().out)["findings"]]
    assert GOOD in findings
    told = [(each.name, each.value) for each in findings if each.verdict == FAILURE]
    assert told == [("rank 1", "it has left no word"), ("end", "exit code 139")]


SECTIONS = {"environment", "memory", "links", "ranks", "time-outs", "self-test"}


def test_the_command_starts_ranks_and_finds_nothing_that_fails(tmp_path):
    findings = findings_of(tmp_path, be_sherd, "doctor --ranks 2 --json")
    assert {each["section"] for each in findings} >= SECTIONS
    assert len([each for each in findings if each["name"] == "ranks"]) == 1


def test_it_runs_under_torchrun_too(tmp_path):
    findings = findings_of(tmp_path, torchrun, "--standalone --nproc-per-node 2 -m sherd doctor --json")
    assert {each["section"] for each in findings} >= SECTIONS


def test_ranks_that_cannot_meet_are_told_with_the_interface(tmp_path):
    environment = {"GLOO_SOCKET_IFNAME": "nothing9"}
    findings = findings_of(tmp_path, be_sherd, "doctor --ranks 2 --json", environment, code=2)
    failures = [each for each in findings if each["verdict"] == FAILURE]
    assert {each["name"] for each in failures} == {"rank 0", "rank 1"}
    assert "nothing9" in failures[0]["value"]
