"""The tables of docs/understand/transports.md, made of the verdicts of a campaign."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tests.faults.builder import FATAL, Kind
from tests.faults.campaign import Outcome, Verdict

PAGE = Path(__file__).parent.parent.parent / "docs/understand/transports.md"


def sections(verdicts: Sequence[Verdict]) -> dict[str, str]:
    """Returns what stands between the page's markers, by marker."""
    deaths = [each for each in verdicts if each.case.fault.kind in FATAL]
    return {
        "outcomes": _outcomes(verdicts),
        "times": _times("fault", {kind.value: _of(verdicts, kind) for kind in Kind}),
        "deaths": _times("the rank has ended, by transport and policy", _by(deaths, _transport_and_policy)),
        "bad": _bad(verdicts),
    }


def written(page: str, verdicts: Sequence[Verdict]) -> str:
    """Returns the page with its tables made anew."""
    for marker, text in sections(verdicts).items():
        page = re.sub(
            rf"(<!-- {marker} -->\n).*?(<!-- /{marker} -->)",
            lambda found, text=text: f"{found[1]}{text}\n{found[2]}",
            page,
            flags=re.DOTALL,
        )
    return page


def _outcomes(verdicts: Sequence[Verdict]) -> str:
    shown = [outcome for outcome in Outcome if any(each.outcome is outcome for each in verdicts)]
    lines = [["fault", "cases", *(outcome.value for outcome in shown)]]
    for kind in Kind:
        counts = Counter(each.outcome for each in _of(verdicts, kind))
        lines.append([kind.value, f"{counts.total()}", *(f"{counts[outcome] or ''}" for outcome in shown)])
    totals = Counter(each.outcome for each in verdicts)
    lines.append(["all", f"{len(verdicts)}", *(f"{totals[outcome]}" for outcome in shown)])
    return _markdown(lines)


def _times(title: str, groups: dict[str, list[Verdict]]) -> str:
    lines = [[title, "errors", "median (s)", "worst (s)"]]
    for name, verdicts in groups.items():
        seconds = [each.seconds for each in verdicts if not math.isnan(each.seconds)]
        if seconds:
            lines.append([name, f"{len(seconds)}", f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}"])
    return _markdown(lines)


def _bad(verdicts: Sequence[Verdict]) -> str:
    bad = [[f"{each.case}", each.outcome.value] for each in verdicts if not each.is_good]
    return _markdown([["case", "outcome"], *bad]) if bad else "None."


def _of(verdicts: Iterable[Verdict], kind: Kind) -> list[Verdict]:
    return [each for each in verdicts if each.case.fault.kind is kind]


def _by(verdicts: Iterable[Verdict], name_of: Callable[[Verdict], str]) -> dict[str, list[Verdict]]:
    groups: dict[str, list[Verdict]] = {}
    for each in sorted(verdicts, key=name_of):
        groups.setdefault(name_of(each), []).append(each)
    return groups


def _transport_and_policy(verdict: Verdict) -> str:
    setting = verdict.case.setting
    transport = {"auto": "shared memory"}.get(setting.transport, setting.transport)
    return f"{transport}, `{setting.divergence}`"


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *body = (f"| {' | '.join(cells)} |" for cells in lines)
    return "\n".join([head, f"|{'---|' * len(lines[0])}", *body])
