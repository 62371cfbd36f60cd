"""The figure `device`: which group measures which case of which system, in what time; and the rows of it."""

from __future__ import annotations

import gc
import importlib.util
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..ranks import Conditions
from ..systems import System
from ..table import Figure
from .cases import CASES, LARGE, PLAIN, SMALLER, STACKS, TINY, Case, Stack, systems_for
from .clock import Measured, measured
from .groups import Failed, Group, Ranks
from .lines import Lines
from .rows import Result, rows_of, unlike_losses
from .training import Unsupported, training_for

FAKE_SIZES = (2, 64, 8)
"""The other cases are measured with the last one's."""
JOB_SECONDS = 120.0
JOB_SECONDS_AT_END = 30.0
"""How long one system in one case may take, and how long if it is begun when the time is nearly up."""
NUM_TURNS = 2
"""Each system is measured twice in the plain case, the second time in the opposite order."""
NO_TIME = "not measured: the time was up"


@dataclass(frozen=True, slots=True)
class Job:
    """One system in one case, in one turn."""

    system: System
    case: Case
    stack: Stack
    turn: int
    num_steps: int


Plan = list[tuple[Group, list[Job]]]


def measure(conditions: Conditions) -> Figure:
    """All that the plan has and the time allows. Sound if anything was measured and losses agree."""
    lines = Lines(conditions.lines)
    lines.begin(conditions)
    results: list[Result] = []
    until = time.monotonic() + 60 * conditions.minutes
    for group, jobs in plan_for(conditions):
        for result in results_of(group, jobs, conditions, until):
            lines.add(result)
            results.append(result)
            print(f"\n  {result.line()}", end="", file=sys.stderr, flush=True)
    difference = unlike_losses(results)
    notes = [difference] if difference else []
    return Figure(
        rows_of(results), {"results": results}, notes, bool(not difference and any(each.ranks for each in results))
    )


# The plan


def plan_for(conditions: Conditions) -> Plan:
    """The groups, the most important first, each with its jobs in order."""
    chosen = [case for case in CASES.values() if not conditions.cases or case.name in conditions.cases]
    plain, others = [case for case in chosen if case is PLAIN], [case for case in chosen if case is not PLAIN]
    plan: list[tuple[Group, list[Case]]] = []
    real = conditions.num_devices if conditions.device != "cpu" and "real" in conditions.groups else 0
    if real > 1:
        plan += [(Group("real", real), plain), (Group("silent", real), plain), (Group("real", real), others)]
    if "fake" in conditions.groups:
        *sizes, last = FAKE_SIZES
        plan += [(Group("fake", size), plain) for size in sizes]
        plan += [(Group("fake", last), plain if real > 1 else plain + others)]
    return [(group, jobs_of(cases, group, conditions)) for group, cases in plan if cases]


def jobs_of(cases: Sequence[Case], group: Group, conditions: Conditions) -> list[Job]:
    """Case by case, and in the plain case turn by turn."""
    wanted = stack_for(conditions)
    has_megatron = importlib.util.find_spec("megatron_fsdp") is not None
    jobs = []
    for case in cases:
        systems = systems_for(case, conditions.quick, has_megatron)
        num_turns = 1 if conditions.quick or case is not PLAIN or group.kind == "silent" else NUM_TURNS
        for turn in range(num_turns):
            for system in systems[:: -1 if turn % 2 else 1]:
                jobs.append(Job(system, case, case.stack_for(wanted), turn, conditions.rounds))
    return jobs


def stack_for(conditions: Conditions) -> Stack:
    """What was asked for, or what the device and `--quick` leave time for."""
    if conditions.stack:
        return STACKS[conditions.stack]
    if conditions.device == "cpu":
        return TINY
    return SMALLER if conditions.quick else LARGE


# The work


def results_of(group: Group, jobs: Sequence[Job], conditions: Conditions, until: float) -> Iterator[Result]:
    """A result for each job until the time is up. A failure ends the group's processes; the next job has new ones."""
    left = deque(jobs)
    while left and time.monotonic() < until:
        with Ranks(group, conditions.device, conditions.load, measure_job) as ranks:
            while left and time.monotonic() < until:
                job = left.popleft()
                result, is_alive = _asked(ranks, group, job, until)
                yield result
                if result.why:  # it would fail in its second turn too
                    left = deque(each for each in left if (each.case, each.system) != (job.case, job.system))
                if not is_alive:
                    break
    for case in dict.fromkeys(job.case for job in left):
        missing = [job for job in left if job.case == case]
        systems = ", ".join(dict.fromkeys(job.system.name for job in missing))
        yield _result(group, missing[0], systems, why=NO_TIME)


def _asked(ranks: Ranks, group: Group, job: Job, until: float) -> tuple[Result, bool]:
    """The result of one job, and whether the ranks may be asked again."""
    try:
        answers = ranks.ask(job, min(JOB_SECONDS, max(JOB_SECONDS_AT_END, until - time.monotonic())))
    except Failed as failure:
        return _result(group, job, job.system.name, why=str(failure)), False
    if isinstance(answers[0], str):
        return _result(group, job, job.system.name, why=answers[0]), True
    return _result(group, job, job.system.name, answers), True


def _result(group: Group, job: Job, system: str, ranks: Sequence[Measured] = (), why: str = "") -> Result:
    return Result(group.kind, group.num_ranks, job.case.name, job.stack.title, system, job.turn, list(ranks), why)


def measure_job(mesh: DeviceMesh, job: Job) -> Measured | str:
    """On a rank: what the job says, with nothing else alive; or, in a line, why it cannot be done here."""
    try:
        training = training_for(job.system, job.case, job.stack, mesh)
    except Unsupported as reason:
        return str(reason)
    try:
        return measured(training, job.num_steps)
    finally:
        del training
        torch.compiler.reset()
        gc.collect()  # or what is left of it in cycles would count for the next one
