"""The doctor's findings: lines with a verdict and a remedy, their table, and the exit code. Loads no torch."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass

OK, WARNING, FAILURE = "ok", "warning", "failure"
WIDTH = 118
EXIT_STRICT, EXIT_FAILURE = 1, 2


@dataclass(frozen=True)
class Finding:
    """One line: in `section`, `name` has `value`. The `remedy` of a verdict that is not ok says what to do."""

    section: str
    name: str
    value: str
    verdict: str = OK
    remedy: str = ""

    def __post_init__(self) -> None:
        assert (self.verdict == OK) == (not self.remedy), f"any other verdict than ok has a remedy: {self}"


def warned(section: str, name: str, value: object, remedy: str) -> Finding:
    """Returns a warning if there is a `remedy`, else an ok line."""
    return Finding(section, name, str(value), WARNING if remedy else OK, remedy)


def failed(section: str, name: str, value: object, remedy: str) -> Finding:
    """Returns a failure if there is a `remedy`, else an ok line."""
    return Finding(section, name, str(value), FAILURE if remedy else OK, remedy)


def worst(findings: Sequence[Finding]) -> str:
    verdicts = {finding.verdict for finding in findings}
    return FAILURE if FAILURE in verdicts else WARNING if WARNING in verdicts else OK


def exit_code(findings: Sequence[Finding], strict: bool) -> int:
    """Returns EXIT_FAILURE after a failure, EXIT_STRICT after a warning if `strict`, else 0."""
    return {FAILURE: EXIT_FAILURE, WARNING: EXIT_STRICT if strict else 0, OK: 0}[worst(findings)]


def as_json(findings: Sequence[Finding]) -> str:
    return json.dumps({"verdict": worst(findings), "findings": [asdict(finding) for finding in findings]})


def as_table(findings: Sequence[Finding]) -> str:
    """Returns the findings by section, each with its remedy below it, and a last line that counts them."""
    lines = []
    for section in dict.fromkeys(finding.section for finding in findings):
        lines.append(section)
        for finding in findings:
            if finding.section == section:
                lines += _lines(finding)
    counts = {verdict: sum(finding.verdict == verdict for finding in findings) for verdict in (OK, WARNING, FAILURE)}
    return "\n".join([*lines, "", ", ".join(f"{number} {verdict}" for verdict, number in counts.items())])


def _lines(finding: Finding) -> list[str]:
    head = f"  {finding.verdict:8}{finding.name:23} "
    said = textwrap.wrap(finding.value, WIDTH - len(head)) or [""]
    remedy = textwrap.wrap(f"-> {finding.remedy}", WIDTH - len(head)) if finding.remedy else []
    first, *others = [*said, *remedy]
    return [(head + first).rstrip(), *(" " * len(head) + line for line in others)]
