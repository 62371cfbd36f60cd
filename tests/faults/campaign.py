"""The campaign: cases drawn from seeds, each of which must end right, or with a named error on every surviving rank."""

from __future__ import annotations

import math
import random
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tests.faults import builder
from tests.faults.builder import (
    CAUGHT,
    CHANGED,
    FATAL,
    HARMLESS,
    LINK,
    MADE,
    ROUTES,
    SILENT,
    Fault,
    Kind,
    Phase,
    phases_of,
)
from tests.faults.crews import Case, Crew, End, Ends
from tests.faults.program import DIVERGENCES, NUM_BLOCKS, NUM_STEPS, TRANSPORTS, Setting, leaves_out_a_step, reference
from tests.machines.hosts import NotAllowed
from tests.support.sharding import PLACEMENTS, WRAPPERS

TOGETHER = 4
"""Cases that run at a time. Most of a case's time is a wait."""


class Outcome(Enum):
    """What became of one case."""

    RIGHT = "right values"
    ALIKE = "the same values on all ranks"
    NAMED = "error with the rank, or the unit"
    AMONG = "error with the ranks, the one among them"
    OTHER = "error with another rank"
    UNNAMED = "error without a name"
    WRONG = "wrong values"
    CRASHED = "ended by a signal"
    HUNG = "hung"
    LEFT = "left something behind"
    IMPOSSIBLE = "not possible on this machine"


ERRORS = {Outcome.NAMED, Outcome.AMONG, Outcome.OTHER}
"""The errors that sherd promises: all of them name ranks."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One case's outcome, and how it came to it."""

    case: Case
    outcome: Outcome
    seconds: float = math.nan
    """From the fault to the error on the last surviving rank; no number where there was none."""
    words: str = ""
    """What was wrong."""

    @property
    def is_good(self) -> bool:
        """Whether that may become of such a case."""
        return self.outcome in may_become(self.case) or self.outcome is Outcome.IMPOSSIBLE

    @property
    def is_known(self) -> bool:
        """Whether it is known that this is not as it should be."""
        return self.outcome is Outcome.HUNG and may_hang(self.case)


def drawn(seed: int) -> Case:
    """Returns the case of `seed`. Kinds take turns; all else is drawn."""
    draw = random.Random(seed)
    kinds = list(Kind)
    kind = kinds[seed % len(kinds)]
    num_ranks = draw.choice((2, 2, 3, 4))
    phase = draw.choice(phases_of(kind))
    fault = Fault(draw.randrange(num_ranks), draw.randrange(NUM_STEPS - 1), phase, kind, draw.randrange(NUM_BLOCKS))
    if kind is Kind.OTHERWISE:
        fault = replace(fault, way=draw.choice(MADE + CHANGED))
    elif kind is Kind.ANYWHERE:
        fault = replace(fault, step=max(fault.step, 1), share=draw.random())
    # One in three is of `fully_shard`, of whichever placement.
    front = draw.choice(("", *WRAPPERS))
    transport, divergence = draw.choice(TRANSPORTS), draw.choice(DIVERGENCES)
    placement = draw.choice(list(PLACEMENTS))
    is_hybrid = num_ranks == 4 and draw.random() < 0.5
    setting = Setting(num_ranks, front or placement, transport, divergence, is_hybrid)
    if kind is Kind.OTHERWISE:  # which the wrapper has no words for
        setting = replace(setting, front=placement, is_hybrid=is_hybrid and fault.way != "strategy")
    if leaves_out_a_step(fault, setting) or Outcome.ALIKE in may_become(Case(setting, fault)):
        setting = replace(setting, is_hybrid=False)  # else the replicas of one shard differ from then on
    return Case(setting, fault, keeps_store=kind in LINK or draw.random() < 0.25)


