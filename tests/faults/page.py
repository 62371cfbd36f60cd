"""docs/data/faults.csv, made of the verdicts of a campaign, and its summary in docs/understand/transports.md."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from bench.pages import DOCS
from tests.faults.builder import FATAL, Kind
from tests.faults.campaign import ERRORS, Outcome, Verdict

PAGE, DATA = DOCS / "understand/transports.md", DOCS / "data/faults.csv"
ENDED = "the rank has ended; "
"""Begins the names of the rows about ranks that ended, by transport and policy."""


def rows(verdicts: Sequence[Verdict]) -> list[list[str]]:
    """Returns the lines of the data: one for each kind of fault, then one for each way of bytes of ranks that ended."""
    lines = [["cases of", "cases", *(outcome.value for outcome in Outcome), "errors", "median (s)", "worst (s)"]]
    for kind in Kind:
        of_kind = [each for each in verdicts if each.case.fault.kind is kind]
        counts = Counter(each.outcome for each in of_kind)
        outcomes = [str(counts[outcome]) for outcome in Outcome]
        lines.append([kind.value, str(counts.total()), *outcomes, *_seconds(of_kind)])
    deaths = [each for each in verdicts if each.case.fault.kind in FATAL]
    for name, group in _by(deaths, _transport_and_policy).items():
        lines.append([ENDED + name, "", *("" for _ in Outcome), *_seconds(group)])
    return lines


def sections(lines: Sequence[Sequence[str]]) -> dict[str, str]:
    """Returns what stands between the page's markers, by marker: a summary of the data."""
    cases = [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]
    faults = [case for case in cases if not case["cases of"].startswith(ENDED)]
    outcomes = {outcome: sum(int(case[outcome.value]) for case in faults) for outcome in Outcome}
    ended = [f"- {number}: {outcome.value}" for outcome, number in outcomes.items() if number]
    deaths = [case for case in cases if case["cases of"].startswith(ENDED) and case["median (s)"]]
    table = [["transport, policy", "errors", "median (s)", "worst (s)"]]
    table += [[case["cases of"].removeprefix(ENDED), *(case[name] for name in table[0][1:])] for case in deaths]
    worst = max(faults, key=lambda case: float(case["worst (s)"] or 0))
    waits = f"{worst['worst (s)']} s ({worst['cases of']})"
    return {
        "outcomes": "\n".join([f"{sum(outcomes.values())} cases ended so:", "", *ended]),
        "times": f"{sum(outcomes[each] for each in ERRORS)} cases ended in errors. The longest wait was {waits}.",
        "deaths": _markdown(table),
    }


def bad_cases(verdicts: Sequence[Verdict]) -> dict[str, str]:
    """Returns the section that lists the cases which ended in another way than they should."""
    bad = [[f"{each.case}", each.outcome.value] for each in verdicts if not each.is_good]
    return {"bad": _markdown([["case", "outcome"], *bad]) if bad else "None."}


def _seconds(verdicts: Iterable[Verdict]) -> list[str]:
    seconds = [each.seconds for each in verdicts if not math.isnan(each.seconds)]
    return [str(len(seconds)), *(f"{of(seconds):.2f}" if seconds else "" for of in (statistics.median, max))]


def _by(verdicts: Iterable[Verdict], name_of: Callable[[Verdict], str]) -> dict[str, list[Verdict]]:
    groups: dict[str, list[Verdict]] = {}
    for each in sorted(verdicts, key=name_of):
        groups.setdefault(name_of(each), []).append(each)
    return groups


def _transport_and_policy(verdict: Verdict) -> str:
    setting = verdict.case.setting
    transport = {"auto": "shared memory"}.get(setting.transport, setting.transport)
    return f"{transport}, {setting.divergence}"


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *body = (f"| {' | '.join(cells)} |" for cells in lines)
    return "\n".join([head, f"|{'---|' * len(lines[0])}", *body])
