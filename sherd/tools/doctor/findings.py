"""The doctor's findings: lines with a verdict and a remedy, the table of all lines, and the exit code. No torch."""

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
    """One line: of `section`, the thing `name` is `value`. `remedy` says what to do where it is not ok."""

    section: str
    name: str
    value: str
    verdict: str = OK
    remedy: str = ""

    def __post_init__(self) -> None:
        assert (self.verdict == OK) == (not self.remedy), f"a remedy where something is wrong, and only there: {self}"


def warned(section: str, name: str, value: object, remedy: str) -> Finding:
    """Returns an ok line, or a warning if there is a `remedy`."""
    return Finding(section, name, str(value), WARNING if remedy else OK, remedy)


def failed(section: str, name: str, value: object, remedy: str) -> Finding:
    """Returns an ok line, or a failure if there is a `remedy`."""
    return Finding(section, name, str(value), FAILURE if remedy else OK, remedy)


def worst(findings: Sequence[Finding]) -> str:
    """Returns the worst verdict."""
    verdicts = {each.verdict for each in findings}
    return FAILURE if FAILURE in verdicts else WARNING if WARNING in verdicts else OK


def exit_code(findings: Sequence[Finding], strict: bool) -> int:
    """Returns 0, EXIT_FAILURE after a failure, or, if `strict`, EXIT_STRICT after a warning."""
    return {FAILURE: EXIT_FAILURE, WARNING: EXIT_STRICT if strict else 0, OK: 0}[worst(findings)]


def as_json(findings: Sequence[Finding]) -> str:
    """Returns all findings as one line of JSON."""
    return json.dumps({"verdict": worst(findings), "findings": [asdict(each) for each in findings]})


def as_table(findings: Sequence[Finding]) -> str:
    """Returns the findings by section, each with its remedy below it, and a last line that counts them."""
    lines = []
    for section in dict.fromkeys(each.section for each in findings):
        lines.append(section)
        for each in findings:
            if each.section == section:
                lines += _lines(each)
    counts = {verdict: sum(each.verdict == verdict for each in findings) for verdict in (OK, WARNING, FAILURE)}
    return "\n".join([*lines, "", ", ".join(f"{number} {verdict}" for verdict, number in counts.items())])


def _lines(finding: Finding) -> list[str]:
    head = f"  {finding.verdict:8}{finding.name:24}"
    said = textwrap.wrap(finding.value, WIDTH - len(head)) or [""]
    remedy = textwrap.wrap(f"-> {finding.remedy}", WIDTH - len(head)) if finding.remedy else []
    first, *others = [*said, *remedy]
    return [(head + first).rstrip(), *(" " * len(head) + line for line in others)]
