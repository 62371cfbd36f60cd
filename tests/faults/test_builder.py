"""The builder does what it says: this fault, on this rank, in this step and phase, once, and nothing anywhere else."""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.faults import builder
from tests.faults.builder import CAUGHT, DISK, ROUTES, Fault, Injected, Kind, Phase, Probe, is_caught, phases_of
from tests.faults.campaign import ERRORS, Outcome, Verdict, drawn, judged, may_become
from tests.faults.crews import Case, Crew, End, Ends
from tests.faults.page import sections, written
from tests.faults.program import ALL, FRONT_ENDS, PLACEMENTS, TRANSPORTS, Chain, Setting, batch
from tests.support.ranks import warm_up

PATIENCE_S = 60


def probe_of(fault: Fault, rank: int = 1, step: int = 2) -> tuple[Probe, list[str]]:
    told: list[str] = []
    return Probe(fault, rank, lambda: told.append("told"), step=step), told


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("phase", Phase)
def test_a_fault_is_made_where_its_kind_can_happen_and_refused_elsewhere(kind, phase):
    if phase in phases_of(kind):
        assert kind.value in str(Fault(1, 2, phase, kind))
    else:
        with pytest.raises(ValueError, match=f"{kind.name} cannot happen in phase {phase.name}"):
            Fault(1, 2, phase, kind)


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.BACKWARD])
def test_a_fault_happens_once_on_its_rank_in_its_step_and_phase(phase):
    fault = Fault(1, 2, phase, Kind.RAISE, unit=0)
    for rank, step, other, unit in itertools.product((0, 1), (1, 2), Phase, (0, 1)):
        probe, told = probe_of(fault, rank, step)
        if (rank, step, other) == (1, 2, phase) and (unit == 0 or not fault.has_unit):
            with pytest.raises(Injected, match="rank 1, step 2"):
                probe.at(other, unit=unit)
            assert told == ["told"]
            assert probe.at(other, "x", unit=unit) == "x"
        else:
            assert probe.at(other, torch.ones(1), unit=unit) is not None
            assert told == []


@pytest.mark.parametrize("phase", [Phase.BEFORE_FORWARD, Phase.FORWARD, Phase.BACKWARD])
def test_nan_is_behind_its_unit_only(phase):
    probe, told = probe_of(Fault(1, 2, phase, Kind.NAN, unit=1))
    model = Chain(probe)
    x = probe.at(Phase.BEFORE_FORWARD, batch(1, 2))
    loss = model(x).sum()
    assert told == ([] if phase is Phase.BACKWARD else ["told"])
    assert loss.isnan().item() == (phase is not Phase.BACKWARD)
    loss.backward()
    assert told == ["told"]
    has_nan = [block.linear.weight.grad.isnan().any().item() for block in model.blocks]
    assert has_nan == ([True, True, False] if phase is Phase.BACKWARD else [True, True, True])


def test_routes_skip_repeat_and_reorder_on_one_rank_in_one_step():
    expected = {Kind.SKIP: (0, 2), Kind.REPEAT: (0, 1, 2, 1), Kind.REORDER: (2, 1, 0)}
    assert expected.keys() == ROUTES
    for kind, order in expected.items():
        fault = Fault(1, 2, Phase.FORWARD, kind, unit=1)
        probe, told = probe_of(fault)
        assert probe.route(ALL) == order
        assert told == ["told"]
        for rank, step in ((0, 2), (1, 1)):
            probe, told = probe_of(fault, rank, step)
            assert probe.route(ALL) == ALL
            assert told == []


def test_a_full_disk_is_full_for_its_rank_in_its_step(tmp_path):
    for kind in DISK:
        probe, told = probe_of(Fault(1, 2, Phase.CHECKPOINT, kind))
        with pytest.raises(OSError) as full, open(probe.disk(str(tmp_path / "x")), "wb") as file:
            file.write(b"x" * 100)
        assert full.value.errno == errno.ENOSPC
        assert told == ["told"]
        assert is_caught(probe.fault, full.value) == (kind in CAUGHT)
        assert probe_of(probe.fault, rank=0)[0].disk("x") == "x"


@pytest.mark.parametrize("kind", [Kind.RAISE, Kind.CATCH, Kind.OOM, Kind.CATCH_OOM])
def test_the_loop_catches_what_it_is_meant_to_and_nothing_else(kind):
    fault = Fault(1, 2, Phase.BETWEEN, kind)
    probe, _ = probe_of(fault)
    with pytest.raises((Injected, torch.OutOfMemoryError)) as raised:
        probe.at(Phase.BETWEEN)
    assert is_caught(fault, raised.value) == (kind in CAUGHT)
    assert not is_caught(fault, RuntimeError(str(fault)))
    assert not is_caught(fault, torch.OutOfMemoryError("of the machine itself"))


def test_slow_and_late_last_as_long_as_they_say():
    for kind, seconds in ((Kind.SLOW, builder.MOMENT_S), (Kind.LATE, 0.5)):
        probe = Probe(Fault(0, 0, Phase.BETWEEN, kind), 0, lambda: None, late_s=0.5, step=0)
        begun = time.monotonic()
        assert probe.at(Phase.BETWEEN, "x") == "x"
        assert time.monotonic() - begun >= seconds


def meet_it(kind: Kind) -> None:
    Probe(Fault(0, 0, Phase.BETWEEN, kind), 0, lambda: None, step=0).at(Phase.BETWEEN)
    os._exit(7)


