"""The parts of a run on GPUs: what each tries, and for how long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from sherd.tools.doctor.findings import WARNING, Finding, failed, warned

from ..device.cases import CASES, LARGE, SMALLER, STACKS, Case, Stack
from ..device.figure import Job, results_of
from ..device.groups import Failed, Group, Ranks
from ..device.rows import Result
from ..ranks import Conditions, load_device
from ..systems import FLAT, FSDP2, SHERD
from .captured import FRONT_ENDS, captured
from .correctness import SET_UPS, differences
from .lost_rank import NAMED_WITHIN_S, lose

TELL = "please open an issue, with the file and the page"
FAKE_SIZE = 8
"""With one device, speed is measured as rank 0 of so many whose collectives copy within the device."""
NUM_TURNS = 3
ROOM = 40 << 30
"""A device of so many bytes or more gets eight layers of Llama 3 8 B, others a smaller model."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a part goes by."""

    conditions: Conditions
    num_ranks: int

    @property
    def group(self) -> Group:
        """A rank on each device."""
        return Group("real", self.num_ranks)

    def ranks(self, work: Callable[[DeviceMesh, Any], Any]) -> Ranks:
        return Ranks(self.group, self.conditions.device, self.conditions.load, work)


Part = Callable[[Run, float], Iterator[Finding | Result]]
"""Yields what it finds. The second argument is when it should be through, by `time.monotonic`."""


def correctness(run: Run, until: float) -> Iterator[Finding]:
    """Each set-up computes what plain torch computes on one device."""
    left = [each for each in SET_UPS if run.num_ranks >= each.fewest_ranks and run.num_ranks % each.fewest_ranks == 0]
    while left and time.monotonic() < until:
        with run.ranks(differences) as ranks:
            while left and time.monotonic() < until:
                set_up = left.pop(0)
                try:
                    said = [each for each in ranks.ask(set_up, _seconds_until(until)) if each]
                except Failed as failure:  # its processes are not used again
                    yield failed("correctness", set_up.name, failure, TELL)
                    break
                as_plain = f"as plain torch on one device, on {run.num_ranks} rank(s)"
                yield failed("correctness", set_up.name, said[0] if said else as_plain, TELL if said else "")
    for set_up in left:
        yield Finding("correctness", set_up.name, "not tried: the time was up", WARNING, TELL)


def compared_with_fsdp2(run: Run, until: float) -> Iterator[Result]:
    """Steps, host time, memory and exposed communication, in turns of opposite order."""
    group = run.group if run.num_ranks > 1 else Group("fake", FAKE_SIZE)
    stack = stack_for(run.conditions)
    cases = [CASES[name] for name in run.conditions.cases]
    turns = range(1 if run.conditions.quick else NUM_TURNS)
    jobs = [job for case in cases for turn in turns for job in jobs_of(case, stack, turn, run.conditions.rounds)]
    yield from results_of(group, jobs, run.conditions, until)


def jobs_of(case: Case, stack: Stack, turn: int, num_steps: int) -> list[Job]:
    """Every second turn in the opposite order, so that what drifts on the machine meets all alike."""
    systems = [FSDP2, SHERD, FLAT]
    return [Job(each, case, stack, turn, num_steps) for each in systems[:: -1 if turn % 2 else 1]]


def stack_for(conditions: Conditions) -> Stack:
    """What was asked for, or what the first device has room for."""
    if conditions.stack:
        return STACKS[conditions.stack]
    load_device(conditions.load)
    module = torch.get_device_module(conditions.device)
    total = module.mem_get_info()[1] if hasattr(module, "mem_get_info") else 0
    return LARGE if total >= ROOM and not conditions.quick else SMALLER


def capture(run: Run, until: float) -> Iterator[Finding]:
    """Whether a step may be captured as a graph of the device, by each front end: what `sherd.capturable` says."""
    stack = run.conditions.stack or SMALLER.name
    with run.ranks(captured) as ranks:
        for system in FRONT_ENDS:
            for may_be, said in dict.fromkeys(ranks.ask((system, stack), _seconds_until(until))):
                yield warned("capture", system.name, said, "" if may_be else TELL)


def lost_rank(run: Run, until: float) -> Iterator[Finding]:
    """The last rank is killed; all others raise an error that names it."""
    if run.num_ranks < 2:
        yield Finding("a lost rank", "the last rank", "not tried: it takes two devices")
        return
    lost = run.num_ranks - 1
    with run.ranks(lose) as ranks:
        for rank, (taken, said) in enumerate(ranks.ask(lost, _seconds_until(until), silent=[lost])):
            is_named = f"rank {lost} has died" in said.lower() and taken <= NAMED_WITHIN_S
            text = f"{taken:.1f} s after rank {lost} was killed: {said.splitlines()[0] if said else 'nothing'}"
            yield failed("a lost rank", f"rank {rank} says", text, "" if is_named else TELL)


PARTS: dict[str, tuple[Part, float]] = {
    "correctness": (correctness, 150),
    "compared with FSDP2": (compared_with_fsdp2, 240),
    "capture": (capture, 75),
    "a lost rank": (lost_rank, 75),
}
"""By name, with the seconds after which each is stopped; the start and the end of its processes come out of them."""


def _seconds_until(until: float) -> float:
    return max(1.0, until - time.monotonic())