def may_become(case: Case) -> set[Outcome]:
    """Returns the outcomes that `case` may have."""
    fault, joins = case.fault, case.setting.divergence == "join"
    if fault is None or fault.kind in HARMLESS or fault.kind is Kind.NAN:
        return {Outcome.RIGHT}
    if fault.kind in FATAL | SILENT | {Kind.OTHERWISE}:
        return ERRORS
    if fault.kind is Kind.ANYWHERE:
        return {Outcome.ALIKE, *ERRORS}
    if fault.kind is Kind.READ:
        return {Outcome.RIGHT, *ERRORS}  # right where the rank needs nothing of that file
    if fault.kind in ROUTES:
        return {Outcome.RIGHT} if joins else ERRORS
    if leaves_out_a_step(fault, case.setting) and not joins:
        # Where a rank holds nothing of a unit, nobody can tell from that one.
        return {Outcome.RIGHT, *ERRORS} if case.setting.front == "owned" else ERRORS
    if fault.phase is Phase.CHECKPOINT or leaves_out_a_step(fault, case.setting):
        return {Outcome.RIGHT}
    if not joins:
        return ERRORS
    if fault.phase in (Phase.BEFORE_FORWARD, Phase.FORWARD, Phase.BETWEEN):
        return {Outcome.RIGHT}
    if fault.phase is Phase.BACKWARD:
        return ERRORS
    # Behind backward a rank that gives up drops its part of all ranks' gradients.
    return {Outcome.ALIKE, *ERRORS}


def may_hang(case: Case) -> bool:
    """Returns whether a rank of `case` is known to wait for much longer than the timeout: one that is cut off and has
    to make a group, for which gloo tries again and again."""
    fault = case.fault
    makes_group = fault is not None and fault.step == 0 and fault.phase is Phase.BEFORE_FORWARD
    return fault is not None and fault.kind is Kind.CUT and makes_group


# Judging

_NUMBERS = re.compile(r"\b[Rr]anks? (\[[\d, ]*\]|\d+(?:, \d+)*(?: and \d+)?)")


def judged(case: Case, ends: Ends) -> Verdict:
    """Returns what became of `case`."""
    fault = case.fault
    verdict = partial(Verdict, case, seconds=seconds_of(case, ends))
    for rank, end in enumerate(ends.of_rank):
        if end.is_stuck:
            return verdict(Outcome.HUNG, words=f"rank {rank}:\n{end.stack}\n{all_of(ends)}")
    if fault is not None and ends.fault_at is None:
        return verdict(Outcome.WRONG, words=f"the fault has not happened\n{all_of(ends)}")
    for rank, end in enumerate(ends.of_rank):
        code = expected_code(case, rank, end)
        if end.exit_code != code:
            return verdict(Outcome.CRASHED, words=f"rank {rank} ended with {end.exit_code}, not {code}\n{all_of(ends)}")
        if end.left:
            return verdict(Outcome.LEFT, words=f"rank {rank} has left {end.left}\n{all_of(ends)}")
    if ends.left:
        return verdict(Outcome.LEFT, words=f"{ends.left}\n{all_of(ends)}")
    if Outcome.RIGHT in may_become(case) and (not ERRORS & may_become(case) or ends.of_rank[0].values is not None):
        outcome, words = ended_right(case, ends)
    elif Outcome.ALIKE in may_become(case) and all(end.values is not None for end in ends.of_rank):
        outcome, words = with_values(Outcome.ALIKE, ends, ends.of_rank[0].values)
    else:
        outcome, words = ended_by_name(case, ends)
    return verdict(outcome, words=f"{words}\n{all_of(ends)}" if words else "")


def expected_code(case: Case, rank: int, end: End) -> int:
    fault = case.fault
    if fault is not None and rank == fault.rank and fault.kind in (Kind.LEAVE, Kind.EXIT):
        return builder.EXIT_CODE
    if fault is not None and rank == fault.rank and fault.kind is Kind.KILL:
        return -9
    return 0 if end.error is None else 1


def ended_right(case: Case, ends: Ends) -> tuple[Outcome, str]:
    for rank, end in enumerate(ends.of_rank):
        if end.values is None:
            return Outcome.UNNAMED, f"rank {rank} has raised"
    of_first = ends.of_rank[0].values.items()
    owned = {name.removeprefix("owner of "): each for name, each in of_first if name.startswith("owner of ")}
    return with_values(Outcome.RIGHT, ends, reference(case.setting, case.fault, owned))


def with_values(outcome: Outcome, ends: Ends, expected: dict[str, Tensor]) -> tuple[Outcome, str]:
    """Returns `outcome` where all ranks have these values."""
    for rank, end in enumerate(ends.of_rank):
        if words := difference(end.values, expected):
            return Outcome.WRONG, f"rank {rank}: {words}"
    return outcome, ""


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> str:
    for name, value in expected.items():
        try:
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, equal_nan=True)
        except (AssertionError, KeyError) as error:
            return f"{name}: {error}"
    return ""