def ended_by(kind: Kind) -> int:
    warm_up()
    process = multiprocessing.get_context("forkserver").Process(target=meet_it, args=(kind,))
    process.start()
    deadline = time.monotonic() + PATIENCE_S
    while kind in (Kind.STOP, Kind.PAUSE) and state_of(process.pid) != "T":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if kind in (Kind.STOP, Kind.PAUSE):
        os.kill(process.pid, signal.SIGCONT)
    process.join(PATIENCE_S)
    return process.exitcode


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (Kind.LEAVE, builder.EXIT_CODE),
        (Kind.EXIT, builder.EXIT_CODE),
        (Kind.KILL, -signal.SIGKILL),
        (Kind.STOP, 7),
        (Kind.PAUSE, 7),
    ],
)
def test_a_process_ends_or_stops_as_the_kind_says(kind, code):
    assert ended_by(kind) == code


# The campaign


def test_seeds_draw_every_kind_in_every_phase_under_every_setting():
    cases = [drawn(seed) for seed in range(2000)]
    assert {(case.fault.kind, case.fault.phase) for case in cases} == {
        (kind, phase) for kind in Kind for phase in phases_of(kind)
    }
    settings = [case.setting for case in cases]
    assert {(each.num_ranks, each.transport, each.divergence, each.front_end) for each in settings} == set(
        itertools.product((2, 3, 4), TRANSPORTS, ("error", "join"), FRONT_ENDS)
    )
    assert {each.placement for each in settings} == set(PLACEMENTS)
    assert {each.is_hybrid for each in settings} == {True, False}
    assert {each.fault.kind for each in cases[:19]} == set(Kind)
    assert drawn(17) == drawn(17)


KILLED = Case(Setting(num_ranks=3), Fault(1, 2, Phase.BACKWARD, Kind.KILL))
NAMES = "CommError"


def ended(*texts: str, kinds: tuple[str, ...] = (NAMES, NAMES), code: int = -9) -> Ends:
    """Ranks 0 and 2 of `KILLED` with these errors, two seconds after the fault."""
    ends = [End(error=kind, text=text, when=12.0, exit_code=1) for kind, text in zip(kinds, texts, strict=True)]
    return Ends([ends[0], End(exit_code=code), ends[1]], fault_at=10.0)


@pytest.mark.parametrize(
    ("ends", "outcome"),
    [
        (ended("[rank 0] rank 1 has died", "[rank 2] Rank 1 has died"), Outcome.NAMED),
        (ended("[rank 0] rank 1 has died", "[rank 2] one of the ranks [0, 1]"), Outcome.AMONG),
        (ended("[rank 0] rank 2 has left", "[rank 2] rank 1 has died"), Outcome.OTHER),
        (ended("[rank 0] rank 1 has died", "[rank 2] something has died"), Outcome.UNNAMED),
        (ended("[rank 0] rank 1 has died", "rank 1", kinds=(NAMES, "RuntimeError")), Outcome.UNNAMED),
        (ended("[rank 0] rank 1 has died", "[rank 2] rank 1 has died", code=-6), Outcome.CRASHED),
    ],
)
def test_a_verdict_says_how_well_the_errors_name_the_rank(ends, outcome):
    verdict = judged(KILLED, ends)
    assert verdict.outcome is outcome
    assert verdict.is_good == (outcome in ERRORS)
    assert verdict.seconds == 2.0


def test_a_rank_that_is_stuck_or_leaves_something_makes_a_case_bad():
    ends = ended("[rank 0] rank 1 has died", "[rank 2] rank 1 has died")
    ends.left.append("/dev/shm/sherd")
    assert judged(KILLED, ends).outcome is Outcome.LEFT
    ends.of_rank[2].is_stuck = True
    assert judged(KILLED, ends).outcome is Outcome.HUNG
    assert not judged(KILLED, ends).is_good


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_training_without_a_fault_ends_as_the_plain_one(tmp_path, front_end):
    case = Case(Setting(front_end=front_end), None)
    verdict = judged(case, Crew(case, tmp_path / "case").run())
    assert verdict.outcome is Outcome.RIGHT, verdict.words


def test_wrong_values_are_noticed(tmp_path):
    """The plain model has the NaN, and the sharded one has not: the verdict must see it."""
    fault = Fault(1, 1, Phase.FORWARD, Kind.NAN)
    case = Case(Setting(), fault)
    ends = Crew(Case(Setting(), Fault(1, 1, Phase.FORWARD, Kind.SLOW)), tmp_path / "case").run()
    assert judged(case, ends).outcome is Outcome.WRONG


def test_the_page_has_a_row_for_each_kind_and_keeps_its_words():
    verdicts = [Verdict(KILLED, Outcome.NAMED, 2.0), Verdict(KILLED, Outcome.NAMED, 4.0)]
    page = "before\n<!-- times -->\nold\n<!-- /times -->\nbehind\n"
    assert (
        written(page, verdicts) == f"before\n<!-- times -->\n{sections(verdicts)['times']}\n<!-- /times -->\nbehind\n"
    )
    assert "| SIGKILL | 2 | 3.00 | 4.00 |" in sections(verdicts)["times"]
    assert may_become(KILLED) == ERRORS
    for kind in Kind:
        assert f"| {kind.value} |" in sections(verdicts)["outcomes"]
