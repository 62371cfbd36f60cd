"""Words that an American engineer reads twice, and what to write instead."""

from __future__ import annotations

import re
from collections.abc import Iterator

PLAIN = {
    "anew": "again",
    "beside": "next to, alongside, together with, compared with",
    "besides": "in addition, except for",
    "companion": "tied owner",
    "dear": "expensive",
    "for ever": "forever",
    "lie": "is, is stored, is laid out",
    "lies": "is, is stored, is laid out",
    "likewise": "in the same way, also",
    "nobody": "no rank, no program, or the passive",
    "piece": "shard, part, chunk",
    "pieces": "shards, parts, chunks",
    "settled": "steady-state",
    "thereby": "by this, and so",
    "therein": "in it, by its name",
    "thereof": "of it, by its name",
    "twentieth": "5 %",
    "wherein": "in which",
    "whole": "unsharded, full, entire, complete",
    "wholly": "entirely",
}
OLD = re.compile(rf"\b(?!whole numbers?\b)(?:{'|'.join(PLAIN)})\b".replace(" ", r"\s+"), re.IGNORECASE)
CODE = re.compile(r"""`[^`]*`|'\w+'|"\w+"|\bone of \w+(?:, \w+)+|^ +\w+:(?= )""", re.MULTILINE)
"""Code in backticks; values of arguments, quoted or in a list as `one of shard, flat, whole`; names under `Args:`."""


def old_words(text: str) -> Iterator[str]:
    """Yields each old word of `text`, where it stands, and what to write instead; `CODE` is left out."""
    text = CODE.sub("`code`", text)
    for found in OLD.finditer(text):
        around = " ".join(text[max(0, found.start() - 30) : found.end() + 30].split())
        word = " ".join(found[0].lower().split())
        yield f"...{around}...: for {word!r} write: {PLAIN[word]}"
