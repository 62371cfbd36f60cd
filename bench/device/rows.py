"""Results of the figure `device`, and the rows that the tables make of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from ..peak import MIB
from ..systems import FLAT, FSDP1, SHERD, SHERD_COALESCED, WRAPPERS
from ..table import Aim, Row, row_of_counts, row_of_differences, row_of_rounds, three_digits
from .cases import TINY
from .clock import Measured

AIMS = [Aim(1.0, system=system.name) for system in (SHERD, SHERD_COALESCED, FLAT, *WRAPPERS)]
"""For stacks that take time; a dry run has nothing to reach."""
LOSSES_AGREE = 0.02
"""Of losses in bfloat16, after a few steps: the order of a sum may differ."""
PHASES = ("forward", "backward", "forward and backward", "optimizer")


@dataclass(frozen=True, slots=True)
class Result:
    """What was measured of one system in one case and turn, rank by rank; or `why` nothing was."""

    kind: str
    num_ranks: int
    case: str
    stack: str
    system: str
    turn: int
    ranks: list[Measured]
    why: str = ""

    @property
    def group(self) -> str:
        return f"{self.num_ranks} {'ranks' if self.kind == 'real' else f'{self.kind} ranks'}"

    @property
    def step_ms(self) -> list[float]:
        """Of the slowest rank, step by step."""
        return [max(steps) for steps in zip(*(each.step_ms for each in self.ranks), strict=True)]

    @property
    def host_ms(self) -> list[float]:
        """Mean of the ranks, step by step."""
        return [fmean(steps) for steps in zip(*(each.host_ms for each in self.ranks), strict=True)]

    def line(self) -> str:
        """The result as a line for whoever waits."""
        if not self.ranks:
            return f"{self.group}, {self.case}, {self.system}: {self.why}"
        peak = max(max(each.allocated.values()) for each in self.ranks) / MIB
        return (
            f"{self.group}, {self.case}, {self.system}: step {three_digits(median(self.step_ms))} ms, "
            f"host {three_digits(median(self.host_ms))} ms, peak {three_digits(peak)} MiB"
        )


def rows_of(results: Sequence[Result]) -> list[Row]:
    """Rows of each group and case in the order in which they were measured; a silent group has none of its own."""
    keys = dict.fromkeys((each.kind, each.num_ranks, each.case, each.stack) for each in results)
    rows: list[Row] = []
    for kind, num_ranks, case, stack in keys:
        if kind == "silent":
            continue
        own = [
            each
            for each in results
            if (each.kind, each.num_ranks, each.case, each.stack) == (kind, num_ranks, case, stack)
        ]
        silent = [each for each in results if (each.kind, each.num_ranks, each.case) == ("silent", num_ranks, case)]
        rows += _rows_of_case(own, silent if kind == "real" else [])
    return rows


def _rows_of_case(results: Sequence[Result], silent: Sequence[Result]) -> Iterator[Row]:
    first = results[0]
    title = f"{first.group}, {first.case}"
    aims = AIMS if first.stack != TINY.title else []
    failures = {each.system: each.why for each in results if each.why}
    # A system that failed in its second turn has fewer steps than the others, which are compared step by step.
    results = [each for each in results if each.system not in failures]
    if results:
        steps = _joined(results, lambda each: each.step_ms)
        yield row_of_rounds(f"{title}: step", "ms", steps, aims, first.stack)
        yield row_of_rounds(f"{title}: host", "ms", _joined(results, lambda each: each.host_ms), aims)
        yield from _longest(f"{title}: compute idle", results, lambda rank: rank.idle_ms)
        yield from _longest(f"{title}: collectives alone", results, lambda rank: rank.exposed_ms)
        yield from _exposed(title, steps, silent)
        yield from _memory(title, results, aims)
    for system, why in failures.items():
        yield Row(f"{title}: {system}", "", {}, remark=why)


def _joined(results: Sequence[Result], samples: Callable[[Result], list[float]]) -> dict[str, list[float]]:
    """By system, of all turns one after another."""
    found: dict[str, list[float]] = {}
    for result in results:
        found.setdefault(result.system, []).extend(samples(result))
    return found


def _first_turns(results: Sequence[Result]) -> dict[str, list[Measured]]:
    """By system, the ranks of its first turn."""
    found: dict[str, list[Measured]] = {}
    for result in results:
        found.setdefault(result.system, result.ranks)
    return found


def _longest(title: str, results: Sequence[Result], of: Callable[[Measured], float | None]) -> Iterator[Row]:
    """The rank with the longest time, of systems that have one."""
    seen = {}
    for name, ranks in _first_turns(results).items():
        times = [taken for rank in ranks if (taken := of(rank)) is not None]
        if times:
            seen[name] = max(times)
    if seen:
        yield row_of_counts(title, "ms", seen)


def _exposed(title: str, steps: dict[str, list[float]], silent: Sequence[Result]) -> Iterator[Row]:
    """What a step takes longer than on a group whose collectives do nothing."""
    alone = {
        name: median(laps)
        for name, laps in _joined([each for each in silent if each.ranks], lambda each: each.step_ms).items()
    }
    exposed = {name: [lap - alone[name] for lap in laps] for name, laps in steps.items() if name in alone}
    if exposed:
        yield row_of_differences(f"{title}: exposed communication", "ms", exposed)


def _memory(title: str, results: Sequence[Result], aims: list[Aim]) -> Iterator[Row]:
    """The rank that takes most, and the first turn."""
    first = _first_turns(results)
    for phase in PHASES:
        for what in ("allocated", "requested"):
            most = {
                name: max(getattr(rank, what)[phase] for rank in ranks) / MIB
                for name, ranks in first.items()
                if phase in getattr(ranks[0], what)
            }
            if most:
                yield row_of_counts(f"{title}: {what} in {phase}", "MiB", most, aims if what == "allocated" else [])
    reserved = {name: max(rank.reserved for rank in ranks) / MIB for name, ranks in first.items()}
    if any(reserved.values()):
        yield row_of_counts(f"{title}: reserved", "MiB", reserved)


def unlike_losses(results: Sequence[Result]) -> str:
    """A sentence on systems of one real group and case that do not train alike; empty if all do. No group but a real
    one reduces. FSDP1 is the one that they are held against, or else the first."""
    for kind, num_ranks, case in dict.fromkeys((each.kind, each.num_ranks, each.case) for each in results):
        losses = {
            each.system: fmean(rank.loss for rank in each.ranks)
            for each in results
            if (each.kind, each.num_ranks, each.case) == ("real", num_ranks, case) and each.ranks
        }
        if kind != "real" or not losses:
            continue
        expected = losses.get(FSDP1.name, next(iter(losses.values())))
        for name, loss in losses.items():
            if not abs(loss - expected) <= LOSSES_AGREE * abs(expected):
                return f"{num_ranks} ranks, {case}: losses DISAGREE: {name} has {loss:.4f}, others {expected:.4f}"
    return ""
