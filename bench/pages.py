"""Data in docs/data, and the pages that show a summary of them between marks."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def as_csv(lines: Sequence[Sequence[str]]) -> str:
    """Returns a table as the text of a file; the first line has the names of the columns."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def read_csv(path: Path) -> list[list[str]]:
    """Returns the lines of a file that `as_csv` has made."""
    with path.open(newline="") as file:
        return list(csv.reader(file))


def written(page: str, texts: Mapping[str, str]) -> str:
    """Returns `page` with each text between `<!-- mark -->` and `<!-- /mark -->`."""
    for mark, text in texts.items():
        page = re.sub(
            rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)",
            lambda match, text=text: f"{match[1]}{text}\n{match[2]}",
            page,
            flags=re.DOTALL,
        )
    return page