def survivors(case: Case) -> list[int]:
    """Returns the ranks that must raise: all but one that has ended, or that has given up a batch and goes on to its
    end before the others."""
    fault, ranks = case.fault, range(case.setting.num_ranks)
    is_ahead = fault.kind in CAUGHT and fault.phase is Phase.BEFORE_FORWARD
    return [rank for rank in ranks if rank != fault.rank or not (fault.kind in FATAL or is_ahead)]


OWN_ERRORS = {
    Kind.RAISE: "Injected",
    Kind.OOM: "OutOfMemoryError",
    Kind.LEAVE: "SystemExit",
    Kind.FULL_DISK: "OSError",
    Kind.EXIT: None,
    Kind.KILL: None,
}


def ended_by_name(case: Case, ends: Ends) -> tuple[Outcome, str]:
    fault = case.fault
    if fault.kind in OWN_ERRORS and ends.of_rank[fault.rank].error != OWN_ERRORS[fault.kind]:
        return Outcome.UNNAMED, f"rank {fault.rank} has lost its own error"
    found = []
    for rank in survivors(case):
        end = ends.of_rank[rank]
        if end.error is None:
            return Outcome.WRONG, f"rank {rank} has noticed nothing"
        if end.error != ("StorageError" if fault.kind is Kind.READ else "CommError"):
            return Outcome.UNNAMED, f"rank {rank} raised {end.error}"
        found.append(naming(end.text, rank, fault, case))
        if found[-1] is Outcome.UNNAMED:
            return Outcome.UNNAMED, f"rank {rank} names nobody"
    return max(found, key=[Outcome.NAMED, Outcome.AMONG, Outcome.OTHER].index), ""


def naming(text: str, rank: int, fault: Fault, case: Case) -> Outcome:
    """Returns how well the error of `rank` names the rank that the fault was on, or the other end of a link."""
    text = text.removeprefix(f"[rank {rank}] ")
    alone, several = set(), set()
    for found in _NUMBERS.findall(text):
        numbers = {int(each) for each in re.findall(r"\d+", found)}
        (several if len(numbers) > 1 else alone).update(numbers)
    says_what = re.search(r"\bgathers unit |\breduces (the gradients of )?unit |\bgathers the |\bruns? ", text)
    if says_what and alone | several:
        return Outcome.NAMED
    blamed = {fault.rank}
    if case.is_across_hosts:
        here = case.host_of(rank)
        blamed = {each for each in range(case.setting.num_ranks) if case.host_of(each) != here}
    if rank == fault.rank and fault.kind not in CAUGHT | {Kind.READ}:
        blamed = {each for each in range(case.setting.num_ranks) if each != rank}  # it was away, and finds them gone
    if blamed & alone:
        return Outcome.NAMED
    if blamed & several:
        return Outcome.AMONG
    return Outcome.OTHER if (alone | several) - {rank} else Outcome.UNNAMED


def seconds_of(case: Case, ends: Ends) -> float:
    if case.fault is None or ends.fault_at is None:
        return math.nan
    watched = [rank for rank in survivors(case) if rank != case.fault.rank or case.fault.kind not in SILENT]
    raised = [ends.of_rank[rank].when for rank in watched if ends.of_rank[rank].error is not None]
    return max(raised) - ends.fault_at if raised else math.nan


def all_of(ends: Ends) -> str:
    shown = []
    for rank, end in enumerate(ends.of_rank):
        after = f" after {end.when - ends.fault_at:.2f} s" if end.when and ends.fault_at else ""
        what = f"{end.error}: {end.text}" if end.error else "values" if end.values else "nothing"
        shown.append(f"  rank {rank} (exit code {end.exit_code}){after}: {what}")
    return "\n".join(shown)


# Running


def run(case: Case, folder: Path) -> Verdict:
    """Returns what became of `case`. Its files are in `folder`, and gone afterwards."""
    try:
        return judged(case, Crew(case, folder).run())
    except NotAllowed as error:
        return Verdict(case, Outcome.IMPOSSIBLE, words=str(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_all(seeds: Sequence[int], folder: Path, seconds: float = math.inf) -> Iterator[tuple[int, Verdict]]:
    """Yields seeds and verdicts in order; those that could not be begun within `seconds` are left out."""
    until = time.monotonic() + seconds

    def in_time(seed: int) -> Verdict | None:
        return run(drawn(seed), folder / str(seed)) if time.monotonic() < until else None

    with ThreadPoolExecutor(TOGETHER) as pool:
        for seed, verdict in zip(seeds, pool.map(in_time, seeds), strict=True):
            if verdict is not None:
                yield seed, verdict
